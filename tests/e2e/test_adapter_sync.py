"""Adapters alone travel to real vLLM engines that are never paused: `weights.lora_sync = "adapter"`, with requests in
flight over every sync, and an engine killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
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
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.plugin.adapters import Placing, build, digests, drop_unnamed, experts_output, place_for
from rltool.engines.plugin.loading import WeightUpdateError
from rltool.engines.plugin.patches import LORA_EXPERTS_VARIABLE, experts_with_adapters
from rltool.engines.plugin.prefetch import NotFetched
from rltool.engines.sync_client import probe
from rltool.engines.transfer.wire import meta_of
from rltool.engines.types import Bucket, Completion, GenerateRequest, SamplingParams
from rltool.errors import EngineRejected
from rltool.models.registry import family_for, read_hf_config
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.state import read_state
from rltool.processes.stop_run import stop_run
from rltool.weights.verify.implied_checksums import adapter_checksums
from tests.e2e.adapters import play
from tests.e2e.engines import free_port, serving_sglang, serving_vllm
from tests.e2e.job import DEADLINE, Job, write_job
from tests.e2e.megatron_models import save_hf
from tests.ranks import flat_bytes, plan_of
from tests.tiny_models import write_tiny_tokenizer

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


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_sequence_has_one_version_no_engine_pauses_and_a_killed_one_comes_back_with_the_adapter(engines, killed):
    job, served = engines
    run = "killed" if killed else "flight"
    train = job.start("train", run, sets=[*LORA, "steps=100000", "rollout.max_staleness=2", "eval.sets={}"])

    def serving() -> list[float]:
        steps = job.steps(run) if (job.runs / run / "metrics.jsonl").exists() else []
        return [record["rollout/engines_serving"] for record in steps]

    def said() -> str:
        return job.output(run)

    try:
        until(lambda: len(serving()) >= 5, said)
        if killed:
            before = read_state(served, "engine-0")
            assert before is not None
            os.kill(before.pid, signal.SIGKILL)
            until(lambda: serving()[-1] == 1, said)
            until(lambda: serving()[-1] == 2, said)
        came_back = len(serving())
        until(lambda: len(serving()) >= max(came_back + 5, 21 if killed else 11), said)
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, said()[-3000:]
    steps = job.steps(run)
    synced = steps[:-1]  # the last ended with the signal
    differences = [record["weights/logprob_abs_diff_mean"] for record in synced]
    assert 0 < max(differences) < 1e-5, "every engine at every sync, in float32 on both sides"
    assert all(record["weights/paused_seconds"] == 0 for record in synced)
    late = 0
    for step, record in enumerate(steps):
        dump = json.loads((job.runs / run / "rollouts" / f"step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        numbers = {int(version.rsplit(":", 1)[1]) for [version] in of_samples}
        assert max(numbers) <= record["step"] and min(numbers) >= record["step"] - 2
        late += min(numbers) < record["step"]
    assert late > 3, "requests were in flight over syncs"
    assert len(synced) >= (20 if killed else 10)
    logs = [log.read_text() for log in served.path.glob("logs/*/engine-*.log")]
    assert any("setting pause state to UNPAUSED" in log for log in logs), "vLLM writes every change of it"
    assert not any("setting pause state to PAUSED" in log for log in logs)
    for engine in Endpoints.load(served.endpoints_file).models["policy"].engines:
        assert probe(engine, timeout=60.0).weight_version == "default", "the model beside the adapters is as it was"
    assert not any(record.get("rollout/refused_foreign_total") for record in steps)


def test_an_engine_that_joins_late_serves_with_the_present_adapter_and_is_what_the_trainer_holds(engines, tmp_path):
    given, served = engines
    first, late = Endpoints.load(served.endpoints_file).models["policy"].engines
    Endpoints(models={"policy": ModelEndpoints(engines=(first,))}).save(tmp_path / "one.json")
    job = write_job(tmp_path, given.model, f"@{tmp_path}/one.json")
    train = job.start("train", "late", sets=[*LORA, "steps=100000", "rollout.max_staleness=1", "eval.sets={}"])

    def serving() -> list[float]:
        found = job.runs / "late" / "metrics.jsonl"
        return [record["rollout/engines_serving"] for record in job.steps("late")] if found.exists() else []

    try:
        until(lambda: len(serving()) >= 3, lambda: job.output("late"))
        assert set(serving()) == {1}
        said = job.say("engines", "add", late.url, "--run", "late", "--key-file", str(late.key_file))
        assert "added to run late (stale" in said
        until(lambda: serving()[-1] == 2, lambda: job.output("late"))
        said = job.say("debug", "weights", "--run", "late")
        for engine in (first, late):
            assert f"{engine.url}: the same weights as the trainer of run late" in said
        assert said.count("sampled tokens agree") == 2, said
        held = re.findall(r"checksums: (\d+) of (\d+) parameters are bit-equal\n", said)
        assert len(held) == 2 and all(equal == compared and int(compared) > 20 for equal, compared in held), said
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, job.output("late")[-3000:]
    assert max(record["weights/logprob_abs_diff_mean"] for record in job.steps("late")[:-1]) < 1e-5


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.long)])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A model with experts, and a vLLM that takes adapters of them."""
    root = tmp_path_factory.mktemp(request.param)
    sizes = dict(hidden_size=128, num_attention_heads=4, max_position_embeddings=512)
    model = save_hf(root / "model", request.param, tied=False, sizes=sizes)
    write_tiny_tokenizer(model)
    with serving_vllm(model, root, lora_rank=4, lora_slots=4) as engine:
        yield model, engine.endpoint


