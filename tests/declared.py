"""A field of a test's own, "surprise": a number that an engine gives with each token, and the loss."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rltool.algorithms import fields
from rltool.engines.types import Completion, VersionSpan
from rltool.rollout.sample import Sample, SampleStatus

OWN = "tests.declared:objective"


def declare_surprise(*, wide: bool = False) -> None:
    held = fields.Held("surprises", "f", comes="appended")
    fields.declare("surprise", fields.token(held=held, wide=wide), in_loss=True)


def objective(logprobs, tokens, algorithm):
    return tokens.surprise + 0 * logprobs


@contextmanager
def table_of_its_own() -> Iterator[None]:
    """What is declared inside is gone afterwards."""

    def below(cls: type) -> list[type]:
        return [cls, *(each for found in cls.__subclasses__() for each in below(found))]

    kept = {cls: dict(cls.__dataclass_fields__) for root in (fields.LossFields, Sample) for cls in below(root)}
    try:
        yield
    finally:
        for cls, known in kept.items():
            for name in cls.__dataclass_fields__.keys() - known.keys():
                del cls.__dataclass_fields__[name]
                if name in vars(cls):
                    delattr(cls, name)
        fields.forget_cached()


def sample(number: int) -> Sample:
    """Of a conversation with an environment's tokens in its middle. Surprises are token id / 8."""
    made = Sample(number // 2, number % 2, 0, [1, 2, 3][: 1 + number % 3], reward=float(number))
    for turn in range(2):
        tokens = tuple(range(10 + turn, 13 + turn + number % 4))
        surprises = {"surprise": array("f", [t / 8 for t in tokens])}
        span = (VersionSpan(f"{'a' * 32}:0:0", 0, len(tokens)),)
        made.append_response_tokens(Completion(tokens, (-1.0,) * len(tokens), "stop", span, columns=surprises))
        if turn == 0:
            made.append_environment_tokens([4, 5])
    assert made.status is SampleStatus.COMPLETED
    return made


class Store:
    """Of blocks of samples, in the place of Ray's: bytes, and a reference for each. asked: the references of each
    `get`."""

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        self.asked: list[list[str]] = []

    def put(self, block: list[Any]) -> str:
        self.blocks[reference := f"block {len(self.blocks)}"] = pickle.dumps(block)
        return reference

    def get(self, references: list[str]) -> list[Any]:
        self.asked.append(references)
        return [pickle.loads(self.blocks[reference]) for reference in references]
