"""An evaluation of the user's own, by import path (eval.function): one call for each set."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rltool.config.import_path import load_callable
from rltool.config.rollout import EvalConfig
from rltool.errors import RltoolError
from rltool.rollout.generate import GenerateContext
from rltool.rollout.measure.eval_set import EvalSet
from rltool.rollout.rewards.worker import describe, finite
from rltool.rollout.sample import Sample

_NAME = re.compile(r"[\w.@-]+")


@dataclass
class EvalContext:
    """What eval.function gets beside its set.

    generation: for requests of its own, as generate functions have it: `generate`, `sampling` (this set's),
    `tokenizer`, `model(NAME)`. seed: of this set, the same in every evaluation; give requests seeds that follow from
    it. drawn: what `samples` has returned.
    """

    generation: GenerateContext
    seed: int
    sample: Callable[[], Awaitable[list[Sample]]]
    drawn: list[Sample] = field(default_factory=list)

    async def samples(self) -> list[Sample]:
        """The set's samples as the built-in evaluation has them: generated, and scored with the set's reward. Those of
        one prompt share `group_id`; one whose reward failed has reward None. Asked again, the same ones."""
        if not self.drawn:
            self.drawn = await self.sample()
        return self.drawn


EvalFunction = Callable[[EvalSet, EvalContext], Awaitable[Mapping[str, float]]]
"""`async def f(eval_set: EvalSet, context: EvalContext) -> dict[str, float]`: names and finite numbers, recorded as
eval/SET/NAME."""


def load_eval_function(config: EvalConfig) -> EvalFunction | None:
    """eval.function as a function; None: the built-in evaluation. UsageError for what is none."""
    if config.function is None:
        return None
    return load_callable(config.function, setting="eval.function", takes=("eval_set", "context"))


async def call(function: EvalFunction, eval_set: EvalSet, context: EvalContext) -> dict[str, float]:
    """What the function found, under its own names. RltoolError for what it raises, and for what it may not
    return."""
    try:
        found = function(eval_set, context)
        if not inspect.isawaitable(found):
            raise ValueError("it is no async function")
        return _checked(await found, has_samples=bool(context.drawn))
    except RltoolError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise RltoolError(f"eval.function failed on set {eval_set.name!r}: {describe(error)}") from error


def _checked(found: Any, *, has_samples: bool) -> dict[str, float]:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in found):
        raise ValueError(f"returned {found!r:.80}, expected a dict of names (letters, digits, . _ @ -) and numbers")
    if not has_samples and "accuracy" not in found:
        raise ValueError("returned no accuracy and took no samples from context.samples(), which would give one")
    return {name: finite(value) for name, value in found.items()}