@pytest.mark.parametrize("transport", ["gloo", "adapters"])
def test_experts_are_sampled_with_the_adapters_that_each_sequence_named_while_others_come(mixture, tmp_path, transport):
    """By its log-probabilities, against transformers. Through the plugin, and from directories by vLLM's own route."""
    model, engine = mixture
    found = play(engine, model, LoraConfig(rank=4, alpha=4), tmp_path, transport=transport, load=2, tokens=64)
    assert found.own < 1e-5 < 0.01 < found.others


def test_a_run_trains_adapters_of_experts_and_its_engine_samples_with_those_bits(mixture, tmp_path):
    model, engine = mixture
    Endpoints(models={"policy": ModelEndpoints(engines=(engine,))}).save(tmp_path / "one.json")
    job = write_job(tmp_path, model, f"@{tmp_path}/one.json")
    train = job.start("train", "experts", sets=[*LORA, "steps=100000", "rollout.max_staleness=1", "eval.sets={}"])

    def steps() -> list[dict]:
        return job.steps("experts") if (job.runs / "experts" / "metrics.jsonl").exists() else []

    try:
        until(lambda: train.poll() is not None or len(steps()) >= 5, lambda: job.output("experts"))
        said = job.say("debug", "weights", "--run", "experts")
    finally:
        train.send_signal(signal.SIGTERM)
        code = train.wait(DEADLINE)
    assert code == 0, job.output("experts")[-3000:]
    [(equal, compared)] = re.findall(r"checksums: (\d+) of (\d+) parameters are bit-equal\n", said)
    assert equal == compared and int(compared) > 2 * 4 * 3 * 4, "three products of each of four experts in each layer"
    assert "cannot be compared" not in said, said
    assert max(record["weights/logprob_abs_diff_mean"] for record in steps()[:-1]) < 1e-5
    assert all(record["weights/paused_seconds"] == 0 for record in steps()[:-1])


