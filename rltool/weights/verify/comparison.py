"""Do engines hold the weights that the ranks hold at this moment? For `rltool debug weights --run`.

As the value check of a sync, with every parameter's checksum beside it where the engine's layout is known: the ranks
work out what each rank of the engine should hold. They must be idle, and no sync may run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from rltool.engines.adapters import adapter_name
from rltool.engines.dialects.checksums import Checksums, Compared, ParameterLayout, compare, with_ranks
from rltool.engines.fleet.disaggregation import generate_at
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Member
from rltool.engines.types import Completion, EngineInfo, GenerateRequest
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError
from rltool.weights.connections import Ranks
from rltool.weights.sleep import SharedGpus
from rltool.weights.verify.implied_checksums import layout_of
from rltool.weights.verify.values import ValueCheck
from rltool.weights.verify.verdict import Sampled, Verdict, verdict

SAMPLES = 4
"""Of one prompt, by each engine."""


@dataclass(frozen=True)
class _Found:
    """What one engine showed. checksums: {} where it has none."""

    info: EngineInfo
    completions: list[Completion]
    checksums: Checksums


class Comparison:
    """deadline: seconds for each answer of an engine. gpus: where they
    sit on the trainer's: the ranks' parameters are away while engines are awake, and come back for this. described:
    adds what an engine does not report of its model, from elsewhere. adapter: of which version engines are compared;
    None: their own weights are."""

    def __init__(
        self, engines: EngineSet, ranks: Ranks, check: ValueCheck, *, deadline: float,
        gpus: SharedGpus | None = None, described: Callable[[EngineInfo], EngineInfo] = lambda info: info,
        adapter: Callable[[], WeightVersion | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._adapter = adapter
        self._described = described
        self._client, self._fleet = engines.client, engines.fleet
        self._ranks, self._check, self._deadline, self._gpus = ranks, check, deadline, gpus

    async def compare(self, engines: Sequence[Member]) -> dict[str, Verdict]:
        """By URL. An engine that does not answer is not equal; what a rank raises is raised."""
        version = self._adapter()
        named = adapter_name(version) if version is not None else ""
        request = replace(self._check.request(), n=SAMPLES, adapter=named)
        urls = [engine.url for engine in engines]
        looks = await asyncio.gather(*(self._look(engine, request) for engine in engines))
        found = {url: look for url, look in zip(urls, looks, strict=True) if isinstance(look, _Found)}
        verdicts = {url: Verdict(False, [look]) for url, look in zip(urls, looks, strict=True) if isinstance(look, str)}
        if found:
            async with self._gpus.parameters() if self._gpus is not None else nullcontext():
                verdicts |= await self._verdicts(found, request)
        return {url: verdicts[url] for url in urls}

    async def _verdicts(self, found: Mapping[str, _Found], request: GenerateRequest) -> dict[str, Verdict]:
        """What the ranks hold is on their devices."""
        batch = self._check.batch(request, [sample for look in found.values() for sample in look.completions])
        scores = iter(_of_responses(await self._ranks.logprobs(batch), batch.lengths, len(request.prompt_ids)))
        digests: dict[ParameterLayout, dict[str, tuple[str, ...]]] = {}
        verdicts: dict[str, Verdict] = {}
        for url, look in found.items():
            samples = [Sampled.of(request.prompt_ids, completion) for completion in look.completions]
            of_it = self._adapter_parameters if request.adapter else self._parameters
            parameters = await of_it(look.info, look.checksums, digests)
            allowed = self._check.allowed(look.info)
            verdicts[url] = verdict(parameters, samples, [next(scores) for _ in samples], allowed)
        return verdicts

    async def _look(self, engine: Member, request: GenerateRequest) -> _Found | str:
        try:
            completions = await generate_at(
                self._client, self._fleet, engine, request, timeout=self._deadline, attempts=1
            )
            checksums = await self._client.checksums(
                engine.endpoint, timeout=self._deadline, adapter=request.adapter
            )
            return _Found(engine.info, completions, checksums or {})
        except EngineError as error:
            return str(error)

    async def _parameters(
        self, info: EngineInfo, checksums: Checksums, digests: dict[ParameterLayout, dict[str, tuple[str, ...]]]
    ) -> Compared | str:
        """digests: the ranks' by layout, each made once, for it reads the whole model."""
        layout = layout_of(self._described(info), checksums, self._ranks.plan.dtype)
        if isinstance(layout, str):
            return layout
        if layout not in digests:
            digests[layout] = await self._ranks.weight_checksums(layout)
        return compare(checksums, with_ranks(checksums, digests[layout]))

    async def _adapter_parameters(
        self, info: EngineInfo, checksums: Checksums, digests: dict[ParameterLayout, dict[str, tuple[str, ...]]]
    ) -> Compared | str:
        """Every worker of the engine has whole tensors of it."""
        if not checksums:
            return "the adapter's tensors cannot be read from this engine: log-probabilities alone are compared"
        layout = ParameterLayout(info.dtype or self._ranks.plan.dtype)
        if layout not in digests:
            digests[layout] = await self._ranks.weight_checksums(layout)
        named = {name: digest for name, (digest,) in digests[layout].items()}
        workers = {key.partition(":")[0] for key in checksums}
        return compare(checksums, {f"{worker}:{name}": value for worker in workers for name, value in named.items()})


def _of_responses(logprobs: Tensor, lengths: Tensor, prompt: int) -> list[list[float]]:
    """logprobs: [T], of samples of these lengths, each after a prompt of `prompt` tokens."""
    return [part[prompt:].tolist() for part in logprobs.split(lengths.tolist())]
