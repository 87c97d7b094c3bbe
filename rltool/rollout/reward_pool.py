import inspect
import math
from dataclasses import dataclass

from rltool.config.import_path import load_callable


@dataclass(frozen=True)
class RewardFailure:
    reason: str
class RewardPool:
    def __init__(self, function_path, *, workers, timeout):
        self.f = load_callable(function_path, setting="reward.function"); self.timeout=timeout
    async def score(self, samples, texts):
        return [await self._one(s,t) for s,t in zip(samples,texts)]
    async def _one(self, s, t):
        try:
            v = self.f(s,t)
            if inspect.isawaitable(v): v = await v
            v=float(v)
            if not math.isfinite(v): return RewardFailure(f"returned {v}")
            return v
        except Exception as e:
            return RewardFailure(f"{type(e).__name__}: {e}")
    async def close(self): pass
