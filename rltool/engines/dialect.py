"""What an engine's HTTP interface looks like to rltool: pure functions from typed values to requests and back.

A dialect performs no I/O and imports no engine package, so it is tested without a network. `client.py` does the I/O for
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from rltool.config.serve import EngineLaunch
from rltool.engines.checksums import Checksums
from rltool.engines.types import (
    Completion,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    HttpRequest,
    TokenScores,
)

PauseMode = Literal["keep", "wait", "abort"]
SleepLevel = Literal[1, 2]
"""1: the weights are kept in the host's memory. 2: they are dropped, and the engine needs a whole update before its KV
cache wakes."""
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What takes GPU memory, in the order in which it must come back."""


def in_waking_order(tags: Sequence[MemoryTag]) -> list[MemoryTag]:
    """Raises ValueError where nothing is named: to both engines that means everything."""
    if not tags or not set(tags) <= set(MEMORY_TAGS):
        raise ValueError(f"memory tags are one or both of {', '.join(MEMORY_TAGS)}, not {list(tags)}")
    return [tag for tag in MEMORY_TAGS if tag in tags]


class Dialect(Protocol):
    """One file per engine kind: vllm.py, sglang.py."""

    name: str
    temporary_in: str
    """The variable by which a server learns where to put its sockets."""

    # -- generation (data plane)
    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        """The HTTP requests that together yield request.n samples (one request where the engine can do n with
        seeds)."""
        ...

    def parse_generate(self, request: GenerateRequest, replies: list[Any]) -> list[Completion]:
        """Exactly request.n completions, or EngineError / MissingLogprobs."""
        ...

    def request_ids(self, request: GenerateRequest) -> list[str]:
        """The ids under which the HTTP requests of `generate` run at an engine, also behind a router: what `abort`
        takes."""
        ...

    # -- probing
    def probe(self) -> Mapping[str, HttpRequest]:
        """Named read-only requests; replies go to parse_probe. A key that ends in '?' may answer 404 (reply None)."""
        ...

    def parse_probe(self, replies: Mapping[str, Any]) -> EngineInfo: ...

    def health(self) -> HttpRequest: ...

    def load(self) -> HttpRequest:
        """How much the engine has to do; cheap enough to be asked every second. The reply goes to parse_load."""
        ...

    def parse_load(self, reply: Any) -> EngineLoad: ...

    def counters(self) -> HttpRequest:
        """What the engine has counted of its own work. The reply goes to parse_counters."""
        ...

    def parse_counters(self, reply: Any) -> EngineCounters: ...

    # -- control plane; each list is sent in order, all must answer 2xx
    def pause(self, mode: PauseMode) -> list[HttpRequest]: ...

    def resume(self) -> list[HttpRequest]: ...

    def abort(self, request_ids: Sequence[str]) -> list[HttpRequest]:
        """End exactly these requests, given by the ids of `request_ids`, at one engine; all of them may be sent side by
        side.

        An id that is not there is harmless, so the same list goes to every engine, and for no ids nothing is sent. A
        request that is ended, waiting or running, answers with the tokens that it has and finish_reason "abort". A
        request that arrives after the abort, or that the server has not yet let in, is not ended by it: whoever waits
        for the end repeats the abort.
        """
        ...

    def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Abort what runs, hold back what comes, and free the GPU memory of `tags`.

        EngineInfo.sleep_levels tells what the server was started for. Raises UsageError for tags that this kind of
        engine frees only together with others.
        """
        ...

    def wake(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> list[HttpRequest]:
        """Take the memory of `tags`, which must be asleep, again.

        The engine generates as soon as its KV cache is awake. So after level 2: wake the weights, update them, wake the
        cache; and nothing in between may resume the engine.
        """
        ...

    def reload(self, model: str | None) -> list[HttpRequest]:
        """Load the weights again from where the server read them, `model` (EngineInfo.model_path): after level 2, while
        its weights are awake and its cache is not."""
        ...

    def leave_transfer(self, group: str) -> list[HttpRequest]:
        """Leave a weight-transfer group and close an update that was left open, by us or by a trainer that died,
        whatever the transport was. Neither need be there. The other steps of a transfer are in rltool.weights."""
        ...

    # -- inspection
    def checksums(self) -> HttpRequest:
        """Digests of the parameters that the engine holds. A version that has none answers 404, which is tolerated."""
        ...

    def parse_checksums(self, reply: Any) -> Checksums | None:
        """None where the engine has none."""
        ...

    def score(self, token_ids: Sequence[int], topk: int = 0) -> HttpRequest:
        """Ask for the log-probabilities of given tokens, each after those before it. The reply goes to parse_score.
        topk: of so many most probable tokens in the place of each as well; then the reply goes to parse_topk."""
        ...

    def parse_score(self, token_ids: Sequence[int], reply: Any) -> tuple[float, ...]:
        """Natural logs at temperature 1 of all tokens but the first. Raises EngineError, MissingLogprobs."""
        ...

    def parse_topk(self, token_ids: Sequence[int], reply: Any, topk: int) -> TokenScores:
        """As parse_score, with the most probable tokens."""
        ...

    # -- classification, of engines that were started for it
    def classify(self, token_ids: Sequence[int], *, use_activation: bool) -> HttpRequest:
        """Ask for the scores of a text, one for each label. use_activation: the model's sigmoid or softmax behind its
        head. The reply goes to parse_classify. Raises UsageError for what this kind of engine cannot do."""
        ...

    def parse_classify(self, reply: Any) -> tuple[float, ...]:
        """In the order of the labels. Raises EngineError where one is no finite number."""
        ...

    # -- launching
    def argv(self, launch: EngineLaunch) -> list[str]: ...

    def environment(self, launch: EngineLaunch) -> dict[str, str]: ...
