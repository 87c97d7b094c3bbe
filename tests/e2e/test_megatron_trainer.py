"""The trainer against transformers and plain torch, and against itself in other layouts and packings."""

from __future__ import annotations

import os
from contextlib import closing
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltool.algorithms.batch import Ragged, Wide, fetched
from rltool.algorithms.fields import fields_of
from rltool.config.sections import ModelConfig, TrainerConfig
from rltool.config.train import TrainConfig
from rltool.training.ranks.sharding import Sharder, Shards
from tests.declared import Store
from tests.e2e.megatron_models import VOCAB, hf_logprobs, hf_model, make_trainer, plain_kernels, policy_batch, save_hf

pytestmark = pytest.mark.e2e

LENGTHS, TEMPERATURE = [5, 17, 2, 9, 12, 3, 8, 8], 0.7


def tensors(trainer) -> dict[str, torch.Tensor] | None:
    """The exported HF tensors, copied; None but on rank 0."""
    pairs = [(meta.name, tensor if tensor is None else tensor.clone()) for meta, tensor in trainer.export_weights()]
    return dict(pairs) if trainer.coordinates.rank == 0 else None


def split(batch, rank: int, ranks: int, micro_batches: int):
    """This rank's samples, sharded into micro-batches."""
    own = list(range(batch.num_samples))[rank::ranks]
    return [batch.select(own[i::micro_batches]) for i in range(micro_batches)]


# Cases: run in the ranks.


def case_logprobs(place, path, tp, pp, temperature, micro_batches):
    with closing(make_trainer(place, path, tp=tp, pp=pp, temperature=temperature)) as trainer:
        result = trainer.compute_logprobs(micro_batches)
        assert (result is not None) == trainer.coordinates.returns_logprobs
        return result


def case_train(place, path, tp, pp, batch, micro_batches, steps, options):
    with closing(make_trainer(place, path, tp=tp, pp=pp, **options)) as trainer:
        at = trainer.coordinates
        own = split(batch, at.dp_rank, at.layout.dp, micro_batches)
        metrics = [trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens) for _ in range(steps)]
        return metrics, tensors(trainer), trainer.parameter_hash()


def case_nan(place, path, tp, pp, batch):
    with closing(make_trainer(place, path, tp=tp, pp=pp)) as trainer:
        at = trainer.coordinates
        broken = batch.replace(advantages=torch.where(batch.loss_mask > 0, batch.advantages, 0.0).clone())
        broken.advantages[batch.loss_mask.nonzero()[3]] = float("nan")
        before = trainer.parameter_hash()
        own = split(broken, at.dp_rank, at.layout.dp, 2)
        skipped = trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens)
        after = trainer.parameter_hash()
        own = split(batch, at.dp_rank, at.layout.dp, 2)
        good = trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens)
        return before, after, skipped, good, trainer.parameter_hash()


def case_reference(place, path, batch):
    with closing(make_trainer(place, path, algorithm={"kl": {"kind": "loss", "coef": 0.1}})) as trainer:
        first = trainer.compute_logprobs([batch])
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        trained, hashed = trainer.compute_logprobs([batch]), trainer.parameter_hash()
        reference = trainer.compute_logprobs([batch], weights="reference")
        return first[0], trained[0], reference[0], hashed, trainer.parameter_hash()


def case_turns(place, path, pp, micro_batches):
    """What happens to this rank's micro-batches, in order."""
    from rltool.megatron import trained

    found = []

    def noted(name):
        def instead(*args, call=getattr(trained, name), **options):
            found.append(name)
            return call(*args, **options)

        return mock.patch.object(trained, name, instead)

    with closing(make_trainer(place, path, pp=pp)) as trainer, noted("prepare"), noted("forward"):
        trainer.compute_logprobs(micro_batches)
        return found


def case_metadata(place, path, dtype):
    with closing(make_trainer(place, path, dtype=dtype)) as trainer:
        pairs = list(trainer.export_weights())
        assert [meta for meta, _ in pairs] == trainer.export_plan.tensors
        return [(meta.name, meta.dtype, meta.shape, str(t.dtype), tuple(t.shape)) for meta, t in pairs]


