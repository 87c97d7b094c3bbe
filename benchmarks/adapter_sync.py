"""How long until an engine that serves on samples its first token with a new adapter.

    python -m benchmarks.adapter_sync --size 7B --transport ipc       trainer's tensors and vLLM on one GPU
    python -m benchmarks.adapter_sync --size tiny --rank 4 --cpu

A vLLM with rltool's plugin and random weights in the shape of a real model is sent random adapters of all linear
layers, through the classes with which the trainer does it, while --load requests run with the adapter before. One line
of JSON a round: seconds to send (beside generation: until it is in its place in the worker), to publish, and from there
to the first token of a request with the new name; beside it those of one with a name that is there already, and, out of
the engine's log, the worker's parts of the sending. Nothing is paused. Every adapter must sample otherwise than the one
before, the same tensors under another name the same, and no request in flight may end early.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.weight_sync import DEADLINE, Link, show
from benchmarks.weight_sync_engines import Server
from benchmarks.weight_sync_models import SIZES, write_model
from benchmarks.weight_sync_weights import Weights
from rltool.config.rollout import WeightsConfig
from rltool.config.sections import LoraConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.plugin.adapters import DROP_PATH, PUBLISH_PATH
from rltool.engines.transfer.ipc import gpu_uuid
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import Completion, GenerateRequest, HttpRequest, SamplingParams, TensorMeta
from rltool.megatron.export_plan import adapter_plan
from rltool.models.registry import family_for, read_hf_config
from rltool.weights.send.sender import Rank, WeightSender

PROMPT = tuple(1 + 37 * i % 500 for i in range(32))
SHORT = SamplingParams(max_tokens=1, temperature=0.0)
FINGERPRINT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class RandomAdapter(Weights):
    def __init__(self, model: Path, rank: int, device: torch.device) -> None:
        self.plan = adapter_plan(family_for(read_hf_config(model)), LoraConfig(rank=rank), str(model))
        generator = torch.Generator(device).manual_seed(1)
        self._tensors = [
            torch.randn(meta.shape, generator=generator, device=device) / meta.shape[-1] ** 0.5
            for meta in self.plan.tensors
        ]

    def stream(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        return zip(self.plan.tensors, self._tensors, strict=True)

    def held(self) -> list[Tensor]:
        """B alone: with A negated as well, B A is what it was."""
        named = zip(self.plan.tensors, self._tensors, strict=True)
        return [tensor for meta, tensor in named if "lora_B" in meta.name]


class Rounds:
    def __init__(
        self, link: Link, endpoint: EngineEndpoint, weights: RandomAdapter, load: int, tokens: int
    ) -> None:
        self.link, self.endpoint, self.weights, self.load, self.tokens = link, endpoint, weights, load, tokens
        self.buckets = weights.plan.buckets(link.senders[0].config.bucket_bytes)

    async def one(self, number: int) -> dict[str, float]:
        """Adapter `number`; its B has the sign of the number."""
        if number:
            self.weights.negate()
        before, name = f"v{number - 1}", f"v{number}"
        long = SamplingParams(max_tokens=self.tokens, temperature=1.0, ignore_eos=True)
        flying = [asyncio.create_task(self.sample(before, long)) for _ in range(self.load if number else 0)]
        await asyncio.sleep(0.2 if flying else 0.0)
        started = time.perf_counter()
        await self.send(name)
        sent = time.perf_counter()
        body = {"name": name, "version": name}
        await self.link.run([HttpRequest("POST", PUBLISH_PATH, body)])
        published = time.perf_counter()
        await self.sample(name, SHORT)
        first = time.perf_counter()
        still = sum(not task.done() for task in flying)
        known = []
        for _ in range(5):
            asked = time.perf_counter()
            await self.sample(name, SHORT)
            known.append(time.perf_counter() - asked)
        for task in flying:
            assert len((await task).token_ids) == self.tokens, "a request in flight ended early"
        return {
            "send": sent - started, "publish": published - sent, "first_token": first - published,
            "publish_to_first_token": first - sent, "token_of_a_known_name": statistics.median(known),
            "in_flight_meanwhile": still,
        }  # fmt: skip

    async def send(self, version: str) -> None:
        link, [sender] = self.link, self.link.senders
        assert link.rendezvous is not None, "connect comes first"
        requests = link.control.prefetch(self.buckets, link.rendezvous, version=version, seconds=DEADLINE)
        asked = [
            HttpRequest(each.method, each.path, {**each.body, "peft": self.weights.plan.peft})  # type: ignore[dict-item]
            for each in requests
        ]
        stream, url = self.weights.stream(), self.endpoint.url
        sending = asyncio.create_task(asyncio.to_thread(sender.send, stream, version, [url]))
        if link.after_send:
            await sending
        await link.run(asked)
        report = await sending
        assert not report.failures, report.failures

    async def sample(self, name: str, sampling: SamplingParams) -> Completion:
        request = GenerateRequest(PROMPT, sampling, "0" * 32, adapter=name).again()
        [completion] = await self.link.client.generate(self.endpoint, request, timeout=DEADLINE)
        return completion

    async def drop(self, name: str) -> None:
        await self.link.run([HttpRequest("POST", DROP_PATH, {"name": name})])


async def measure(args: argparse.Namespace, server: Server, model: Path, work: Path) -> int:
    device = torch.device("cpu" if args.cpu else "cuda:0")
    weights = RandomAdapter(model, args.rank, device)
    sender = WeightSender(
        WeightsConfig(bucket_bytes=64 << 20), weights.plan, device=device, deadline=DEADLINE, model_files=model,
        rank=Rank(gpu="" if args.cpu else gpu_uuid(device)),
    )  # fmt: skip
    try:
        async with EngineClient() as client:
            link = Link(client, server, "adapters", args.transport, [sender], 1, True)
            await link.connect(work / "versions")
            probed = link.endpoint.probed(await client.probe(link.endpoint))
            rounds = Rounds(link, probed, weights, args.load, 200 if args.cpu else 256)
            show(size=args.size, rank=args.rank, bytes=sum(map(bucket_bytes, rounds.buckets)), device=str(device),
                 transport=args.transport, tensors=len(weights.plan.tensors))  # fmt: skip
            rows, seen = list[dict[str, float]](), list[tuple[float, ...]]()
            for number in range(args.rounds):
                row = await rounds.one(number)
                rows.append(row | parts_of(server.log.read_text(errors="replace")))
                seen.append(tuple((await rounds.sample(f"v{number}", FINGERPRINT)).logprobs))
                show(round=number, **rows[-1])
                if number:
                    await rounds.drop(f"v{number - 1}")
    finally:
        sender.close()
    kept = rows[2:] or rows
    show(median_of=len(kept), **{name: statistics.median(row[name] for row in kept) for name in rows[0]})
    differ = all(one != other for one, other in itertools.pairwise(seen))
    same = all(one == other for one, other in zip(seen, seen[2:], strict=False))
    show(adapters_differ=differ, same_tensors_the_same=same, logprobs=str([round(value, 4) for value in seen[-1][:4]]))
    return 0 if differ and same else 1


PARTS = {
    "worker_received": re.compile(r"received v\d+ in ([\d.]+) s"),
    "worker_made": re.compile(r"adapter made in ([\d.]+) s"),
    "worker_filled": re.compile(r"adapter made in .*in its place in ([\d.]+) s"),
}


def parts_of(log: str) -> dict[str, float]:
    """Of the last adapter: receiving it, making vLLM's form of it, copying it into its place."""
    found = {name: pattern.findall(log) for name, pattern in PARTS.items()}
    return {name: float(seconds[-1]) for name, seconds in found.items() if seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7B")
    parser.add_argument("--rank", type=int, default=32, help="32 at most")
    parser.add_argument("--rounds", type=int, default=7, help="the first two are not in the median")
    parser.add_argument("--load", type=int, default=8, help="requests in flight over each sync")
    parser.add_argument("--transport", choices=("gloo", "ipc"), default="gloo", help="ipc: on a GPU alone")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gpu", default="0", help="CUDA_VISIBLE_DEVICES of the engine; the tensors are on cuda:0")
    parser.add_argument("--gpu-share", default="0.6", help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--ready-seconds", type=float, default=420.0)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="adapter-sync-") as directory:
        work = Path(directory)
        dtype = torch.float32 if args.cpu else torch.bfloat16
        model = write_model(work / "model", args.size, dtype)
        gpu, named = None if args.cpu else args.gpu, str(dtype).removeprefix("torch.")
        with Server("adapters", model, work, python=sys.executable, gpu=gpu, dtype=named, share=args.gpu_share) as one:
            started = time.perf_counter()
            one.wait_ready(args.ready_seconds)
            show(ready=time.perf_counter() - started)
            return asyncio.run(measure(args, one, model, work))


if __name__ == "__main__":
    sys.exit(main())
