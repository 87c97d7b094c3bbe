"""A data source of the user's own, by import path (data.source), behind the interface of the built-in one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from rltool.config.data import DataConfig
from rltool.config.import_path import load_callable
from rltool.config.own_functions import calling
from rltool.errors import UsageError
from rltool.rollout.data.prompt import Prompt
from rltool.rollout.data.rows import Refusal, RowParser, takes_all
from rltool.rollout.tokenizer import Tokenizer

SETTING = "data.source"
MAX_TOO_LONG_IN_A_ROW = 1000
"""Rows whose prompts are too long, one after the other, before it is taken for a mistake and no bad luck."""


class DataSource(Protocol):
    """What the function that data.source names returns. It is called on the rollout manager's event loop, so `next`
    must not wait for long; a source that fetches keeps rows ready in a thread of its own."""

    def next(self, count: int) -> Sequence[dict[str, Any]]:
        """`count` rows, or fewer but at least one: what a line of a JSONL file would be."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON; a checkpoint keeps it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the row that was given out last when `state` was taken."""
        ...


class OwnSource:
    """Rows of a DataSource as numbered prompts; those that are too long are counted and left out."""

    epoch = 0

    def __init__(self, source: DataSource, parser: RowParser, *, max_prompt_tokens: int) -> None:
        self._source, self._parser, self._limit = source, parser, max_prompt_tokens
        self._given = 0
        self.num_too_long = 0

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises UsageError for a source that gives none, or rows that are none, and
        FunctionFailed for what it raises itself."""
        taken: list[Prompt] = []
        too_long = 0
        while len(taken) < count:
            with calling(f"{SETTING}: next", self._source.next):
                rows = self._source.next(count - len(taken))
            if not rows or len(rows) > count - len(taken):
                raise UsageError(
                    f"{SETTING}: next({count - len(taken)}) gave {len(rows)} rows; it must give at least one and at "
                    "most as many as it was asked for"
                )
            for row in rows:
                prompt = self._parser.prompt(row, f"{SETTING}, row {self._given}", self._given)
                self._given += 1
                if len(prompt.prompt_ids) <= self._limit:
                    taken.append(prompt)
                    too_long = 0
                    continue
                self.num_too_long += 1
                too_long += 1
                if too_long == MAX_TOO_LONG_IN_A_ROW:
                    raise UsageError(
                        f"{SETTING}: {too_long} rows one after the other have prompts longer than "
                        f"sampling.max_prompt_tokens = {self._limit}"
                    )
        return taken

    def saved(self, prompt: Prompt) -> Any:
        return prompt.to_json()

    def restored(self, saved: Any) -> Prompt:
        return Prompt.from_json(saved)

    def state_dict(self) -> dict[str, Any]:
        """With the source's own, which must be JSON."""
        with calling(f"{SETTING}: state_dict", self._source.state_dict):
            own = self._source.state_dict()
        try:
            own = json.loads(json.dumps(own, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{SETTING}: state_dict() returned what cannot be written as JSON: {error}") from error
        return {"own": own, "given": self._given, "too_long": self.num_too_long}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "own" not in state:
            raise UsageError(
                f"cannot resume: the checkpoint was made with data.train, now {SETTING} is set; restore it, or start a "
                "new run"
            )
        self._source.load_state_dict(state["own"])
        self._given, self.num_too_long = state["given"], state["too_long"]


def load_own_source(
    config: DataConfig, tokenizer: Tokenizer, *, seed: int, max_prompt_tokens: int, refusal: Refusal = takes_all
) -> OwnSource:
    """data.source as prompts. refusal: of rows with inputs beside text. UsageError for an import path that leads
    nowhere, or to something else."""
    assert config.source is not None
    made = load_callable(config.source, setting=SETTING, takes=("config", "seed"))(config, seed)
    lacking = [name for name in ("next", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if lacking:
        raise UsageError(
            f"{SETTING} = {config.source!r} returned {type(made).__name__}, which has no {' and no '.join(lacking)}; "
            "see docs/extending.md"
        )
    parser = RowParser(tokenizer, config, refusal=refusal)
    return OwnSource(made, parser, max_prompt_tokens=max_prompt_tokens)
