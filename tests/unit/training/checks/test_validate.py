import json
from dataclasses import replace
from pathlib import Path

import pytest

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.plugin.info import PLUGIN_PROTOCOL
from rltool.engines.types import EngineInfo
from rltool.errors import UsageError
from rltool.training.checks.preflight import engine_problems
from rltool.training.checks.validate import check_config, check_model


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 128}))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return [f"model.path={tmp_path}", f'data.train=["{tmp_path}/p.jsonl"]', 'engines.external=["127.0.0.1:1"]']


ENGINE = EngineEndpoint(url="http://10.8.0.3:8101", group="far")
MANAGED = 'engines.mode="managed"'
COLOCATE = ['engines.mode="colocate"', "engines.external=[]", "engines.groups=[{}]"]


def check(base: list[str], *sets: str) -> None:
    check_config(load_config(TrainConfig, [], [*base, *sets]).config)


def test_a_sound_configuration_passes(base):
    check(base)
    check(base, "global_batch_size=128", "optimizer_steps_per_rollout=2")
    check(base, *COLOCATE)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["engines.external=[]"], "--rollout-external HOST:PORT"),
        (['engines.mode="colocate"'], "contradict each other"),
        (['engines.mode="managed"', "engines.external=[]"], r"no \[\[engines.groups\]\]"),
        ([*COLOCATE, "rollout.max_staleness=1"], 'max_staleness = 1 contradict each other.*sleep.*"managed"'),
        ([*COLOCATE, "weights.staged=true"], "generate nothing while weights arrive"),
        ([*COLOCATE, "weights.delta=true"], "engines that generate while patches arrive"),
        ([*COLOCATE, 'weights.transport="nccl"'], "NCCL joins no two processes on one GPU"),
        ([*COLOCATE, 'weights.transport="ipc"', 'trainer.device="cpu"'], "CUDA IPC shares memory of GPUs"),
        (['weights.transport="ipc"'], r'engines\.mode = "external" contradict each other: CUDA IPC is for engines on'),
        ([MANAGED, "engines.external=[]", 'engines.groups=[{role="placeholder"}]'], "no engine to start"),
        ([MANAGED, "engines.external=[]", "engines.groups=[{gpus=[0]}]"], "names gpus.*--gpus"),
        (
            [MANAGED, "engines.external=[]", 'engines.groups=[{engine="sglang",role="prefill"}]'],
            "prefill and decode go together",
        ),
        (
            [*COLOCATE, 'engines.groups=[{name="p",role="prefill"},{name="d",role="decode"}]'],
            "colocate.*contradict each other.*caches of engines that sleep",
        ),
        ([MANAGED, "engines.external=[]", "engines.groups=[{}]", 'engines.router="http://h:1"'], "start_router = true"),
        (['models={judge={sleep="disk"}}'], 'models.judge.sleep = "disk" has no effect'),
        ([*COLOCATE, 'models={judge={sleep="disk"}}'], 'models.judge.sleep = "disk" has no effect'),
        (['models={judge={update_weights=true}}'], "updates only its policy"),
        (['models={judge={path="/nonexistent"}}'], "models.judge.path: /nonexistent is not a directory"),
        (
            ['models={judge={task="classify"}}', 'reward.function="judge"'],
            "reward.function = 'judge' lets it generate, but model 'judge' is served for 'classify'",
        ),
        (["rollout.prompts_per_step=33", "optimizer_steps_per_rollout=2"], "1 prompts remain.*such as 32"),
        (["rollout.prompts_per_step=1", "optimizer_steps_per_rollout=2"], "such as 2"),
        (["global_batch_size=100"], "32 x rollout.samples_per_prompt 8 = 256 samples.*set global_batch_size to 256"),
        (
            ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", "trainer.world_size=4"],
            "2 samples for 4 data-parallel ranks",
        ),
        (["rollout.samples_per_prompt=1"], "nothing would be learned.*reinforce_pp"),
        (["sampling.top_p=0.9"], "set sampling.top_k as well, such as 50"),
        (["sampling.top_k=20", "rollout.agent=a:b"], "top_k = 20 with rollout.agent: the gateway does not record"),
        (["sampling.top_k=20", "engines.router=r:1"], "top_k = 20 with --router: sglang-router does not pass on"),
        (["trainer.max_tokens_per_micro_batch=100"], "at least 2048"),
        (["data.train=[]"], "data.train names no file"),
        (['data.train=["none.jsonl"]'], "none.jsonl does not exist"),
        (["model.path=/nonexistent"], "is not a directory"),
        (["eval.stop_at=0.5"], "eval.every_steps above 0"),
        (
            [
                "checkpoint.keep_last=1",
                "checkpoint.keep_best=1",
                'checkpoint.best_metric="eval/none/accuracy"',
                "eval.every_steps=1",
            ],
            "would never be measured.*there is none",
        ),
        (
            [
                "checkpoint.keep_last=1",
                "checkpoint.keep_best=1",
                'checkpoint.best_metric="eval/heldout/accuracy"',
                'eval.sets={heldout="h.jsonl"}',
            ],
            "would never be measured.*every_steps",
        ),
        (
            ['algorithm.loss="sft"', "algorithm.kl={kind='loss', coef=0.1}"],
            r'algorithm.kl = \{kind = "loss", coef = 0.1\} has no meaning.*leave it out',
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_and_the_fix(base, sets, message):
    with pytest.raises(UsageError, match=message):
        check(base, *sets)


def test_a_model_directory_without_config_is_refused(base, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no config.json"):
        check(base, f"model.path={tmp_path}/empty")


def test_supervised_training_without_evaluation_needs_no_engines(base):
    check(base, "engines.external=[]", 'algorithm.loss="sft"')


MODEL = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "vocab_size": 128}


def info(**changes) -> EngineInfo:
    values = dict(
        dialect="vllm", engine_version="0.32.0", model_id="policy", world_size=1, max_model_len=4096, vocab_size=128,
        dtype="float32", weight_backend="rltool", weight_version=None, boot_id="b", plugin=True,
        model_config=dict(MODEL), plugin_protocol=PLUGIN_PROTOCOL,
    )  # fmt: skip
    return EngineInfo(**{**values, **changes})


MIXTURE = dict(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=64, intermediate_size=12, num_hidden_layers=1, vocab_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=6, norm_topk_prob=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dialect": "sglang", "plugin": False, "engine_version": "0.5.23"}, "was not seen to sample with them"),
        ({"plugin": False, "device": "cpu"}, "no kernel for them on a CPU: start it with `rltool serve-engines"),
        ({"plugin": False, "device": "cuda"}, None), ({"device": "cpu"}, None), ({"device": "cuda"}, None),
    ],
)
def test_adapters_of_experts_go_to_engines_that_sample_with_them(base, tmp_path, changes, why):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    sets = [*base, "lora.rank=4", 'weights.lora_sync="adapter"', f"weights.disk_dir={tmp_path}"]
    engine = info(**{"lora_rank": 8, "lora_slots": 4, "model_config": dict(MIXTURE), **changes})
    found = engine_problems(ENGINE, engine, MIXTURE, load_config(TrainConfig, [], sets).config, "cpu")
    if why is None:
        assert not found
        return
    [problem] = found
    assert why in problem and "experts" in problem and 'weights.lora_sync to "merged"' in problem
    config = load_config(TrainConfig, [], [*sets, 'lora.targets=["qkv","proj"]']).config
    assert not engine_problems(ENGINE, engine, MIXTURE, config, "cpu")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_run_that_sends_fp8_takes_engines_that_serve_it_alone(base):
    config = load_config(TrainConfig, [], [*base, 'engines.quantization="fp8"']).config
    [problem] = engine_problems(ENGINE, info(), MODEL, config, "cpu")
    assert "serve-engines --quantization fp8" in problem
    serves = info(model_config={**MODEL, "quantization_config": FP8})
    assert engine_problems(ENGINE, serves, MODEL, config, "cpu") == []
    assert engine_problems(ENGINE, serves, MODEL, config, None) == [], "nothing is sent to it"
    first = engine_problems(ENGINE, replace(serves, weight_backend="nccl"), MODEL, config, "cpu")[0]
    assert "FP8 through rltool's plugin alone" in first