@pytest.mark.long
def test_a_stock_vllm_loads_each_version_from_a_directory(tiny_tied_dir, tmp_path):
    """Without rltool's plugin, by vLLM's own routes."""
    port = free_port()
    flags = f"""--model {tiny_tied_dir} --served-model-name policy --host 127.0.0.1 --port {port} --dtype float32
        --enable-lora --max-lora-rank 8 --max-loras 3 --max-cpu-loras 3 --enable-scale-out --enforce-eager
        --logprobs-mode processed_logprobs --max-model-len 256 --no-enable-chunked-prefill
        --max-num-batched-tokens 2048 --max-num-seqs 64"""
    stock = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    log, url = tmp_path / "vllm.log", f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags.split()]
    with log.open("wb") as file:
        server = subprocess.Popen(
            argv, env=os.environ | stock, stdout=file, stderr=file, cwd=tmp_path, start_new_session=True
        )
    try:
        until(lambda: server.poll() is not None or is_healthy(url), log.read_text)
        assert server.poll() is None, log.read_text()[-4000:]
        job = write_job(tmp_path, tiny_tied_dir, f"127.0.0.1:{port}")
        job("train", "stock", sets=[*LORA, "steps=20", "rollout.max_staleness=1", "eval.sets={}"])
        with urllib.request.urlopen(f"{url}/v1/models") as reply:
            left = [model["id"] for model in json.load(reply)["data"]]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(DEADLINE)
    assert left == ["policy"], "a run that has ended leaves no adapter"
    check_steps(job, "stock", 1e-5)
    said = log.read_text()
    assert said.count('"POST /v1/load_lora_adapter HTTP/1.1" 200') >= 20
    assert '"POST /pause' not in said and '"POST /rltool/' not in said


@pytest.mark.long
def test_an_sglang_loads_each_version_from_a_directory(tiny_untied_dir, tmp_path):
    """With its LoRA products in plain torch, which need no GPU; its memory is pinned by CUDA elsewhere."""
    with serving_sglang(
        tiny_untied_dir, tmp_path, lora_rank=4, lora_slots=3, extra_args=("--lora-backend", "torch_native")
    ) as engine:
        Endpoints(models={"policy": ModelEndpoints(engines=(engine.endpoint,))}).save(tmp_path / "one.json")
        job = write_job(tmp_path, tiny_untied_dir, f"@{tmp_path}/one.json")
        job("train", "sglang", sets=[*LORA, "steps=20", "rollout.max_staleness=1", "eval.sets={}"])
    check_steps(job, "sglang", 1e-4)  # its kernels against Megatron's, as in full training
    said = engine.log.read_text()
    assert said.count('"POST /load_lora_adapter HTTP/1.1" 200') >= 20
    assert '"POST /pause_generation' not in said and '"POST /update_weights' not in said


def check_steps(job: Job, run: str, allowed: float) -> None:
    """Twenty steps without a pause, with every sequence of one version."""
    steps = job.steps(run)
    assert len(steps) == 20
    assert 0 < max(record["weights/logprob_abs_diff_mean"] for record in steps if record["step"]) < allowed
    assert all(record["weights/paused_seconds"] == 0 for record in steps)
    seen = set()
    for step, record in enumerate(steps):
        dump = json.loads((job.runs / run / "rollouts" / f"step_{step:06d}.json").read_text())
        of_samples = [{span[0] for span in sample["versions"]} for sample in dump["samples"]]
        assert all(len(versions) == 1 for versions in of_samples)
        numbers = {int(version.rsplit(":", 1)[1]) for [version] in of_samples}
        assert record["step"] - 1 <= min(numbers) and max(numbers) <= record["step"]
        seen |= numbers
    assert len(seen) >= 18


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


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


def test_each_sequence_is_sampled_with_the_adapter_that_it_named_while_others_come(engines, tmp_path):
    """By its log-probabilities, against transformers."""
    job, served = engines
    one, _ = Endpoints.load(served.endpoints_file).models["policy"].engines
    found = play(one, job.model, LoraConfig(rank=4, alpha=4), tmp_path)
    assert found.own < 1e-5 < 0.01 < found.others


