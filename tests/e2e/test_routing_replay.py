"""The trainer's routers choose the experts that were recorded, in every layout of ranks, and compute the rest
themselves."""

from __future__ import annotations

from contextlib import closing
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rltool.megatron.routing_replay import ReplayedRouter
from tests.e2e.megatron_models import hf_logprobs, hf_model, make_trainer, policy_batch, save_hf
from tests.e2e.megatron_ranks import CaseFailed
from tests.e2e.test_megatron_trainer import TEMPERATURE, logprobs_of_both_cuts
from tests.e2e.test_parallelism import LENGTHS, OPTIONS, assert_same_gradients, own_micro_batches

pytestmark = pytest.mark.e2e

LAYERS, NONE = 4, 255
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe")
"""Both ways to weight by softmax; sigmoid with bias, scaling, and with groups or none, behind a dense layer; a router's
bias and experts with biases; one norm over all heads; a dense layer between, a shared expert with a gate."""
LONG = ("mixtral", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe")
PARAMETERS = [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS]
REPLAY = {**OPTIONS, "algorithm": {**OPTIONS["algorithm"], "routing_replay": True}}
LAYOUTS = {
    "one rank": (1, {}),
    "full recompute": (1, {"trainer": {"recompute": "full"}}),
    "selective recompute": (1, {"trainer": {"recompute": "selective"}}),
    "DP2": (2, {}),
    "EP2": (2, {"ep": 2}),
    "EP2 with grouped products": (2, {"ep": 2, "trainer": {"expert_products": "grouped"}}),
    "PP2": (2, {"pp": 2}),
    "PP2 with full recompute": (2, {"pp": 2, "trainer": {"recompute": "full"}}),
    "CP2": (2, {"cp": 2}),
    "CP2 with full recompute": (2, {"cp": 2, "trainer": {"recompute": "full"}}),
    "TP2 with sequence parallelism": (2, {"tp": 2, "trainer": {"sequence_parallel": True}}),
}
FEW_LAYOUTS = ("one rank", "EP2 with grouped products", "PP2 with full recompute", "TP2 with sequence parallelism")
CASES = [
    pytest.param(kind, layout, marks=[pytest.mark.long] * (kind in LONG and (kind, layout) != ("mixtral", "one rank")))
    for kind in KINDS
    for layout in (LAYOUTS if kind in ("qwen3_moe", "mixtral") else FEW_LAYOUTS)
]


def last_tokens(batch) -> Tensor:
    return batch.lengths.cumsum(0) - 1


def with_routing(batch, experts: Tensor):
    """experts: [T, layers, top_k]; the last token of each sample was never forwarded."""
    routed = experts.to(torch.uint8).flatten(1)
    routed[last_tokens(batch)] = NONE
    return batch.replace(routed_experts=routed)


def sizes(model) -> tuple[int, int]:
    """(experts of a layer, how many are chosen)."""
    config = model.config
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    return experts, config.num_experts_per_tok


def sparse_layers(model) -> list[int]:
    """Those with experts, in the order of `gates`."""
    return [int(name.split(".layers.")[1].split(".")[0]) for name, _ in named_gates(model)]


def random_experts(model, batch, seed=5) -> Tensor:
    """Of each token different experts in each layer, whatever a router would say; also in layers without experts."""
    experts, top_k = sizes(model)
    scores = torch.rand(len(batch.tokens), LAYERS, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


def own_experts(path_model, batch) -> Tensor:
    """[T, layers, top_k]: what transformers' routers choose, most probable first."""
    chosen: list[list[Tensor]] = [[] for _ in gates(path_model)]

    def in_order(gate, output) -> Tensor:
        bias = getattr(gate, "e_score_correction_bias", None)
        if bias is None:
            return output[2]
        return output[2].gather(1, (output[0].sigmoid() + bias).gather(1, output[2]).argsort(1, descending=True))

    hooks = [
        gate.register_forward_hook(lambda gate, _i, output, at=at: chosen[at].append(in_order(gate, output)))
        for at, gate in enumerate(gates(path_model))
    ]
    with torch.no_grad():
        for tokens in batch.tokens.split(batch.lengths.tolist()):
            path_model(tokens[None])
    for hook in hooks:
        hook.remove()
    of_layers = {at: torch.cat(found) for at, found in zip(sparse_layers(path_model), chosen, strict=True)}
    dense = torch.zeros_like(next(iter(of_layers.values())))
    return torch.stack([of_layers.get(at, dense) for at in range(LAYERS)], dim=1)


def named_gates(model) -> list[tuple[str, torch.nn.Module]]:
    return [item for item in model.named_modules() if item[0].endswith((".gate", ".mlp.router"))]


def gates(model) -> list[torch.nn.Module]:
    return [module for _, module in named_gates(model)]


def forced_logprobs(model, batch, temperature: float) -> Tensor:
    """[T] by transformers, its routers made to choose batch.routed_experts and to weight them as the family does."""
    routed = batch.routed_experts.view(len(batch.tokens), LAYERS, -1).long()
    normalized = getattr(model.config, "norm_topk_prob", True)
    scaling = getattr(model.config, "routed_scaling_factor", None)
    found, offset = [], 0
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        of_sample = routed[offset : offset + len(tokens)]

        def force(_module, _inputs, output, *, at, of_sample=of_sample):
            logits, _, own = output
            chosen = torch.where(of_sample[:, at] == NONE, own, of_sample[:, at])
            scores = logits.float().softmax(-1) if scaling is None else logits.float().sigmoid()
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
            return logits, weights * (scaling or 1.0), chosen

        hooks = [
            gate.register_forward_hook(lambda m, i, o, at=at, force=force: force(m, i, o, at=at))
            for at, gate in zip(sparse_layers(model), gates(model), strict=True)
        ]
        with torch.no_grad():
            found.append(hf_logprobs(model, tokens, temperature))
        for hook in hooks:
            hook.remove()
        offset += len(tokens)
    return torch.cat(found)


def case_replay(place, path, layout, batch):
    """Log-probabilities, gradients, metrics; and by global layer what its router chose in each forward pass."""
    chosen: dict[int, list[Tensor]] = {}
    given = ReplayedRouter.get_replay_topk

    def recorded(router, *arguments, **options):
        values, indices = given(router, *arguments, **options)
        chosen.setdefault(id(router), []).append(indices.cpu())
        return values, indices

    with closing(make_trainer(place, path, **REPLAY, **layout)) as trainer:
        micro_batches = own_micro_batches(batch, trainer.coordinates)
        sparse = [layer for layer in trainer.gpt.decoder.layers if hasattr(layer.mlp, "router")]
        routers = {id(layer.mlp.router.router_replay): layer.layer_number - 1 for layer in sparse}
        with patch.object(ReplayedRouter, "get_replay_topk", recorded):
            logprobs = trainer.compute_logprobs(micro_batches)
            in_logprobs = {routers[router]: list(indices) for router, indices in chosen.items()}
            chosen.clear()
            _, metrics = trainer.forward_backward(micro_batches, global_loss_tokens=batch.num_loss_tokens)
            in_training = {routers[router]: indices for router, indices in chosen.items()}
        with torch.no_grad():
            for parameter in trainer.gpt.parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.main_grad)
        pairs = [
            (meta.name, tensor if tensor is None else tensor.clone())
            for meta, tensor in trainer.export_weights()
            if "correction_bias" not in meta.name  # which has no gradient
        ]
        gradients = dict(pairs) if trainer.coordinates.rank == 0 else None
        return trainer.coordinates, logprobs, (metrics, gradients), (in_logprobs, in_training)


def case_bits(place, path, layout, batch, replays):
    """Log-probabilities, metrics and parameters of one training step, exactly; and the agreement."""
    with closing(make_trainer(place, path, **(REPLAY if replays else OPTIONS), **layout)) as trainer:
        micro_batches = own_micro_batches(batch, trainer.coordinates)
        logprobs = trainer.compute_logprobs(micro_batches)
        metrics = trainer.train_step(micro_batches, global_loss_tokens=batch.num_loss_tokens)
        agreement = metrics.pop("train/routing_agreement", None)
        return logprobs, metrics, trainer.parameter_hash(), agreement


def case_frozen(place, path, batch):
    """Log-probabilities by policy and reference, which are the same weights."""
    options = {"algorithm": {"kl": {"kind": "loss", "coef": 0.05}, "routing_replay": True}}
    with closing(make_trainer(place, path, **options)) as trainer:
        return [trainer.compute_logprobs([batch], weights=weights)[0] for weights in ("policy", "reference", "policy")]


def case_without(place, path, batch):
    with closing(make_trainer(place, path, **REPLAY)) as trainer:
        return trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)


