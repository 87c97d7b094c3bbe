"""vLLM with rltool's plugin: as `vllm`, but samples come as arrays, from the plugin's own route.

The request is that of vLLM's token route, to which the plugin hands it on; see rltool.engines.plugin.arrays for the
reply.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from rltool.engines import arrays
from rltool.engines.dialects.inspection import NO_SUCH_ROUTE
from rltool.engines.dialects.sampling_mask import FoundMask, SamplingMask
from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.types import Completion, HttpRequest, VersionSpan
from rltool.errors import EngineError, MissingLogprobs

ARRAYS_PATH = "/rltool/generate"
RELOAD_PATH = "/rltool/reload_weights"
CHECKSUMS_PATH = "/rltool/checksums"


class ArrayVllmDialect(VllmDialect):
    """See rltool.engines.dialects.protocol."""

    with_plugin = ""
    routable = True
    generate_path = ARRAYS_PATH

    def reload(self, model: str | None) -> list[HttpRequest]:
        return [HttpRequest("POST", RELOAD_PATH)]

    def checksums(self) -> HttpRequest:
        return HttpRequest("GET", CHECKSUMS_PATH, tolerate=(NO_SUCH_ROUTE,))  # of an rltool that has no such route yet

    @staticmethod
    def adapter_checksums(name: str) -> HttpRequest:
        """Of an adapter that was published; parsed by parse_checksums."""
        return HttpRequest("GET", CHECKSUMS_PATH, query={"adapter": name}, tolerate=(NO_SUCH_ROUTE,))

    def parse_choice(self, choice: Mapping[str, Any], with_mask: bool) -> Completion:
        """One entry of `choices`. Raises MissingLogprobs where a value is missing or not finite."""
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{ARRAYS_PATH} ended a sample with finish_reason {reason!r}")
        if choice.get("logprobs") is None:
            raise MissingLogprobs(f"{ARRAYS_PATH} returned a sample without log-probabilities")
        try:
            tokens, logprobs = (
                arrays.decode(arrays.TOKEN, choice["token_ids"]),
                arrays.decode(arrays.LOGPROB, choice["logprobs"]),
            )
            mask = _sampling_mask(choice) if with_mask else None
        except ValueError as error:
            raise EngineError(f"{ARRAYS_PATH} returned arrays that cannot be read: {error}") from error
        spans = tuple(VersionSpan(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ())
        return Completion(tokens, logprobs, reason, spans, mask)  # type: ignore[arg-type]


def _sampling_mask(choice: Mapping[str, Any]) -> SamplingMask:
    """Raises ValueError for arrays that cannot be read, EngineError for a mask that is none."""
    found = choice.get("sampling_mask")
    if found is None:
        raise EngineError(f"{ARRAYS_PATH} returned no sampling mask: the server has an older rltool, update it")
    ids, counts = (array("i", map(int, arrays.decode(arrays.TOKEN, found[name]))) for name in ("ids", "counts"))
    return FoundMask(SamplingMask(ids, counts), found["mass"]).checked()
