"""The same global batch in every layout of ranks: the same loss and the same gradients, in fp32 to a relative 1e-5."""

from __future__ import annotations

from contextlib import closing, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel import layers

from rltool.algorithms.schedule import plan_micro_batches
from rltool.algorithms.shaping import with_corrections
from rltool.megatron import model
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.training.ranks.sharding import Shards
from tests.declared import OWN, declare_surprise, sample, table_of_its_own
from tests.e2e.megatron_models import DEVICE, hf_model, make_trainer, plain_kernels, policy_batch, save_hf
from tests.e2e.megatron_ranks import RankPool

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]
OPTIONS = {
    "algorithm": {"kl": {"kind": "loss", "coef": 0.05}, "entropy": {"kind": "bonus", "coef": 0.01}},
    "temperature": 0.9,
    "optimizer": {"eps": 1e-3},
}

ICEPOP = {"is_weights": {"kind": "token", "cap": 1.3}, "is_mask": {"kind": "token", "low": 0.6, "high": 1.6}}
TOLD = {"train/is_weight_mean", "train/is_truncated_fraction", "train/masked_fraction"}

TWO_RANKS = {
    "DP2": {},
    "DP2 with gradients summed after the backward pass": {"trainer": {"overlap_grad_reduce": False}},
    "TP2": {"tp": 2},
    "TP2 with sequence parallelism": {"tp": 2, "trainer": {"sequence_parallel": True}},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2 with selective recompute": {"trainer": {"recompute": "selective"}},
    "PP2 with full recompute of one layer": {"pp": 2, "trainer": {"recompute": "full", "recompute_layers": 1}},
    "CP2 with full recompute": {"cp": 2, "trainer": {"recompute": "full"}},
}
FOUR_RANKS = {
    "DP4": {},
    "TP2 x PP2": {"tp": 2, "pp": 2},
    "DP2 x PP2": {"pp": 2},
    "DP2 x TP2 with sequence parallelism": {"tp": 2, "trainer": {"sequence_parallel": True}},
    "CP2 x TP2 with sequence parallelism": {"cp": 2, "tp": 2, "trainer": {"sequence_parallel": True}},
    "CP2 x PP2": {"cp": 2, "pp": 2},
    "DP2 x CP2": {"cp": 2},
    "CP4": {"cp": 4},
}


def own_micro_batches(batch, at, count=2):
    samples = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp]
    return [batch.select(samples[i::count]) for i in range(count)]


def case_gradients(place, path, layout, batch):
    """Loss metrics and the whole gradient of every HF tensor."""
    with closing(make_trainer(place, path, **OPTIONS, **layout)) as trainer:
        micro_batches = own_micro_batches(batch, trainer.coordinates)
        logprobs, metrics = trainer.forward_backward(micro_batches, global_loss_tokens=batch.num_loss_tokens)
        assert (logprobs is not None) == trainer.coordinates.returns_logprobs
        # Exported as the weights are, gradients are gathered and cut into HF tensors by code that has tests of its own.
        with torch.no_grad():
            for parameter in trainer.gpt.parameters():
                if parameter.requires_grad:  # routers' biases are not trained
                    parameter.copy_(parameter.main_grad)
        pairs = [(meta.name, tensor if tensor is None else tensor.clone()) for meta, tensor in trainer.export_weights()]
        return metrics, dict(pairs) if trainer.coordinates.rank == 0 else None


def case_fused_gradients(place, path, layout, batch):
    """As `case_gradients`, with weight gradients added to main_grad by Megatron's linear layers, as on a GPU."""
    calls = []

    def fuse(_device):
        assert right(torch.device("cuda"))
        add = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda *given: (calls.append(1), add(*given))
        )
        return True

    right = model.fuse_weight_gradients
    # Megatron makes its stand-in for the gradient there; where there is a GPU, that is one, and the random generators
    # ask as well.
    stand_in = nullcontext() if DEVICE == "cuda" else patch.object(torch.cuda, "current_device", lambda: "cpu")
    with patch.object(model, "fuse_weight_gradients", fuse), stand_in:
        result = case_gradients(place, path, layout, batch)
    layers._grad_accum_fusion_available = False
    assert calls, "no layer took the fused path"
    return result


