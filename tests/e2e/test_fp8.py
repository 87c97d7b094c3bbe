"""Engines in FP8: what a sync leaves in the real vLLM is what it loads from a directory of the same weights."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from rltool.checkpoints.convert import to_fp8
from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.transfer import fp8
from rltool.megatron.fp8 import fp8_plan, quantization_config
from rltool.models.hf_directory import HFTensors
from rltool.models.quantized import dequantized_fp8, is_fp8
from rltool.models.registry import family_for, read_hf_config
from rltool.quickstart.tiny_model import make_tiny_model
from tests.contract.fakes.sglang import EXPECTED_KEY
from tests.contract.sync_rig import rig, version
from tests.e2e.engines import serving_sglang, serving_vllm, sglang_python
from tests.e2e.job import write_job
from tests.e2e.megatron_models import hf_model, save_for_runs
from tests.e2e.weights import TIMEOUT, Sender, mean_difference
from tests.export_plans import RanksInFp8, save_qwen3

pytestmark = [pytest.mark.e2e]
# As vLLM says itself: on a CPU its kernels for FP8 are AMX's.
with_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build has FP8 with AMX alone"
)

SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass
class Sglang:
    """A real one, as the rig knows fakes."""

    url: str
    gpus: tuple[str, ...] = ()


def save(kind, directory, seed, **more):
    """A model in float32 whose weights are not those of bfloat16."""
    model = hf_model(kind, True, seed, **SIZES, **more)
    model.save_pretrained(directory)
    return model, family_for(read_hf_config(directory))


def made(family, directory):
    with HFTensors(directory) as tensors:
        return {meta.name: tensor for meta, tensor in fp8_plan(family).made(tensors.merged)}


@torch.no_grad()
def dequantize(model, tensors):
    """What an engine computes with, but for its own rounding."""
    for name, parameter in model.named_parameters():
        scale = tensors.get(name + fp8.SCALE)
        parameter.copy_(tensors[name].float() if scale is None else dequantized_fp8(tensors[name], scale))
    return model


@with_amx
@pytest.mark.parametrize(("kind", "more"), [("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 128})])
def test_after_a_sync_an_engine_holds_what_it_loads_from_a_directory_of_these_weights(tmp_path, kind, more):
    _, family = save(kind, tmp_path / "first", 1, **more)
    model, _ = save(kind, tmp_path / "second", 2, **more)
    done = to_fp8(tmp_path / "second", tmp_path / "fp8")
    tensors = made(family, tmp_path / "second")
    assert done.tensors_equal == len(tensors)
    assert done.weight_bytes < 0.6 * 2 * done.parameters, "half of bfloat16's, and the embeddings"
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()

    async def loaded(engine):
        async with EngineClient() as client:
            return await client.checksums(engine.endpoint, timeout=TIMEOUT)

    async def synced(engine):
        async with EngineClient() as client:
            sender = Sender(client, engine)
            assert is_fp8((await client.probe(engine.endpoint)).model_config)
            await sender.gloo(made(family, tmp_path / "first"), "one")
            first = await client.checksums(engine.endpoint, timeout=TIMEOUT)
            for version in ("two", "three"):
                await sender.gloo(tensors, version)
            return first, await client.checksums(engine.endpoint, timeout=TIMEOUT), await sender.one()

    with serving_vllm(tmp_path / "fp8", tmp_path / "a", extra_args=("--dtype", "bfloat16")) as engine:
        expected = asyncio.run(loaded(engine))
    config = quantization_config(family)
    with serving_vllm(tmp_path / "first", tmp_path / "b", quantization=config) as engine:
        first, found, sample = asyncio.run(synced(engine))
    assert found == expected and first != expected
    assert sum(name.endswith(fp8.SCALE) for name in found) >= 4
    if kind == "qwen3":  # the router of random experts turns with any rounding
        assert mean_difference(dequantize(model, tensors), sample) < 0.05
        assert mean_difference(hf_model(kind, True, 3, **SIZES), sample) > 1


@with_amx
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_samples_in_fp8_and_its_engine_is_compared_with_the_trainer(tmp_path):
    # Not the tiny model itself: for its biases, vLLM's kernel for FP8 on CPUs wants float32, and gets bfloat16.
    job = write_job(tmp_path / "job", save_for_runs(tmp_path, True, SIZES), None)
    sets = [
        'engines.mode="managed"', 'engines.groups=[{max_model_len=64}]', 'engines.quantization="fp8"', "eval.sets={}",
        'optimizer_steps_per_rollout=1', 'model.dtype="bfloat16"', "steps=100000",
        "monitor.logprob_difference_limit=1.0",
    ]  # fmt: skip
    process = job.start("train", "one", sets=sets)
    try:
        ends = time.monotonic() + 600
        while not (job.runs / "one/metrics.jsonl").exists() or len(job.steps("one")) < 4:
            assert process.poll() is None and time.monotonic() < ends, job.output("one")[-4000:]
            time.sleep(0.2)
        found = job.say("debug", "weights", "--run", "one")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, job.output("one")[-4000:]
    finally:
        if process.poll() is None:
            job.say("stop", "--run", "one")
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", found).groups())
    assert equal == compared >= 10, found  # what vLLM has packed for its kernels is not compared
    assert len({step["weight_version"] for step in job.steps("one")}) >= 4


WITHOUT_AMX = """
import importlib.abc, importlib.util, sys