@pytest.fixture(scope="module", params=PARAMETERS)
def model(request, tmp_path_factory):
    kind = request.param
    return save_hf(tmp_path_factory.mktemp(kind), kind, tied=False), hf_model(kind, False)


@pytest.fixture(scope="module")
def batch():
    return policy_batch(LENGTHS)


@pytest.fixture(scope="module")
def alone(ranks, model, batch):
    routed = with_routing(batch, random_experts(model[1], batch))
    return routed, ranks.run(case_replay, 1, model[0], {}, routed)[0]


@pytest.mark.parametrize(("model", "layout"), CASES, indirect=["model"])
def test_routers_choose_what_was_recorded_and_log_probabilities_are_those_of_these_experts(
    ranks, model, alone, layout
):
    (path, reference), (routed, expected) = model, alone
    world, settings = LAYOUTS[layout]
    results = ranks.run(case_replay, world, path, settings, routed)
    forced = forced_logprobs(reference, routed, OPTIONS["temperature"])
    ends = set(last_tokens(routed).tolist())
    wanted = {
        layer: sorted(tuple(sorted(row)) for at, row in enumerate(of_layer.tolist()) if at not in ends)
        for layer, of_layer in enumerate(routed.routed_experts.view(len(routed.tokens), LAYERS, -1).unbind(1))
    }
    for pass_, times in ((0, 1), (1, 2 if "full" in layout else 1)):
        found: dict[int, list] = {}
        for _, _, _, chosen in results:
            for layer, indices in chosen[pass_].items():
                found.setdefault(layer, []).extend(tuple(sorted(row)) for part in indices for row in part.tolist())
        assert sorted(found) == sparse_layers(reference)
        for layer, rows in found.items():
            left = list(rows)
            for row in wanted[layer] * times:
                left.remove(row)  # ValueError where a recorded choice was not made
            assert len(left) >= times * len(ends)  # the last tokens', and padding
    for at, logprobs, _, _ in results:
        if logprobs is None:
            continue
        samples = own_samples(routed, at)
        for mine, rows in zip(logprobs, samples, strict=True):
            theirs = torch.cat([forced.split(routed.lengths.tolist())[i] for i in rows])
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    assert_same_gradients(results[0][2], expected[2], layout)