@pytest.mark.parametrize(
    ("changes", "sets", "why"),
    [
        ({}, [], None),
        ({}, ['weights.transport="disk"'], None),
        ({"device": "cpu"}, [], "on a CPU it packs FP8 for AMX"),
        ({"model_config": {**MODEL, "kv_lora_rank": 64, "quantization_config": FP8}}, [], "latent attention in FP8"),
        ({}, ['engines.mode="colocate"', "engines.groups=[{}]"], None),
        ({}, ['engines.mode="colocate"', "engines.groups=[{}]", 'weights.transport="disk"'], "after it has slept"),
        ({"model_config": dict(MODEL)}, [], "serves no FP8"),
        ({"model_config": {"architectures": MODEL["architectures"]}, "vocab_size": None}, [], None),  # files elsewhere
    ],
)
def test_an_sglang_that_serves_fp8_is_sent_it_where_it_keeps_it_as_it_came(base, changes, sets, why):
    others = [] if any("colocate" in one for one in sets) else ["engines.external=['http://h:1']"]
    sets = ["model.path=/m", 'data.train=["p.jsonl"]', 'engines.quantization="fp8"', *others, *sets]
    config = load_config(TrainConfig, [], sets).config
    serves = info(
        dialect="sglang", engine_version="0.5.17", weight_backend="sglang", plugin=False, device="cuda",
        dtype="bfloat16", model_config={**MODEL, "quantization_config": FP8},
    )  # fmt: skip
    found = engine_problems(ENGINE, replace(serves, **changes), MODEL, config, "cuda")
    assert (not found) if why is None else (why in found[0]), found


