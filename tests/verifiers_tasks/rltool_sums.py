"""A taskset of verifiers, as its users write one: sums, and a tool that adds."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str | None


class Sum(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        """A sum without an answer cannot be judged."""
        if self.data.answer is None:
            raise LookupError("nobody knows the answer")
        return float(trace.last_reply == self.data.answer)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        for prompt, answer in (("2 + 3?", "5"), ("1 + 1?", "2"), ("0 / 0?", None)):
            yield Sum(SumData(prompt=prompt, answer=answer), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":  # verifiers starts the tools so
    Adder.run()