def own_samples(batch, at) -> list[list[int]]:
    samples = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp]
    return [samples[i::2] for i in range(2)]


@pytest.mark.parametrize(("model", "layout"), CASES, indirect=["model"])
def test_a_models_own_routing_replayed_is_training_without_replay_bit_by_bit(ranks, model, batch, layout):
    path, reference = model
    world, settings = LAYOUTS[layout]
    routed = with_routing(batch, own_experts(reference, batch))
    plain = ranks.run(case_bits, world, path, settings, routed, False)
    replayed = ranks.run(case_bits, world, path, settings, routed, True)
    for (logprobs, metrics, weights, nothing), (again, measured, same, agreement) in zip(plain, replayed, strict=True):
        assert (nothing, agreement) == (None, 1.0)
        assert (metrics, weights) == (measured, same)
        assert (logprobs is None) == (again is None)
        assert all(torch.equal(a, b) for a, b in zip(logprobs or [], again or [], strict=True))


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("layout", ["one rank", "DP2", "EP2", "PP2", "CP2", "TP2 with sequence parallelism"])
def test_larger_micro_batches_where_nothing_is_trained_replay_the_experts_of_each_sample(ranks, model, layout):
    (path, reference), (world, settings) = model, LAYOUTS[layout]
    batch = policy_batch([n for n in LENGTHS for _ in range(2)])
    routed = with_routing(batch, random_experts(reference, batch))
    options = {"algorithm": {"routing_replay": True}, **settings}
    found = logprobs_of_both_cuts(ranks, world, path, routed, options)
    torch.testing.assert_close(found, forced_logprobs(reference, routed, TEMPERATURE), rtol=0, atol=2e-5)


