"""The order in which prompts are drawn: shuffled by epoch, mixed by weight, resumable exactly."""

from __future__ import annotations

import bisect
import hashlib
import json
import random
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from rltool.errors import UsageError
from rltool.rollout.data.prompt import Prompt


class PromptSupply(Protocol):
    """Where the collector takes prompts from: PromptSource, or a source of the user's own."""

    num_too_long: int
    """Rows that were left out for the length of their prompt, so far."""

    @property
    def epoch(self) -> int: ...

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts; there are always more."""
        ...

    def saved(self, prompt: Prompt) -> Any:
        """What a checkpoint keeps of a prompt whose group is not trained yet: JSON."""
        ...

    def restored(self, saved: Any) -> Prompt:
        """The inverse of `saved`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. UsageError if it was taken from something else."""
        ...


class PromptSource:
    """Endless prompts. Epoch e is shuffled by (seed, e) alone, so (epoch, position) is all that a resume needs.

    parts, weights: the prompts are those of several sets, `parts` of each, and the drawn ones are mixed by these
    shares; each set has epochs of its own. The next prompt comes from the set that is furthest behind its share, so
    after n prompts every set is within one of n times its share. Without weights all prompts are one set.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True, parts: Sequence[int] = (),
        weights: Sequence[float] = (), num_too_long: int = 0,
    ) -> None:  # fmt: skip
        if not prompts:
            raise UsageError("the data set is empty")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self.num_too_long = num_too_long
        self._fingerprint, self._indices = _fingerprint(prompts)
        self._weights = [float(weight) for weight in weights]
        sizes = list(parts) if weights else [len(prompts)]
        if 0 in sizes:
            raise UsageError(f"set {sizes.index(0) + 1} of data.train has no prompt left, but a share in data.weights")
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._streams = [
            _Stream(start, size, f"{seed}:{number}" if weights else f"{seed}", shuffle)
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]

    @property
    def epoch(self) -> int:
        """Of the set that has been gone through least often."""
        return min(stream.epoch for stream in self._streams)

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts, going on into the next epoch where this one ends."""
        return [self._prompts[self._due().take()] for _ in range(count)]

    def _due(self) -> _Stream:
        if not self._weights:
            return self._streams[0]
        drawn, total = sum(stream.taken for stream in self._streams), sum(self._weights)
        behind = [
            (drawn + 1) * weight / total - stream.taken
            for weight, stream in zip(self._weights, self._streams, strict=True)
        ]
        return self._streams[behind.index(max(behind))]

    def prompt(self, index: int) -> Prompt:
        """The prompt of this row of the data set."""
        return self._prompts[bisect.bisect_left(self._indices, index)]

    def saved(self, prompt: Prompt) -> int:
        return prompt.index

    def restored(self, saved: int) -> Prompt:
        return self.prompt(saved)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "streams": [[stream.epoch, stream.position] for stream in self._streams],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "weights": self._weights,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. UsageError if it was taken from other data, another seed or order."""
        own = self.state_dict()
        if "own" in state:
            raise UsageError(
                "cannot resume: the checkpoint was made with data.source, now data.train is set; restore it, or start "
                "a new run"
            )
        for key, what in (
            ("fingerprint", "data set (or tokenizer)"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle setting"),
            ("weights", "data.weights setting"),
        ):
            if state.get(key) != own[key]:
                raise UsageError(
                    f"cannot resume: the checkpoint was made with another {what} ({state.get(key)}, now {own[key]}); "
                    "restore it, or start a new run"
                )
        for stream, (epoch, position) in zip(self._streams, state["streams"], strict=True):
            stream.go_to(epoch, position)


class _Stream:
    """Positions start .. start + size - 1, for ever, in an order of each epoch's own."""

    def __init__(self, start: int, size: int, seed: str, shuffle: bool) -> None:
        self._start, self._size, self._seed, self._shuffle = start, size, seed, shuffle
        self.go_to(0, 0)

    @property
    def taken(self) -> int:
        return self.epoch * self._size + self.position

    def go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = array("Q", range(self._start, self._start + self._size))
        if self._shuffle:
            # a string seed is hashed with SHA-512: the same order in every process and on every machine
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)

    def take(self) -> int:
        if self.position == self._size:
            self.go_to(self.epoch + 1, 0)
        self.position += 1
        return self._order[self.position - 1]


def _fingerprint(prompts: Sequence[Prompt]) -> tuple[str, array]:
    """Of the data, and the index of each prompt, ascending."""
    digest, indices = hashlib.blake2b(digest_size=8), array("Q")
    for prompt in prompts:
        digest.update(repr((prompt.index, prompt.prompt_ids, prompt.label, prompt.response)).encode())
        if prompt.multimodal_inputs:
            digest.update(json.dumps(prompt.multimodal_inputs).encode())
        indices.append(prompt.index)
    return digest.hexdigest(), indices