def case_exact(place, path, batch, exact):
    if exact:
        plain_kernels()
    options = {"algorithm": {"exact": exact}, "trainer": {"recompute": "selective" if exact else "none"}}
    with closing(make_trainer(place, path, temperature=0.7, **options)) as trainer:
        [logprobs] = trainer.compute_logprobs([batch])
        trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
        gradients = {name: p.main_grad.clone() for name, p in trainer.gpt.named_parameters()}
        return logprobs, gradients, sorted({type(module).__name__ for module in trainer.gpt.modules()})


def case_cuts(place, path, batch, options):
    """With micro-batches as training has them, and with those of passes that train nothing, wide fields by reference:
    where this rank stands, the cut, and the log-probabilities of this rank's micro-batches."""
    if options.get("algorithm", {}).get("exact"):
        plain_kernels()
    store = Store()
    batch = by_reference(batch, store.put)
    longest, total = int(batch.lengths.max()), len(batch.tokens)
    config = TrainConfig(
        model=ModelConfig(path=path),
        trainer=TrainerConfig(
            world_size=place.world_size, tensor_parallel=options.get("tp", 1), pipeline_parallel=options.get("pp", 1),
            context_parallel=options.get("cp", 1), max_tokens_per_micro_batch=longest,
            logprob_tokens_per_micro_batch=total, **options.get("trainer", {}),
        ),
        sampling={"max_prompt_tokens": 1, "max_response_tokens": 1},
    )  # fmt: skip
    with closing(make_trainer(place, path, **{"temperature": TEMPERATURE} | options)) as trainer:
        found = []
        for forward_only in (False, True):
            shards = Sharder(config).shard(batch, forward_only=forward_only)
            own = fetched(shards.micro_batches(trainer.coordinates.dp_rank), store.get)
            found.append((trainer.coordinates, shards.plan, trainer.compute_logprobs(own)))
        return found


def by_reference(batch, put):
    """The batch as a rollout manager sends it. Rows are as long as the sample's own longest."""
    fields = {name: item for name, item in fields_of(batch).items() if item.wide and getattr(batch, name) is not None}
    samples = [batch.select([i]) for i in range(batch.num_samples)]

    def row(value, item):
        if isinstance(value, Ragged):
            return value.values.numpy()
        return value[:, (value != item.filler(value.dtype)).any(0)].numpy()

    rows = {name: [row(getattr(own, name), item) for own in samples] for name, item in fields.items()}
    return batch.replace(**dict.fromkeys(fields), wide=(Wide.of(rows, put),)) if fields else batch


def logprobs_of_both_cuts(ranks, world, path, batch, options):
    """[T] with the larger micro-batches, where nothing is trained, once they are those with training's."""
    results = ranks.run(case_cuts, world, path, batch, options)
    (cuts, expected), (joined, found) = (
        (plans[0], Shards(batch, plans[0]).in_order(coordinates, rows))
        for coordinates, plans, rows in (zip(*given, strict=True) for given in zip(*results, strict=True))
    )
    assert all(len(of_rank) == 1 for of_rank in joined) and len(cuts[0]) > 1
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    return found


def case_differing_layer(place, path, directory, tokens, spoilt):
    """spoilt: the tensor of the export, as vLLM gets it, in which one number is another; None: none."""
    from rltool.checkpoints.hf_export import export_hf
    from rltool.weights.verify.layers import find

    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ.update(on_cpu | {"TORCHDYNAMO_DISABLE": "1"})
    directory.mkdir()
    with closing(make_trainer(place, path, temperature=0.7)) as trainer:
        export_hf(trainer, directory / "model")
        if spoilt is not None:
            file = directory / "model/model.safetensors"
            weights = load_file(file)
            weights[spoilt].view(-1)[0] += 0.5
            save_file(weights, file, {"format": "pt"})
        found = find(trainer, tokens, directory, tolerance=1e-4)
        [usual] = trainer.compute_logprobs([policy_batch([len(tokens)]).replace(tokens=torch.tensor(tokens))])
        return found, float(usual[-1]), sorted(file.name for file in directory.iterdir())


