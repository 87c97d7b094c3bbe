"""A trainer's server in tests: one real Megatron rank behind the API. MODEL DIRECTORY KEYS PORT NAME. With
another name than "tiny" it saves weights for sampling too, although no engine is there to sample with."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from rltool.tinker.limits import Limits
from rltool.tinker.samples import Samples
from rltool.tinker.sampling import SampleRequest
from rltool.tinker.server import TinkerServer, read_keys, serve
from rltool.tinker.service import Service
from rltool.tinker.wire import SampleOutput
from tests.e2e.megatron_models import VOCAB
from tests.e2e.served_ranks import served

WATCH_KEY = "the-run"
"""Of `/status`."""


class NoEngine:
    max_model_len, at_once = 0, 1

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput:
        raise AssertionError


def main(model: str, directory: str, keys: str, port: str, name: str) -> None:
    place = SimpleNamespace(rank=0, world_size=1, port=0)
    with served(place, Path(model)) as trainer:

        async def run() -> None:
            service = Service(Path(directory), trainer, name, limits=Limits(in_flight=32), snapshot_every=4)
            samples = None if name == "tiny" else Samples(NoEngine(), vocab_size=VOCAB, most=1)
            server = TinkerServer(
                service, read_keys(Path(keys)), samples=samples, poll_seconds=1, watched_by=("tests", WATCH_KEY)
            )
            await serve(server, service, "127.0.0.1", int(port))

        asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
