"""One agent's session: its trajectories, and where in them a request goes on. Pure.

Requests that continue what was recorded extend a trajectory; what an agent has edited (a turn dropped or summarised, a
sub-agent with another system prompt, the same question once more) opens a new one, a branch. Over all trajectories of a
session each sampled token has loss mask 1 exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rltool.chat.conversation import Conversation, starts_with
from rltool.gateway.errors import NotFound
from rltool.gateway.trajectory import Seen, Trajectory, Turn, TurnRecord, before, common_pictures, common_prefix

UNRECEIVED = "unreceived"
DISCARDED = "discarded"
ASKED = "asked"
"""Why a turn is left out of training: the client had gone before the answer was written; the agent sent the same
messages again without the reply; the agent has said so."""


@dataclass
class Session:
    """id: 32 hex digits. key_digest: sha256 of its key, in hex. in_progress: turns that are being generated.
    last_used: seconds of the registry's clock. left_out: turn -> why it is not trained; rewards: turn -> what the agent
    paid for it; open_ends: turns that nothing has continued. file_bytes, file_time: how much of its file the session
    holds, and when that was last written, in nanoseconds (store.py)."""

    id: str
    key_digest: str
    created: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    places: dict[str, Turn] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    open_ends: set[str] = field(default_factory=set)
    in_progress: int = 0
    last_used: float = 0.0
    ended: str | None = None
    file_bytes: int = 0
    file_time: int = 0

    @property
    def tokens(self) -> int:
        """Recorded tokens; those that a branch shares count again."""
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)

    def prefix(self, turn: Turn, tokens: int) -> array[int]:
        return self.trajectories[turn.trajectory].token_ids[:tokens]

    def pictures(self, turn: Turn, tokens: int) -> tuple[Seen, ...]:
        """Those in a `prefix`."""
        return before(self.trajectories[turn.trajectory].pictures, tokens)

    @property
    def picture_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Digest -> (rows, columns, bytes), of all that it has recorded."""
        return {
            seen.digest: (seen.place.rows, seen.place.columns, seen.place.size)
            for trajectory in list(self.trajectories)
            for seen in list(trajectory.pictures)
        }

    def is_leaf(self, turn: Turn) -> bool:
        """Nothing follows it in its trajectory."""
        return turn.end == len(self.trajectories[turn.trajectory].token_ids)

    def continued_by(self, conversation: Conversation) -> Turn | None:
        """The turn whose history the conversation begins with: the longest, and of equal ones the newest."""
        key, sent = conversation.tools_key, conversation.messages
        return next(
            (
                turn
                for turn in self._newest_longest(lambda turn: len(turn.history or ()))
                if turn.history and turn.tools_key == key and len(turn.history) < len(sent)
                if starts_with(sent, turn.history, conversation.tools)
            ),
            None,
        )

    def was_asked(self, conversation: Conversation) -> bool:
        """Whether a turn had just these messages."""
        key, sent = conversation.tools_key, conversation.messages
        return any(
            turn.history and turn.tools_key == key and len(turn.history) == len(sent) + 1
            and starts_with(sent, turn.history[:-1], conversation.tools)
            for turn in list(self.places.values())
        )  # fmt: skip

    def continued_by_text(self, prompt: str) -> Turn | None:
        """As `continued_by`, for a prompt without a chat template."""
        turns = self._newest_longest(lambda turn: len(turn.raw or ""))
        return next((turn for turn in turns if turn.raw and prompt.startswith(turn.raw)), None)

    def _newest_longest(self, length: Callable[[Turn], int]) -> list[Turn]:
        """Most often the first of them is the one that goes on, so the rest is not compared. A list first: the planner
        runs in a thread, and another turn may end meanwhile."""
        return sorted(reversed(list(self.places.values())), key=length, reverse=True)

    def longest_shared(self, token_ids: array[int], pictures: Sequence[Seen] = ()) -> tuple[int | None, int]:
        """(trajectory, tokens) of the longest recorded beginning of `token_ids`, with these pictures among them;
        (None, 0) where nothing is shared."""
        best: tuple[int | None, int] = (None, 0)
        for index, trajectory in enumerate(self.trajectories):
            least = best[1] + 1
            if len(trajectory.token_ids) >= least and trajectory.token_ids[:least] == token_ids[:least]:
                common = common_prefix(trajectory.token_ids, token_ids)
                tokens = common_pictures(trajectory.pictures, pictures, common)
                best = (index, tokens) if tokens >= least else best
        return best

    def place(
        self, prompt_ids: array[int], base: Turn | None, cut: int, pictures: Sequence[Seen] = ()
    ) -> tuple[int, int | None, int]:
        """(trajectory, parent, shared) of a turn with this prompt, of which the first `cut` tokens are those of `base`.
        pictures: all of the prompt's.

        The trajectory's own tokens decide: where the prompt begins with all of them, it is extended.
        """
        found = self.longest_shared(prompt_ids, pictures) if base is None or not cut else (base.trajectory, cut)
        parent, shared = found
        whole = parent is not None and shared == len(self.trajectories[parent].token_ids)
        return (parent if parent is not None and whole else len(self.trajectories)), parent, shared

    def apply(self, record: TurnRecord) -> None:
        """Add a turn: the only way in which a session grows."""
        if record.trajectory == len(self.trajectories):
            self.trajectories.append(Trajectory(record.parent, record.shared, record.reason))
            if record.parent is not None:
                parent = self.trajectories[record.parent]
                pictures = before(parent.pictures, record.shared)
                self.trajectories[-1].add_context(parent.token_ids[: record.shared], pictures)
        trajectory = self.trajectories[record.trajectory]
        trajectory.add_context(record.context_ids, record.pictures)
        trajectory.add_sampled(record)
        place = self._place_after(record, len(trajectory.token_ids))
        self._discard(record, place)
        self.places[record.id] = place
        self.open_ends.add(record.id)
        if record.left_out:
            self.left_out[record.id] = ASKED
        self.turns.append(_without_tokens(record))

    def mark(self, turn: str, *, left_out: str | None = None, reward: float | None = None) -> None:
        """What became of a turn; left_out "": it counts after all. NotFound for one that is not of this session."""
        if turn not in self.places:
            raise NotFound(f"session {self.id} has no turn {turn[:64]!r}")
        if left_out:
            self.left_out[turn] = left_out
        elif left_out is not None:
            self.left_out.pop(turn, None)
        if reward is not None:
            self.rewards[turn] = reward

    def _discard(self, record: TurnRecord, place: Turn) -> None:
        """Replies that the agent threw away: it had them when it sent the same messages again without them. One that is
        continued later, as the best of several is, counts again."""
        if record.base is not None:
            self.open_ends.discard(record.base)
            if self.left_out.get(record.base) == DISCARDED:
                del self.left_out[record.base]
        if not place.history or record.seconds is None:
            return
        sent, began = place.history[:-1], record.time - record.seconds
        ended = {turn.id: turn.time for turn in self.turns if turn.id in self.open_ends}
        for earlier in [self.places[turn] for turn, time in ended.items() if time <= began]:
            asked = (earlier.history or ())[:-1]
            if not asked or earlier.tools_key != place.tools_key or not starts_with(sent, asked):
                continue
            if len(sent) == len(asked) or sent[len(asked)].role != "assistant":
                self.open_ends.discard(earlier.id)
                self.left_out.setdefault(earlier.id, DISCARDED)

    def _place_after(self, record: TurnRecord, end: int) -> Turn:
        base = self.places[record.base] if record.base is not None else None
        history, raw = None, None
        if record.reply is not None:
            history = (*((base.history if base else None) or ()), *record.messages, record.reply)
        elif record.raw_prompt is not None and record.raw_reply is not None:
            raw = ((base.raw if base else None) or "") + record.raw_prompt + record.raw_reply
        stop_id = record.sampled_ids[-1] if record.stopped else None
        start = end - len(record.sampled_ids)
        return Turn(record.id, record.trajectory, start, end, stop_id, record.tools_key, history, raw)

    def to_json(self) -> dict[str, Any]:
        """The record that GET /sessions/ID gives."""
        return {
            "id": self.id,
            "created": self.created,
            "metadata": dict(self.metadata),
            "ended": self.ended,
            "trajectories": [trajectory.to_json(i) for i, trajectory in enumerate(self.trajectories)],
            "turns": list(self._turns_json()),
        }

    def _turns_json(self) -> Iterator[dict[str, Any]]:
        for record in self.turns:
            place = self.places[record.id]
            shown = record.to_json()
            for name in ("context_ids", "sampled_ids", "logprobs", "versions", "stopped", "tools_key"):
                del shown[name]
            why, reward = self.left_out.get(record.id, ""), self.rewards.get(record.id)
            yield shown | {"start": place.start, "end": place.end, "left_out": why, "reward": reward}


def _without_tokens(record: TurnRecord) -> TurnRecord:
    """The tokens are in the trajectory: twice would be twice the memory."""
    nothing: Sequence[int] = ()
    return replace(record, context_ids=nothing, sampled_ids=nothing, logprobs=(), versions=())
