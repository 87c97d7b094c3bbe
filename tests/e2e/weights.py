"""A trainer in miniature for engine tests: perturbed copies of a checkpoint, a gloo and a disk sender, HF's scores."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import controls
from rltool.engines.fleet.lease import holder_of_this_process
from rltool.engines.fleet.resume import resume_engines
from rltool.engines.transfer import wire
from rltool.engines.types import Bucket, Completion, GenerateRequest, HttpRequest, SamplingParams
from rltool.weights.transport import Rendezvous, transport
from rltool.weights.transports.nccl_vllm import PluginControl
from rltool.weights.transports.vllm import bucket_request
from tests.e2e.engines import RunningEngine
from tests.ranks import flat_bytes

GROUP = "test-weights"
TIMEOUT = 30.0
GLOO = transport("vllm", "gloo").control
DISK = transport("vllm", "disk").control
IN_ONE_REQUEST = PluginControl()
"""Of NCCL: what it asks for does not depend on how the bytes travel."""
PROMPT = (40, 41, 17, 90, 33, 5, 64, 22)


def first_model(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def perturbed_model(directory: Path, *, seed: int):
    """The checkpoint with noise on every parameter: weights that no engine has seen."""
    model = first_model(directory)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def tensors_of(model) -> dict[str, torch.Tensor]:
    """HF name -> tensor; tied embeddings appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def buckets_of(tensors: Mapping[str, torch.Tensor], per_bucket: int = 7) -> list[Bucket]:
    metas = [wire.meta_of(name, tensor) for name, tensor in tensors.items()]
    return [tuple(metas[i : i + per_bucket]) for i in range(0, len(metas), per_bucket)]


def hf_logprobs(model, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """HF's log-probability of each sampled token at that temperature, [response length]."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def mean_difference(
    model, completion: Completion, *, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0
) -> float:
    return (hf_logprobs(model, prompt, completion, temperature) - torch.tensor(completion.logprobs)).abs().mean().item()


def new_request(
    *, n: int = 1, seed: int | None = 11, max_tokens: int = 24, prompt: tuple[int, ...] = PROMPT, **sampling
) -> GenerateRequest:
    sampling = {"ignore_eos": True} | sampling
    return GenerateRequest(prompt, SamplingParams(max_tokens, **sampling), uuid.uuid4().hex, n=n, seed=seed)


@dataclass
class Sender:
    """Drives one engine through a weight sync as a trainer does. Use inside one event loop."""

    client: EngineClient
    engine: RunningEngine

    async def control(self, requests: list[HttpRequest]) -> None:
        await self.client.run(self.engine.endpoint, requests, timeout=TIMEOUT)

    async def gloo(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: str,
        *,
        buckets: list[Bucket] | None = None,
        in_one_request: bool = False,
    ) -> None:
        """begin, all buckets, finish, shutdown. `buckets` overrides what is announced (and the bytes that are sent).
        in_one_request: the plugin's route, which pauses as well."""
        store = wire.host_store("127.0.0.1", 0, TIMEOUT)
        meeting = Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port)
        init = GLOO.init(meeting, rank_offset=1, timeout_seconds=TIMEOUT)
        join = asyncio.to_thread(wire.open_group, "127.0.0.1", store.port, 0, 2, GROUP, TIMEOUT, store=store)
        _, group = await asyncio.gather(self.control(init), join)
        try:
            planned = buckets or buckets_of(tensors)
            if in_one_request:
                update = IN_ONE_REQUEST.update(planned, meeting, version=version)
                sent = (asyncio.to_thread(wire.broadcast, group, flat_bytes(tensors, bucket)) for bucket in planned)
                await asyncio.gather(self.control([update]), _in_order(sent))
                await self.control(IN_ONE_REQUEST.finish(version))
                return
            await self.control(GLOO.begin())
            requests = GLOO.announce(planned, meeting, version=version)
            for bucket, (request, _) in zip(planned, requests, strict=True):
                flat = flat_bytes(tensors, bucket)
                await asyncio.gather(self.control([request]), asyncio.to_thread(wire.broadcast, group, flat))
            await self.control(GLOO.finish(version))
        finally:
            await self.control(GLOO.leave(GROUP))
            group.shutdown()

    async def disk(self, tensors: Mapping[str, torch.Tensor], version: str, directory: Path) -> None:
        await self.control(DISK.init(Rendezvous("disk", 2, GROUP), rank_offset=1, timeout_seconds=TIMEOUT))
        await self.control(DISK.begin())
        for index, bucket in enumerate(buckets_of(tensors)):
            path = directory / f"{version.replace(':', '-')}-{index}.safetensors"
            save_file({meta.name: tensors[meta.name].contiguous() for meta in bucket}, path)
            await self.control([bucket_request(bucket, path=str(path))])
        await self.control(DISK.finish(version))

    async def one(self, request: GenerateRequest | None = None) -> Completion:
        return (await self.client.generate(self.engine.endpoint, request or new_request(), timeout=TIMEOUT))[0]


def reset(engine: RunningEngine) -> RunningEngine:
    """Free of whoever controlled it, serving, and with the weights of its model directory, whatever a test has done to
    it. By value: what it samples then is what HF's forward pass says of these."""
    holder = holder_of_this_process(uuid.uuid4().hex, "of a fixture")
    of_its_kind = controls(engine.endpoint.dialect, plugin=engine.endpoint.plugin)

    async def run() -> None:
        async with EngineClient(run=holder.run) as client:
            [resumed] = await resume_engines(client, [engine.endpoint], timeout=TIMEOUT, holder=holder, steal=True)
            assert resumed.error is None, resumed.error
            sender = Sender(client, engine)
            again = of_its_kind.reload(str(engine.launch.model))
            await sender.control([*of_its_kind.pause("abort"), *again, *of_its_kind.resume()])
            assert mean_difference(first_model(engine.launch.model), await sender.one()) < 1e-4

    asyncio.run(run())
    return engine


async def _in_order(steps: Iterable[Awaitable[object]]) -> None:
    for step in steps:
        await step
