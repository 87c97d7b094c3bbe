"""What the delta transport sends for each training step, and how long an engine stands still for it.

    python -m benchmarks.delta
    python -m benchmarks.delta --url http://127.0.0.1:8101 --key-file key

A model (the quickstart's, unless --layers and --hidden say otherwise) is trained for some steps of AdamW on short
texts, with float32 weights in the optimizer and the weights sent as --dtypes. Every step is written to a store in a
temporary directory and taken from there by a copy in host memory, which must be bit-equal. One line of JSON for each
dtype and learning rate: the share of elements that changed, bytes of a patch against those of all weights, and the
seconds for writing and for taking one; medians over the steps.

With --url a running vLLM, started by `rltool serve-engines` with the model of --model, takes the same steps over gloo,
as deltas over gloo, from disk and as deltas from a store in turns: one line for each, with the seconds for which it
stood still. With --device cuda the weights lie on this process's first GPU, which must not be the engine's, and nccl
and deltas over nccl come before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.delta.memory import MemoryCopy
from rltool.engines.delta.patch import bits
from rltool.engines.delta.rebuild import bring
from rltool.engines.delta.store import open_store
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.transfer.wire import bucket_bytes, meta_of, plan_buckets, split_flat
from rltool.engines.weight_version import WeightVersion
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.weights.connections import Trainer
from rltool.weights.delta.writer import DeltaWriter
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.verify.values import ValueCheck
from tests.ranks import SenderRanks, flat_bytes

RUN = "b" * 32
Weights = dict[str, torch.Tensor]


def trained(model_directory: Path, lr: float, steps: int, dtype: torch.dtype) -> Iterator[Weights]:
    """The weights before the first step and after each, as they are sent."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    for step in range(steps + 1):
        yield {name: parameter.detach().to(dtype, copy=True) for name, parameter in model.named_parameters()}
        if step == steps:
            return
        drawn = torch.randint(0, 26, (32, 8), generator=generator).tolist()
        words = ["".join(letters[i] for i in row) for row in drawn]
        texts = [tokenizer(f"{word} => {word[::-1]}").input_ids for word in words]
        shortest = min(map(len, texts))  # a tokenizer of more than letters
        ids = torch.tensor([text[:shortest] for text in texts])
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def payload(model: Path, dtype: torch.dtype, lr: float, steps: int) -> dict[str, Any]:
    """One line of the table without an engine."""
    changed, patches, writing, taking = [], [], [], []
    dense = elements = 0
    with tempfile.TemporaryDirectory() as directory:
        store, copy = open_store(directory), MemoryCopy()
        writer = DeltaWriter(store, anchor_every=steps + 1, model_files=model)
        last: Weights = {}
        for number, weights in enumerate(trained(model, lr, steps, dtype)):
            version = str(WeightVersion(RUN, 0, number))
            buckets = plan_buckets([meta_of(name, tensor) for name, tensor in weights.items()], 256 << 20)
            started = time.perf_counter()
            writer.begin(version, buckets)
            for bucket in buckets:
                writer.add(bucket, flat_bytes(weights, bucket))
            published = writer.finish()
            written = time.perf_counter()
            bring(copy, store, version, seconds=600)
            taken = time.perf_counter()
            held = {name: tensor for bucket, flat in copy.buckets() for name, tensor in split_flat(flat, bucket)}
            assert all(torch.equal(bits(held[name]), bits(tensor)) for name, tensor in weights.items())
            if published.patch_bytes is not None:
                different = sum(int((bits(last[name]) != bits(tensor)).sum()) for name, tensor in weights.items())
                elements = sum(tensor.numel() for tensor in weights.values())
                dense = sum(map(bucket_bytes, buckets))
                changed.append(different / elements)
                patches.append(published.patch_bytes)
                writing.append(written - started)
                taking.append(taken - written)
            last = weights
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "lr": lr,
        "steps": steps,
        "parameters": elements,
        "changed": round(statistics.median(changed), 5),
        "dense_bytes": dense,
        "patch_bytes": round(statistics.median(patches)),
        "share": round(statistics.median(patches) / dense, 5),
        "write_seconds": round(statistics.median(writing), 4),
        "take_seconds": round(statistics.median(taking), 4),
    }


class Ranks(SenderRanks):
    """The trainer's side of a sync of weights that were computed before."""

    def __init__(self, config: WeightsConfig, model: Path, versions: list[Weights], device: str) -> None:
        super().__init__(config, model, device=device)
        self.versions = versions

    def weights(self, step: int) -> Weights:
        return self.versions[step]

    async def logprobs(self, batch) -> torch.Tensor:
        return batch.rollout_logprobs.clone()  # values are the tests' matter


SENT_AS: dict[str, dict[str, Any]] = {
    "nccl": {"transport": "nccl"},
    "nccl, delta": {"transport": "nccl", "delta": True},
    "gloo": {"transport": "gloo"},
    "gloo, delta": {"transport": "gloo", "delta": True},
    "disk": {"transport": "disk"},
    "delta": {"transport": "delta"},
}


async def pauses(args: argparse.Namespace, sent_as: str, versions: list[Weights], directory: Path) -> dict[str, Any]:
    """One line of the table with an engine."""
    store = str(directory / "store") if sent_as == "delta" else None
    config = WeightsConfig(store=store, anchor_every=len(versions), **SENT_AS[sent_as])
    endpoint = EngineEndpoint(url=args.url, dialect="vllm", key_file=args.key_file)
    ranks: Any = Ranks(config, args.model, versions, args.device)  # of one rank, and of these transports
    fleet = Fleet()
    async with EngineClient() as client:
        info = await client.probe(endpoint)
        fleet.add_probed(endpoint, info)
        sync = WeightSync(
            EngineSet(fleet, client), Trainer(ranks, args.device, directory / "disk", info.vocab_size or 0), config,
            ValueCheck(info.vocab_size or 0, 1.0, 1e9, info.max_model_len), SyncDeadlines(120.0, 120.0),
        )  # fmt: skip
        try:
            reports = [await sync.sync(WeightVersion(RUN, 0, number)) for number in range(len(versions))]
            await sync.leave()
        finally:
            ranks.sender.close()
    steady = reports[1:]
    patches = [report.patch_bytes for report in steady if report.patch_bytes is not None]
    return {
        "sent_as": sent_as,
        "dtype": str(next(iter(versions[0].values())).dtype).removeprefix("torch."),
        "syncs": len(steady),
        "paused_seconds": round(statistics.median(report.paused for report in steady), 4),
        "sync_seconds": round(statistics.median(report.seconds for report in steady), 4),
        **({"patch_bytes": round(statistics.median(patches))} if patches else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3, 3e-5, 3e-6, 1e-6])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--model", type=Path, help="a checkpoint to train; default: a new one of --layers and --hidden")
    parser.add_argument("--url", help="an engine that serves --model")
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the weights that --url is sent")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.model is None:
            args.model = make_tiny_model(Path(temporary) / "model", seed=0, layers=args.layers, hidden=args.hidden)
        for dtype in (getattr(torch, name) for name in args.dtypes):
            if args.url is None:
                for lr in args.lrs:
                    print(json.dumps(payload(args.model, dtype, lr, args.steps)), flush=True)
                continue
            versions = [
                {name: tensor.to(args.device) for name, tensor in weights.items()}
                for weights in trained(args.model, args.lrs[0], args.steps, dtype)
            ]
            for sent_as in SENT_AS:
                if "nccl" in sent_as and args.device == "cpu":
                    continue
                line = asyncio.run(pauses(args, sent_as, versions, Path(temporary) / str(dtype) / sent_as))
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
