"""What each trainer rank holds of the exported tensors: of every family, bit by bit, and for several layouts."""

from __future__ import annotations

import pytest
import torch

from rltool.config.parallel import ParallelLayout
from rltool.config.sections import LoraConfig
from rltool.engines.transfer.shards import Box, plan_shards, sends_bytes
from rltool.engines.transfer.wire import tensor_bytes
from rltool.errors import UsageError
from rltool.megatron.export_plan import adapter_plan, full_plan
from rltool.megatron.shards import OwnPart, check_family, check_plan, held, interleaved
from rltool.models.base import Family
from rltool.models.registry import family_for, supported_architectures
from tests.export_plans import quantised

LAYOUTS = {
    "tp 2": ParallelLayout(2, tp=2),
    "pp 2": ParallelLayout(2, pp=2),
    "dp 2": ParallelLayout(2),
    "tp 2, pp 2, dp 2": ParallelLayout(8, tp=2, pp=2),
    "ep 2": ParallelLayout(2, ep=2),
    "tp 2, ep 2": ParallelLayout(4, tp=2, ep=2),
}
REFUSED = {
    "DeepseekV3ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
}


def family_of(architecture: str, layers: int = 2) -> Family:
    experts = dict(num_experts=4, n_routed_experts=4, first_k_dense_replace=1, num_experts_per_tok=2, n_group=1)
    return family_for(
        {
            "architectures": [architecture], "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": layers, "vocab_size": 11, "rms_norm_eps": 1e-6,
            "rope_theta": 5000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
            "moe_intermediate_size": 8, "num_local_experts": 4, **experts,
        }
    )  # fmt: skip


def is_refused(family: Family) -> bool:
    try:
        check_family(family)
    except UsageError:
        return True
    return False


SHARDED = [name for name in supported_architectures() if not is_refused(family_of(name))]


def test_families_that_are_refused_are_these():
    assert set(supported_architectures()) - set(SHARDED) == REFUSED


def test_the_refusal_names_what_is_not_implemented():
    with pytest.raises(UsageError, match="multi-head latent attention, which DeepseekV3ForCausalLM has"):
        check_family(family_of("DeepseekV3ForCausalLM"))
    for stacked in ("GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration"):
        with pytest.raises(UsageError, match=f"{stacked}: .* is fused or transposed"):
            check_family(family_of(stacked))
    family = family_of("Qwen2ForCausalLM")
    with pytest.raises(UsageError, match="quantised engines"):
        check_plan(quantised(full_plan(family, torch.float32)))
    with pytest.raises(UsageError, match="adapters"):
        check_plan(adapter_plan(family, LoraConfig(rank=2), "base"))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("architecture", SHARDED)
def test_the_ranks_parts_make_every_tensor_once(architecture, layout):
    family = family_of(architecture)
    if layout.ep > 1 and not family.num_experts:
        layout = ParallelLayout(layout.world_size, tp=layout.tp)
    plan = full_plan(family, torch.float32)
    generator = torch.Generator().manual_seed(0)
    whole = {meta.name: torch.randn(meta.shape, generator=generator) for meta in plan.tensors}
    boxes = held(plan, layout)
    for meta in plan.tensors:
        times = torch.zeros(meta.shape)
        for source in boxes[meta.name]:
            source.box.of(times, Box.whole(meta.shape)).add_(1)
        assert (times == 1).all(), meta.name
    for rank in range(layout.world_size):
        part = OwnPart(plan, layout, rank, 2000)
        local = {
            export.parameter.name: export.parameter.shard(
                export.parameter.merge([whole[name] for name, _ in export.parameter.hf]), part.tp_rank, layout.tp
            )
            for export in part.exports
        }
        made = dict(part.tensors(local))
        assert [meta for bucket in part.buckets for meta in bucket] == list(made)
        here = {name for name, sources in boxes.items() if any(rank in source.ranks for source in sources)}
        assert {meta.name for meta in made} == here
        for meta, tensor in made.items():
            assert torch.equal(tensor, part.boxes[meta.name].of(whole[meta.name], Box.whole(whole[meta.name].shape)))
            assert any(rank in source.ranks and source.box == part.boxes[meta.name] for source in boxes[meta.name])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_share_the_bytes_of_an_engine(layout):
    """A mixture of experts, to one worker that stores everything."""
    plan = full_plan(family_of("Qwen3MoeForCausalLM"), torch.float32)
    [bucket] = plan.buckets(1 << 30)
    needs = [{meta.name: [Box.whole(meta.shape)] for meta in bucket}]
    planned = plan_shards([bucket], held(plan, layout), needs, layout.world_size)
    dtypes = {meta.name: meta.dtype for meta in bucket}
    sent = [sends_bytes(planned[rank, 0], dtypes) for rank in range(layout.world_size)]
    assert sum(sent) == plan.bytes
    largest = max(map(tensor_bytes, bucket))
    # Pipeline stages alone hold different parts: the first has the embedding, the last the head.
    assert max(sent) <= plan.bytes / layout.world_size + largest


@pytest.mark.parametrize("stages", [2, 4])
def test_every_bucket_is_of_all_pipeline_stages(stages):
    family = family_of("Qwen3MoeForCausalLM", layers=8)
    plan, layout = full_plan(family, torch.float32), ParallelLayout(stages, pp=stages)
    taken = interleaved(plan, stages)
    assert interleaved(plan, 1) is plan and set(taken.tensors) == set(plan.tensors)
    boxes, largest = held(taken, layout), max(map(tensor_bytes, plan.tensors))
    for bucket in taken.buckets(10 * largest):
        of_stage = [0] * stages
        for meta in bucket:
            [source] = boxes[meta.name]
            of_stage[source.ranks[0]] += tensor_bytes(meta)
        assert max(of_stage) <= sum(of_stage) / stages + 2 * largest, of_stage
