"""One sampled response and its prompt: what generation fills, rewards score, dumps store and training consumes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rltool.engines.types import Completion, Drafts, RoutedExperts, VersionSpan


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


@dataclass
class Sample:
    """group_id is unique per (step, prompt); index counts samples within the group.

    response_ids, response_mask and response_logprobs have equal lengths. response_mask: 1 for tokens that the policy
    sampled, 0 for tokens inserted by an environment (their logprobs are 0.0). versions cover the response in order.
    sampling_mask_ids, sampling_mask_counts ("i"): the tokens that top-p and top-k left to choose from, place after
    place, and how many for each token of the response, 0 where its mask is 0; empty where sampling was not truncated.
    `prompt_index` is the row of the data set. raw_reward: the one before reward.group replaced it; reward_parts: those
    that it is the weighted sum of, by name, where there are several. remove_sample, set by a hook: no loss on this
    sample, while its reward still counts in its group's baseline. episode_reward: what an environment or an agent gave
    at the end, None: [reward] does. turn_rewards: what single turns have earned besides, where anything says so; the
    reward is the sum of both. trajectory: an agent's episode may leave several samples, with one index and one reward;
    numbered from 0. failure: why it is FAILED. teacher_logprobs: of model.teacher, one for each token of the response,
    0.0 where its mask is 0; empty without one. teacher_topk_ids ("i"), teacher_topk_logprobs ("f"): of its K most
    probable tokens in the place of each, token after token; -1 and -inf: none. baseline_reward: of a greedy response to
    its prompt, where advantages are relative to that. train_metadata: what hooks, generate functions, environments,
    agents and async rewards hand on to training, JSON by name; its numbers are TrainBatch.metadata. multimodal_inputs:
    "image", "video" or "audio" -> what the row has of them, paths, URLs or base64 text, not decoded; empty without.
    routed_experts ("B" or "h"): the experts that the engine's router chose for each token of prompt and response, in
    each layer, token after token (engines.types.RoutedExperts); UNROUTED for what was never forwarded: the last token,
    and what an environment appended behind the last reply. Those of the newest request, which has computed everything
    before its own tokens, after a weight sync with the newer weights: of one forward pass, by the weights that are
    closest to those in training. Empty: not asked for. cached_tokens: of the prompts of all its requests together,
    those that engines found in their prefix caches; drafts: of speculative decoding, likewise; None where an engine
    does not report them. tool_seconds: from replies of the policy to what it read next, as environments and agents
    took them; None without. Generate functions may set it.
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
    sampling_mask_ids: array[int] = field(default_factory=lambda: array("i"))
    sampling_mask_counts: array[int] = field(default_factory=lambda: array("i"))
    status: SampleStatus = SampleStatus.PENDING
    reward: float | None = None
    raw_reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    remove_sample: bool = False
    episode_reward: float | None = None
    turn_rewards: list[TurnReward] = field(default_factory=list)
    trajectory: int = 0
    failure: str = ""
    teacher_logprobs: list[float] = field(default_factory=list)
    teacher_topk_ids: array[int] = field(default_factory=lambda: array("i"))
    teacher_topk_logprobs: array[float] = field(default_factory=lambda: array("f"))
    baseline_reward: float | None = None
    train_metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, list[Any]] = field(default_factory=dict)
    routed_experts: array[int] = field(default_factory=lambda: array("B"))
    cached_tokens: int | None = None
    drafts: Drafts | None = None
    tool_seconds: float | None = None

    def append_response_tokens(self, completion: Completion) -> None:
        """Append what the engine sampled; version spans are shifted behind what is already there."""
        shift = len(self.response_ids)
        self._count(completion, is_first=not any(self.response_mask))
        self.response_ids.extend(completion.token_ids)
        self.response_mask.extend([1] * len(completion.token_ids))
        self.response_logprobs.extend(completion.logprobs)
        self.versions.extend(VersionSpan(v.version, v.start + shift, v.end + shift) for v in completion.versions)
        if completion.sampling_mask is not None:
            self._append_unmasked(shift)
            self.sampling_mask_ids.extend(completion.sampling_mask.ids)
            self.sampling_mask_counts.extend(completion.sampling_mask.counts)
        self.status = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}[
            completion.finish_reason
        ]
        routed = completion.routed_experts
        self.routed_experts = array("B") if routed is None else routed.padded(self.num_tokens)
        self.validate()

    def _count(self, completion: Completion, *, is_first: bool) -> None:
        """A sum that lacks one of its parts would be taken for the whole."""
        cached, drafts = completion.cached_tokens, completion.drafts
        if not is_first:
            cached = None if None in (cached, self.cached_tokens) else (cached or 0) + (self.cached_tokens or 0)
            drafts = self.drafts.plus(drafts) if self.drafts and drafts else None
        self.cached_tokens, self.drafts = cached, drafts

    def append_environment_tokens(self, token_ids: list[int]) -> None:
        """Append tokens that the policy did not sample (tool output, a next user turn): no loss, no log-probability."""
        if self.routed_experts:
            routed = RoutedExperts(self.routed_experts, len(self.routed_experts) // self.num_tokens)
            self.routed_experts = routed.padded(self.num_tokens + len(token_ids))
        self.response_ids.extend(token_ids)
        self.response_mask.extend([0] * len(token_ids))
        self.response_logprobs.extend([0.0] * len(token_ids))
        if self.sampling_mask_counts:
            self._append_unmasked(len(self.response_ids))
        self.validate()

    def _append_unmasked(self, length: int) -> None:
        """Tokens that were not sampled, up to this length of the response, have nothing to choose from."""
        self.sampling_mask_counts.extend([0] * (length - len(self.sampling_mask_counts)))

    def clear(self) -> None:
        """Forget the response: the sample is PENDING again."""
        self.response_ids, self.response_mask, self.response_logprobs, self.versions = [], [], [], []
        self.status, self.episode_reward, self.turn_rewards = SampleStatus.PENDING, None, []
        self.sampling_mask_ids, self.sampling_mask_counts = array("i"), array("i")
        self.teacher_logprobs, self.baseline_reward = [], None
        self.teacher_topk_ids, self.teacher_topk_logprobs = array("i"), array("f")
        self.train_metadata = {}
        self.routed_experts = array("B")
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
        if self.teacher_logprobs and len(self.teacher_logprobs) != n:
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {n} tokens, {len(self.teacher_logprobs)} log-probabilities of "
                "the teacher"
            )
        places = len(self.teacher_topk_ids)
        if places != len(self.teacher_topk_logprobs) or (places and (n == 0 or places % n)):
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {n} tokens, {places} most probable tokens of the teacher, "
                f"{len(self.teacher_topk_logprobs)} log-probabilities of these"
            )
        if len(self.sampling_mask_counts) not in (0, n):
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {n} tokens, sampling masks for {len(self.sampling_mask_counts)}"
            )
        if len(self.routed_experts) % max(self.num_tokens, 1):
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {self.num_tokens} tokens of prompt and response, "
                f"{len(self.routed_experts)} experts of these"
            )
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
