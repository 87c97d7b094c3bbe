"""How long until an engine that serves on samples its first token with a new adapter.

    python -m benchmarks.adapter_sync --size 7B --transport ipc       trainer's tensors and vLLM on one GPU
    python -m benchmarks.adapter_sync --size 7B --transport nccl      tensors on GPU 0, vLLM on GPU 1
    python -m benchmarks.adapter_sync --size tiny --rank 4 --cpu

A vLLM with rltool's plugin and random weights in the shape of a real model is sent random adapters of all linear
layers, through the classes with which the trainer does it, while --load requests run with the adapter before. It
compiles as vLLM does by default; its own flags come behind --, such as -- --compilation-config '{"backend": "eager"}'
(starts sooner) or -- --no-async-scheduling.

One line of JSON a round, in seconds: send (beside generation: until it is in its place in the worker; worker_*: its
parts, out of the engine's log), publish, first_token (of a request with the new name, as a client sees it). What the
engine measures of this request itself: engine_first_token, from its arrival in the engine's server; queued in the
engine and in prefill; http is the rest, of client, sockets and server. known_*: the same of requests with a name that
is there already. decode_step: between two tokens of the requests in flight. Nothing is paused, and
no request in flight may end early. With vLLM's dummy weights, near 0, every token is as likely whatever the adapter:
that engines sample with what was sent is for tests/gpu/test_adapters.py.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
KNOWN = 5
"""Requests of a round with a name that is there already."""
OWN = {
    "engine_first_token": "time_to_first_token", "queued": "request_queue_time", "prefill": "request_prefill_time"
}  # fmt: skip
"""Part of a first token -> vLLM's histogram of it."""
STEPS = "inter_token_latency"
SUM_OR_COUNT = re.compile(r"^vllm:(\w+_seconds_(?:sum|count))\{.*\} (\S+)$", re.MULTILINE)