@pytest.mark.parametrize(
    ("changes", "transport", "message"),
    [
        ({"vocab_size": 256}, "gloo", "vocabulary of 256.*one of 128"),
        ({"model_config": {**MODEL, "hidden_size": 32}}, "gloo", "another model: hidden_size is 32.*is 64"),
        ({"model_config": {"text_config": {**MODEL, "hidden_size": 32}}}, "gloo", "another model"),
        ({"weight_backend": None}, "gloo", "has no weight transfer"),
        ({"model_config": {**MODEL, "quantization_config": {"quant_method": "mxfp4"}}}, "gloo", "serves MXFP4 files"),
        ({"model_config": {**MODEL, "quantization_config": FP8}}, "gloo", 'engines.quantization = "fp8"'),
        ({"weight_backend": "nccl", "plugin": False}, "disk", "cannot load weights from disk.*--weight-backend rltool"),
        ({"weight_backend": "nccl"}, "gloo", "gloo needs rltool's own"),
        ({"weight_backend": "rltool"}, "nccl", "cannot be sent weights over nccl"),
        ({"max_model_len": 100}, "gloo", "--max-model-len 2048"),
        ({"plugin_protocol": None}, "gloo", "the plugin of an older rltool: install this one in its environment, and"),
        ({"plugin_protocol": PLUGIN_PROTOCOL - 1}, "gloo", "the plugin of an older rltool"),
        ({"plugin_protocol": PLUGIN_PROTOCOL + 1}, "gloo", "the plugin of a newer rltool"),
    ],
)
def test_an_engine_that_cannot_serve_the_run_is_refused_with_the_reason(base, changes, transport, message):
    config = load_config(TrainConfig, [], [*base, f'weights.transport="{transport}"']).config
    problems = engine_problems(ENGINE, info(**changes), MODEL, config, "cpu")
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problems[0])


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 64}
PHI3 = dict(
    architectures=["Phi3ForCausalLM"], hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
    vocab_size=128, max_position_embeddings=256, rope_parameters=LONGROPE,
)  # fmt: skip


def test_longrope_is_for_sequences_and_engines_of_the_context_of_pretraining(base, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PHI3))
    short = ["sampling.max_prompt_tokens=32", "sampling.max_response_tokens=32"]
    check_model(load_config(TrainConfig, [], [*base, *short]).config)
    with pytest.raises(UsageError, match="= 65: .*at most 64 tokens"):
        check_model(load_config(TrainConfig, [], [*base, "sampling.max_prompt_tokens=33", short[1]]).config)
    config = load_config(TrainConfig, [], [*base, *short]).config
    assert not engine_problems(ENGINE, info(model_config=PHI3, max_model_len=64), PHI3, config, "cpu")
    [problem] = engine_problems(ENGINE, info(model_config=PHI3, max_model_len=65), PHI3, config, "cpu")
    assert "the long factors of longrope" in problem and "--max-model-len 64" in problem
    assert not engine_problems(ENGINE, info(model_config=PHI3, max_model_len=65), PHI3, config, None)


