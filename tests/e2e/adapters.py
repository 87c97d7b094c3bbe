"""Random adapters into one real vLLM, one after another while requests run with those before, and what each request
should have sampled with: transformers' model, with that adapter added to its weights."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.adapter_sync import RandomAdapter, Rounds
from benchmarks.weight_sync import GROUP, Link
from rltool.config.rollout import WeightsConfig
from rltool.config.sections import LoraConfig
from rltool.engines.adapters import write_adapter
from rltool.engines.client import EngineClient
from rltool.engines.dialects.vllm import VllmDialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import Completion, SamplingParams
from rltool.models.adapters import PEFT_PREFIX
from rltool.weights.send.sender import WeightSender
from rltool.weights.transport import Backend


class Differences(NamedTuple):
    """Of the log-probabilities of a sequence, in the mean over its tokens: the largest from the adapter that it named,
    and the smallest from one that it did not name."""

    own: float
    others: float


def play(
    engine: EngineEndpoint, model: Path, lora: LoraConfig, work: Path, *, transport: Backend = "gloo",
    device: str = "cpu", versions: int = 4, load: int = 3, tokens: int = 128,
) -> Differences:  # fmt: skip
    """Sends `versions` adapters from this process's `device`; `load` requests of `tokens` tokens run with each while
    the next is sent and named, and beside the next one's requests. transport "adapters": each is a directory, which the
    engine loads by its own route."""
    where = torch.device(device)
    weights = RandomAdapter(model, lora, where)
    sender = WeightSender(
        WeightsConfig(bucket_bytes=1 << 20), weights.plan, device=where, deadline=60.0, model_files=model
    )
    drawn: list[dict[str, Tensor]] = []
    try:
        found = asyncio.run(_rounds(engine, sender, transport, weights, drawn, work, (versions, load, tokens)))
    finally:
        sender.close()
    return compare(found, drawn, model, lora, work, where)


class InDirectories(Rounds):
    """By the engine's own route."""

    directory: Path

    async def send(self, version: str) -> None:
        assert self.weights.plan.peft is not None
        write_adapter(self.directory / version, self.weights.plan.peft, self.weights.tensors().items())

    async def publish(self, name: str) -> None:
        await self.link.run([VllmDialect().load_adapter(name, str(self.directory / name))])

    async def drop(self, name: str) -> None:
        await self.link.run([VllmDialect().unload_adapter(name)])


Found = list[tuple[int, tuple[int, ...], Completion]]
"""Number of the adapter, prompt, what was sampled."""


async def _rounds(
    engine: EngineEndpoint, sender: WeightSender, transport: Backend, weights: RandomAdapter,
    drawn: list[dict[str, Tensor]], work: Path, sizes: tuple[int, int, int],
) -> Found:  # fmt: skip
    versions, load, tokens = sizes
    long = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    prompts = [tuple(3 + (5 * number + i) % 100 for i in range(20)) for number in range(load)]
    found: Found = []
    async with EngineClient() as client:
        link = Link(client, engine, "adapters", transport, [sender], 1, True)  # pyright: ignore[reportArgumentType]
        probed = link.endpoint.probed(await client.probe(link.endpoint))
        rounds = Rounds(link, probed, weights, load, tokens)
        if transport == "adapters":
            rounds = InDirectories(link, probed, weights, load, tokens)
            rounds.directory = work
        else:
            await link.connect(work / "versions")
        flying: list[list[asyncio.Task[Completion]]] = []
        half = 0.0
        for number in range(versions):
            if number > 1:  # there are four places
                found += [(number - 2, *pair) for pair in zip(prompts, await asyncio.gather(*flying[-2]), strict=True)]
                await rounds.drop(f"v{number - 2}")
            weights.draw(number)
            drawn.append({name: tensor.clone() for name, tensor in weights.tensors().items()})
            await rounds.send(f"v{number}")
            await rounds.publish(f"v{number}")
            if number:
                assert not any(task.done() for task in flying[-1]), "in flight while the next was sent and named"
            else:
                started = time.perf_counter()
                await rounds.sample("v0", long, prompts[0])
                half = (time.perf_counter() - started) / 2
            flying.append([asyncio.create_task(rounds.sample(f"v{number}", long, prompt)) for prompt in prompts])
            await asyncio.sleep(half)
        for number in (versions - 2, versions - 1):
            found += [(number, *pair) for pair in zip(prompts, await asyncio.gather(*flying[number]), strict=True)]
            await rounds.drop(f"v{number}")
        if transport != "adapters":
            await link.run(link.control.leave(GROUP))
    assert [number for number, _, _ in found] == [number for number in range(versions) for _ in range(load)]
    assert all(len(completion.token_ids) == tokens for _, _, completion in found)
    return found


def compare(
    found: Found, drawn: list[dict[str, Tensor]], model: Path, lora: LoraConfig, work: Path, device: torch.device
) -> Differences:
    own, others = [], []
    for version, tensors in enumerate(drawn):
        merged = with_adapter(model, tensors, lora.scale, work / f"merged-{version}")
        reference = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).to(device).eval()
        reference.set_experts_implementation("eager")  # grouped products on a GPU are for 16 bits
        for named, prompt, completion in found:
            sampled = torch.tensor(completion.token_ids)
            ids = torch.tensor([*prompt, *completion.token_ids], device=device)[None]
            with torch.no_grad():
                logits = reference(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
            expected = logits.log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
            difference = float((expected - torch.tensor(completion.logprobs)).abs().mean())
            (own if named == version else others).append(difference)
    return Differences(max(own), min(others))


def with_adapter(model: Path, tensors: Mapping[str, Tensor], scale: float, directory: Path) -> Path:
    """The model with W + scale B A in the place of W, in float32."""
    directory.mkdir()
    weights = {name: t.float() for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
    for name, a in tensors.items():
        product, is_a, _ = name.partition(".lora_A.")
        if is_a:
            changed = scale * (tensors[f"{product}.lora_B.weight"] @ a).cpu()
            weights[f"{product.removeprefix(PEFT_PREFIX)}.weight"] += changed
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    shutil.copy(model / "config.json", directory)
    return directory