def case_steps(place, path, layout, batch, steps):
    with closing(make_trainer(place, path, **OPTIONS, **layout)) as trainer:
        micro_batches = own_micro_batches(batch, trainer.coordinates)
        metrics = [trainer.train_step(micro_batches, global_loss_tokens=batch.num_loss_tokens) for _ in range(steps)]
        pairs = [(meta.name, tensor if tensor is None else tensor.clone()) for meta, tensor in trainer.export_weights()]
        return metrics, dict(pairs) if trainer.coordinates.rank == 0 else None


def case_logprobs(place, path, layout, micro_batches):
    with closing(make_trainer(place, path, temperature=0.7, **layout)) as trainer:
        return trainer.compute_logprobs(micro_batches)


def case_fresh(place, path, layout, batch, corrections):
    """Gradients with the old log-probabilities, and the corrections that are made of them, from a forward of their own,
    and from the training forward."""
    options = OPTIONS | {"algorithm": OPTIONS["algorithm"] | corrections}
    with closing(make_trainer(place, path, **options, **layout)) as trainer:
        micro_batches = own_micro_batches(batch, trainer.coordinates)
        old = [trainer.compute_logprobs(micro_batches)]
        if place.world_size > 1 and trainer.coordinates.layout.dp == 1:  # data-parallel ranks have samples of their own
            last = trainer.coordinates.layout.pp - 1
            torch.distributed.broadcast_object_list(old, src=trainer.runtime.global_rank(tp=0, pp=last))
        separate = [
            with_corrections(micro.replace(old_logprobs=values), trainer.algorithm)[0]
            for micro, values in zip(micro_batches, old[0], strict=True)
        ]
        without = [micro.replace(old_logprobs=None) for micro in micro_batches]
        before, results = trainer.parameter_hash(), []
        for given, fresh in ((separate, False), (without, True)):
            logprobs, metrics = trainer.forward_backward(
                given, global_loss_tokens=batch.num_loss_tokens, on_policy=fresh
            )
            for micro, mine, theirs in zip(given, logprobs or [], old[0], strict=False):
                torch.testing.assert_close(mine, theirs * micro.loss_mask, rtol=0, atol=1e-6)
            results.append((metrics, [parameter.main_grad.clone() for parameter in trainer.gpt.parameters()]))
        assert trainer.parameter_hash() == before, "a weight changed before the optimizer's step"
        trainer.optimizer_step()
        assert trainer.parameter_hash() != before
        return results


def case_declared(place, path, layout, directory):
    """The loss is the mean of a declared field, which comes from completions and was on disk."""
    with table_of_its_own(), closing(make_trainer(place, path, algorithm={"objective": OWN}, **layout)) as trainer:
        declare_surprise()
        samples = [sample(i) for i in range(6)]
        write_dump(directory / str(place.rank), step=0, seed=0, samples=samples)
        batch = samples_to_batch(read_dump(directory / str(place.rank), 0).samples)
        batch = batch.replace(old_logprobs=batch.rollout_logprobs, advantages=batch.loss_mask)
        at = trainer.coordinates
        shards = Shards(batch, plan_micro_batches(batch.lengths.tolist(), max_tokens=25, data_parallel=at.layout.dp))
        assert len(shards.plan[at.dp_rank]) > 1
        tokens = batch.num_loss_tokens
        _, metrics = trainer.forward_backward(shards.micro_batches(at.dp_rank), global_loss_tokens=tokens)
        return metrics["train/loss"], float((batch.tokens / 8 * batch.loss_mask).sum()) / tokens


def case_discard(place, path, batch):
    with closing(make_trainer(place, path, **OPTIONS)) as trainer:
        before = trainer.parameter_hash()
        trainer.forward_backward(
            [batch.replace(loss_weights=5 * batch.loss_weights)], global_loss_tokens=batch.num_loss_tokens
        )
        trainer.discard_gradients()
        between = trainer.parameter_hash()
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        return before, between, trainer.parameter_hash()