class RandomAdapter(Weights):
    def __init__(self, model: Path, lora: LoraConfig, device: torch.device) -> None:
        self.plan = adapter_plan(family_for(read_hf_config(model)), lora, str(model))
        self._tensors = [torch.empty(meta.shape, device=device) for meta in self.plan.tensors]
        self.draw(1)

    def draw(self, seed: int) -> None:
        """Other values, in place."""
        generator = torch.Generator(self._tensors[0].device).manual_seed(seed)
        for tensor in self._tensors:
            tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)

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
        at_first = await self.engines_own()
        started = time.perf_counter()
        await self.send(name)
        sent = time.perf_counter()
        await self.publish(name)
        published = time.perf_counter()
        await self.sample(name, SHORT)
        first = time.perf_counter()
        still = sum(not task.done() for task in flying)
        then = await self.engines_own()
        known, at_last = list[dict[str, float]](), then
        for _ in range(KNOWN):
            before_it, asked = at_last, time.perf_counter()
            await self.sample(name, SHORT)
            seen, at_last = time.perf_counter() - asked, await self.engines_own()
            known.append({"first_token": seen} | first_token_parts(seen, before_it, at_last))
        for task in flying:
            assert len((await task).token_ids) == self.tokens, "a request in flight ended early"
        row = {
            "send": sent - started, "publish": published - sent, "first_token": first - published,
            "publish_to_first_token": first - sent,
        } | first_token_parts(first - published, at_first, then)  # fmt: skip
        row |= {f"known_{name}": seconds for name, seconds in medians(known).items()}
        for during, step in (("sending", decode_step(at_first, then)), ("after", decode_step(then, at_last))):
            if step is not None:
                row[f"decode_step_{during}"] = step
        return row | {"in_flight_meanwhile": still}

    async def engines_own(self) -> dict[str, float]:
        """Sums and counts of the histograms of vLLM's /metrics."""
        text = await asyncio.to_thread(self.link.server.call, "GET", "/metrics")
        return {name: float(value) for name, value in SUM_OR_COUNT.findall(text)}

    async def publish(self, name: str) -> None:
        await self.link.run([HttpRequest("POST", PUBLISH_PATH, {"name": name, "version": name})])

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

    async def sample(self, name: str, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> Completion:
        request = GenerateRequest(prompt, sampling, "0" * 32, adapter=name).again()
        [completion] = await self.link.client.generate(self.endpoint, request, timeout=DEADLINE)
        return completion

    async def drop(self, name: str) -> None:
        await self.link.run([HttpRequest("POST", DROP_PATH, {"name": name})])


def first_token_parts(seen: float, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Of one request's first token. seen: by the client; before, after: `engines_own`. A histogram that others came
    into meanwhile says nothing of it."""
    found = dict[str, float]()
    for part, histogram in OWN.items():
        seconds, count = _grown(histogram, before, after)
        if count == 1:
            found[part] = seconds
    if "engine_first_token" in found:
        found["http"] = seen - found["engine_first_token"]
    return found


def decode_step(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    seconds, count = _grown(STEPS, before, after)
    return seconds / count if count else None


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what each row has."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[-1] if all(name in row for row in rows)}


def _grown(histogram: str, before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    seconds, count = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in (f"{histogram}_seconds_sum", f"{histogram}_seconds_count")
    )
    return seconds, count


async def measure(args: argparse.Namespace, server: Server, model: Path, work: Path) -> int:
    device = torch.device("cpu" if args.cpu else "cuda:0")
    weights = RandomAdapter(model, LoraConfig(rank=args.rank), device)
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
            rows = list[dict[str, float]]()
            for number in range(args.rounds):
                row = await rounds.one(number)
                rows.append(row | parts_of(server.log.read_text(errors="replace")))
                show(round=number, **rows[-1])
                if number:
                    await rounds.drop(f"v{number - 1}")
    finally:
        sender.close()
    kept = rows[2:] or rows
    show(median_of=len(kept), **medians(kept))
    return 0


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
    parser.add_argument(
        "--transport", choices=("gloo", "ipc", "nccl"), default="gloo", help="ipc: on one GPU alone, nccl: on two"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--engine-gpu", choices=[str(number) for number in range(8)],
        help="CUDA_VISIBLE_DEVICES of the engine, with nccl 1 by default, else 0; the tensors are on GPU 0 (leave its "
        "own CUDA_VISIBLE_DEVICES unset)",
    )  # fmt: skip
    parser.add_argument("--gpu-share", default="0.6", help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--ready-seconds", type=float, default=420.0)
    parser.add_argument("flags", nargs="*", help="of vLLM, behind --")
    args = parser.parse_args()
    gpu = None if args.cpu else args.engine_gpu or ("1" if args.transport == "nccl" else "0")
    if args.transport != "gloo" and gpu is None:
        parser.error(f"--transport {args.transport} needs a GPU: leave --cpu out, or use gloo")
    if (args.transport, gpu) == ("nccl", "0"):
        parser.error("the tensors are on GPU 0, and NCCL joins no two ranks on one GPU: --engine-gpu 1, or ipc")
    if args.transport == "ipc" and gpu != "0":
        parser.error("the tensors are on GPU 0, and CUDA IPC is for an engine on the same: --engine-gpu 0, or nccl")
    with TemporaryDirectory(prefix="adapter-sync-") as directory:
        work = Path(directory)
        dtype = torch.float32 if args.cpu else torch.bfloat16
        model = write_model(work / "model", args.size, dtype)
        named = str(dtype).removeprefix("torch.")
        with Server(
            "adapters", model, work, python=sys.executable, gpu=gpu, dtype=named, share=args.gpu_share, flags=args.flags
        ) as one:
            started = time.perf_counter()
            one.wait_ready(args.ready_seconds)
            show(ready=time.perf_counter() - started)
            return asyncio.run(measure(args, one, model, work))


if __name__ == "__main__":
    sys.exit(main())