# Tests.


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_with_plain_functions_for_vllms_kernels_an_exact_trainer_is_the_usual_one(ranks, tmp_path, kind):
    """Each kernel is called for its own part of the model, on its own weights, rotary positions and log-softmax
    included; gradients come through all of them. The kernels' bits are for tests/gpu/test_exact.py."""
    path, batch = save_hf(tmp_path / "hf", kind), policy_batch(LENGTHS)
    [usual] = ranks.run(case_exact, 1, path, batch, False)
    [exact] = ranks.run(case_exact, 1, path, batch, True)
    assert {"_GatedMLP", "_Linear", "_Norm", "_Rotary"} <= {*exact[2]} and "RMSNorm" not in exact[2]
    assert ("OnePassSelfAttention" in usual[2]) == (kind != "qwen3") and "OnePassSelfAttention" not in exact[2]
    torch.testing.assert_close(exact[0], usual[0], rtol=0, atol=2e-5)
    for name, gradient in usual[1].items():
        torch.testing.assert_close(exact[1][name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("spoilt", "part"),
    [
        (None, None),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp"),
        ("model.layers.2.post_attention_layernorm.weight", "model.layers.2.post_attention_layernorm"),
        ("model.layers.3.self_attn.o_proj.weight", "model.layers.3.self_attn"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_the_layer_in_which_a_real_vllm_differs_from_the_trainer_is_named(ranks, tmp_path, spoilt, part):
    """In float32 on a CPU, to 1e-4: all parts of all layers are the same ones on both sides, and of a model with one
    other number the part that it belongs to is the first that differs."""
    path = save_hf(tmp_path / "hf", "qwen3", tied=False)
    tokens = [7 * i % VOCAB for i in range(23)]
    [(found, usual, files)] = ranks.run(case_differing_layer, 1, path, tmp_path / "found", tokens, spoilt)
    assert found.part == part and (found.length, found.layers) == (23, 4)
    assert found.alone == usual != found.ours, "at the run's temperature, and at 1"
    assert (abs(found.ours - found.theirs) < 1e-4) == (spoilt is None)
    assert files == ["found.json", "request.json", "trainer.safetensors", "vllm.json", "vllm.log", "vllm.safetensors"]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_equal_those_of_transformers(ranks, tmp_path, kind, tied):
    path, model = save_hf(tmp_path, kind, tied), hf_model(kind, tied)
    batch = policy_batch(LENGTHS)
    micro_batches = [batch.select([0, 1, 2]), batch.select([3]), batch.select([4, 5, 6, 7])]
    with torch.no_grad():
        expected = [
            torch.cat([hf_logprobs(model, tokens, 0.7) for tokens in micro.tokens.split(micro.lengths.tolist())])
            for micro in micro_batches
        ]
    for world, tp, pp in ((1, 1, 1), (2, 2, 1), (2, 1, 2)):
        results = ranks.run(case_logprobs, world, path, tp, pp, 0.7, micro_batches)
        (found,) = [result for result in results if result is not None]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


SHARED = {"trainer": {"shared_prefixes": True}}


@pytest.mark.parametrize("options", [{}, {"algorithm": {"exact": True}}, {"pp": 2}, {"cp": 2}, SHARED], ids=str)
def test_larger_micro_batches_where_nothing_is_trained_give_the_same_logprobs(ranks, tmp_path, options):
    path, batch = save_hf(tmp_path), policy_batch([n for n in LENGTHS for _ in range(4)])
    batch.tokens[batch.lengths.cumsum(0) - batch.lengths] = 1  # something to share
    logprobs_of_both_cuts(ranks, 2 if options.keys() & {"pp", "cp"} else 1, path, batch, options)


@pytest.mark.parametrize("options", [{}, {"cp": 2}, SHARED], ids=str)
def test_in_larger_micro_batches_a_token_is_one_of_those_that_sampling_left_and_of_the_ids_that_are_asked(
    ranks, tmp_path, options
):
    """Each sample has a number of its own of tokens to choose from, also where two have tokens in common."""
    path, model, batch = save_hf(tmp_path), hf_model("qwen2", True), policy_batch(LENGTHS)
    rows = batch.tokens.split(LENGTHS)
    rows[4][:10], rows[6][:] = rows[1][:10], rows[7]
    generator = torch.Generator().manual_seed(3)
    left = torch.full((len(batch.tokens), 9), -1, dtype=torch.int32)
    asked = torch.randint(0, VOCAB, batch.tokens.shape, generator=generator)
    masked, wanted, start = [], [], 0
    for number, tokens in enumerate(batch.tokens.split(batch.lengths.tolist())):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float() / TEMPERATURE
        for at in range(1, len(tokens)):
            others = torch.randperm(VOCAB, generator=generator)
            kept = torch.cat([tokens[at : at + 1], others[others != tokens[at]][: 1 + number]])
            if batch.loss_mask[start + at]:
                left[start + at, : len(kept)] = kept
                masked.append((start + at, logits[at - 1, kept].log_softmax(0)[0]))
            wanted.append((start + at, logits[at - 1].log_softmax(0)[asked[start + at]]))
        start += len(tokens)
    world = 2 if "cp" in options else 1
    for changes, expected in (({"sampling_mask": left}, masked), ({"target_ids": asked}, wanted)):
        found = logprobs_of_both_cuts(ranks, world, path, batch.replace(**changes), options)
        rows, values = zip(*expected, strict=True)
        torch.testing.assert_close(found[list(rows)], torch.stack(values), rtol=0, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_gradient_norm_and_weights_do_not_depend_on_layout_or_packing(ranks, tmp_path, tied):
    path, batch = save_hf(tmp_path, tied=tied), policy_batch(LENGTHS)
    # A large eps keeps the update smooth in the gradient; at 1e-8 Adam's first step is its sign, of noise too.
    options = {"algorithm": {"kl": {"kind": "loss", "coef": 0.05}}, "temperature": 0.9, "optimizer": {"eps": 1e-3}}
    runs = {}
    for world, tp, pp, micro_batches in ((1, 1, 1, 1), (1, 1, 1, 8), (2, 1, 1, 2), (2, 2, 1, 3), (2, 1, 2, 4)):
        results = ranks.run(case_train, world, path, tp, pp, batch, micro_batches, 2, options)
        assert all(result[0] == results[0][0] for result in results), "metrics differ between ranks"
        assert all(result[2] == results[0][2] for result in results), "the hash differs between ranks"
        runs[tp, pp, world, micro_batches] = results[0]
    reference_metrics, reference_weights, _ = runs.pop((1, 1, 1, 1))
    assert reference_metrics[0]["train/grad_norm"] > 0.1
    for layout, (metrics, weights, _) in runs.items():
        for found, expected in zip(metrics, reference_metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), layout
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, reference_weights[name], rtol=0, atol=1e-6, msg=f"{layout} {name}")


def test_three_steps_equal_plain_torch_adamw_on_the_transformers_model(ranks, tmp_path):
    path, model = save_hf(tmp_path, "qwen2", tied=True), hf_model("qwen2", tied=True)
    batch, clip, decay = policy_batch(LENGTHS), 0.3, 0.1
    settings = dict(lr=1e-3, weight_decay=decay, clip_grad=clip, warmup_steps=1, decay_style="linear", eps=1e-4)
    results = ranks.run(
        case_train,
        1,
        path,
        1,
        1,
        batch,
        2,
        3,
        {"optimizer": settings, "algorithm": {"kl": {"kind": "loss", "coef": 0.05}}},
    )
    metrics, weights, _ = results[0]

    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-4)
    at = batch.loss_mask > 0
    for step, lr in enumerate((0.0, 1e-3, 1e-3 * 8 / 9)):
        logprobs = torch.cat([hf_logprobs(model, t, 1.0) for t in batch.tokens.split(batch.lengths.tolist())])[at]
        ratio = (logprobs - batch.old_logprobs[at]).exp()
        advantages = batch.advantages[at]
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        log_ratio = batch.ref_logprobs[at] - logprobs
        kl = (log_ratio.exp() - 1 - log_ratio).clamp(max=10)
        loss = ((surrogate + 0.05 * kl) * batch.loss_weights[at]).sum() / at.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert metrics[step]["train/loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert metrics[step]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert metrics[step]["train/lr"] == pytest.approx(lr)
    state = model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-5, msg=name)
    assert set(weights) == set(state) - {"lm_head.weight"}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 1)])