def worker(
    packed: dict[str, list[str]], modules: dict[str, tuple[int, ...]], sizes: int, dtype: torch.dtype = torch.float32
) -> Any:
    """A worker's manager of adapters, with two places; vLLM's own manager and layers, without a model around them.
    modules: outputs of each slice; sizes: inputs of all."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
    from vllm.lora.layers.replicated_linear import ReplicatedLinearWithLoRA
    from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

    config = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=2, lora_dtype=dtype)
    adapters: Any = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
    adapters.model, adapters.modules, adapters.packed_modules = torch.nn.Sequential(), {}, packed
    adapters.is_pooling_model = adapters._is_non_gated_moe = False
    adapters._enable_moe_shared_loras = adapters._enable_mixed_moe_lora_format = False
    adapters.lora_config, adapters.lora_index_to_id = config, [None, None]
    adapters._registered_adapters = AdapterLRUCache(2, adapters.deactivate_adapter)
    adapters._active_adapters = AdapterLRUCache(2, adapters._deactivate_adapter)
    for name, outputs in modules.items():
        kind = MergedColumnParallelLinearWithLoRA if name in packed else ReplicatedLinearWithLoRA
        layer: Any = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.n_slices, layer.tp_size = len(outputs), 1
        # As if another adapter had been there before.
        layer.lora_a_stacked = tuple(torch.ones(2, 1, 8, sizes, dtype=dtype) for _ in outputs)
        layer.lora_b_stacked = tuple(torch.ones(2, 1, size, 8, dtype=dtype) for size in outputs)
        adapters.modules[name] = layer
    return SimpleNamespace(_adapter_manager=adapters, lora_config=config, vocab_size=64, device=torch.device("cpu"))


def place(manager: Any, sent: list[tuple[Bucket, torch.Tensor]], peft: dict[str, Any], lora_id: int) -> Placing:
    placing = Placing(manager, {"peft": peft, "id": lora_id})
    placing(sent).register()
    return placing


LAYER = "model.layers.0."
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def flat(module: str, rank: int = 2) -> tuple[Bucket, torch.Tensor]:
    names = [f"base_model.model.model.layers.{module}.lora_{letter}.weight" for letter in "AB"]
    tensors = dict(zip(names, (torch.ones(rank, 3), torch.ones(4, rank)), strict=True))
    bucket = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
    return bucket, flat_bytes(tensors, bucket)


def test_tensors_that_are_placed_twice_are_scaled_once_each_time_and_nothing_of_the_adapter_before_stays():
    """vLLM multiplies B in place when it takes an adapter."""
    qkv, o = f"{LAYER}self_attn.qkv_proj", f"{LAYER}self_attn.o_proj"
    packed = {qkv: [f"{LAYER}self_attn.{letter}_proj" for letter in "qkv"]}
    manager = worker(packed, {qkv: (4, 4, 4), o: (4,)}, 3)
    adapters, sent = manager._adapter_manager, flat("0.self_attn.q_proj")
    for lora_id in (1, 2):
        index = place(manager, [sent], PEFT, lora_id).index
        layer = adapters.modules[qkv]
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        assert torch.equal(b[0][index, 0], torch.full((4, 8), 4.0) * (torch.arange(8) < 2)), "alpha / rank, once"
        assert torch.equal(a[0][index, 0], torch.ones(8, 3) * (torch.arange(8) < 2)[:, None])
        others = [*a[1:], *b[1:], *adapters.modules[o].lora_a_stacked, *adapters.modules[o].lora_b_stacked]
        assert not any(tensor[index].any() for tensor in others), "k, v and o have no adapter"
    assert adapters.lora_index_to_id == [1, 2]


def test_a_place_belongs_to_one_adapter_until_it_is_dropped_and_none_is_lost_in_silence():
    manager = worker({}, {f"{LAYER}self_attn.q_proj": (4,)}, 3)
    adapters, sent = manager._adapter_manager, flat("0.self_attn.q_proj")
    place(manager, [sent], PEFT, 1)
    given_up = Placing(manager, {"peft": PEFT, "id": 2})
    with pytest.raises(WeightUpdateError, match="all 2 places"):
        Placing(manager, {"peft": PEFT, "id": 3})
    given_up.give_up()
    with pytest.raises(NotFetched, match="given to another"):
        given_up([sent])
    assert adapters.lora_index_to_id == [1, None]
    place(manager, [sent], PEFT, 3)
    # vLLM puts out the one used least lately where another needs a place: not one of ours, which it could not get back.
    for cache in (adapters._registered_adapters, adapters._active_adapters):
        with pytest.raises(RuntimeError, match="pinned"):
            cache.remove_oldest()
    # What was never published goes when the next comes; what has a name stays.
    drop_unnamed(manager, [3])
    assert adapters.lora_index_to_id == [None, 3] and list(adapters.list_adapters()) == [3]
    adapters.deactivate_adapter(3)
    with pytest.raises(WeightUpdateError, match="lost its place"):
        adapters.activate_adapter(3)
    assert adapters.remove_adapter(3) and not adapters._active_adapters
    # As vLLM does after an update of the weights: what was filled meanwhile is not there.
    late = Placing(manager, {"peft": PEFT, "id": 4})([sent])
    adapters.lora_index_to_id = [None, None]
    with pytest.raises(WeightUpdateError, match="taken away"):
        late.register()


def test_what_vllm_keeps_of_an_adapter_without_a_name_gives_its_place_where_none_is_free():
    """One that it loaded from a directory stays in its place when its name is taken back."""
    manager = worker({}, {f"{LAYER}self_attn.q_proj": (4,)}, 3)
    adapters, sent = manager._adapter_manager, flat("0.self_attn.q_proj")

    def loaded(lora_id: int) -> list[int | None]:
        adapters._registered_adapters[lora_id] = build(manager, [sent], PEFT, lora_id)
        adapters.activate_adapter(lora_id)
        return adapters.lora_index_to_id

    assert loaded(1) == [1, None]
    drop_unnamed(manager, [])
    assert loaded(2) == [1, 2], "there was a place beside it"
    drop_unnamed(manager, [1, 2])
    assert adapters.lora_index_to_id == [1, 2], "named, or requests run with it"
    drop_unnamed(manager, [2])
    assert adapters.lora_index_to_id == [None, 2] and list(adapters.list_adapters()) == [2]


def test_names_that_are_published_or_that_requests_run_on_with_keep_their_places():
    def request(lora_id: int | None) -> Any:
        return SimpleNamespace(lora_request=None if lora_id is None else SimpleNamespace(lora_int_id=lora_id))

    states = {"a": request(7), "b": request(None)}
    models = SimpleNamespace(
        lora_requests={"x": SimpleNamespace(lora_int_id=3)}, lora_id_counter=SimpleNamespace(inc=lambda _: 9)
    )
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    state = SimpleNamespace(openai_serving_models=models, engine_client=engine)
    assert place_for(state, {"version": "v"}) is None
    assert place_for(state, {"version": "v", "peft": PEFT}) == {"peft": PEFT, "id": 9, "named": [3, 7]}


def test_tensors_that_a_model_does_not_know_are_refused():
    """vLLM ignores them. Of a model with experts as well, and of a pipeline stage the layers of the others are let
    pass."""
    from vllm.model_executor.models.utils import PPMissingLayer

    packed = {
        f"{LAYER}self_attn.qkv_proj": [f"{LAYER}self_attn.{letter}_proj" for letter in "qkv"],
        f"{LAYER}mlp.experts": [f"{LAYER}mlp.experts.{expert}.up_proj" for expert in range(2)],
    }
    manager = worker(packed, {**dict.fromkeys(packed, (4, 4)), f"{LAYER}self_attn.o_proj": (4,)}, 3)
    adapters, sent = manager._adapter_manager, flat("0.self_attn.q_proj")
    adapters._create_merged_loras_inplace = lambda _: None
    for module in ("0.self_attn.o_proj", "0.mlp.experts.1.up_proj"):
        build(manager, [flat(module)], PEFT)
    unknown = ("mlp.unheard_of", "self_attn.qkv_proj", "mlp.experts.2.up_proj", "mlp.experts")
    for module in ("1.self_attn.q_proj", *(f"0.{name}" for name in unknown)):
        with pytest.raises(WeightUpdateError, match=f"no adapter for model.layers.{module}$"):
            build(manager, [sent, flat(module)], PEFT)
    adapters.model.append(PPMissingLayer())
    build(manager, [flat("1.self_attn.q_proj")], PEFT)
    with pytest.raises(WeightUpdateError, match="no adapter for"):
        build(manager, [flat("1.mlp.unheard_of")], PEFT)


def of_experts(slots: int, experts: int, hidden: int, inner: int) -> Any:
    """vLLM's own layer of experts with adapters, without experts beneath."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

    layer: Any = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    parallel = SimpleNamespace(use_ep=False, ep_rank=0)
    layer.moe_config = SimpleNamespace(
        num_local_experts=experts, num_experts=experts, hidden_dim=hidden, intermediate_size_per_partition=inner,
        moe_parallel_config=parallel,
    )  # fmt: skip
    layer.tp_size, layer.tp_rank, layer._w13_slices, layer.device = 1, 0, 2, torch.device("cpu")
    layer.create_lora_weights(slots, LoRAConfig(max_lora_rank=8, max_loras=slots, lora_dtype=torch.float32))
    for stacked in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        for tensor in getattr(layer, f"{stacked}_stacked"):
            tensor.fill_(1.0)  # as if another adapter had been there before
    return layer


