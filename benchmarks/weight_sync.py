"""How long an engine is paused while it is sent new weights, over each transport, with every phase timed.

    python -m benchmarks.weight_sync --size 0.5B --engines vllm plugin        two GPUs: 0 the trainer's, 1 the engine's
    python -m benchmarks.weight_sync --size tiny --cpu --engines plugin sglang --sglang-python .venv-sglang/bin/python
    python -m benchmarks.weight_sync --size 7B --engines plugin --engine-gpu 0,1 --backends ipc gloo --gpu-share 0.4

Starts each engine with no weights of its own, and sends it random ones in the shape of a real model, through the
classes with which the trainer does it; --source megatron: out of a Megatron model. vllm is a stock server, plugin one
with rltool's; backends are those of rltool.weights.transport that fit. --reference measures a bare NCCL broadcast of
the same bytes as well, and vLLM's own sender into the stock server. One line of JSON for each round; after each backend
the engine's weights are checked: by its own checksums where it has them (vLLM on a GPU), and by log-probabilities; both
must be the same over every backend.
The first rounds of the plugin on a GPU go through vLLM's reload, the others are replayed. With ipc the trainer has a
rank on each of the engine's GPUs (--engine-gpu), all in one process, and the engine does not sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import weight_sync_reference as reference
from benchmarks.weight_sync_engines import KINDS, Server, checksums, fingerprint
from benchmarks.weight_sync_models import SIZES, parameter_shapes, vllm_checksums, write_model
from benchmarks.weight_sync_weights import SOURCES, Weights, make_weights
from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.checksums import compare, with_ranks
from rltool.engines.dialects.table import controls
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.transfer.ipc import gpu_uuid
from rltool.engines.transfer.wire import bucket_bytes
from rltool.engines.types import HttpRequest
from rltool.processes import garbage
from rltool.weights.send.sender import Rank, SendReport, WeightSender, one_answer, one_meeting, one_report
from rltool.weights.transport import Backend, OneRequestControl, PausingControl, Receiver, Rendezvous, transport

BACKENDS: dict[str, tuple[Backend, ...]] = {
    "vllm": ("vllm-nccl",),
    "plugin": ("nccl", "gloo", "disk", "ipc"),
    "sglang": ("nccl", "gloo", "disk", "ipc"),
}
GROUP = "weight-benchmark"
DEADLINE = 120.0
UPDATE_SESSIONS = ("/begin_weight_update", "/end_weight_update")
"""SGLang has them since 0.5.21: an older one answers 404, and needs none."""


def show(**row: object) -> None:
    print(
        json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}),
        flush=True,
    )


Seen = tuple[dict[str, str], list[float]]
"""Checksums, and log-probabilities."""


@contextmanager
def negated(copies: Sequence[Weights]) -> Iterator[None]:
    """Other weights without the room for them: every bit is as it was afterwards."""

    def negate() -> None:
        for weights in copies:
            weights.negate()
        for device in {tensor.device for weights in copies for tensor in weights.held() if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    negate()
    try:
        yield
    finally:
        negate()


class Link:
    """One engine over one backend. senders: of the trainer's ranks."""

    def __init__(
        self, client: EngineClient, server: Server, kind: str, backend: Backend, senders: Sequence[WeightSender],
        world_size: int, staged: bool,
    ) -> None:  # fmt: skip
        self.client, self.server, self.senders = client, server, senders
        self.engine_dialect = controls(KINDS[kind].dialect)
        offered = transport(KINDS[kind].dialect, backend)
        self.control = offered.staged if staged and offered.staged is not None else offered.control
        if kind == "adapters":
            self.control = offered.adapters or self.control
        self.after_send = self.control.after_send
        gpus = tuple(sender.gpu for sender in senders)
        self.receiver = Receiver(server.url, KINDS[kind].dialect, backend, world_size, gpus)
        self.endpoint = EngineEndpoint(url=server.url, key_file=server.key_file)
        self.rendezvous: Rendezvous | None = None

    async def run(self, requests: Sequence[HttpRequest]) -> None:
        older = [
            replace(request, tolerate=(*request.tolerate, 404)) if request.path in UPDATE_SESSIONS else request
            for request in requests
        ]
        await self.client.run(self.endpoint, older, timeout=DEADLINE)

    async def connect(self, directory: Path) -> float:
        started = time.perf_counter()
        await self.run(self.control.leave(GROUP))
        meetings = [sender.host([self.receiver], GROUP, directory) for sender in self.senders]
        joining = asyncio.gather(*(asyncio.to_thread(sender.join) for sender in self.senders))
        self.rendezvous = one_meeting(meetings).get(self.server.url)
        if self.rendezvous is not None:
            await self.run(self.control.init(self.rendezvous, rank_offset=1, timeout_seconds=DEADLINE))
        failures = one_answer(await joining)
        if failures:
            raise RuntimeError(str(failures))
        return time.perf_counter() - started

    async def ready(self, version: str, taken: int) -> None:
        """See WeightSync._acknowledge."""
        if not self.control.acknowledged:
            return
        asked = (asyncio.to_thread(s.ready, self.server.url, version, taken, DEADLINE) for s in self.senders)
        reasons = [reason for reason in await asyncio.gather(*asked) if reason is not None]
        if reasons:
            raise RuntimeError(reasons[0])

    async def sync(self, copies: Sequence[Weights], version: str) -> dict[str, float]:
        """copies: the weights, as each rank has them. Seconds of each phase, and in all from the pause to the resume;
        bytes that the rank that held most did on the host and on its GPU."""
        buckets = copies[0].plan.buckets(self.senders[0].config.bucket_bytes)
        assert self.rendezvous is not None, "connect comes first"
        rendezvous = self.rendezvous
        loop = asyncio.get_running_loop()

        def send() -> asyncio.Future[list[SendReport]]:
            sends = [
                partial(sender.send, weights.stream(), version, [self.server.url], stream_bytes=weights.stream_bytes)
                for sender, weights in zip(self.senders, copies, strict=True)
            ]
            return asyncio.gather(*(loop.run_in_executor(None, send) for send in sends))

        async def load() -> None:
            if isinstance(self.control, OneRequestControl):
                await self.run([self.control.update(buckets, rendezvous, version=version)])
                return
            taken = 0
            for request, covered in self.control.announce(buckets, rendezvous, version=version):
                await self.ready(version, taken)
                await self.run([request])
                taken += covered
            await self.ready(version, taken)

        @asynccontextmanager
        async def sent() -> AsyncIterator[asyncio.Future[list[SendReport]]]:
            """The ranks send; in the end all have, or have given up."""
            sending = send()
            try:
                yield sending
            except BaseException as error:
                for sender in self.senders:
                    sender.abort([self.server.url], str(error))
                raise
            finally:
                report = one_report(await sending)
            if report.failures:
                raise RuntimeError(str(report.failures))
            held.update(host_bytes=report.memory.host, device_bytes=report.memory.device)

        async def transfer() -> None:
            async with sent() as sending:
                if self.after_send:
                    await sending
                await load()

        seconds, held = dict[str, float](), dict[str, float]()

        async def timed(name: str, step: Awaitable[None]) -> None:
            started = time.perf_counter()
            await step
            seconds[name] = time.perf_counter() - started

        async def paused(load: Awaitable[None]) -> float:
            started = time.perf_counter()
            if isinstance(self.control, OneRequestControl):
                await timed("update", load)
                await timed("finish", self.run([self.control.finish_and_resume(version)]))
                return time.perf_counter() - started
            pausing = self.control if isinstance(self.control, PausingControl) else None
            await timed("pause", self.run(pausing.pause() if pausing else self.engine_dialect.pause("keep")))
            await timed("begin", self.run(self.control.begin()))
            await timed("transfer", load)
            await timed("finish", self.run(self.control.finish(version)))
            await timed("resume", self.run((pausing or self.engine_dialect).resume()))
            return time.perf_counter() - started

        with garbage.paused():  # as WeightSync does
            if self.control.staged:
                asked = self.control.prefetch(buckets, rendezvous, version=version, seconds=DEADLINE)
                async with sent():
                    await timed("prefetch", self.run(asked))
                total, moved = await paused(load()), seconds["prefetch"]
            else:
                total = await paused(transfer())
                moved = seconds.get("transfer", total)
        rate = sum(map(bucket_bytes, buckets)) / 1e9 / moved
        return seconds | held | {"total": total, "gb_per_second": rate}