def test_non_finite_advantage_skips_the_step_on_every_rank_and_leaves_everything_unchanged(ranks, tmp_path, tp, pp):
    path, batch = save_hf(tmp_path), policy_batch(LENGTHS)
    clean = ranks.run(case_train, 2, path, tp, pp, batch, 2, 1, {})
    for before, after, skipped, good, final in ranks.run(case_nan, 2, path, tp, pp, batch):
        assert before == after != final
        assert skipped["train/skipped"] == 1 and good["train/skipped"] == 0
        # The step after the skipped one is the first step: optimizer and schedule did not move either.
        assert final == clean[0][2] and good == clean[0][0][0]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_micro_batch_is_prepared_in_its_turn_but_in_a_pipeline_before_the_first(ranks, tmp_path, pp):
    """So that a GPU has work meanwhile; and so that no stage waits for one that refuses a batch."""
    path, micro_batches = save_hf(tmp_path / "hf", "qwen2"), split(policy_batch(LENGTHS), 0, 1, 3)
    expected = ["prepare", "forward"] * 3 if pp == 1 else ["prepare"] * 3 + ["forward"] * 3
    assert ranks.run(case_turns, pp, path, pp, micro_batches) == [expected] * pp


def test_micro_batch_without_loss_tokens_changes_nothing(ranks, tmp_path):
    path, batch = save_hf(tmp_path), policy_batch([6, 7])
    silent = policy_batch([4], seed=9)
    silent = silent.replace(loss_mask=torch.zeros(4), loss_weights=torch.zeros(4))
    tokens = batch.num_loss_tokens
    alone = ranks.run(case_train_given, 2, path, [batch], tokens)
    beside = ranks.run(case_train_given, 2, path, [silent, batch], tokens)
    assert beside[0][0] == pytest.approx(alone[0][0], rel=1e-6)
    assert beside[0][1] == alone[0][1]