def test_adapters_of_experts_are_put_in_their_places_scaled_once_and_one_changed_value_shows():
    experts, hidden, inner = f"{LAYER}mlp.experts", 6, 5
    names = [f"{experts}.{number}.{letter}_proj" for number in range(3) for letter in ("gate", "down", "up")]
    manager = worker({experts: names}, {}, 3)
    adapters = manager._adapter_manager
    layer = adapters.modules[experts] = of_experts(2, 3, hidden, inner)
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name in names:
        inputs, outputs = (inner, hidden) if "down" in name else (hidden, inner)
        for letter, shape in (("A", (2, inputs)), ("B", (outputs, 2))):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = torch.randn(shape, generator=generator)
    bucket = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
    sent, peft = (bucket, flat_bytes(tensors, bucket)), PEFT | {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    for lora_id in (1, 2):
        index = place(manager, [sent], peft, lora_id).index
        assert layer.adapter_enabled[index] == 1
        for number, name in enumerate(names):
            expert, part = divmod(number, 3)
            a, b = (tensors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
            stacks = (layer.w2_lora_a_stacked[0], layer.w2_lora_b_stacked[0]) if part == 1 else (
                layer.w13_lora_a_stacked[part // 2], layer.w13_lora_b_stacked[part // 2]
            )  # fmt: skip
            held_a, held_b = (stack[index, expert] for stack in stacks)
            assert torch.equal(held_a[:2], a) and not held_a[2:].any()
            assert torch.equal(held_b[:, :2], 4.0 * b) and not held_b[:, 2:].any(), "alpha / rank, once"
    implied = adapter_checksums(replace(plan_of(tensors), peft=peft), tensors.items(), ParameterLayout("float32"))
    for lora_id in (1, 2):
        assert {name: (digest,) for name, digest in digests(manager, lora_id).items()} == implied
    layer.w13_lora_b_stacked[1][index, 2, 3, 1] += 0.1
    found = digests(manager, 2)
    assert [name for name, digest in found.items() if implied[name] != (digest,)] == [f"{experts}.2.up_proj.lora_B"]
    # A worker that has some of the experts says nothing of them.
    adapters.packed_modules[experts] = names + [name.replace("experts.", "experts.1") for name in names]
    assert digests(manager, 2) == {}


def test_experts_with_adapters_on_a_cpu_are_plain_products_of_each_tokens_own_adapter():
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    layer, experts, hidden, inner, tokens = of_experts(2, 3, 6, 5), 3, 6, 5, 7
    for stacked in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        for tensor in getattr(layer, f"{stacked}_stacked"):
            tensor.copy_(draw(tensor.shape))
    places = torch.tensor([0, 1, -1, 1, 0, 0, -1])
    layer.punica_wrapper = SimpleNamespace(token_lora_indices=places)
    x, w13, w2 = draw(tokens, hidden), draw(experts, 2 * inner, hidden), draw(experts, hidden, inner)
    chosen, shares = draw(tokens, experts).topk(2).indices, draw(tokens, 2).softmax(-1)

    def activate(both: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]

    output = experts_output(layer, x, (w13, w2), (shares, chosen), activate)
    for token, number in enumerate(places.tolist()):
        expected = torch.zeros(hidden)
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            weights = [w13[expert][:inner], w2[expert], w13[expert][inner:]]
            if number >= 0:
                at = (number, expert)
                pairs = [(layer.w13_lora_a_stacked[i][at], layer.w13_lora_b_stacked[i][at]) for i in (0, 1)]
                pairs.insert(1, (layer.w2_lora_a_stacked[0][at], layer.w2_lora_b_stacked[0][at]))
                weights = [weight + b @ a for weight, (a, b) in zip(weights, pairs, strict=True)]
            gate, down, up = weights
            expected += share * (down @ (torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])))
        assert torch.allclose(output[token], expected, rtol=1e-4, atol=1e-4)


def test_models_without_adapters_keep_vllms_experts_and_those_with_biases_are_refused_beside_adapters(monkeypatch):
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def able(cls, config, *_):
        return cls._supports_grouped_gemm(config)

    monkeypatch.setattr(CPUUnquantizedExperts, "is_supported_config", able)
    monkeypatch.setattr(method, "select_unquantized_moe_backend", lambda config: ("vLLM's own", None))
    experts_with_adapters({})
    assert not hasattr(method.select_unquantized_moe_backend, "rltool")
    for _ in range(2):
        experts_with_adapters({LORA_EXPERTS_VARIABLE: "1"})

    def chosen(**config):
        return method.select_unquantized_moe_backend(SimpleNamespace(**config))[1]

    assert chosen(is_lora_enabled=False) is None
    assert chosen(is_lora_enabled=True, has_bias=False).supports_lora()
    with pytest.raises(ValueError, match="its experts have biases; start the server without adapters"):
        chosen(is_lora_enabled=True, has_bias=True)


def test_a_worker_begins_with_experts_that_take_adapters_where_the_server_was_started_for_them():
    code = """if True:
        import rltool.engines.plugin.worker
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
        print(getattr(method.select_unquantized_moe_backend, "rltool", False))
    """
    for more, said in (({LORA_EXPERTS_VARIABLE: "1"}, "True"), ({}, "False")):
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True)
        assert done.stdout.split()[-1:] == [said], done.stderr


