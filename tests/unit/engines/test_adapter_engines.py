"""What a run with adapters alone demands of its settings and of its engines, and how those are started for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rltool.config.loader import load_config
from rltool.config.serve import EngineGroup, ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines.dialects.table import dialect
from rltool.engines.launch.plan import Host, Model, Settings, engine_slots, plan_engines, seat_slots
from rltool.engines.launch.start import order_of_file
from rltool.engines.plugin.sglang_api import BadRequest, to_vllm
from rltool.engines.types import EngineInfo, GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.weights.transport import choose

ADAPTER = ["model.path=/m", "lora.rank=12", 'weights.lora_sync="adapter"']
REQUEST = GenerateRequest((3,), SamplingParams(max_tokens=1), "0" * 32, adapter="a")


def launches(model=None, device="cuda", **group):
    slots = engine_slots([EngineGroup(**group)], device=device, gpus_per_host=1)
    settings = Settings({"policy": model or Model(Path("/m"))}, Path("/k"), Path("/s"), device=device)
    return plan_engines(slots, seat_slots(slots, [Host("h", gpus=(0,))]), settings, lambda *_: 20_000).launches


def flags_of(engine, **options):
    [launch] = launches(engine=engine, **options)
    argv = dialect(engine).argv(launch)
    found = [flag for flag in argv if "lora" in flag]
    return {flag: argv[argv.index(flag) + 1] for flag in found if flag.startswith("--max-")}, dialect(engine), launch


def test_engines_are_started_for_adapters_by_the_group_or_by_the_run():
    assert flags_of("vllm")[0] == {} and flags_of("sglang")[0] == {}
    for options in (dict(lora_rank=12, lora_slots=5), dict(model=Model(Path("/m"), lora_rank=12, lora_slots=5))):
        flags, engine, launch = flags_of("vllm", **options)
        # 16 is the smallest that vLLM is built for.
        assert flags == {"--max-lora-rank": "16", "--max-loras": "5", "--max-cpu-loras": "5"}
        assert engine.environment(launch)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
        assert "RLTOOL_LORA_EXPERTS" not in engine.environment(launch), "a GPU has vLLM's kernels"
        flags, _, _ = flags_of("sglang", **options)
        assert flags == {"--max-lora-rank": "12", "--max-loras-per-batch": "5", "--max-loaded-loras": "5"}
    with pytest.raises(UsageError, match="on a CPU it takes no adapters.*merged"):
        launches(engine="sglang", device="cpu", lora_rank=12)
    [launch] = launches(engine="vllm", device="cpu", lora_rank=12)
    assert dialect("vllm").environment(launch)["RLTOOL_LORA_EXPERTS"] == "1"
    group = ServeConfig(model=Path("/m"), lora_rank=8, lora_slots=2).group
    assert (group.lora_rank, group.lora_slots) == (8, 2)


def test_a_run_has_its_own_engines_started_with_its_rank_and_a_place_for_each_version_in_flight():
    groups = ['engines.mode="managed"', 'engines.groups=[{name="default"}]', "rollout.max_staleness=2"]
    model = order_of_file(load_config(TrainConfig, [], [*ADAPTER, *groups]).config).models["policy"]
    assert (model.lora_rank, model.lora_slots) == (12, 4)
    merged = order_of_file(load_config(TrainConfig, [], [*ADAPTER[:2], *groups]).config).models["policy"]
    assert merged.lora_rank == 0


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["lora.rank=0"], "lora.rank is 0"),
        (['engines.mode="colocate"', 'engines.groups=[{name="d"}]', "rollout.max_staleness=1"], "colocate"),
        (["weights.staged=true"], "weights.staged"),
        (["weights.delta=true"], "weights.delta"),
        (['weights.transport="ipc"'], "weights.transport"),
        (['weights.engines=[{match="a*", transport="gloo"}]'], "weights.engines"),
        (
            ['rollout.agent="m:f"', 'rollout.gateway="http://host:1"', 'rollout.gateway_key_file="key"'],
            "rollout.gateway",
        ),
        (["rollout.partial_rollout=true", "rollout.oversampling_factor=2", "rollout.max_staleness=1"], "one version"),
    ],
)
def test_what_adapters_alone_do_not_go_with_is_refused_by_name(sets, why):
    with pytest.raises(UsageError, match=why):
        load_config(TrainConfig, [], [*ADAPTER, *sets])


def test_adapters_go_into_engines_on_the_trainers_gpus_by_their_memory():
    """Engines of the run's own sleep in turns; others stay awake beside it, which trainer.share_gpus allows."""
    load_config(TrainConfig, [], [*ADAPTER, 'engines.mode="colocate"', 'engines.groups=[{name="default"}]'])
    beside = [*ADAPTER, "trainer.gpus=[0]", "trainer.share_gpus=true", 'weights.transport="ipc"']
    config = load_config(TrainConfig, [], beside).config
    vllm = EngineInfo("vllm", "0.32.0", "policy", 1, 64, 64, "float32", "rltool", "default", None, True, "cuda")
    sglang = replace(vllm, dialect="sglang", plugin=False)
    assert choose(vllm, config.weights, "cuda") == "ipc"
    auto = config.weights.model_copy(update={"transport": "auto"})
    assert [choose(vllm, auto, "cuda", shares_gpus=shared) for shared in (True, False)] == ["ipc", "nccl"]
    assert choose(replace(vllm, device="cpu"), auto, "cpu", shares_gpus=True) == "gloo"
    with pytest.raises(UsageError, match="for a vLLM with rltool's plugin alone"):
        choose(sglang, auto, "cuda", shares_gpus=True)


def test_a_request_names_its_adapter_in_every_dialect():
    for kind, field in (("vllm", "model"), ("sglang", "lora_path")):
        [named] = dialect(kind).generate(REQUEST)
        assert named.body[field] == "a"
        [unnamed] = dialect(kind).generate(GenerateRequest((3,), SamplingParams(max_tokens=1), "0" * 32))
        assert field not in unnamed.body
    # Through sglang-router, to a vLLM with the plugin.
    assert to_vllm({"input_ids": [3], "lora_path": "a"})["model"] == "a"
    assert "model" not in to_vllm({"input_ids": [3], "lora_path": None})
    with pytest.raises(BadRequest, match="lora_path"):
        to_vllm({"input_ids": [3], "lora_path": ["a", "b"]})
