"""`debug rollout-only` as a benchmark of engines: what they generated, and pauses like those of weight syncs that send
nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rltool.engines.client import EngineClient
from rltool.engines.dialects.protocol import PauseMode
from rltool.engines.dialects.table import controls
from rltool.engines.endpoints import EngineEndpoint


@dataclass
class Totals:
    """Of all rollouts. pauses: seconds of each, from the first pause request to the last engine's resuming."""

    rollouts: int = 0
    samples: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    hit_rates: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def add(self, metrics: Mapping[str, float], seconds: float) -> None:
        """metrics: of one rollout; seconds: wall-clock time from asking for it until it was there."""
        self.rollouts += 1
        self.samples += metrics["rollout/samples"]
        self.tokens += metrics["rollout/sampled_tokens"]
        self.seconds += seconds
        if "rollout/prefix_cache_hit_rate" in metrics:
            self.hit_rates.append(metrics["rollout/prefix_cache_hit_rate"])

    def lines(self, *, gpus: int) -> list[str]:
        """What a person reads at the end. gpus: of all engines (on the CPU their workers)."""
        if not self.rollouts or self.seconds <= 0:
            return []
        rate = self.tokens / self.seconds
        found = [
            f"engines: {self.tokens:,.0f} tokens of {self.samples:,.0f} samples in {self.seconds:.2f} s: "
            f"{rate:,.0f} tokens/s, {rate / max(gpus, 1):,.0f} per GPU or worker; "
            f"{self.tokens / max(self.samples, 1):.1f} tokens a sample"
        ]
        if self.hit_rates:
            found.append(f"prefix cache: {sum(self.hit_rates) / len(self.hit_rates):.1%} of prompt tokens were in it")
        if self.pauses:
            mean = sum(self.pauses) / len(self.pauses)
            found.append(f"simulated syncs: {len(self.pauses)}, {mean:.3f} s each, {max(self.pauses):.3f} s at most")
        return found


async def simulate_sync(
    engines: Sequence[EngineEndpoint], modes: Mapping[str, PauseMode], *, seconds: float, timeout: float
) -> float:
    """Pause all engines, hold them for `seconds`, and resume them, whatever failed before. Returns how long it took.
    modes: by URL. EngineError of the first that did not do it."""
    started = time.perf_counter()
    async with EngineClient() as client:

        async def each(act: str) -> None:
            calls = []
            for engine in engines:
                engine_dialect = controls(engine.dialect or "", plugin=engine.plugin)
                requests = engine_dialect.pause(modes[engine.url]) if act == "pause" else engine_dialect.resume()
                calls.append(client.run(engine, requests, timeout=timeout))
            results = await asyncio.gather(*calls, return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if failures:
                raise failures[0]

        try:
            await each("pause")
            await asyncio.sleep(seconds)
        finally:
            await each("resume")
    return time.perf_counter() - started
