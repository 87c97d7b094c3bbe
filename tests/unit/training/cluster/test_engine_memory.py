"""The KV cache of colocated engines: as large as a run's own batch, where that follows from its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rltool.config.train import TrainConfig
from rltool.models.registry import family_for
from rltool.training.cluster.engine_memory import (
    BESIDE_BYTES,
    batch_tokens,
    engine_memory,
    token_bytes,
    trainer_bytes,
)
from rltool.training.cluster.placement import plan_placement

GIB = 1 << 30
H100 = 80 * GIB
LAYERS, GROUPS, DIM = 24, 2, 64
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": LAYERS, "num_attention_heads": 14,
    "num_key_value_heads": GROUPS, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
A_TOKEN = 2 * LAYERS * GROUPS * DIM * 2
"""Key and value, in 16 bit."""


@pytest.fixture
def config(tmp_path: Path):
    """f(groups, **sections): 64 prompts x 8 samples of at most 48 + 512 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def make(*groups, mode: str = "colocate", **more) -> TrainConfig:
        rollout = {"prompts_per_step": 64, "samples_per_prompt": 8} | more.pop("rollout", {})
        return TrainConfig.model_validate({
            "model": more.pop("model", {"path": tmp_path}), "engines": {"mode": mode, "groups": groups or ({},)},
            "rollout": rollout, "sampling": {"max_prompt_tokens": 48, "max_response_tokens": 512},
            "trainer": more.pop("trainer", {"world_size": 1}), **more,
        })  # fmt: skip

    return make


def test_one_engine_has_room_for_every_answer_of_a_batch_at_its_longest(config):
    found = engine_memory(config(), H100)
    assert found.caches["default"].bytes == 64 * 8 * 560 * A_TOKEN
    assert found.lines[:1] == (
        "group default: a KV cache of 3.28 GiB for 286,720 tokens in each engine, which a batch of this run needs at "
        "most (a memory flag of your own in engines.groups: flags wins)",
    )
    whole = found.caches["default"].fraction * H100
    parameters = LAYERS * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864) + 151936 * 896
    assert whole == pytest.approx(64 * 8 * 560 * A_TOKEN + 2 * parameters + BESIDE_BYTES, rel=0.02)


def test_several_engines_have_a_quarter_more_than_their_share(config):
    two = config({"count": 2, "engines_per_gpu": 2})
    assert batch_tokens(two, 2) == 40 * 8 * 560
    assert engine_memory(two, H100).caches["default"].bytes == 40 * 8 * 560 * A_TOKEN
    assert batch_tokens(config(rollout={"requests_per_engine": 4}), 1) == 4 * 8 * 560
    assert batch_tokens(config(rollout={"oversampling_factor": 1.5}), 8) == 15 * 8 * 560


def test_one_sequence_of_the_longest_that_the_engine_takes_fits_whatever_the_batch(config):
    small = config({"max_model_len": 4000}, rollout={"prompts_per_step": 1, "samples_per_prompt": 2})
    assert engine_memory(small, H100).caches["default"].bytes == 4000 * A_TOKEN


def test_the_cache_reaches_the_engines_command_line(config):
    made = config()
    [slot] = plan_placement(made, gpu=True, memory=engine_memory(made, H100)).slots
    flags = list(slot.group.flags)
    assert flags[flags.index("--kv-cache-memory-bytes") + 1] == str(64 * 8 * 560 * A_TOKEN)


@pytest.mark.parametrize(
    "why",
    [
        {"groups": ({"flags": ["--gpu-memory-utilization", "0.3"]},)},
        {"groups": ({"engine": "sglang"},)},
        {"rollout": {"environment": "a.b:C"}},
        {"rollout": {"prompts_per_step": 4096, "requests_per_engine": 4096}},
        {"mode": "managed"},
    ],
    ids=["own-flag", "sglang", "turns", "too-large", "managed"],
)
def test_where_it_does_not_follow_engines_take_their_fraction(config, why):
    assert engine_memory(config(*why.pop("groups", ()), **why), H100).caches == {}


def test_on_a_gpu_of_unknown_size_nothing_is_set(config):
    assert engine_memory(config(), None).caches == {}


def test_layers_that_keep_another_number_of_tokens_are_left_to_the_engine(config):
    [group] = config().engines.groups
    assert token_bytes(family_for(SHAPE), SHAPE, group) == A_TOKEN
    hybrid = {**SHAPE, "layer_types": ["full_attention", "linear_attention"]}
    assert token_bytes(family_for(SHAPE), hybrid, group) is None
    latent = dict(architectures=["DeepseekV3ForCausalLM"], n_routed_experts=8, num_experts_per_tok=4, n_group=4)
    latent = {**SHAPE, **latent, "topk_group": 2, "moe_intermediate_size": 16}
    assert token_bytes(family_for(latent), latent, group) is None


def test_tensor_and_pipeline_parallel_engines_keep_a_part_on_each_gpu(config):
    [cut] = config({"tp": 2, "flags": ["--pipeline-parallel-size", "2"]}, trainer={"world_size": 4}).engines.groups
    assert token_bytes(family_for(SHAPE), SHAPE, cut) == A_TOKEN // 4


def test_trainer_and_engines_load_at_once_where_both_have_room(config):
    bf16 = {"model": {"path": config().model.path, "dtype": "bfloat16"}}
    assert engine_memory(config(**bf16), H100).beside
    parameters = LAYERS * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864) + 151936 * 896
    family = family_for(SHAPE)
    assert trainer_bytes(config(**bf16), family) == pytest.approx(18 * parameters, rel=0.01)
    assert trainer_bytes(config(), family) == pytest.approx(16 * parameters, rel=0.01)
    cut = config(**bf16, trainer={"world_size": 4, "distributed_optimizer": True})
    assert trainer_bytes(cut, family) == pytest.approx((6 + 12 / 4) * parameters, rel=0.01)
    found = engine_memory(config(**bf16), 16 * GIB)
    assert found.caches and not found.beside, "9 GB of the trainer, 9 of the engine"
    assert not engine_memory(config({"flags": ["--gpu-memory-utilization", "0.1"]}), H100).beside, "it measures"
    assert plan_placement(config(), gpu=True, memory=engine_memory(config(), H100)).starts_beside
    assert not plan_placement(config(), gpu=True).starts_beside
    assert plan_placement(config(), gpu=False).starts_beside