def test_digests_of_an_adapter_are_what_the_trainer_works_out_and_one_changed_value_shows():
    """In bfloat16, with a scale that rounds; read out of the place that is sampled with."""
    manager = worker({}, {f"{LAYER}self_attn.o_proj": (5,)}, 5, torch.bfloat16)
    peft = {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "target_modules": ["o_proj"], "bias": "none"}
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    tensors = {name.format(letter): torch.randn(3, 5, generator=generator) for letter in "AB"}
    tensors[name.format("B")] = tensors[name.format("B")].T.contiguous()
    bucket = tuple(meta_of(each, tensor) for each, tensor in tensors.items())
    placing = place(manager, [(bucket, flat_bytes(tensors, bucket))], peft, 1)
    plan = replace(plan_of(tensors), peft=peft)
    implied = adapter_checksums(plan, tensors.items(), ParameterLayout("bfloat16"))
    assert {each: (digest,) for each, digest in digests(manager, 1).items()} == implied and len(implied) == 2
    layer = manager._adapter_manager.modules[f"{LAYER}self_attn.o_proj"]
    layer.lora_b_stacked[0][placing.index, 0, 2, 1] += 0.1
    found = digests(manager, 1)
    assert [each for each, digest in found.items() if implied[each] != (digest,)] == [
        "model.layers.0.self_attn.o_proj.lora_B"
    ]
    # A worker that has a part of a tensor says nothing of it.
    layer.lora_b_stacked = tuple(tensor[:, :, :2] for tensor in layer.lora_b_stacked)
    assert [*digests(manager, 1)] == ["model.layers.0.self_attn.o_proj.lora_A"]
