"""Adapters alone travel to real vLLM engines that are never paused: `weights.lora_sync = "adapter"`, with requests in
flight over every sync, and an engine killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rltool.checkpoints.peft_format import write_peft
from rltool.config.sections import LoraConfig
from rltool.engines.adapters import NamedAdapters
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.plugin.adapters import build, take
from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.sync_client import probe
from rltool.engines.transfer.wire import meta_of
from rltool.engines.types import Bucket, Completion, GenerateRequest, SamplingParams
from rltool.errors import EngineRejected
from rltool.models.registry import family_for, read_hf_config
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_state
from rltool.processes.stop_run import stop_run
from tests.e2e.job import DEADLINE, Job, write_job
from tests.ranks import flat_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG_PROMPT = tuple(3 + i % 100 for i in range(160))
"""More than a block of the prefix cache, 128 tokens on a CPU."""
LORA = ["lora.rank=4", "optimizer.lr=0.002", 'weights.lora_sync="adapter"']


def until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, said()[-4000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, tiny_tied_dir: Path) -> Iterator[tuple[Job, RunDirectory]]:
    """Two vLLMs that take adapters, watched by serve-engines, and a job against them."""
    root = tmp_path_factory.mktemp("adapters")
    with ExitStack() as stack:
        job = Job(root, tiny_tied_dir)
        job.say(
            "serve-engines", str(tiny_tied_dir), "--device", "cpu", "--num-engines", "2", "--max-model-len", "256",
            "--lora-rank", "4", "--lora-slots", "4", "--run", "engines", "--detach",
        )  # fmt: skip
        run = open_run("engines", create=False, root=job.runs)
        stack.callback(stop_run, run)
        yield write_job(root, tiny_tied_dir, f"@{run.endpoints_file}"), run


def test_every_sequence_has_one_version_no_engine_pauses_and_a_killed_one_comes_back_with_the_adapter(engines):
    job, served = engines
    train = job.start("train", "flight", sets=[*LORA, "steps=100000", "rollout.max_staleness=2", "eval.sets={}"])

    def serving() -> list[float]:
        steps = job.steps("flight") if (job.runs / "flight" / "metrics.jsonl").exists() else []
        return [record["rollout/engines_serving"] for record in steps]

    def said() -> str:
        return job.output("flight")

    try:
        until(lambda: len(serving()) >= 5, said)
        before = read_state(served, "engine-0")
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: serving()[-1] == 1, said)
        until(lambda: serving()[-1] == 2, said)
        came_back = len(serving())
        until(lambda: len(serving()) >= came_back + 5, said)
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, said()[-3000:]
    steps = job.steps("flight")
    synced = steps[:-1]  # the last ended with the signal
    differences = [record["weights/logprob_abs_diff_mean"] for record in synced]
    assert 0 < max(differences) < 1e-5, "every engine at every sync, in float32 on both sides"
    assert all(record["weights/paused_seconds"] == 0 for record in synced)
    late = 0
    for step, record in enumerate(steps):
        dump = json.loads((job.runs / "flight" / "rollouts" / f"step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        numbers = {int(version.rsplit(":", 1)[1]) for [version] in of_samples}
        assert max(numbers) <= record["step"] and min(numbers) >= record["step"] - 2
        late += min(numbers) < record["step"]
    assert late > 3, "requests were in flight over syncs"
    logs = [log.read_text() for log in served.path.glob("logs/*/engine-*.log")]
    assert any("setting pause state to UNPAUSED" in log for log in logs), "vLLM writes every change of it"
    assert not any("setting pause state to PAUSED" in log for log in logs)
    for engine in Endpoints.load(served.endpoints_file).models["policy"].engines:
        assert probe(engine, timeout=10.0).weight_version == "default", "the model beside the adapters is as it was"
    assert not any(record.get("rollout/refused_foreign_total") for record in steps)


def test_a_name_has_values_of_its_own_in_the_prefix_cache_and_a_server_refuses_it_a_second_time(engines, tmp_path):
    job, served = engines
    family, lora = family_for(read_hf_config(job.model)), LoraConfig(rank=4)
    directories = {name: tmp_path / name for name in ("first", "second")}
    for seed, directory in enumerate(directories.values()):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator)
        write_peft(directory, family, lora, str(job.model), lambda p, draw=draw: 0.3 * draw(p.merged_shape))
    sampling = SamplingParams(max_tokens=4, temperature=0.0)

    async def ask() -> None:
        one, other = Endpoints.load(served.endpoints_file).models["policy"].engines
        async with EngineClient() as client:
            one, other = [engine.probed(await client.probe(engine)) for engine in (one, other)]
            adapters = NamedAdapters(client, deadline=60.0)

            async def sample(engine: EngineEndpoint, name: str) -> Completion:
                request = adapters.sampling_with(name, GenerateRequest(LONG_PROMPT, sampling, "0" * 32)).again()
                [completion] = await client.generate(engine, request, timeout=60.0)
                return completion

            for name, directory in directories.items():
                assert await adapters.publish(name, directory, [one, other]) == {}
            first, cached = [await sample(one, "first") for _ in range(2)]
            assert cached.cached_tokens and cached.token_ids == first.token_ids
            after, alone = await sample(one, "second"), await sample(other, "second")
            assert not after.cached_tokens and first.logprobs[0] != pytest.approx(after.logprobs[0], abs=1e-3)
            assert after.token_ids == alone.token_ids and after.logprobs == pytest.approx(alone.logprobs, abs=1e-6)
            forgetful = NamedAdapters(client, deadline=60.0)
            [refused] = (await forgetful.publish("first", directories["second"], [one])).values()
            assert "already been loaded" in str(refused)
            for name in directories:
                assert await adapters.unload(name) == {}
            with pytest.raises(EngineRejected, match="does not exist"):
                await client.generate(one, GenerateRequest((3, 4), sampling, "1" * 32, adapter="first"), timeout=60.0)

    asyncio.run(ask())


def test_tensors_that_are_loaded_twice_are_scaled_once_each_time_and_unknown_ones_are_refused():
    """vLLM multiplies B in place when it takes an adapter, and ignores names that it does not know. Of a model with
    experts as well, and of a pipeline stage the layers of the others are let pass."""
    from vllm.config.lora import LoRAConfig
    from vllm.model_executor.models.utils import PPMissingLayer

    taken: list[Any] = []

    def add(lora: Any) -> None:
        taken.append({name: layer.optimize().lora_b for name, layer in lora.loras.items()})

    layer = "model.layers.0."
    packed = {
        f"{layer}self_attn.qkv_proj": [f"{layer}self_attn.{letter}_proj" for letter in "qkv"],
        f"{layer}mlp.experts": [f"{layer}mlp.experts.{expert}.up_proj" for expert in range(2)],
    }
    adapters = SimpleNamespace(
        model=torch.nn.Sequential(), modules={**packed, f"{layer}self_attn.o_proj": None}, packed_modules=packed,
        add_adapter=add, activate_adapter=lambda _: None, _validate_moe_lora_format=lambda _: None,
    )  # fmt: skip
    config = LoRAConfig(max_lora_rank=8, max_loras=2, lora_dtype=torch.float32)
    manager = SimpleNamespace(_adapter_manager=adapters, lora_config=config, vocab_size=64)
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}

    def flat(module: str) -> tuple[Bucket, torch.Tensor]:
        names = [f"base_model.model.model.layers.{module}.lora_{letter}.weight" for letter in "AB"]
        tensors = dict(zip(names, (torch.ones(2, 3), torch.ones(4, 2)), strict=True))
        bucket = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        return bucket, flat_bytes(tensors, bucket)

    sent = flat("0.self_attn.q_proj")
    for lora_id in (1, 2):
        take(manager, build(manager, [sent], peft), lora_id)
        [b] = taken[-1].values()
        assert torch.equal(b, torch.full((4, 2), 4.0)), "alpha / rank, once"
    for module in ("0.self_attn.o_proj", "0.mlp.experts.1.up_proj"):
        build(manager, [flat(module)], peft)
    unknown = ("mlp.unheard_of", "self_attn.qkv_proj", "mlp.experts.2.up_proj", "mlp.experts")
    for module in ("1.self_attn.q_proj", *(f"0.{name}" for name in unknown)):
        with pytest.raises(WeightUpdateError, match=f"no adapter for model.layers.{module}$"):
            build(manager, [sent, flat(module)], peft)
    adapters.model.append(PPMissingLayer())
    build(manager, [flat("1.self_attn.q_proj")], peft)
    with pytest.raises(WeightUpdateError, match="no adapter for"):
        build(manager, [flat("1.mlp.unheard_of")], peft)
