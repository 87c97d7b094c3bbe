"""Data sets by name: read row by row, tokenised once, filtered by length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rltool.config.data import DataConfig
from rltool.errors import UsageError
from rltool.rollout.data.files import file_rows
from rltool.rollout.data.gym import gym_rows
from rltool.rollout.data.hub import hub_rows, saved_rows
from rltool.rollout.data.layouts import recognise
from rltool.rollout.data.prompt import Prompt, PromptStore
from rltool.rollout.data.rows import Refusal, RowParser, takes_all
from rltool.rollout.data.spec import DataSpec, parse_spec
from rltool.rollout.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptSet:
    """num_too_long: rows that were left out because their prompt exceeds the limit; parts: how many of the prompts came
    from each of the sets that were named, in order; layouts: published ones that were recognised."""

    prompts: Sequence[Prompt]
    num_too_long: int
    parts: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()


def load_prompts(
    sets: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int,
    limit: int | None = None, refusal: Refusal = takes_all,
) -> PromptSet:  # fmt: skip
    """Read and tokenise the rows of all sets, in order; stop after `limit` kept prompts.

    refusal: of rows with inputs beside text. Prompts go to a PromptStore, so a data set may be larger than memory.
    Raises UsageError naming file and line for a broken or refused row, and if nothing is left.
    """
    store = PromptStore()
    too_long = index = 0
    parts, layouts = [], []
    for name in sets:
        before, parser = len(store), None
        for place, row in read_rows(parse_spec(str(name))):
            if limit is not None and len(store) >= limit:
                break
            if parser is None:
                layout = recognise(row, config)
                layouts += [layout] if layout is not None else []
                parser = RowParser(tokenizer, config, layout, refusal=refusal)
            prompt = parser.prompt(row, place, index)
            index += 1
            if len(prompt.prompt_ids) > max_prompt_tokens:
                too_long += 1
            else:
                store.append(prompt)
        parts.append(len(store) - before)
    store.flush()
    if not store:
        names = ", ".join(str(name) for name in sets) or "no file given: set data.train"
        why = (
            f"all {too_long} prompts are longer than sampling.max_prompt_tokens = {max_prompt_tokens}"
            if too_long
            else "no rows"
        )
        raise UsageError(f"the data set is empty ({names}): {why}")
    return PromptSet(store, too_long, tuple(parts), tuple(dict.fromkeys(layouts)))


def read_rows(spec: DataSpec) -> Iterator[tuple[str, Any]]:
    """(place for error messages, row) of each row that the slice leaves. Raises UsageError."""
    if spec.kind == "reasoning-gym":
        return gym_rows(spec)  # makes only the items that are asked for
    if spec.kind == "hub":
        rows = hub_rows(spec)
    elif spec.kind == "directory":
        rows = saved_rows(spec)
    else:
        rows = file_rows(Path(spec.name))
    return islice(rows, spec.start, spec.stop)


def data_summary(
    train: PromptSet | None, evaluation: Mapping[str, PromptSet], *, targets_too_long: int | None = None
) -> str:
    """One line on what was read, and what was left out of each set and why; for the start of a run.

    train: None for a source of the user's own, of which nothing is known beforehand. targets_too_long: of supervised
    training, the rows among train.prompts that were left out for their response (the num_too_long of a SupervisedSet);
    None: rollouts, which know no targets.
    """
    parts = ["prompts come from data.source"]
    if train is not None:
        kept = len(train.prompts) - (targets_too_long or 0)
        what = "prompts" if targets_too_long is None else "supervised rows"
        parts = [f"{kept} {what}{_layouts(train)}{_left_out(train.num_too_long, targets_too_long or 0)}"]
    for name, found in evaluation.items():
        parts.append(f"{name}: {len(found.prompts)} prompts{_layouts(found)}{_left_out(found.num_too_long)}")
    return "data: " + "; ".join(parts)


def _layouts(found: PromptSet) -> str:
    return f" in the layout of {' and '.join(found.layouts)}" if found.layouts else ""


def _left_out(prompts: int, targets: int = 0) -> str:
    reasons = [
        f"{count} with a {what} longer than sampling.{limit}"
        for count, what, limit in (
            (prompts, "prompt", "max_prompt_tokens"),
            (targets, "response", "max_response_tokens"),
        )
        if count
    ]
    return f" (left out: {' and '.join(reasons)})" if reasons else ""