def case_train_given(place, path, micro_batches, tokens):
    with closing(make_trainer(place, path, pp=2)) as trainer:
        return trainer.train_step(micro_batches, global_loss_tokens=tokens), trainer.parameter_hash()


def test_supervised_loss_is_cross_entropy(ranks, tmp_path):
    path, batch = save_hf(tmp_path), policy_batch(LENGTHS)
    supervised = batch.replace(advantages=None, old_logprobs=None, ref_logprobs=None, loss_weights=batch.loss_mask)
    results = ranks.run(case_train, 1, path, 1, 1, supervised, 2, 1, {"algorithm": {"loss": "sft"}})
    model = hf_model("qwen2", tied=True)
    with torch.no_grad():
        logprobs = torch.cat([hf_logprobs(model, t, 1.0) for t in batch.tokens.split(batch.lengths.tolist())])
    assert results[0][0][0]["train/loss"] == pytest.approx(-logprobs[batch.loss_mask > 0].mean().item(), rel=1e-5)
    assert "train/clip_fraction" not in results[0][0][0]


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_supervised_training_does_not_depend_on_the_sampling_temperature_and_policy_training_does(
    ranks, tmp_path, temperature
):
    path, batch = save_hf(tmp_path), policy_batch(LENGTHS)
    for loss in ("sft", "policy"):
        at_one, other = (
            ranks.run(case_train, 1, path, 1, 1, batch, 2, 1, {"algorithm": {"loss": loss}, "temperature": t})[0]
            for t in (1.0, temperature)
        )
        # Metrics of the step, and the hash of the weights after it.
        assert (at_one[0] == other[0] and at_one[2] == other[2]) == (loss == "sft")


def test_reference_logprobs_stay_those_of_the_first_weights_and_the_policy_is_put_back(ranks, tmp_path):
    first, trained, reference, before, after = ranks.run(case_reference, 1, save_hf(tmp_path), policy_batch(LENGTHS))[0]
    assert torch.equal(reference, first)
    assert not torch.equal(trained, first)
    assert before == after


def test_policy_loss_without_old_logprobs_is_refused(ranks, tmp_path):
    from tests.e2e.megatron_ranks import CaseFailed

    batch = policy_batch([6, 7]).replace(old_logprobs=None)
    with pytest.raises(CaseFailed, match=r"TrainBatch\.old_logprobs is None"):
        ranks.run(case_train, 1, save_hf(tmp_path), 1, 1, batch, 1, 1, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_tensors_match_their_metadata(ranks, tmp_path, tied, dtype):
    path = save_hf(tmp_path, tied=tied)
    exported = ranks.run(case_metadata, 1, path, dtype)[0]
    expected = {name: tuple(tensor.shape) for name, tensor in hf_model("qwen2", tied).state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert {name: shape for name, _, shape, _, _ in exported} == expected
    assert all(meta == dtype and found == f"torch.{dtype}" and a == b for _, meta, a, found, b in exported)
    assert expected["model.embed_tokens.weight"] == (VOCAB, 64)
