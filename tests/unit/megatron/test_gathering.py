"""Which parameters are gathered together, and where each lies in the buffer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

from rltool.config.parallel import ParallelLayout
from rltool.megatron.export_plan import full_plan
from rltool.megatron.gathering import Gather, Route, gather_bytes, plan_gathers
from rltool.models.base import EMBEDDING
from rltool.models.registry import family_for
from tests.unit.models.test_models_families import hf_config, random_hf_state

DENSE = family_for(hf_config())
EXPERTS = family_for(hf_config("Qwen3MoeForCausalLM", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2))
DENSE_PLAN, EXPERTS_PLAN = full_plan(DENSE, torch.float32), full_plan(EXPERTS, torch.float32)
LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(2),
    ParallelLayout(2, tp=2),
    ParallelLayout(2, pp=2),
    ParallelLayout(4, tp=2, pp=2),
    ParallelLayout(4, tp=2, ep=2),
    ParallelLayout(8, tp=2, pp=2, ep=2),
]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("bound", [1, 1000, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_parameter_once_in_order_and_no_buffer_above_the_bound_but_for_one_parameter(layout, bound, everywhere):
    family, exported = (EXPERTS, EXPERTS_PLAN) if layout.ep > 1 else (DENSE, DENSE_PLAN)
    plan = plan_gathers(exported, layout, everywhere=everywhere, bound=bound)
    assert [p for gather in plan for p in gather.parameters] == list(family.parameters)
    for gather in plan:
        alone = len(gather.cut) + len(gather.whole) == 1
        assert 4 * gather.elements <= bound or alone
    for before, after in pairwise(plan):  # none was closed early
        first = next((Gather(after.route, after.dtype, layout.tp, (p,)).elements for p in after.parameters), 0)
        assert before.route != after.route or 4 * (before.elements + first) > bound


def test_where_ranks_have_all_they_need_there_is_no_buffer():
    for layout, everywhere in ((ParallelLayout(1), False), (ParallelLayout(2), False), (ParallelLayout(2), True)):
        [gather] = plan_gathers(DENSE_PLAN, layout, everywhere=everywhere, bound=1)
        assert gather.elements == 0 and not gather.route.travels


def test_parameters_that_are_not_cut_take_no_room_unless_they_travel():
    [first, second] = plan_gathers(DENSE_PLAN, ParallelLayout(4, tp=2, pp=2))
    assert not first.route.travels and not first.whole and first.cut
    assert second.route.travels and {p.name for p in second.whole} > {"decoder.final_layernorm.weight"}
    [alone] = plan_gathers(DENSE_PLAN, ParallelLayout(2, tp=2))
    cut = [p for p in DENSE.parameters if p.shard_dim is not None]
    assert alone.cut == cut
    padded = 2 * 6 * 16 - 11 * 16  # the vocabulary, twice: embedding and head
    assert alone.elements == sum(torch.Size(p.merged_shape).numel() for p in cut) + 2 * padded


def test_experts_of_one_replica_are_gathered_together():
    plan = plan_gathers(EXPERTS_PLAN, ParallelLayout(2, ep=2))
    owners = [{p.expert for p in gather.parameters if p.expert is not None} for gather in plan]
    # The first two experts of a layer, and what follows, are rank 0's own.
    assert owners == [{0, 1}, {2, 3}, {0, 1}, {2, 3}, set()]
    assert Counter(gather.route.replica for gather in plan) == {0: 3, 1: 2}


@pytest.mark.parametrize("tp", [1, 2])
def test_views_of_the_buffer_are_disjoint_and_fill_it(tp):
    gather = Gather(Route(0, 0, travels=True, in_each_replica=False), torch.float32, tp, DENSE.parameters)
    flat = torch.zeros(gather.elements)
    state = random_hf_state(DENSE)
    for parameter in DENSE.parameters:
        merged = parameter.merge([state[name] for name, _ in parameter.hf])
        views = gather.views(flat)[parameter.name]
        for rank, view in enumerate(views):
            assert not view.any()
            view.copy_(parameter.shard(merged, rank, tp))
        assert torch.equal(parameter.unshard(views), merged)
    zeros = 2 * 16 if tp == 2 else 0  # the padding of the vocabulary
    assert int((flat == 0).sum()) == zeros


def test_what_a_gather_holds_is_its_buffer_and_one_merged_parameter():
    largest = 4 * 12 * 16  # the padded embedding, of 48 x 16 in gate and up
    assert gather_bytes(DENSE_PLAN, ParallelLayout(2, tp=2), bound=1) == 2 * 4 * 48 * 16 > largest
    [whole] = plan_gathers(DENSE_PLAN, ParallelLayout(2, tp=2))
    qkv = DENSE.parameter("decoder.layers.0.self_attention.linear_qkv.weight")
    twice = 2 * torch.Size(qkv.merged_shape).numel()  # merged, then cut into three
    assert gather_bytes(DENSE_PLAN, ParallelLayout(2, tp=2)) == 4 * (whole.elements + twice)
    # Alone a rank has no buffer; it cuts q, k and v out of one parameter.
    assert gather_bytes(DENSE_PLAN, ParallelLayout(1)) == 4 * torch.Size(qkv.merged_shape).numel()
    assert DENSE.parameter(EMBEDDING).shard_shape(2) == (6, 16)
