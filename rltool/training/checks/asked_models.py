"""Before a run starts: what asks models beside the policy, against what those models are. Shipped rewards and the
teacher name the model that they ask; functions of the user's own find out when they do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rltool.config.import_path import load_callable
from rltool.config.reward import SHIPPED, SHIPPED_FOR_GROUPS, Shipped
from rltool.config.serve import Task
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.models.registry import read_hf_config
from rltool.rollout.data import PromptSet
from rltool.rollout.tokenizer import load_tokenizer

DOES: Mapping[Task, str] = {"generate": "lets it generate", "classify": "asks it for the scores of its head"}


class Asking(NamedTuple):
    """setting: the key that makes the run ask; value: what stands there; task: what the model must be served for."""

    setting: str
    value: str
    task: Task
    model: str
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.setting} = {self.value!r}"


def askings(config: TrainConfig) -> Iterator[Asking]:
    """Everything in a configuration of which it is known which model it asks."""
    reward = config.reward
    named = [(f"reward.parts ({part.name})", part.function, part.options) for part in reward.parts]
    named = named or [("reward.function", reward.function, reward.options)]
    for name, own in config.eval.overrides.items():
        if own.reward is not None:
            named.append((f"eval.overrides.{name}.reward", own.reward, own.reward_options))
    for setting, value, options in named:
        yield from _asking(setting, value, SHIPPED.get(value), options)
    yield from _asking("reward.group", reward.group, SHIPPED_FOR_GROUPS.get(reward.group), reward.group_options)
    if config.model.teacher is not None:
        yield Asking("model.teacher", config.model.teacher, "generate", config.model.teacher)


def _asking(setting: str, value: str, shipped: Shipped | None, options: Mapping[str, Any]) -> Iterator[Asking]:
    if shipped is not None and shipped.asks is not None:
        function = load_callable(shipped.path, setting=setting)
        model = options.get("model", inspect.signature(function).parameters["model"].default)
        yield Asking(setting, value, shipped.asks, model, options)


def check_tasks(config: TrainConfig, tasks: Mapping[str, Task]) -> None:
    """UsageError for a judge that is a classifier, and a reward model that generates. tasks: of the models that are
    known so far."""
    for asking in askings(config):
        task = tasks.get(asking.model, asking.task)
        if task != asking.task:
            raise UsageError(
                f"{asking} {DOES[asking.task]}, but model {asking.model!r} is served for {task!r}: set "
                f'models.{asking.model}.task = "{asking.task}" if that is what it is for, or name another model'
                + (' (the reward of a classifier is "reward-model")' if task == "classify" else "")
            )


def check_reward_models(config: TrainConfig, sets: Iterable[PromptSet]) -> None:
    """What reward-model needs: of a model's directory a chat template, and one label, or `label`; of the data prompts
    without the policy's template, which it would read inside its own. sets: all that were read. UsageError."""
    templated = config.data.apply_chat_template or any(one.messages is not None for s in sets for one in s.prompts[:1])
    for asking in askings(config):
        if asking.task != "classify":
            continue
        if templated and asking.options.get("prompt_key") is None:
            raise UsageError(
                f"{asking} would read prompts in the policy's chat template, inside its own: copy what stands in the "
                'rows with data.metadata_keys = ["messages"] (or data.prompt_key), and name that with the option '
                'prompt_key = "messages"'
            )
        model = config.models.get(asking.model)
        if model is None or model.path is None:
            raise UsageError(
                f"{asking} writes prompt and response with the chat template of model {asking.model!r}: name its "
                f"directory in models.{asking.model}.path"
            )
        if not load_tokenizer(model.path).has_template:
            raise UsageError(
                f"models.{asking.model}.path: the tokenizer of {model.path} has no chat template, with which "
                f"{asking} writes prompt and response; add one there, or write a reward of your own, with "
                f'context.model("{asking.model}").classify(text)'
            )
        _check_label(asking, model.path)


def _check_label(asking: Asking, path: Path) -> None:
    labels, label = labels_of(read_hf_config(path)), asking.options.get("label")
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(labels))
    if label is None and len(labels) != 1:
        raise UsageError(
            f"{asking}: model {asking.model!r} ({path}) has {len(labels)} labels ({listed}); name the reward's "
            "with the option label = NUMBER"
        )
    if label is not None and not (isinstance(label, int) and 0 <= label < len(labels)):
        raise UsageError(f"{asking}: label = {label!r} is none of the labels of model {asking.model!r} ({listed})")


def labels_of(hf_config: Mapping[str, Any]) -> list[str]:
    """Of a config.json, in order. Two without any (transformers.PreTrainedConfig)."""
    named = hf_config.get("id2label")
    if named:
        return [named[number] for number in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(hf_config.get("num_labels") or 2)]
