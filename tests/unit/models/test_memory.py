"""Memory of a model in training and in an engine, against what was measured; the answers of `rltool models`."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from benchmarks.trainer_speed import SHAPES
from rltool.cli import main
from rltool.config.parallel import ParallelLayout
from rltool.config.sections import LoraConfig, TrainerConfig
from rltool.errors import UsageError
from rltool.models.base import Parameter
from rltool.models.estimate import Asked, estimate
from rltool.models.memory import (
    GIB,
    USED,
    engine_bytes,
    fitting_layout,
    parameters_of,
    rank_state,
    training_memory,
)
from rltool.models.registry import FAMILIES, family_for
from tests.unit.models.test_models_families import hf_config, latent_config


def family_of(shape: str, **changes):
    return family_for({"architectures": ["Qwen2ForCausalLM"], **SHAPES[shape], **changes})


@pytest.mark.parametrize(
    ("peak", "shape", "trainer"),
    [
        (30.3, "0.5B", {"recompute_head": False, "head_chunk_tokens": 4096}),
        (59, "1.5B", {}),
        (63.2, "1.5B", {"recompute_head": False}),
        (49.5, "1.5B", {"recompute": "selective"}),
        (52.15, "1.5B", {"recompute": "selective", "residual": "float32"}),
        (46, "1.5B", {"recompute": "full", "recompute_layers": 6}),
        (29, "1.5B", {"recompute": "full"}),
        (132.0, "7B", {"recompute": "full", "max_tokens_per_micro_batch": 8192}),
        (112.1, "7B", {"recompute": "selective", "world_size": 4, "distributed_optimizer": True}),
        (56.6, "30B-A3B", {}),
        (119.6, "30B-A3B", {"max_tokens_per_micro_batch": 32768}),
    ],
)
def test_the_estimate_is_what_was_measured_on_h200s_or_a_little_more(peak, shape, trainer):
    """Peaks of docs/benchmarks.md and docs/parallelism.md, in GiB; micro-batches there are not quite full."""
    layers = {"num_hidden_layers": 8} if peak == 119.6 else {}
    trainer = TrainerConfig(**{"max_tokens_per_micro_batch": 16384, **trainer})
    found = training_memory(family_of(shape, **layers), trainer, dtype="bfloat16").total / GIB
    assert 0.99 * peak < found < 1.065 * peak


@pytest.mark.parametrize(
    ("peak", "shape", "trainer", "layers"),
    [
        (107.8, "qwen3.5-4B", {"recompute": "selective", "max_tokens_per_micro_batch": 8192}, 32),
        (85.0, "qwen3.5-4B", {}, 16),
        (53.1, "moonlight", {}, 4),
        (55.3, "gpt-oss-20b", {}, 2),
    ],
)
def test_the_estimate_of_other_families_is_near_what_was_measured(peak, shape, trainer, layers):
    """As above, of docs/benchmarks.md: within 0.1 % for gated delta nets, and 2.0 and 1.2 % too little for latent
    attention and sinks."""
    family = family_of(shape, num_hidden_layers=layers)
    trainer = TrainerConfig(**{"max_tokens_per_micro_batch": 16384, **trainer})
    found = training_memory(family, trainer, dtype="bfloat16").total
    if delta := family.attention.delta:
        # Measured when the norm of a delta net's output kept it in bf16, and its gate and that one's SiLU in fp32: of
        # seven times as many numbers as there are values, four are left.
        found += 3 * delta.value_heads * delta.value * sum(delta.layers) * trainer.max_tokens_per_micro_batch * 2
    assert abs(found / GIB / peak - 1) < (0.005 if delta else 0.021)


def test_the_layout_that_is_found_fits_and_one_gpu_less_of_it_does_not():
    family = family_of("7B")
    trainer, memory = fitting_layout(family, gpus=2, gpu_bytes=80 * GIB, tokens=16384)
    assert memory == training_memory(family, trainer, dtype="bfloat16")
    assert memory.total <= USED * 80 * GIB
    assert trainer.world_size == 2 and trainer.sequence_parallel == (trainer.tensor_parallel > 1)
    assert fitting_layout(family, gpus=1, gpu_bytes=80 * GIB, tokens=16384) is None
    least = fitting_layout(family_of("0.5B"), gpus=4, gpu_bytes=80 * GIB, tokens=16384)[0]
    assert (least.tensor_parallel, least.pipeline_parallel, least.recompute) == (1, 1, "none")


def test_a_pass_that_keeps_no_activations_counts_only_where_it_takes_more_than_training():
    family, sizes = family_of("0.5B"), {"max_tokens_per_micro_batch": 16384, "recompute": "full"}
    usual, same, larger = (
        training_memory(family, TrainerConfig(**sizes, logprob_tokens_per_micro_batch=tokens), dtype="bfloat16")
        for tokens in (None, 16384, 131072)
    )
    assert usual == same
    # Of one layer of 896 and 4,864: two residuals, two norms, what attention has, three of the MLP; and the stream.
    numbers = 4 * 896 + (896 + 2 * 128) + (896 + 128) + 896 + 3 * 4864 + 2 * 896
    assert larger.activations == 131072 * 2 * numbers > usual.activations
    found = fitting_layout(family, gpus=1, gpu_bytes=80 * GIB, tokens=16384, logprob_tokens=131072)
    assert found[0].logprob_tokens_per_micro_batch == 131072


def test_with_adapters_the_model_has_weights_alone_and_a_7b_trains_on_one_gpu_of_80_gib():
    family = family_of("7B")
    full = training_memory(family, TrainerConfig(max_tokens_per_micro_batch=16384), dtype="bfloat16")
    for rank in (16, 32):
        # Of each product rank x (inputs + outputs) numbers, four of them of the inputs 3584 twice and 18944.
        inputs, outputs = 4 * 3584 + 2 * 3584 + 18944, (3584 + 2 * 512) + 3584 + 2 * 18944 + 3584
        trained = 28 * rank * (inputs + outputs)
        trainer = TrainerConfig(max_tokens_per_micro_batch=16384)
        found = training_memory(family, trainer, dtype="bfloat16", lora=LoraConfig(rank=rank))
        assert found.weights == full.weights + 4 * trained
        assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
        # queries, keys, values, output, gate, up, down: seven products between whose matrices rank numbers are.
        assert found.activations == full.activations + 28 * 7 * rank * 2 * 16384
    lora = LoraConfig(rank=32)
    assert fitting_layout(family, gpus=1, gpu_bytes=80 * GIB, tokens=16384) is None
    assert fitting_layout(family, gpus=1, gpu_bytes=80 * GIB, tokens=16384, lora=lora) is not None


def test_experts_are_spread_where_they_do_not_fit_otherwise():
    trainer, _ = fitting_layout(family_of("30B-A3B", num_hidden_layers=48), gpus=8, gpu_bytes=141 * GIB, tokens=16384)
    assert trainer.expert_parallel * trainer.tensor_parallel * trainer.pipeline_parallel > 1


def test_stages_and_ranks_hold_each_tensor_once_and_the_embedding_of_a_tied_model_at_both_ends():
    family, layout = family_of("30B-A3B"), ParallelLayout(16, tp=2, pp=4, ep=2)
    found = [rank_state(family, layout, stage, dtype="bfloat16", distributed=True) for stage in range(4)]
    sizes = [(math.prod(p.shard_shape(2)), p.expert is not None) for p in family.parameters]
    dense, experts = (sum(size for size, of_expert in sizes if of_expert == kind) for kind in (False, True))
    dense += 2048 * 151936 // 2
    assert sum(memory.weights for memory in found) == 2 * (dense + experts // 2)
    assert sum(memory.gradients for memory in found) == 4 * (dense + experts // 2)
    # Two replicas share the rest, and of an expert there is one.
    assert sum(memory.optimizer for memory in found) == 12 * (dense // 2 + experts // 2)


def test_a_search_that_finds_nothing_looks_at_the_tensors_once_for_each_cut_of_them(monkeypatch):
    """It took 40 s for all sizes of a cluster when each cut and stage counted all experts again."""
    family, looks, shard_shape = family_of("30B-A3B", num_hidden_layers=48), Counter(), Parameter.shard_shape
    monkeypatch.setattr(Parameter, "shard_shape", lambda p, tp: looks.update([tp]) or shard_shape(p, tp))
    for gpus in (8, 96, 768, 8192):
        assert fitting_layout(family, gpus=gpus, gpu_bytes=2 * GIB, tokens=16384) is None
    assert looks.keys() == {1, 2, 4}
    assert set(looks.values()) == {sum(not parameter.expert for parameter in family.parameters)}


def test_adapters_that_a_model_cannot_have_are_no_lack_of_memory():
    family = family_of("gpt-oss-20b")
    with pytest.raises(UsageError, match="experts of GptOssForCausalLM are one tensor"):
        fitting_layout(family, gpus=8, gpu_bytes=80 * GIB, tokens=16384, lora=LoraConfig(rank=8))
    lora = LoraConfig(rank=8, targets=("qkv", "proj"))
    assert fitting_layout(family, gpus=8, gpu_bytes=80 * GIB, tokens=16384, lora=lora) is not None


def test_an_engines_cache_is_of_what_its_attention_keeps():
    assert engine_bytes(family_of("7B")).cache == 2 * 28 * 4 * 128 * 2
    assert engine_bytes(family_of("7B"), tensor_parallel=2).cache == 28 * 4 * 128 * 2
    latent = latent_config()
    kept = 2 * (latent["kv_lora_rank"] + latent["qk_rope_head_dim"]) * 2
    assert engine_bytes(family_for(latent)).cache == engine_bytes(family_for(latent), tensor_parallel=2).cache == kept
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 4}
    windows = engine_bytes(family_for(hf_config("Gemma3ForCausalLM", **kinds)))
    assert (windows.cache, windows.windowed) == (2 * 2 * 4 * 2, 8 * 2 * 2 * 4 * 2)


def written(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_checkpoint_that_is_not_supported_is_an_answer_with_its_reason_and_exit_code_1(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["models", str(written(tmp_path, hf_config("Qwen2VLForConditionalGeneration")))])
    assert end.value.code == 1
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("no: unsupported architecture") and "Qwen3VLForConditionalGeneration" in output
    with pytest.raises(SystemExit) as end:
        main(["models", str(written(tmp_path, hf_config(use_sliding_window=True))), "--json"])
    assert end.value.code == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["supported"] and "use_sliding_window" in answer["why_not"]


def test_the_json_of_a_checkpoint_has_the_numbers_of_the_lines(tmp_path, capsys):
    config = {"architectures": ["Qwen2ForCausalLM"], **SHAPES["7B"]}
    words = ["models", str(written(tmp_path, config)), "--gpus", "4", "--gpu-memory", "80"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--json", "--set", "trainer.tensor_parallel=2", "--set", 'trainer.recompute="full"'])
    assert end.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    trainer = TrainerConfig(world_size=4, tensor_parallel=2, recompute="full", max_tokens_per_micro_batch=16384)
    expected = training_memory(family_for(config), trainer, dtype="bfloat16")
    assert answer["training"]["total"] == expected.total and answer["trainer"]["tensor_parallel"] == 2
    assert answer["parameters"]["total"] == parameters_of(family_for(config)).total == 7_615_616_512
    with pytest.raises(SystemExit):
        main([*words, "--lora-rank", "16", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["lora_rank"] == 16 and answer["training"]["gradients"] < expected.gradients / 50
    with pytest.raises(SystemExit):
        main(words)
    output = capsys.readouterr().out
    assert "7,615,616,512" in output and "fits 4 x 80 GiB" in output and "57,344 bytes a token" in output


def test_a_layout_that_the_model_cannot_have_is_refused_with_its_key(tmp_path):
    asked = Asked(3, 80 * GIB, 16384, "bfloat16", ("trainer.tensor_parallel=3",))
    with pytest.raises(UsageError, match="tensor_parallel = 3"):
        estimate(written(tmp_path, hf_config()), asked)


def test_the_list_has_every_family(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["models"])
    printed = capsys.readouterr().out
    assert all(architecture in printed for family in FAMILIES for architecture in family.architectures)
    assert "TP PP CP EP" in printed and "vLLM" in printed
    with pytest.raises(SystemExit) as end:
        main(["models", "--json"])
    assert end.value.code == 0
    listed = json.loads(capsys.readouterr().out)["families"]
    assert [family["opens"] for family in listed] == [family.opens for family in FAMILIES]
    assert all(family["layouts"] and "engines" in family for family in listed)
