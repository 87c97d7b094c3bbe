"""Configuration of `rltool train` and `rltool debug`: the sections of a run, with the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, model_validator

from rltool.config.renamed import REMOVED, RENAMED
from rltool.config.rules import RULES
from rltool.config.sections import Sections
from rltool.config.serve import POLICY


class TrainConfig(Sections):
    """Everything of one run. steps counts rollouts; optimizer_steps_per_rollout updates follow each, in each of
    epochs_per_rollout epochs."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED
    removed: ClassVar[Mapping[str, str]] = REMOVED

    @model_validator(mode="after")
    def _models(self) -> TrainConfig:
        if POLICY in self.models:
            raise ValueError(f"[models.{POLICY}]: the policy is model.path; other models have other names")
        for group in self.engines.groups:
            if group.model != POLICY and group.model not in self.models:
                known = ", ".join([POLICY, *self.models])
                raise ValueError(
                    f"group {group.name!r} serves model {group.model!r}, which is none of: {known}; name it in "
                    f"[models.{group.model}] with its path"
                )
            if group.model != POLICY and self.models[group.model].path is None:
                raise ValueError(f"models.{group.model}.path: group {group.name!r} has to serve it; give its directory")
            classifies = group.model != POLICY and self.models[group.model].task == "classify"
            if classifies and group.role not in ("regular", "placeholder"):
                raise ValueError(
                    f'models.{group.model}.task = "classify": group {group.name!r} has role = "{group.role}", and a '
                    "classifier has regular engines alone"
                )
        return self

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> TrainConfig:
        context: dict[str, Any] = info.context or {}
        for rule in context.get("rules", RULES):
            rule(self)
        return self