def assert_same_gradients(found, expected, layout):
    metrics, gradients = found
    assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6), layout
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        reference = expected[1][name]
        error = (gradient - reference).norm() / reference.norm()
        assert error <= 1e-5, f"{layout}: gradient of {name} differs by a relative {error:.2e}"


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """Models, the batch, and what one rank makes of it."""
    batch = policy_batch(LENGTHS)
    paths = {tied: save_hf(tmp_path_factory.mktemp("model"), tied=tied) for tied in (True, False)}
    results = {tied: ranks.run(case_gradients, 1, path, {}, batch)[0] for tied, path in paths.items()}
    assert all(gradient.norm() > 1e-3 for _, gradients in results.values() for gradient in gradients.values())
    return paths, batch, results


@pytest.fixture(scope="module")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["DP2", "CP2"])
def test_a_declared_field_arrives_in_the_loss_of_two_ranks(ranks, tmp_path, layout):
    path = save_hf(tmp_path / "model")
    for found, expected in ranks.run(case_declared, 2, path, TWO_RANKS[layout], tmp_path):
        assert expected > 1 and found == pytest.approx(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_find_the_loss_and_gradients_of_one(ranks, alone, layout, tied):
    paths, batch, expected = alone
    results = ranks.run(case_gradients, 2, paths[tied], TWO_RANKS[layout], batch)
    assert all(metrics == results[0][0] for metrics, _ in results), "metrics differ between ranks"
    assert_same_gradients(results[0], expected[tied], layout)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, TWO_RANKS["TP2 with sequence parallelism"]), (2, TWO_RANKS["DP2 with selective recompute"])],
)
def test_gradients_added_where_they_are_summed_are_the_same(ranks, alone, world, layout, tied):
    paths, batch, expected = alone
    assert_same_gradients(ranks.run(case_fused_gradients, world, paths[tied], layout, batch)[0], expected[tied], layout)


def test_in_bf16_gradients_added_where_they_are_summed_are_no_less_exact(ranks, alone):
    paths, batch, exact = alone
    plain, fused = (
        ranks.run(case, 1, paths[True], {"dtype": "bfloat16"}, batch)[0][1]
        for case in (case_gradients, case_fused_gradients)
    )
    for name, gradient in exact[True][1].items():
        errors = [(found[name].float() - gradient).norm() / gradient.norm() for found in (plain, fused)]
        assert errors[1] < 1.1 * errors[0] + 0.002, f"{name}: {errors}"


BF16_LAYOUTS = [
    *((2, TWO_RANKS, name) for name in ("DP2", "TP2 with sequence parallelism", "PP2", "CP2")),
    *((4, FOUR_RANKS, name) for name in ("DP4", "TP2 x PP2", "DP2 x TP2 with sequence parallelism", "DP2 x CP2")),
]


@pytest.fixture(scope="module")
def wide(ranks, tmp_path_factory):
    """A model wide enough for a GPU's own kernels (heads of 64), the batch, and one rank's results in fp32 and bf16."""
    path = tmp_path_factory.mktemp("wide")
    model = hf_model("qwen2", True, hidden_size=256, intermediate_size=352)
    with torch.no_grad():  # four times as wide, each product would double what is rounded
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)
    batch = policy_batch([5, 67, 2, 9, 130, 3, 88, 8])
    exact, one = (ranks.run(case_gradients, 1, path, {"dtype": dtype}, batch)[0] for dtype in ("float32", "bfloat16"))
    return path, batch, exact, one


