"""Prompts: read from JSONL or Parquet, tokenised once, then served in a resumable shuffled order."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltool.config.train import DataConfig
from rltool.errors import UsageError
from rltool.rollout.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One row. index: its number among all rows of the data set, from 0;
    text: what was tokenised, chat template applied; messages: the row's, where it has some."""

    index: int
    prompt_ids: tuple[int, ...]
    text: str
    label: str | None = None
    response: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class PromptSet:
    """num_too_long: rows that were left out because their prompt exceeds the limit."""

    prompts: list[Prompt]
    num_too_long: int


def load_prompts(
    paths: Sequence[Path], tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int, limit: int | None = None
) -> PromptSet:
    """Read and tokenise rows of .jsonl or .parquet files, in order; stop after `limit` kept prompts.

    A row has `prompt` (text) or `messages` (chat), and optionally `label`, `response`, `metadata`; the keys are
    configurable. Raises UsageError naming file and line for a broken row, and if nothing is left.
    """
    prompts: list[Prompt] = []
    too_long = index = 0
    for path in paths:
        for place, row in _read_rows(Path(path)):
            if limit is not None and len(prompts) >= limit:
                break
            prompt = _parse_row(row, place, index, tokenizer, config)
            index += 1
            if len(prompt.prompt_ids) > max_prompt_tokens:
                too_long += 1
            else:
                prompts.append(prompt)
    if not prompts:
        names = ", ".join(str(path) for path in paths) or "no file given: set data.train"
        why = (
            f"all {too_long} prompts are longer than sampling.max_prompt_tokens = {max_prompt_tokens}"
            if too_long
            else "no rows"
        )
        raise UsageError(f"the data set is empty ({names}): {why}")
    return PromptSet(prompts, too_long)


def data_summary(train: PromptSet, evaluation: Mapping[str, PromptSet], *, targets_too_long: int | None = None) -> str:
    """One line on what was read, and what was left out of each set and why; for the start of a run.

    targets_too_long: of supervised training, the rows among train.prompts that were left out for their response (the
    num_too_long of a SupervisedSet); None: rollouts, which know no targets.
    """
    kept = len(train.prompts) - (targets_too_long or 0)
    what = "prompts" if targets_too_long is None else "supervised rows"
    parts = [f"{kept} {what}{_left_out(train.num_too_long, targets_too_long or 0)}"]
    for name, found in evaluation.items():
        parts.append(f"{name}: {len(found.prompts)} prompts{_left_out(found.num_too_long)}")
    return "data: " + "; ".join(parts)


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


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for error messages, row). The place counts lines or rows from 1."""
    if not path.is_file():
        raise UsageError(f"data file {path} does not exist")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from _read_jsonl(path)
    else:
        raise UsageError(f"data file {path}: expected a name that ends in .jsonl or .parquet")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # bytes, because text mode would need a decision on what a line is; in JSONL it is what ends in \n
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"data file {path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                place = f"{path}, line {number}"
                yield place, _parse_json(content, place)


def _parse_json(line: bytes, place: str) -> Any:
    try:
        # Decoded here: json would take a line with NUL bytes for UTF-16.
        row = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # the only way to half of a surrogate pair, at which tokenizers and writers fail
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise UsageError(
            f"{place}: {half} is half of a surrogate pair, which is no character; write both halves, or leave it out"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise UsageError(f"{place}: cannot be read as JSON: {error}") from error
    return row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: cannot be read as Parquet: {error}") from error


def _parse_row(row: Any, place: str, index: int, tokenizer: Tokenizer, config: DataConfig) -> Prompt:
    if not isinstance(row, dict):
        raise UsageError(
            f"{place}: expected an object with {config.prompt_key!r} or 'messages', found {type(row).__name__}"
        )
    source = row.get(config.prompt_key)
    messages = row.get("messages")
    if source is None:
        source = messages
    elif messages is not None and config.prompt_key != "messages":
        raise UsageError(f"{place}: has both {config.prompt_key!r} and 'messages'; keep one")
    if source is None:
        raise UsageError(
            f"{place}: has neither {config.prompt_key!r} nor 'messages'; "
            f"its keys are {', '.join(map(repr, row)) or 'none'}"
        )
    text, ids = _encode(source, place, tokenizer, config)
    if not ids:
        raise UsageError(f"{place}: the prompt is empty")
    return Prompt(
        index=index,
        prompt_ids=tuple(ids),
        text=text,
        label=_optional_text(row, config.label_key, place),
        response=_optional_text(row, config.response_key, place),
        metadata=_metadata(row, place),
        messages=tuple(source) if isinstance(source, list) else None,
    )


def _encode(source: Any, place: str, tokenizer: Tokenizer, config: DataConfig) -> tuple[str, list[int]]:
    if isinstance(source, str):
        if not config.apply_chat_template:
            return source, tokenizer.encode_prompt(source)
        source = [{"role": "user", "content": source}]
    elif config.apply_chat_template is False:
        raise UsageError(f"{place}: 'messages' need a chat template, but data.apply_chat_template is false")
    valid = (
        isinstance(source, list)
        and source
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in source)
    )
    if not valid:
        raise UsageError(
            f"{place}: expected text, or a list of messages with 'role' and 'content', "
            f"found {json.dumps(source, default=str)[:80]}"
        )
    try:
        text = tokenizer.render_messages(source)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise UsageError(f"{place}: the chat template refuses these messages: {error}") from error
    return text, tokenizer.encode_rendered(text)


def _optional_text(row: dict[str, Any], key: str, place: str) -> str | None:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UsageError(
        f"{place}: {key!r} must be text or a number, found {type(value).__name__}; put structured data into 'metadata'"
    )


def _metadata(row: dict[str, Any], place: str) -> dict[str, Any]:
    value = row.get("metadata")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{place}: 'metadata' must be an object, found {type(value).__name__}")
    try:
        # Dumps are JSON: what Parquet has beyond it fails here, not after the rollout.
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place}: 'metadata' cannot be written as JSON: {error}") from error


class PromptSource:
    """Endless prompts. Epoch e is shuffled by (seed, e) alone, so (epoch, position) is all that a resume needs."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise UsageError("the data set is empty")
        self._prompts = list(prompts)
        self._by_index = {prompt.index: prompt for prompt in self._prompts}
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(self._prompts)
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts, going on into the next epoch where this one ends."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            end = min(self._position + count - len(taken), len(self._order))
            taken.extend(self._prompts[i] for i in self._order[self._position : end])
            self._position = end
        return taken

    def prompt(self, index: int) -> Prompt:
        """The prompt of this row of the data set."""
        return self._by_index[index]

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. UsageError if it was taken from other data, another seed or order."""
        own = self.state_dict()
        for key, what in (
            ("fingerprint", "data set (or tokenizer)"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle setting"),
        ):
            if state[key] != own[key]:
                raise UsageError(
                    f"cannot resume: the checkpoint was made with another {what} ({state[key]}, now {own[key]}); "
                    "restore it, or start a new run"
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            # a string seed is hashed with SHA-512: the same order in every process and on every machine
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr((prompt.index, prompt.prompt_ids, prompt.label, prompt.response)).encode())
    return digest.hexdigest()
