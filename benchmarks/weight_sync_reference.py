"""What the weight benchmark compares with: a bare NCCL broadcast of as many bytes, and vLLM's own sender."""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.weight_sync_models import random_weights
from rltool.engines.transfer.nccl import Communicator, NcclLibrary

CHUNK = 1 << 30
SECONDS = 60.0
TURNS = 5
REPOSITORY = Path(__file__).resolve().parents[1]


def broadcast(peer_gpu: str, num_bytes: int) -> dict[str, Any]:
    """From cuda:0 to another GPU, in chunks of 1 GiB, with nobody who loads them."""
    library = NcclLibrary()
    unique_id = base64.b64encode(library.unique_id()).decode()
    command = [sys.executable, "-m", __spec__.name, "peer", "--unique-id", unique_id, "--bytes", str(num_bytes)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": peer_gpu}
    with subprocess.Popen(command, env=environment, cwd=REPOSITORY) as peer:
        try:
            communicator = _join(library, base64.b64decode(unique_id), 0)
            seconds = _turns(communicator, num_bytes)
            peer.wait(SECONDS)  # it may still be receiving
            communicator.abort("done")
        finally:
            peer.kill()
    median = statistics.median(seconds[1:])
    return {"reference": "broadcast", "bytes": num_bytes, "seconds": median, "gb_per_second": num_bytes / 1e9 / median}


def _join(library: NcclLibrary, unique_id: bytes, rank: int) -> Communicator:
    communicator = Communicator(library, unique_id, 2, rank, torch.device("cuda:0"), seconds=SECONDS)
    communicator.join(SECONDS)
    return communicator


def _turns(communicator: Communicator, num_bytes: int) -> list[float]:
    buffer = torch.zeros(min(CHUNK, num_bytes), dtype=torch.uint8, device=communicator.device)
    seconds = []
    for _ in range(TURNS):
        started = time.perf_counter()
        works = [
            communicator.broadcast(buffer[: min(CHUNK, num_bytes - start)]) for start in range(0, num_bytes, CHUNK)
        ]
        for work in works:
            work.wait(SECONDS)
        seconds.append(time.perf_counter() - started)
    return seconds


class VllmSender:
    """vLLM's trainer side in a process of its own, which begins to import at once; a context manager."""

    def __init__(self, url: str, size: str, rounds: int, python: str) -> None:
        command = [python, "-m", __spec__.name, "vllm", "--url", url, "--size", size, "--rounds", str(rounds)]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait(SECONDS)

    def run(self) -> None:
        """Prints rows like the benchmark's."""
        self._process.communicate("go\n", timeout=3 * SECONDS)
        if self._process.returncode:
            raise RuntimeError(f"exit status {self._process.returncode}")


def _vllm_rows(url: str, size: str, rounds: int) -> None:
    from urllib.request import Request, urlopen

    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    def metadata(_: WeightSource) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]

    def tensors(_: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(weights.items())

    own: dict[str, Any] = {"metadata": metadata, "__iter__": tensors}
    if hasattr(WeightSource, "iter_full"):  # since 0.33
        own = {"metadata": cached_property(metadata), "iter_full": tensors}
    source = type("Source", (WeightSource,), own)()

    def post(path: str) -> None:
        urlopen(Request(url + path, data=b"", method="POST"), timeout=SECONDS).read()

    torch.cuda.set_device(0)
    weights = random_weights(size, 1, torch.device("cuda:0"), torch.bfloat16)
    torch.cuda.synchronize()
    sys.stdin.readline()
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    client = HTTPVLLMWeightSyncClient(url)
    info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=get_open_port(), world_size=2, rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    rows = []
    for _ in range(rounds):
        started = time.perf_counter()
        post("/pause?mode=keep")
        paused = time.perf_counter()
        trainer.send_weights()
        sent = time.perf_counter()
        post("/reset_prefix_cache?reset_running_requests=true")
        post("/resume")
        rows.append((time.perf_counter() - started, paused - started, sent - paused))
    total, pause, send = (statistics.median(column) for column in zip(*rows[1:] or rows, strict=True))
    row = {"reference": "vLLM's own sender", "size": size, "pause": pause, "send": send, "total": total}
    print(json.dumps(row | {"gb_per_second": num_bytes / 1e9 / send}), flush=True)
    client.shutdown_weight_transfer_engine()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("peer", "vllm"))
    parser.add_argument("--unique-id", default="")
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--url", default="")
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.role == "peer":
        _turns(_join(NcclLibrary(), base64.b64decode(args.unique_id), 1), args.bytes)
    else:
        _vllm_rows(args.url, args.size, args.rounds)


if __name__ == "__main__":
    main()