@pytest.mark.parametrize(
    ("world", "layouts", "layout"),
    # bf16 products on two cores take minutes: all but one for `make test-long`, and for GPUs.
    [pytest.param(*case, marks=[pytest.mark.long] * (case[2] != "DP2")) for case in BF16_LAYOUTS],
    ids=[name for _, _, name in BF16_LAYOUTS],
)
def test_in_bf16_layouts_differ_by_no_more_than_its_rounding(ranks, four_ranks, wide, world, layouts, layout):
    path, batch, exact, one = wide
    pool = ranks if world == 2 else four_ranks
    many = pool.run(case_gradients, world, path, {"dtype": "bfloat16", **layouts[layout]}, batch)[0]
    # Sums over the same tokens: what differs is the rounding of every log-probability, a few thousandths each way.
    assert many[0]["train/loss"] == pytest.approx(one[0]["train/loss"], rel=0.01, abs=0.002)
    assert many[0]["train/loss"] == pytest.approx(exact[0]["train/loss"], rel=0.03, abs=0.005)
    for name, gradient in exact[1].items():
        error = {
            key: (found[1][name].float() - gradient).norm() / gradient.norm()
            for key, found in (("one", one), ("many", many))
        }
        # Against fp32; rounded in another order, not more often.
        assert 1e-4 < error["one"] < 0.1, name
        assert error["many"] < 1.5 * error["one"] + 0.005, f"{layout}: {name}: {error}"


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [("qwen3", [{}, TWO_RANKS["TP2 with sequence parallelism"], TWO_RANKS["PP2"]]), ("olmo2", [{}]), ("gemma2", [{}])],
)
def test_a_residual_stream_in_fp32_rounds_less(ranks, tmp_path, kind, layouts):
    """Norms before layers, behind them, on both sides. Over 516 tokens: of 60 the squares' mean was noise."""
    model, batch = hf_model(kind, True, num_hidden_layers=16), policy_batch([64] * 12)
    behind = ("post_attention_layernorm", "post_feedforward_layernorm") if kind != "qwen3" else ("o_proj", "down_proj")
    with torch.no_grad():  # as in trained models, each layer adds little to the stream
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in behind:
                parameter.copy_(parameter * 0.1 - 0.9 * (kind == "gemma2"))
    model.bfloat16().float().save_pretrained(tmp_path)  # what is left is the rounding of what the layers compute
    (exact,) = ranks.run(case_logprobs, 1, tmp_path, {}, [batch])[0]

    def error(layout, **trainer):
        own = {"dtype": "bfloat16"} | layout | {"trainer": layout.get("trainer", {}) | trainer}
        found = [x for x in ranks.run(case_logprobs, 2 if layout else 1, tmp_path, own, [batch]) if x is not None]
        return float((found[0][0] - exact)[batch.loss_mask > 0].square().mean())

    for layout in layouts:
        usual, here = error(layout), error(layout, residual="float32")
        assert 0 < here < 0.8 * usual, layout


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_come_through_a_residual_stream_in_fp32(ranks, alone, recompute):
    paths, batch, exact = alone
    usual, here = (
        ranks.run(case_gradients, 1, paths[False], {"dtype": "bfloat16", "trainer": trainer}, batch)[0][1]
        for trainer in ({}, {"residual": "float32", "recompute": recompute})
    )
    for name, gradient in exact[False][1].items():
        errors = [(found[name].float() - gradient).norm() / gradient.norm() for found in (usual, here)]
        assert errors[1] < 1.5 * errors[0] + 0.002, f"{name}: {errors}"


@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_four_ranks_find_the_loss_and_gradients_of_one(four_ranks, alone, layout):
    paths, batch, expected = alone
    assert_same_gradients(
        four_ranks.run(case_gradients, 4, paths[True], FOUR_RANKS[layout], batch)[0], expected[True], layout
    )


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"tp": 2, "trainer": {"sequence_parallel": True}}])
def test_distributed_optimizer_makes_the_steps_of_the_plain_one(ranks, alone, layout):
    paths, batch, _ = alone
    plain = ranks.run(case_steps, 1, paths[True], {}, batch, 3)[0]
    distributed = {**layout, "trainer": {**layout.get("trainer", {}), "distributed_optimizer": True}}
    metrics, weights = ranks.run(case_steps, 2, paths[True], distributed, batch, 3)[0]
    for found, expected in zip(metrics, plain[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain[1][name], rtol=0, atol=1e-6, msg=name)


def case_varied_steps(place, path, settings, batch):
    """Four steps of 2, 1, 3 and 2 micro-batches, the last of which has no samples on the last rank."""
    with closing(make_trainer(place, path, optimizer={"eps": 1e-4, "weight_decay": 0.1}, **settings)) as trainer:
        at = trainer.coordinates
        mine, metrics = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp], []
        for count in (2, 1, 3, 2):
            shares = [mine[i::count] for i in range(count)]
            if at.dp_rank == at.layout.dp - 1 and count > 1:
                shares = [shares[0] + shares[1], *shares[2:], []]
            own = [batch.micro_batch(share) for share in shares]
            metrics.append(trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens))
        return metrics, trainer.parameter_hash()


