"""slime's reward functions (`--custom-rm-path`) as they are: `async def custom_rm(args, sample, **kwargs) -> float`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rltool.config.import_path import load_callable
from rltool.rollout.sample import Sample, SampleStatus


@dataclass
class SlimeSample:
    """What such a function reads of slime's `Sample`, under slime's names. tokens: prompt and response."""

    prompt: str
    response: str
    label: str | None
    metadata: dict[str, Any]
    tokens: list[int]
    response_length: int
    status: SampleStatus
    index: int
    group_index: int
    reward: float | None = None


async def custom_rm(
    sample: Sample, text: str, *, function: str, arguments: Mapping[str, Any] | None = None, key: str | None = None
) -> float:
    """Calls slime's function. function: its import path; arguments: what it reads of `args`; key: slime's --reward-key,
    where the function returns an object.

    It runs on the event loop, as in slime: a plain function, or one that computes for long, is better named in
    reward.function as one of rltool's, which runs in a process.
    """
    called = load_callable(function, setting="reward.options.function")
    theirs = SlimeSample(
        prompt=sample.prompt_text, response=text, label=sample.label, metadata=sample.metadata,
        tokens=[*sample.prompt_ids, *sample.response_ids], response_length=len(sample.response_ids),
        status=sample.status, index=sample.index, group_index=sample.group_id,
    )  # fmt: skip
    value = called(SimpleNamespace(**(arguments or {})), theirs)
    if inspect.isawaitable(value):
        value = await value
    return value[key] if key is not None else value
