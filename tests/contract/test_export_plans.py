"""Another plan than the full one, from the ranks into fake engines: no transport knows the difference."""

from __future__ import annotations

import asyncio
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rltool.checkpoints.convert import to_fp8
from rltool.config.rollout import WeightsConfig
from rltool.megatron.fp8 import quantization_config
from rltool.models.registry import read_hf_config
from rltool.weights.transports import nccl_sender
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.values import ValueCheck
from tests.contract import sync_rig
from tests.contract.fakes import ipc as fake_ipc
from tests.contract.fakes import nccl as fake_nccl
from tests.contract.fakes.sglang import VOCAB_SIZE, FakeSglang
from tests.contract.sync_rig import version
from tests.export_plans import LAYERS, SCALE, RanksInFp8, adapted_model, adapter, save_qwen3
from tests.ranks import SenderRanks

DEADLINE = 10.0
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {"transport": "gloo"}),
    ("cpu", {"transport": "gloo", "delta": True}),
    ("cpu", {"transport": "gloo", "staged": True}),
    ("cpu", {"transport": "disk"}),
    ("cuda", {"transport": "nccl"}),
]
OF_THE_PLUGIN_ALONE = ("delta", "staged")


class Ranks(SenderRanks):
    """Of a model with an adapter, which alone is exported."""

    @cached_property
    def plan(self):
        return adapter()

    def weights(self, step):
        return adapted_model(step)

    def stream(self, step):
        model = self.weights(step)
        return self.plan.made(lambda parameter: model[parameter.name])

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


def expected(step: int) -> dict[str, torch.Tensor]:
    """What an engine holds, worked out without the plan."""
    model, found = adapted_model(step), {}
    for layer in range(LAYERS):
        at, name = f"decoder.layers.{layer}.down", f"base_model.model.layers.{layer}.down"
        found[f"{name}.lora_A.weight"] = model[f"{at}.lora_a"].half()
        found[f"{name}.lora_B.weight"] = (SCALE * model[f"{at}.lora_b"]).half()
    return found


def assert_holds(engine: Any, step: int) -> None:
    wanted = expected(step)
    if isinstance(engine, FakeSglang):
        assert engine.weights == {name: tensor.numpy().tobytes() for name, tensor in wanted.items()}
        return
    assert engine.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert engine.tensors[name].dtype == torch.float16 and torch.equal(engine.tensors[name], tensor)


@pytest.mark.parametrize(("device", "weights"), ROUTES, ids=str)
def test_an_adapter_arrives_by_value_and_checksums_and_comparison_follow_its_plan(
    monkeypatch, stack, two, tmp_path, device, weights
):
    fake_nccl.installed(monkeypatch)
    monkeypatch.setattr(nccl_sender, "COMPLETE_SECONDS", 0.5)
    engines: list[Any] = list(two)
    if not any(name in weights for name in OF_THE_PLUGIN_ALONE):
        engines.append(stack.enter_context(FakeSglang()))
    for engine in engines:
        engine.device, engine.dtype = device, "float16"

    async def run() -> None:
        config = WeightsConfig(bucket_bytes=60, **weights)
        ranks = partial(Ranks, deadline=DEADLINE)
        async with sync_rig.rig(engines, ranks, config, tmp_path, deadline=DEADLINE, trainer_device=device) as r:
            for step in (1, 2):
                report = await r.sync.sync(version(step))
                assert report.failed == {} and len(report.updated) == len(engines)
                assert report.bytes == r.ranks.plan.bytes == sum(t.nbytes for t in expected(step).values())
                for engine in engines:
                    assert_holds(engine, step)
            check = ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256)
            comparison = Comparison(r.set, r.ranks, check, deadline=DEADLINE)
            name = f"base_model.model.layers.{LAYERS - 1}.down.lora_B.weight"
            two[1].tensors[name] = two[1].tensors[name] / SCALE
            found = await comparison.compare(list(r.fleet.members()))
            right = found.pop(two[0].url)
            assert right.equal and f"{2 * LAYERS} of {2 * LAYERS} parameters are bit-equal" in right.lines[0]
            assert found.pop(two[1].url).lines[1] == f"the first parameter that differs: {name}"
            assert all(verdict.equal for verdict in found.values())

    asyncio.run(run())


def of_directory(directory: Path) -> dict[str, bytes]:
    found = load_file(directory / "model.safetensors")
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.parametrize("transport", ["gloo", "disk", "nccl", "ipc"])
def test_an_sglang_in_fp8_is_sent_the_bytes_of_the_directory_that_convert_ckpt_writes(
    monkeypatch, stack, tmp_path, transport
):
    fake_nccl.installed(monkeypatch)
    fake_ipc.installed(monkeypatch)
    model, expected = tmp_path / "model", {}
    family = save_qwen3(model, 0)
    for step in (1, 2):
        save_qwen3(model / f"step{step}", step)
        to_fp8(model / f"step{step}", tmp_path / f"fp8-{step}")
        expected[step] = of_directory(tmp_path / f"fp8-{step}")
    assert expected[1].keys() == expected[2].keys() and expected[1] != expected[2]
    engine = stack.enter_context(FakeSglang())
    engine.dtype, engine.device = "bfloat16", "cuda" if transport in ("nccl", "ipc") else "cpu"
    engine.gpus = ("gpu-a",)

    async def run() -> None:
        shares = transport == "ipc"
        options: dict[str, Any] = {"deadline": DEADLINE, "trainer_device": engine.device, "shares_gpus": shares}
        config = WeightsConfig(bucket_bytes=40_000, transport=transport)
        ranks = partial(RanksInFp8, models=model, gpus=("gpu-a",), deadline=DEADLINE)
        async with sync_rig.rig([engine], ranks, config, tmp_path, **options) as r:
            for step in (1, 2):
                report = await r.sync.sync(version(step))
                assert report.failed == {} and engine.weights == expected[step]
            assert report.bytes == sum(map(len, expected[2].values()))
        if transport == "disk":
            written = read_hf_config(Path(engine.bodies["/update_weights_from_disk"]["model_path"]))
            assert written["quantization_config"] == quantization_config(family)
        elif transport != "ipc":
            last = engine.bodies["/update_weights_from_distributed"]
            pairs = dict(zip(last["names"], last["dtypes"], strict=True))
            assert {"float8_e4m3fn", "float32"} <= set(pairs.values()), pairs

    asyncio.run(run())
    assert fake_ipc.SharedExport.live == set(), "every buffer is freed when its engine is left"