class Benchmark:
    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.device = torch.device("cpu" if args.cpu else "cuda:0")
        self.dtype = torch.float32 if args.cpu else torch.bfloat16
        self.model = write_model(work / "model", args.size, self.dtype)
        self.devices = [self.device]
        if "ipc" in (args.backends or ()):
            self.devices = [torch.device("cuda", int(gpu)) for gpu in args.engine_gpu.split(",")]
        self.failed = False

    @cached_property
    def weights(self) -> list[Weights]:
        """Made when the first engine is ready: what runs on the trainer's GPU until then has it to itself."""
        args = self.args
        return [make_weights(args.source, args.size, self.model, device, self.dtype) for device in self.devices]

    def run(self) -> int:
        shapes = [shape for _, shape in parameter_shapes(self.args.size)]
        size = sum(map(math.prod, shapes)) * self.dtype.itemsize
        show(size=self.args.size, bytes=size, tensors=len(shapes), devices=str(self.devices))
        for kind in self.args.engines:
            self._attempt(kind, lambda kind=kind: self._engine(kind))
        if self.args.reference and not self.args.cpu:
            self._attempt("broadcast", lambda: self._broadcast(size))
        return 1 if self.failed else 0

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone on the GPUs, among the benchmarks that were given the same --lock."""
        if self.args.lock is None:
            yield
            return
        with self.args.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        """What fails does not keep the others from being measured."""
        try:
            work()
        except Exception as error:
            self.failed = True
            show(failed=name, error=f"{type(error).__name__}: {error}"[:2000])

    def _broadcast(self, size: int) -> None:
        with self._turn():
            show(**reference.broadcast(self.args.engine_gpu, size))

    def _engine(self, kind: str) -> None:
        args = self.args
        python = args.sglang_python if kind == "sglang" else args.vllm_python
        gpu = None if args.cpu else args.engine_gpu
        dtype = str(self.dtype).removeprefix("torch.")
        with ExitStack() as stack:
            server = Server(kind, self.model, self.work, python=python, gpu=gpu, dtype=dtype, share=args.gpu_share)
            stack.enter_context(server)
            own = None
            if kind == "vllm" and args.reference and not args.cpu:
                own = reference.VllmSender(server.url, args.size, args.rounds, args.vllm_python)
                stack.enter_context(own)
            started = time.perf_counter()
            server.wait_ready(args.ready_seconds)
            show(engine=kind, ready=time.perf_counter() - started)
            self._backends(server, kind, own)

    def _backends(self, server: Server, kind: str, own: reference.VllmSender | None) -> None:
        args, seen = self.args, dict[str, Seen]()
        for backend in args.backends or [backend for backend in BACKENDS[kind] if backend != "ipc"]:
            if backend not in BACKENDS[kind] or (args.cpu and backend not in ("gloo", "disk")):
                continue
            can_stage = transport(KINDS[kind].dialect, backend).staged is not None
            for staged in (False, True) if args.staged and can_stage else (False,):
                self._attempt(f"{kind} {backend}", partial(self._backend, server, kind, backend, seen, staged=staged))
        if own is not None:
            self._attempt("vLLM's own sender", lambda: self._vllm_sender(own))

    def _vllm_sender(self, own: reference.VllmSender) -> None:
        with self._turn():
            own.run()

    def _senders(self, backend: Backend) -> list[WeightSender]:
        config = WeightsConfig(bucket_bytes=self.args.bucket_mib << 20)
        return [
            WeightSender(
                config, self.weights[0].plan, device=device, deadline=DEADLINE, model_files=self.model,
                rank=Rank(rank, gpu_uuid(device) if device.type == "cuda" else ""),
            )
            for rank, device in enumerate(self.devices if backend == "ipc" else self.devices[:1])
        ]  # fmt: skip

    def _backend(self, server: Server, kind: str, backend: Backend, seen: dict[str, Seen], *, staged: bool) -> None:
        senders, name = self._senders(backend), f"{backend}, staged" if staged else backend

        async def rounds() -> list[dict[str, float]]:
            rows = []
            async with EngineClient() as client:
                link = Link(client, server, kind, backend, senders, self._workers, staged)
                show(engine=kind, backend=name, connect=await link.connect(self.work / "versions"))
                for number in range(self.args.rounds):
                    with negated([] if number == self.args.rounds - 1 else self.weights):
                        rows.append(await link.sync(self.weights[: len(senders)], f"v{number}"))
                    show(engine=kind, backend=name, round=number, **rows[-1])
                await link.run(link.control.leave(GROUP))  # the engine is idle
            return rows

        try:
            with self._turn():
                rows = asyncio.run(rounds())
        finally:
            for sender in senders:
                sender.close()
        kept = rows[2:] or rows[-1:]  # the plugin replays from the third on
        show(
            engine=kind,
            backend=name,
            median_of=len(kept),
            **{n: statistics.median(r[n] for r in kept) for n in rows[0]},
        )
        self._check(server, kind, name, seen)

    @property
    def _workers(self) -> int:
        return 1 if self.args.cpu else len(self.args.engine_gpu.split(","))

    def _check(self, server: Server, kind: str, backend: str, seen: dict[str, Seen]) -> None:
        held = checksums(server) if KINDS[kind].dialect == "vllm" else {}
        if held:
            wanted = vllm_checksums(self.model, self.weights[0].tensors(), self.dtype, self._workers)
            found = compare(held, with_ranks(held, wanted))
            show(
                engine=kind, backend=backend, tensors=len(wanted), equal=found.equal, differ=len(found.differing),
                first=list(found.differing)[:3], not_compared=len(found.unknown),
            )  # fmt: skip
            self.failed |= bool(found.differing) or not found.equal
        logprobs = fingerprint(server, KINDS[kind].dialect, int(SIZES[self.args.size]["vocab_size"]))
        seen[backend] = held, logprobs
        same = all(values == seen[backend] for values in seen.values())
        show(engine=kind, backend=backend, checksums=len(held), logprobs=logprobs[:4], same_over_all_backends=same)
        self.failed |= not same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--engines", nargs="+", choices=BACKENDS, default=["vllm", "plugin"])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("nccl", "vllm-nccl", "gloo", "disk", "ipc"),
        help="default: all that fit, without ipc, which needs the trainer on the engine's GPUs",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="syncs of each backend; the first two are not in the median"
    )
    parser.add_argument("--bucket-mib", type=int, default=1024, help="weights.bucket_bytes")
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="tensors",
        help="megatron: a Megatron model, whose parameters are merged and cut for each sync as in the trainer",
    )
    parser.add_argument("--cpu", action="store_true", help="trainer and engines on the CPU, without NCCL")
    parser.add_argument(
        "--engine-gpu", default="1",
        help="CUDA_VISIBLE_DEVICES of the engine, several for tensor parallelism; the trainer has cuda:0, with ipc "
        "these (leave its own CUDA_VISIBLE_DEVICES unset)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-share", default="0.8", help="vLLM's --gpu-memory-utilization; less for several on one GPU"
    )
    parser.add_argument(
        "--lock", type=Path, help="file: benchmarks that share it start side by side and measure in turn"
    )
    parser.add_argument(
        "--staged",
        action="store_true",
        help="each backend with weights.staged as well: the engine is paused only to load what it has by then",
    )
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--sglang-python", default=sys.executable, help="interpreter of SGLang's own environment")
    parser.add_argument("--ready-seconds", type=float, default=240.0)
    parser.add_argument("--reference", action="store_true", help="also a bare broadcast, and vLLM's own sender")
    parser.add_argument(
        "--work", type=Path, help="for models, logs and the disk transport; default: a temporary directory"
    )
    args = parser.parse_args()
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
        return Benchmark(args, args.work.absolute()).run()
    with TemporaryDirectory(prefix="weight-sync-") as work:
        return Benchmark(args, Path(work)).run()


if __name__ == "__main__":
    sys.exit(main())
