"""One sampled response and its prompt: what generation fills, rewards score, dumps store and training consumes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rltool.algorithms.fields import CODES, Field, Held, Record, held_fields, holds_columns, record
from rltool.engines.types import Completion, Drafts, VersionSpan


class SampleStatus(StrEnum):
    PENDING = "pending"  # no response yet
    COMPLETED = "completed"  # the model stopped by itself
    TRUNCATED = "truncated"  # cut at max_response_tokens
    ABORTED = "aborted"  # cut by an abort on the engine; may be continued
    FAILED = "failed"  # dropped: its reward, its environment or its agent failed


@dataclass(frozen=True)
class TurnReward:
    """What one reply of the policy has earned: tokens [start, end) of the response. turn: its number within the
    episode, counted over all trajectories in order of time."""

    turn: int
    start: int
    end: int
    reward: float


@holds_columns
@record()
class Sample(Record):
    """group_id is unique per (step, prompt); index counts samples within the group.

    response_ids, response_mask and response_logprobs have equal lengths. response_mask: 1 for tokens that the policy
    sampled, 0 for tokens inserted by an environment (their logprobs are 0.0). versions cover the response in order.
    What it holds of the table in algorithms/fields.py are attributes too, flat lists or arrays, empty where there is
    nothing (Held): those of model.teacher, the tokens left to choose from, the experts that an engine chose.
    `prompt_index` is the row of the data set. raw_reward: the one before reward.group replaced it; reward_parts: those
    that it is the weighted sum of, by name, where there are several. remove_sample, set by a hook: no loss on this
    sample, while its reward still counts in its group's baseline. episode_reward: what an environment or an agent gave
    at the end, None: [reward] does. turn_rewards: further rewards of single turns, if any; the
    reward is the sum of both. trajectory: an agent's episode may leave several samples, with one index and one reward;
    numbered from 0. failure: why it is FAILED. baseline_reward: of a greedy response to its prompt, where advantages
    are relative to that. train_metadata: what hooks, generate functions, environments, agents and async rewards pass on
    to training, JSON by name; its numbers are TrainBatch.metadata. multimodal_inputs: "image", "video" or "audio" ->
    what the row has of them, paths, URLs or base64 text, not decoded; empty without. cached_tokens: of the prompts of
    all its requests together, those that engines found in their prefix caches; drafts: of speculative decoding,
    likewise; None where an engine does not report them. tool_seconds: from replies of the policy to what it read next,
    as environments and agents took them; None without. Generate functions may set it.
    """

    group_id: int
    index: int
    prompt_index: int
    prompt_ids: list[int]
    prompt_text: str = ""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    status: SampleStatus = SampleStatus.PENDING
    reward: float | None = None
    raw_reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    remove_sample: bool = False
    episode_reward: float | None = None
    turn_rewards: list[TurnReward] = field(default_factory=list)
    trajectory: int = 0
    failure: str = ""
    baseline_reward: float | None = None
    train_metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, list[Any]] = field(default_factory=dict)
    cached_tokens: int | None = None
    drafts: Drafts | None = None
    tool_seconds: float | None = None

    if TYPE_CHECKING:  # columns of the table

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(getattr(self, item.name) == getattr(other, item.name) for item in fields(self))

    def append_response_tokens(self, completion: Completion) -> None:
        """Append what the engine sampled; version spans are shifted behind what is already there."""
        shift = len(self.response_ids)
        self._count(completion, is_first=not any(self.response_mask))
        self.response_ids.extend(completion.token_ids)
        self.response_mask.extend([1] * len(completion.token_ids))
        self.response_logprobs.extend(completion.logprobs)
        self.versions.extend(VersionSpan(v.version, v.start + shift, v.end + shift) for v in completion.versions)
        self.status = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}[
            completion.finish_reason
        ]
        for name, (item, held) in held_fields().items():
            if held.comes != "later":
                self._take(name, item, held, completion.brought(name), shift)
        self.validate()

    def _take(self, name: str, item: Field, held: Held, brought: Any, shift: int) -> None:
        """What a completion whose tokens begin at `shift` of the response has brought of a field; None: nothing."""
        *_, column = held.columns(name)
        if held.comes == "newest":
            setattr(self, name, column.empty() if brought is None else brought.padded(self.num_tokens))
        elif held.counted and brought is not None:
            self._fill(item, held, getattr(self, column.name), shift)
            getattr(self, f"{name}_ids").extend(brought.ids)
            getattr(self, column.name).extend(brought.counts)
        elif brought is not None:
            values = getattr(self, name)
            if not any(self.response_mask[:shift]):  # else tokens that were sampled lack it
                self._fill(item, held, values, shift * (len(brought) // max(len(self.response_ids) - shift, 1)))
            values.extend(brought)

    def _fill(self, item: Field, held: Held, values: Any, length: int) -> None:
        """Up to this length, for tokens that were not sampled: a counted field has 0 of them there."""
        code = getattr(values, "typecode", None)
        value = 0 if held.counted else item.filler(CODES[code] if code else item.dtypes[0])
        values.extend([value] * (length - len(values)))

    def _count(self, completion: Completion, *, is_first: bool) -> None:
        """A sum that lacks one of its parts would be taken for the whole."""
        cached, drafts = completion.cached_tokens, completion.drafts
        if not is_first:
            cached = None if None in (cached, self.cached_tokens) else (cached or 0) + (self.cached_tokens or 0)
            drafts = self.drafts.plus(drafts) if self.drafts and drafts else None
        self.cached_tokens, self.drafts = cached, drafts

    def append_environment_tokens(self, token_ids: list[int]) -> None:
        """Append tokens that the policy did not sample (tool output, a next user turn): no loss, no log-probability."""
        for name, (item, held) in held_fields().items():
            *_, column = held.columns(name)
            values = getattr(self, column.name)
            if values and held.comes != "later":
                if held.comes == "newest":  # a checkpoint's copy of the sample has the same array
                    setattr(self, name, values := values[:])
                a_token = len(values) // (self.num_tokens if held.over == "sequence" else len(self.response_ids))
                self._fill(item, held, values, len(values) + a_token * len(token_ids))
        self.response_ids.extend(token_ids)
        self.response_mask.extend([0] * len(token_ids))
        self.response_logprobs.extend([0.0] * len(token_ids))
        self.validate()

    def clear(self) -> None:
        """Forget the response: the sample is PENDING again."""
        self.response_ids, self.response_mask, self.response_logprobs, self.versions = [], [], [], []
        self.status, self.episode_reward, self.turn_rewards = SampleStatus.PENDING, None, []
        self.baseline_reward, self.train_metadata = None, {}
        for name, (_, held) in held_fields().items():
            for column in () if held.outlives else held.columns(name):
                setattr(self, column.name, column.empty())
        self.cached_tokens = self.drafts = self.tool_seconds = None

    def fail(self, reason: str) -> None:
        """It is not trained on; the reason is counted."""
        self.status, self.failure = SampleStatus.FAILED, reason

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def session(self) -> str:
        """For requests that are turns of this sample (GenerateRequest.session)."""
        return f"{self.group_id}-{self.index}"

    @property
    def turns(self) -> int:
        """How many stretches of the response the policy has sampled."""
        mask = bytes(self.response_mask)  # counted in C: a rollout has millions of tokens
        return mask.startswith(b"\1") + mask.count(b"\0\1")

    @property
    def earned(self) -> float:
        """The sum of turn_rewards."""
        return sum(turn.reward for turn in self.turn_rewards)

    def validate(self) -> None:
        """ValueError unless the lists are aligned, and version spans and turns lie inside the response, in order."""
        n = len(self.response_ids)
        if not (len(self.response_mask) == len(self.response_logprobs) == n):
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {n} tokens, {len(self.response_mask)} mask entries, "
                f"{len(self.response_logprobs)} log-probabilities"
            )
        self._check_columns()
        last = 0
        for span in self.versions:
            if not last <= span.start <= span.end <= n:
                raise ValueError(
                    f"sample {self.group_id}/{self.index}: version span {span} does not fit a response of {n} tokens"
                )
            last = span.end
        last = 0
        for turn in self.turn_rewards:
            if not last <= turn.start < turn.end <= n:
                raise ValueError(
                    f"sample {self.group_id}/{self.index}: {turn} does not fit a response of {n} tokens, or the turn "
                    "before it"
                )
            last = turn.end

    def _check_columns(self) -> None:
        rows: dict[str, int] = {}
        for name, (item, held) in held_fields().items():
            if item.of == "ragged":
                continue
            *_, column = held.columns(name)
            found = len(getattr(self, column.name))
            tokens = self.num_tokens if held.over == "sequence" else len(self.response_ids)
            whole = found % tokens == 0 if item.row and not held.counted and tokens else found in (0, tokens)
            if not whole or rows.setdefault(item.row or name, found) != found:
                of = "tokens of prompt and response" if held.over == "sequence" else "tokens"
                has = f"{held.what} for {found}" if held.counted else f"{found} {held.what}"
                raise ValueError(f"sample {self.group_id}/{self.index}: {tokens} {of}, {has}")