@pytest.mark.parametrize(("kind", "layout"), [("qwen2", {}), ("qwen3_moe", {}), ("qwen3_moe", {"ep": 2})])
@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_summed_beside_the_backward_pass_are_the_same(ranks, tmp_path, kind, layout, distributed):
    # More than one step: Megatron sums those of the first one after the backward pass in any case.
    path, batch = save_hf(tmp_path, kind, tied=False), policy_batch(LENGTHS)
    found = []
    for overlap in (True, False):
        settings = {**layout, "trainer": {"overlap_grad_reduce": overlap, "distributed_optimizer": distributed}}
        found.append(ranks.run(case_varied_steps, 2, path, settings, batch))
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2, "trainer": {"sequence_parallel": True}}])
def test_logprobs_do_not_depend_on_how_sequences_are_cut(ranks, alone, layout):
    paths, batch, _ = alone
    micro_batches = [batch.select([0, 1, 2]), batch.select([3]), batch.select([4, 5, 6, 7])]
    (expected,) = ranks.run(case_logprobs, 1, paths[False], {}, micro_batches)
    found = [
        result for result in ranks.run(case_logprobs, 2, paths[False], layout, micro_batches) if result is not None
    ]
    assert len(found) == 1
    for mine, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (2, {"cp": 2}), (2, {"pp": 2})])
@pytest.mark.parametrize("corrections", [{}, ICEPOP], ids=["plain", "icepop"])
def test_fresh_samples_take_their_old_logprobs_from_the_training_forward(ranks, alone, world, layout, corrections):
    paths, batch, _ = alone
    for separate, fresh in ranks.run(case_fresh, world, paths[True], layout, batch, corrections):
        told = {name: fresh[0].pop(name) for name in set(fresh[0]) - set(separate[0])}
        assert fresh[0] == pytest.approx(separate[0], rel=1e-5, abs=1e-6)
        assert set(told) == (TOLD if corrections else set()) and all(0 < value < 1.3 for value in told.values())
        assert fresh[0]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        for mine, theirs in zip(fresh[1], separate[1], strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_discarded_gradients_leave_no_trace(ranks, alone):
    paths, batch, _ = alone
    before, between, after = ranks.run(case_discard, 1, paths[True], batch)[0]
    assert before == between
    assert after == ranks.run(case_hash_after_step, 1, paths[True], batch)[0]


def case_hash_after_step(place, path, batch):
    with closing(make_trainer(place, path, **OPTIONS)) as trainer:
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        return trainer.parameter_hash()


def case_three_steps(place, path, batch, exact, options):
    if exact:
        plain_kernels()
    algorithm, eps = {"exact": exact}, {"eps": 1e-3}
    with closing(make_trainer(place, path, algorithm=algorithm, trainer=options, optimizer=eps)) as trainer:
        trainer.warm_up()
        mine, norms = own_micro_batches(batch, trainer.coordinates), []
        for _ in range(3):
            trainer.forward_backward(mine, global_loss_tokens=batch.num_loss_tokens, on_policy=False)
            norms.append(trainer.optimizer_step()["train/grad_norm"])
        weights = {meta.name: tensor.clone() for meta, tensor in trainer.export_weights() if tensor is not None}
        return norms, weights


def test_exact_ranks_with_a_distributed_optimizer_make_the_steps_of_one_usual_rank(ranks, tmp_path):
    """With plain functions for vLLM's kernels: their bits are a GPU's."""
    path, batch = save_hf(tmp_path / "hf", "qwen2"), policy_batch(LENGTHS)
    options = {"distributed_optimizer": True, "recompute": "selective"}
    [(norms, weights)] = ranks.run(case_three_steps, 1, path, batch, False, {})
    found = ranks.run(case_three_steps, 2, path, batch, True, options)
    assert found[0][0] == pytest.approx(norms, rel=1e-4) and min(norms) > 0
    assert found[0][1].keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=1e-4, atol=1e-5)