NAME = "sglang.srt.layers.quantization.fp8"


class Patched(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module.Fp8LinearMethod)

        spec.loader.exec_module = exec_module
        return spec


def patch(method):
    import torch

    def apply(self, layer, x, bias=None):
        rows, columns = layer.weight.shape
        scale = layer.weight_scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return torch.nn.functional.linear(x, (layer.weight.float() * scale).to(x.dtype), bias)

    method.process_weights_after_loading_block_quant = lambda self, layer: None
    method.apply = apply


sys.meta_path.insert(0, Patched())
"""
"""Of an SGLang on a CPU: matrices stay as they were loaded, as on a Hopper, and are multiplied by torch."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_syncs_leave_in_an_sglang_is_what_it_loads_from_a_directory_of_these_weights(tmp_path):
    """Its server, its loaders and its update sessions are real; AMX and kernels are left out."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_AMX)
    python, real = tmp_path / "python", sglang_python()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {real} "$@"\n')
    python.chmod(0o700)
    models = tmp_path / "models"
    save_qwen3(models, 0)
    for step in (1, 2, 3):
        save_qwen3(models / f"step{step}", step)
        shutil.copy(make_tiny_model(tmp_path / "tiny", seed=0) / "tokenizer.json", models / f"step{step}")
        to_fp8(models / f"step{step}", tmp_path / f"fp8-{step}")

    async def held(engine):
        async with EngineClient() as client:
            endpoint = engine.endpoint
            return (
                await client.checksums(endpoint, timeout=TIMEOUT),
                await client.score(endpoint, list(range(3, 60)), timeout=TIMEOUT),
            )

    async def synced(engine, transport):
        config, directory = WeightsConfig(bucket_bytes=40_000, transport=transport), tmp_path / transport
        directory.mkdir()
        ranks = partial(RanksInFp8, models=models, gpus=("none",), deadline=TIMEOUT)
        async with rig([Sglang(engine.url)], ranks, config, directory, deadline=TIMEOUT) as r:
            for step in (2, 3):
                assert (await r.sync.sync(version(step))).failed == {}

    options = {"key": EXPECTED_KEY, "max_model_len": 128, "extra_args": ("--dtype", "bfloat16"), "python": python}
    found = {}
    for name, directory in (("synced", "fp8-1"), ("fresh", "fp8-3")):
        (tmp_path / name).mkdir()
        with serving_sglang(tmp_path / directory, tmp_path / name, **options) as engine:
            found[directory] = asyncio.run(held(engine))
            for transport in ("gloo", "disk") if name == "synced" else ():
                asyncio.run(synced(engine, transport))
                found[transport] = asyncio.run(held(engine))
    assert found["gloo"] == found["disk"] == found["fp8-3"] != found["fp8-1"]
    # Matrices in FP8 have the digests of what they stand for, under their own names.
    [layer] = {name.split(":")[-1] for name in found["gloo"][0] if "layers.0.mlp.down_proj.weight" in name}
    assert layer.endswith("down_proj.weight") and len(found["gloo"][0]) >= 10
