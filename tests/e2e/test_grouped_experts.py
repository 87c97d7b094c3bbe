"""A mixture's experts by grouped products against Megatron's own one after the other: the same gradients, steps, files.

On the CPU, by torch's grouped product in float32, which is a loop there.
"""

from __future__ import annotations

from contextlib import closing
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from rltool.checkpoints.torch_dist import load_checkpoint, save_checkpoint
from rltool.megatron.experts import GroupedExperts, stacked, weights_of
from rltool.models.registry import family_for, read_hf_config
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf
from tests.e2e.test_parallelism import (
    LENGTHS,
    OPTIONS,
    case_fused_gradients,
    case_gradients,
    case_varied_steps,
    own_micro_batches,
)

pytestmark = pytest.mark.e2e

LAYOUTS = {
    "one rank": (1, {}),
    "full recompute": (1, {"trainer": {"recompute": "full"}}),
    "EP2": (2, {"ep": 2}),
    "EP2 with selective recompute": (2, {"ep": 2, "trainer": {"recompute": "selective"}}),
    "EP2 with the distributed optimizer": (2, {"ep": 2, "trainer": {"distributed_optimizer": True}}),
    "TP2": (2, {"tp": 2, "trainer": {"sequence_parallel": True}}),
}


def by(products, layout):
    return {**layout, "trainer": {**layout.get("trainer", {}), "expert_products": products}}


def experts_of(trainer):
    return [layer.mlp.experts for layer in trainer.gpt.decoder.layers if hasattr(layer.mlp, "experts")]


def case_counted(place, path, layout, batch):
    """Gradients, and how many grouped products they took."""
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as counted:
        return case_gradients(place, path, layout, batch), counted.call_count


def case_kind(place, path, products, layout):
    """Of each layer's experts: their class, names of their parameters, whether each weight of all is one piece."""
    with closing(make_trainer(place, path, **by(products, layout))) as trainer:
        return [
            (
                type(each),
                [name for name, _ in each.named_parameters()],
                [stacked(weights).data_ptr() == weights[0].data_ptr() for weights in weights_of(each)],
            )
            for each in experts_of(trainer)
        ]


def case_steps(place, path, layout, batch, source, target):
    """From the checkpoint `source` (None: the model's weights) one step, and a checkpoint; metrics and parameters."""
    with closing(make_trainer(place, path, load=source is None, **OPTIONS, **layout)) as trainer:
        if source is not None:
            load_checkpoint(trainer, source)
        loaded = trainer.parameter_hash()
        own = own_micro_batches(batch, trainer.coordinates)
        metrics = trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens)
        save_checkpoint(trainer, target, {"step": 1})
        return loaded, metrics, trainer.parameter_hash()


def case_offload(place, path, batch):
    with closing(make_trainer(place, path, **OPTIONS, **by("grouped", {}))) as trainer:
        results = []
        for away in (False, True):
            if away:
                trainer.offload()
                trainer.onload()
            results.append(trainer.compute_logprobs([batch]))
        every = [weights for each in experts_of(trainer) for weights in weights_of(each)]
        return results, all(stacked(weights).data_ptr() == weights[0].data_ptr() for weights in every)


# glm4_moe: a dense layer, shared experts, a router with a bias; gpt_oss: biases, another activation.
@pytest.fixture(
    scope="module", params=["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long), "glm4_moe", "gpt_oss"]
)
def model(request, tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp(request.param), request.param, tied=False)


@pytest.fixture(scope="module")
def batch():
    return policy_batch(LENGTHS)


def assert_same(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=1e-7)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert error <= tolerance, f"gradient of {name} differs by a relative {error:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_experts_one_after_the_other(ranks, model, batch, layout):
    world, settings = LAYOUTS[layout]
    (found, many), (expected, none) = (
        ranks.run(case_counted, world, model, by(products, settings), batch)[0]
        for products in ("grouped", "sequential")
    )
    assert many > 0 and none == 0
    routers = ("gate.weight", "router.weight")
    assert any("experts" in name for name in expected[1]) and any(name.endswith(routers) for name in expected[1])
    assert_same(found, expected, 2e-6)


def test_experts_add_their_gradients_where_other_layers_add_theirs_as_they_are_computed(ranks, model, batch):
    found = ranks.run(case_fused_gradients, 2, model, by("grouped", {"ep": 2}), batch)[0]
    assert_same(found, ranks.run(case_gradients, 2, model, by("sequential", {"ep": 2}), batch)[0], 2e-6)


@pytest.mark.parametrize("distributed", [False, True])
def test_steps_with_ranks_that_have_no_samples_are_the_same(ranks, model, batch, distributed):
    settings = {"ep": 2, "trainer": {"distributed_optimizer": distributed}}
    found, expected = (
        ranks.run(case_varied_steps, 2, model, by(products, settings), batch)[0][0]
        for products in ("grouped", "sequential")
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("first", "second"), [("grouped", "sequential"), ("sequential", "grouped")])
def test_a_checkpoint_of_one_is_a_checkpoint_of_the_other(ranks, model, batch, tmp_path, first, second):
    """Parameters and optimizer bit by bit: of two steps from it, one each way, both find the same numbers."""
    saved, again = tmp_path / "saved", [tmp_path / "first", tmp_path / "second"]
    _, _, trained = ranks.run(case_steps, 2, model, by(first, {"ep": 2}), batch, None, saved)[0]
    results = [
        ranks.run(case_steps, 2, model, by(products, {"ep": 2}), batch, saved, directory)[0]
        for products, directory in zip((first, second), again, strict=True)
    ]
    assert [loaded for loaded, _, _ in results] == [trained, trained]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5, abs=1e-6)
    assert len({sum(file.stat().st_size for file in path.glob("**/*.distcp")) for path in (saved, *again)}) == 1


@pytest.mark.parametrize(
    ("products", "layout", "kind", "in_one_piece"),
    [
        ("auto", {}, SequentialMLP, False),
        ("sequential", {}, SequentialMLP, False),
        ("grouped", {}, GroupedExperts, True),
        ("grouped", {"trainer": {"distributed_optimizer": True}}, GroupedExperts, False),
    ],
)
def test_parameters_are_named_alike_and_lie_in_one_piece_where_products_read_them(
    ranks, model, products, layout, kind, in_one_piece
):
    family = family_for(read_hf_config(model))
    kinds = ("weight", "bias") if family.transformer["add_bias_linear"] else ("weight",)
    names = [f"local_experts.{i}.linear_fc{j}.{x}" for i in range(family.num_experts) for j in (1, 2) for x in kinds]
    every = [(kind, names, [in_one_piece] * 2)] * sum(family.expert_layers)
    assert ranks.run(case_kind, 1, model, products, layout)[0] == every


def test_weights_that_were_away_lie_in_one_piece_again(ranks, model, batch):
    (before, after), in_one_piece = ranks.run(case_offload, 1, model, batch)[0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, after, strict=True)) and in_one_piece