def test_one_other_expert_for_one_token_changes_what_follows_it_and_nothing_else(ranks, model, alone):
    path, reference = model
    experts, top_k = sizes(reference)
    routed, expected = alone
    start = int(routed.lengths[:1].sum())
    changed = routed.routed_experts.clone()
    first = top_k * sparse_layers(reference)[1]
    free = next(e for e in range(experts) if e not in changed[start + 3, first : first + top_k].tolist())
    changed[start + 3, first] = free  # second sample, fourth token, second layer with experts
    found = ranks.run(case_replay, 1, path, {}, routed.replace(routed_experts=changed))[0]
    difference = (torch.cat(found[1]) - torch.cat(expected[1])).abs()
    # Micro-batches have every other sample.
    places = torch.cat([torch.cat([torch.arange(len(routed.tokens)).split(routed.lengths.tolist())[i] for i in rows])
                        for rows in own_samples(routed, found[0])])  # fmt: skip
    moved = set(places[difference > 0].tolist())
    end = start + int(routed.lengths[1])
    assert moved and moved <= set(range(start + 4, end)) and start + 4 in moved
    assert found[2][0]["train/loss"] != expected[2][0]["train/loss"]


def test_routers_get_gradients_through_the_weights_of_replayed_experts(model, alone):
    _, (_, _, (metrics, gradients), _) = alone
    ends = (".gate.weight", ".router.weight")
    gates = {name: gradient for name, gradient in gradients.items() if name.endswith(ends)}
    assert len(gates) == len(sparse_layers(model[1])) and all(gradient.norm() > 1e-4 for gradient in gates.values())
    assert 0.2 < metrics["train/routing_agreement"] < 0.8  # half of the experts by chance: one half


def test_the_share_of_agreeing_choices_is_counted(ranks, model, batch):
    path, reference = model
    own = own_experts(reference, batch)
    (experts, top_k), first = sizes(reference), sparse_layers(reference)[0]
    half = torch.full_like(own, NONE)  # one layer alone: behind it the states are not those of `own`
    for token, row in enumerate(own[:, first].tolist()):
        others = [e for e in range(experts) if e not in row]
        half[token, first] = torch.tensor(row[top_k // 2 :] + others[: top_k // 2])
    routed = batch.replace(routed_experts=half.to(torch.uint8).flatten(1))
    _, metrics = ranks.run(case_without, 1, path, routed)[0]
    assert metrics["train/routing_agreement"] == 0.5


def test_a_frozen_reference_chooses_its_own_experts(ranks, model, alone):
    (path, _), (routed, _) = model, alone
    policy, reference, again = ranks.run(case_frozen, 1, path, routed)[0]
    own = ranks.run(case_frozen, 1, path, routed.replace(routed_experts=None))[0][0]
    assert torch.equal(reference, own) and torch.equal(policy, again) and not torch.equal(policy, own)


def test_training_without_recorded_experts_is_an_error_that_names_the_setting(ranks, model, batch):
    with pytest.raises(CaseFailed, match="algorithm.routing_replay needs it"):
        ranks.run(case_without, 1, model[0], batch)


def test_experts_of_a_model_of_another_size_are_refused(ranks, model, batch):
    routed = torch.zeros(len(batch.tokens), LAYERS * 3, dtype=torch.uint8)
    with pytest.raises(CaseFailed, match="the router has"):
        ranks.run(case_without, 1, model[0], batch.replace(routed_experts=routed))