def test_an_engine_of_the_same_model_passes_and_rollout_only_needs_no_weight_transfer(base):
    config = load_config(TrainConfig, [], base).config
    assert not engine_problems(ENGINE, info(), MODEL, config, "cpu")
    assert not engine_problems(ENGINE, info(weight_backend=None), MODEL, config, None)
    assert not engine_problems(ENGINE, info(plugin=False, plugin_protocol=None), MODEL, config, None)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rollout.partial_rollout=true", "rollout.max_staleness=1"], "oversampling_factor = 1 there is no race"),
        (["rollout.partial_rollout=true", "rollout.oversampling_factor=1.5"], "forbids: set max_staleness to 1"),
        (['rollout.on_stale="resample"'], "no effect with rollout.max_staleness = 0"),
        (['rollout.batch_size="trim"'], "a single dropped sample would leave none"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_settings_of_the_collector_that_cannot_work_are_refused(base, sets, message):
    with pytest.raises(UsageError, match=message):
        check(base, *sets)


def test_settings_of_the_collector_that_go_together_pass(base):
    check(base, "rollout.partial_rollout=true", "rollout.oversampling_factor=1.5", "rollout.max_staleness=1")
    check(base, "rollout.partial_rollout=true", "rollout.oversampling_factor=1.5", "algorithm.mask_tokens_older_than=0")
    check(base, "rollout.max_staleness=2", 'rollout.on_stale="resample"')
    check(base, *PARTIAL_ROLLOUT, 'rollout.environment="a:B"')
    check(base, *PARTIAL_ROLLOUT[1:], 'rollout.generate_function="a:f"')


AGENT, OWN = 'rollout.agent="a:run"', 'rollout.function="a:f"'
PARTIAL_ROLLOUT = ("rollout.partial_rollout=true", "rollout.oversampling_factor=2", "rollout.max_staleness=1")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([AGENT, 'rollout.environment="a:B"'], "rollout.environment and rollout.agent are each a whole generation"),
        (['rollout.environment_arguments={"a"=1}'], "no effect without rollout.environment"),
        (['rollout.gateway="http://h:1"'], "no effect without rollout.agent"),
        (["rollout.agent=[]"], "words of a command line"),
        ([AGENT, 'rollout.gateway="http://h:1"'], "gateway_key_file go together"),
        ([AGENT, *PARTIAL_ROLLOUT], "does not go with rollout.agent: what it has begun cannot be taken up"),
        (
            ['rollout.generate_function="a:f"', *PARTIAL_ROLLOUT],
            "does not go with rollout.generate_function: what it has begun cannot be taken up",
        ),
        ([OWN, "rollout.oversampling_factor=2"], "oversampling_factor = 2.0 does not go with rollout.function"),
        ([OWN, *PARTIAL_ROLLOUT[::2]], "rollout.partial_rollout = True does not go with rollout.function"),
        ([OWN, 'rollout.on_stale="resample"', "rollout.max_staleness=1"], "on_stale = 'resample' does not go with"),
        ([AGENT, 'eval.sets.a="{base}"', "eval.sampling.temperature=0"], "set both to one value"),
    ],
)
def test_ways_to_generate_that_contradict_each_other_are_refused(base, sets, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        check(base, *(text.replace("{base}", f"{tmp_path}/p.jsonl") for text in sets))


def test_agents_and_environments_pass(base):
    check(base, AGENT, 'rollout.gateway="http://h:1"', 'rollout.gateway_key_file="key"')
    check(base, 'rollout.agent=["python", "agent.py"]')
    check(base, AGENT, OWN, "rollout.max_staleness=1", 'rollout.on_stale="mask"')
    check(base, 'rollout.environment="a:B"', "rollout.environment_arguments={a=1}")
