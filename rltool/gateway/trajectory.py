"""What a session records: token sequences as an engine has read and written them, and the turns that made them. Pure.

A turn is one JSON line (store.py). A session is the sum of its turns: `Session.apply` is the one way in which a record
grows, for a turn that has just ended and for one that is read back from the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from rltool.chat.conversation import Message
from rltool.engines.types import VersionSpan
from rltool.models.pictures import Place


class Seen(NamedTuple):
    """A picture in a trajectory. digest: of its file, as the agent sent it."""

    digest: str
    place: Place


@dataclass(frozen=True)
class TurnRecord:
    """One request and its answer.

    trajectory: its number; one above the last opens a new one, which begins with the first `shared` tokens of `parent`
    (their loss is in the parent: their mask is 0 here). context_ids, sampled_ids: what follows, in this order; logprobs
    and versions are of the sampled ones. stopped: the last of them is a stop token. base: the turn whose history
    `messages` continue, or None; reason: why the turn does not simply extend a trajectory, or "".
    raw_prompt, raw_reply: of OpenAI Completions, the text behind that of the base, and the text that was sampled.
    pictures: those among context_ids, with their places in the trajectory.
    seconds: from the request until `time`; None in records of an earlier rltool. left_out: the agent has said that the
    turn is not trained.
    """

    id: str
    time: float
    api: str
    trajectory: int
    parent: int | None
    shared: int
    reason: str
    base: str | None
    context_ids: Sequence[int]
    sampled_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    stopped: bool
    engine: str | None = None
    not_followed: tuple[str, ...] = ()
    tools_key: str = ""
    messages: tuple[Message, ...] = ()
    reply: Message | None = None
    raw_prompt: str | None = None
    raw_reply: str | None = None
    seconds: float | None = None
    left_out: bool = False
    pictures: tuple[Seen, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "seconds": self.seconds,
            "left_out": self.left_out,
            "context_ids": list(self.context_ids),
            "sampled_ids": list(self.sampled_ids),
            "logprobs": list(self.logprobs),
            "versions": [[span.version, span.start, span.end] for span in self.versions],
            "messages": [message.to_json() for message in self.messages],
            "reply": self.reply.to_json() if self.reply else None,
            "pictures": [[seen.digest, *seen.place] for seen in self.pictures],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TurnRecord:
        """The inverse of `to_json`."""
        return cls(
            **{name: data[name] for name in _PLAIN if name != "not_followed"},
            not_followed=tuple(data["not_followed"]),
            context_ids=data["context_ids"],
            sampled_ids=data["sampled_ids"],
            logprobs=data["logprobs"],
            versions=tuple(VersionSpan(*span) for span in data["versions"]),
            messages=tuple(map(Message.from_json, data["messages"])),
            reply=Message.from_json(data["reply"]) if data["reply"] else None,
            seconds=data.get("seconds"),
            left_out=bool(data.get("left_out")),
            pictures=tuple(Seen(digest, Place(*place)) for digest, *place in data.get("pictures", ())),
        )


_PLAIN = (
    "id", "time", "api", "trajectory", "parent", "shared", "reason", "base", "finish_reason", "stopped", "engine",
    "not_followed", "tools_key", "raw_prompt", "raw_reply",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A place at which a trajectory can go on: after a reply, which is tokens [start, end).

    history: all messages up to and with the reply; None for OpenAI Completions, whose whole text is `raw` (None where
    the prompt was token ids).
    """

    id: str
    trajectory: int
    start: int
    end: int
    stop_id: int | None
    tools_key: str
    history: tuple[Message, ...] | None
    raw: str | None


@dataclass
class Trajectory:
    """One token sequence. loss_mask: 1 for what the model sampled in this trajectory, 0 for what it was given and for
    what was sampled in its parent. Log-probabilities are 0.0 where the mask is 0. pictures: in order."""

    parent: int | None
    shared: int
    reason: str
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    pictures: list[Seen] = field(default_factory=list)

    def add_context(self, token_ids: Sequence[int], pictures: Sequence[Seen]) -> None:
        self.token_ids.extend(token_ids)
        self.pictures.extend(pictures)
        self.loss_mask.extend(bytes(len(token_ids)))
        self.logprobs.frombytes(bytes(len(token_ids) * self.logprobs.itemsize))

    def add_sampled(self, record: TurnRecord) -> None:
        shift = len(self.token_ids)
        self.token_ids.extend(record.sampled_ids)
        self.loss_mask.extend(b"\1" * len(record.sampled_ids))
        self.logprobs.extend(record.logprobs)
        self.versions.extend(VersionSpan(s.version, s.start + shift, s.end + shift) for s in record.versions)
        self.finish_reasons.append(record.finish_reason)

    def to_json(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "parent": self.parent,
            "shared": self.shared,
            "reason": self.reason,
            "token_ids": self.token_ids.tolist(),
            "loss_mask": list(self.loss_mask),
            "logprobs": self.logprobs.tolist(),
            "versions": [{"version": s.version, "start": s.start, "end": s.end} for s in self.versions],
            "finish_reasons": list(self.finish_reasons),
            "pictures": [seen.digest for seen in self.pictures],
            "picture_places": [number for seen in self.pictures for number in seen.place],
        }


def common_prefix(a: array[int], b: array[int]) -> int:
    """How many leading tokens are equal. Slices are compared, which is C, not tokens one by one."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # equal up to low, different within high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def before(pictures: Sequence[Seen], tokens: int) -> tuple[Seen, ...]:
    """Those in the first `tokens`."""
    return tuple(seen for seen in pictures if seen.place.at < tokens)


def common_pictures(a: Sequence[Seen], b: Sequence[Seen], tokens: int) -> int:
    """How many leading tokens of two sequences are equal whose first `tokens` token ids are: up to where one has a
    picture that the other has not."""
    for pair in zip_longest(a, b):
        first = min(seen.place.at for seen in pair if seen is not None)
        if first >= tokens:
            break
        if pair[0] != pair[1]:
            return first
    return tokens
