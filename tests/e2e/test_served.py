"""A served trainer: each model as if alone, in each layout, over saves, snapshots and restarts; equal to `train`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.checkpoints.torch_dist import load_adapters, save_checkpoint
from rltool.errors import UsageError
from rltool.training.served import AdamParams, AdapterSpec, batch_of
from tests.e2e.megatron_models import make_trainer, save_hf
from tests.e2e.served_ranks import data_of, served

pytestmark = pytest.mark.e2e

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)
SPECS = {"a": AdapterSpec(4, 6.0), "b": AdapterSpec(2, 8.0, ("qkv", "down"))}
SEEDS = {"a": 1, "b": 2}
LAYOUTS = {
    "tp": {"tp": 2, "trainer": {"sequence_parallel": True}}, "pp": {"pp": 2}, "cp": {"cp": 2}, "dp": {},
    "distributed": {"trainer": {"distributed_optimizer": True}},
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


def flat(outputs) -> np.ndarray:
    return np.concatenate([*outputs.logprobs, *outputs.elementwise_loss])


def part(trainer, name, i):
    """One call of a model's life: two backward passes, a step, a look, over and over."""
    seed = 10 * SEEDS[name] + i
    if i % 4 == 2:
        return np.array(list(trainer.optim_step(name, ADAM).values()))
    loss = "ppo" if name == "a" else "cross_entropy"
    return flat(trainer.forward(name, data_of(seed, policy=name == "a"), loss, {}, backward=i % 4 != 3))


def case_life(place, path, names, layout, calls=8, specs=SPECS):
    """What each of the models gives, driven in turns."""
    with served(place, path, **layout) as trainer:
        for name in names:
            trainer.create(name, specs.get(name), SEEDS[name])
        found = {name: [] for name in names}
        for i in range(calls):
            for name in names:
                found[name].append(part(trainer, name, i))
        return found


def test_two_adapters_driven_in_turns_are_bit_by_bit_what_each_is_alone(ranks, dense):
    together = ranks.run(case_life, 1, dense, ["a", "b"], {})[0]
    for name in ("a", "b"):
        alone = ranks.run(case_life, 1, dense, [name], {})[0]
        for first, second in zip(alone[name], together[name], strict=True):
            np.testing.assert_array_equal(first, second)
    assert np.abs(together["a"][3] - together["a"][7]).max() > 1e-3, "it learns"


@pytest.mark.parametrize(
    "name", ["tp", "cp", *(pytest.param(each, marks=pytest.mark.long) for each in ("pp", "dp", "distributed"))]
)
def test_each_layout_computes_what_one_rank_does(ranks, dense, name):
    one = ranks.run(case_life, 1, dense, ["a", "b"], {})[0]
    for found in ranks.run(case_life, 2, dense, ["a", "b"], LAYOUTS[name]):
        for model in one:
            for first, second in zip(one[model], found[model], strict=True):
                np.testing.assert_allclose(first, second, rtol=1e-5, atol=2e-5)


def case_sums(place, path, chunks):
    """The gradient's norm of data that come in calls of so many, and log-probabilities after a step of it."""
    data, found = data_of(4), []
    with served(place, path, trainer={"sequence_parallel": True}, tp=place.world_size) as trainer:
        for size in chunks:
            name = f"in calls of {size}"
            trainer.create(name, SPECS["a"], 1)
            for start in range(0, len(data), size):
                trainer.forward(name, data[start : start + size], "importance_sampling", {}, backward=True)
            norm = trainer.optim_step(name, AdamParams(learning_rate=1e-2, eps=1e-8))["grad_norm"]
            found.append((norm, flat(trainer.forward(name, data, "ppo", {}, backward=False))))
        return found


def test_gradients_of_several_calls_are_the_gradient_of_their_sum(ranks, dense):
    (norm, moved), *others = ranks.run(case_sums, 2, dense, [8, 3, 1])[0]
    for other, also in others:
        assert other == pytest.approx(norm, rel=1e-5)
        np.testing.assert_allclose(also, moved, rtol=1e-4, atol=1e-4)


CLIP = {"clip_low_threshold": 0.97, "clip_high_threshold": 1.04}


def case_gspo(place, path, layout):
    """By gspo, and by a linear loss of the slopes that gspo has there in plain torch: losses, the norm of the gradient
    and log-probabilities after a step of it, of each."""
    plain = data_of(4, [5, 17, 9, 12, 3, 40])
    marks = [np.arange(len(datum.tokens), dtype=np.float32) // 2 % 3 for datum in plain]
    data = [
        replace(datum, inputs=datum.inputs | {"sequence_ratio_mask": each})
        for datum, each in zip(plain, marks, strict=True)
    ]
    found = []
    with served(place, path, **layout) as trainer:
        for name in ("named", "linear"):
            trainer.create(name, SPECS["a"], 1)
            loss, sent = "gspo", data
            if name == "linear":
                new = trainer.forward(name, data, "gspo", CLIP, backward=False).logprobs
                both = [plain_gspo(datum, values) for datum, values in zip(data, new, strict=True)]
                slopes = [each for _, each in both]
                sent = [replace(datum, inputs={"weights": -each}) for datum, each in zip(data, slopes, strict=True)]
                loss, losses = "cross_entropy", np.concatenate([each for each, _ in both])
            out = trainer.forward(name, sent, loss, CLIP if loss == "gspo" else {}, backward=True)
            losses = losses if name == "linear" else np.concatenate(out.elementwise_loss)
            norm = trainer.optim_step(name, AdamParams(learning_rate=1e-2, eps=1e-2))["grad_norm"]
            moved = trainer.forward(name, data, "gspo", CLIP, backward=False).logprobs
            found.append((losses, norm, np.concatenate(moved), np.concatenate(out.logprobs)))
    return found


def plain_gspo(datum, new):
    """Losses, and their derivatives by the log-probabilities, written down from the formula."""
    p = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    w, q, a, m = (torch.tensor(datum.inputs[name], dtype=torch.float64) for name in
                  ("weights", "logprobs", "advantages", "sequence_ratio_mask"))  # fmt: skip
    ratio = (p.detach() - q)[m != 0].mean().exp() * (p - p.detach()).exp()
    losses = -w * torch.minimum(ratio * a, ratio.clamp(*CLIP.values()) * a)
    losses.sum().backward()
    return losses.detach().numpy(), p.grad.numpy().astype(np.float32)


@pytest.mark.parametrize("name", ["one", "cp"])
def test_gspo_has_the_gradient_of_its_formula_also_where_ranks_have_a_part_of_each_sequence(ranks, dense, name):
    for named, linear in ranks.run(case_gspo, 1 if name == "one" else 2, dense, LAYOUTS.get(name, {})):
        np.testing.assert_allclose(named[0], linear[0], rtol=1e-4, atol=1e-5)
        assert named[1] == pytest.approx(linear[1], rel=1e-5) and named[1] > 0.1
        np.testing.assert_allclose(named[2], linear[2], rtol=1e-5, atol=2e-5)
        assert np.abs(named[2] - named[3]).max() > 1e-3, "it learns"


@pytest.mark.long
def test_experts_and_their_parallelism(ranks, tmp_path):
    path = save_hf(tmp_path, "qwen3_moe", tied=False)
    specs = SPECS | {"b": AdapterSpec(4, 8.0, ("qkv", "experts"))}
    one = ranks.run(case_life, 1, path, ["a", "b"], {}, 8, specs)[0]
    for layout in ({"ep": 2}, {"trainer": {"expert_products": "grouped"}}):
        found = ranks.run(case_life, 2 if "ep" in layout else 1, path, ["a", "b"], layout, 8, specs)[0]
        for model in one:
            for first, second in zip(one[model], found[model], strict=True):
                np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-4)


def case_snapshot(place, path, directory, names, layout, cut):
    """A life of which a snapshot is made after `cut` calls, and that is put back to it after one more."""
    with served(place, path, **layout) as trainer:
        for name in names:
            trainer.create(name, SPECS.get(name), SEEDS[name])
        for i in range(cut):
            for name in names:
                part(trainer, name, i)
        trainer.snapshot(directory)
        for name in names:
            part(trainer, name, cut)
        trainer.restore(directory)
        return {name: part(trainer, name, cut) for name in names}


def case_restored(place, path, directory, names, layout, cut):
    """Goes on from it in another trainer."""
    with served(place, path, **layout) as trainer:
        trainer.restore(directory)
        with pytest.raises(UsageError, match="is there already"):
            trainer.create(names[0], SPECS["a"], 0)
        return {name: [part(trainer, name, i) for i in range(cut, 8)] for name in names}


def check_snapshot(ranks, world, path, directory, names, layout, cut):
    whole = ranks.run(case_life, world, path, names, layout)[0]
    again = ranks.run(case_snapshot, world, path, directory, names, layout, cut)[0]
    later = ranks.run(case_restored, world, path, directory, names, layout, cut)[0]
    for name in names:
        np.testing.assert_array_equal(again[name], whole[name][cut])
        for first, second in zip(whole[name][cut:], later[name], strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("cut", [pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long), 5])
def test_a_snapshot_goes_on_bit_by_bit_also_between_two_backward_passes(ranks, dense, tmp_path, cut):
    check_snapshot(ranks, 1, dense, tmp_path / "s", ["a", "b"], {}, cut)


SEEDS["full"] = 3


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_snapshot_of_all_weights_goes_on_bit_by_bit(ranks, dense, tmp_path, dtype):
    check_snapshot(ranks, 2, dense, tmp_path / "s", ["full"], LAYOUTS["distributed"] | {"dtype": dtype}, 5)


def case_full(place, path):
    """Log-probabilities of an adapter that does nothing yet, before all weights were trained and after."""
    data = data_of(5)
    with served(place, path) as trainer:
        trainer.create("a", SPECS["a"], 1)
        first = flat(trainer.forward("a", data, "ppo", {}, backward=False))
        with pytest.raises(UsageError, match="'full' would train all weights.*'a'"):
            trainer.create("full", None, 0)
        trainer.drop("a")
        trainer.create("full", None, 0)
        with pytest.raises(UsageError, match="'full' trains all weights"):
            trainer.create("a", SPECS["a"], 1)
        trainer.forward("full", data, "ppo", {}, backward=True)
        trainer.optim_step("full", ADAM)
        moved = flat(trainer.forward("full", data, "ppo", {}, backward=False))
        trainer.drop("full")
        trainer.create("a", SPECS["a"], 1)
        return first, moved, flat(trainer.forward("a", data, "ppo", {}, backward=True))


def test_all_weights_are_one_model_alone_and_dropped_with_all_that_it_learnt(ranks, dense):
    first, moved, after = ranks.run(case_full, 1, dense)[0]
    assert np.abs(first - moved).max() > 1e-2
    np.testing.assert_allclose(after, first, atol=1e-6)


def look(trainer):
    return flat(trainer.forward("a", data_of(6), "ppo", {}, backward=False))


def go_on(trainer):
    trainer.forward("a", data_of(6), "ppo", {}, backward=True)
    trainer.optim_step("a", ADAM)
    return look(trainer)


def case_save(place, path, directory, layout):
    """A step, saved; and what follows."""
    with served(place, path, **layout) as trainer:
        trainer.create("a", SPECS["a"], 1)
        go_on(trainer)
        trainer.save("a", directory / "with", optimizer=True)
        trainer.save("a", directory / "without", optimizer=False)
        return {"then": look(trainer), "next": go_on(trainer)}


def case_load(place, path, directory, layout):
    """What follows from each of what was saved."""
    found = {}
    with served(place, path, **layout) as trainer:
        trainer.create("a", SPECS["a"], 7)
        trainer.forward("a", data_of(6), "ppo", {}, backward=True)  # a gradient that loading drops
        trainer.load("a", directory / "with", optimizer=True)
        found["with: then"], found["with: next"] = look(trainer), go_on(trainer)
        trainer.load("a", directory / "without", optimizer=False)
        found["without: then"], found["anew: next"] = look(trainer), go_on(trainer)
        trainer.load("a", directory / "with", optimizer=False)
        found["weights of with: then"], found["weights of with: next"] = look(trainer), go_on(trainer)
        for asked in ("without", "nothing"):
            with pytest.raises(UsageError, match="no optimizer's state|is not there"):
                trainer.load("a", directory / asked, optimizer=True)
        trainer.create("b", SPECS["b"], 7)
        with pytest.raises(UsageError, match="lora.rank = 4"):
            trainer.load("b", directory / "with", optimizer=True)
    return found


@pytest.mark.parametrize("layout", [{}, LAYOUTS["tp"], pytest.param({"pp": 2}, marks=pytest.mark.long)])
def test_saved_models_are_loaded_with_and_without_their_optimizer(ranks, dense, tmp_path, layout):
    world = 2 if layout else 1
    found = ranks.run(case_save, world, dense, tmp_path, layout)[0]
    found |= ranks.run(case_load, world, dense, tmp_path, layout)[0]
    for name in ("with: then", "without: then", "weights of with: then"):
        np.testing.assert_array_equal(found[name], found["then"])
    np.testing.assert_array_equal(found["with: next"], found["next"])
    np.testing.assert_array_equal(found["anew: next"], found["weights of with: next"])
    assert np.abs(found["anew: next"] - found["next"]).max() > 1e-3, "moments matter"


TRAIN = {
    "lora": {"rank": 4, "alpha": 6.0},
    "algorithm": {"loss": "policy", "objective": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}},
}
KNOWN = [datum for i, datum in enumerate(data_of(8)) if i % 2]
"""`train` knows no targets but the tokens."""


def trained_batch() -> TrainBatch:
    given = batch_of(KNOWN)
    names = ("tokens", "lengths", "loss_mask", "rewards", "group_ids", "loss_weights", "advantages", "old_logprobs")
    return TrainBatch(**{name: getattr(given, name) for name in names})


def case_train(place, path, directory):
    batch = trained_batch()
    with closing(make_trainer(place, path, **TRAIN)) as trainer:
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        save_checkpoint(trainer, directory, {"step": 1})
        logprobs = trainer.compute_logprobs([batch])[0][batch.loss_mask > 0]
        return logprobs.numpy(), trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)


def case_served(place, path, begin, directory):
    with served(place, path) as trainer:
        trainer.create("a", SPECS["a"], 7)
        trainer.load("a", begin, optimizer=True)
        out = trainer.forward("a", KNOWN, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, backward=True)
        step = trainer.optim_step("a", ADAM)
        trainer.save("a", directory, optimizer=True)
        moved = trainer.forward("a", KNOWN, "cispo", {}, backward=False)
        return np.concatenate(out.logprobs), out.metrics, step, np.concatenate(moved.logprobs)


def case_trained_on(place, path, begin):
    batch = trained_batch()
    with closing(make_trainer(place, path, **TRAIN)) as trainer:
        load_adapters(trainer, begin)
        return trainer.compute_logprobs([batch])[0][batch.loss_mask > 0].numpy()


def test_a_step_is_that_of_train_and_each_begins_from_the_others_checkpoint(ranks, dense, tmp_path):
    logprobs, metrics = ranks.run(case_train, 1, dense, tmp_path / "trained")[0]
    same, out, step, moved = ranks.run(case_served, 1, dense, tmp_path / "trained", tmp_path / "served")[0]
    tokens = trained_batch().num_loss_tokens
    np.testing.assert_allclose(same, logprobs, atol=5e-6)  # other micro-batches
    assert out["num_tokens"] == tokens
    assert out["loss_sum"] / tokens == pytest.approx(metrics["train/loss"], rel=1e-6)
    assert step["grad_norm"] / tokens == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
    np.testing.assert_allclose(ranks.run(case_trained_on, 1, dense, tmp_path / "served")[0], moved, atol=5e-6)
    assert np.abs(moved - same).max() > 1e-3


def case_put_in(place, path, other, layout, disturbed):
    """A life with all weights in whose middle, a gradient added up, another model stands for a moment."""
    with served(place, path, **layout) as trainer:
        trainer.create("full", None, 1)
        found = [part(trainer, "full", i) for i in range(5)]
        if disturbed:
            with pytest.raises(UsageError, match="is not there"):
                trainer.put_in(other / "none")
            trainer.put_in(other)
            found.append(flat(trainer.forward("full", data_of(9), "ppo", {}, backward=False)))
            trainer.put_back()
        return found + [part(trainer, "full", i) for i in range(5, 8)]


@pytest.mark.parametrize(
    "name", ["one", "bf16", *(pytest.param(each, marks=pytest.mark.long) for each in ("tp", "distributed"))]
)
def test_weights_that_are_put_in_for_a_sync_leave_a_model_and_its_gradient_as_they_are(ranks, dense, tmp_path, name):
    layout = LAYOUTS.get(name, {"dtype": "bfloat16"} if name == "bf16" else {})
    other, size = save_hf(tmp_path, "qwen3", tied=True, seed=5), 1 if name in ("one", "bf16") else 2
    alone = ranks.run(case_put_in, size, dense, other, layout, False)[0]
    *before, seen, last, second, third = ranks.run(case_put_in, size, dense, other, layout, True)[0]
    for first, again in zip(alone, [*before, last, second, third], strict=True):
        np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(seen, ranks.run(case_put_in_alone, size, other, layout)[0])
    assert np.abs(ranks.run(case_put_in_alone, size, dense, layout)[0] - seen).max() > 1e-2


def case_put_in_alone(place, path, layout):
    with served(place, path, **layout) as trainer:
        trainer.create("full", None, 1)
        return flat(trainer.forward("full", data_of(9), "ppo", {}, backward=False))


def case_wrong(place, path):
    with served(place, path) as trainer:
        trainer.create("a", SPECS["a"], 1)
        before = flat(trainer.forward("a", data_of(1), "ppo", {}, backward=False))
        short, words = data_of(1)[0], []
        wrong = [
            [], [short.__class__(short.tokens, short.targets[:2], short.inputs)],
            [short.__class__(short.tokens + 200, short.targets, short.inputs)],
            [short.__class__(short.tokens, short.targets, {n: v * np.nan for n, v in short.inputs.items()})],
            data_of(1, [64]), [*data_of(1, [3]), *data_of(1, [3], policy=False)],
        ]  # fmt: skip
        for data in wrong:
            with pytest.raises(UsageError) as raised:
                trainer.forward("a", data, "ppo", {}, backward=True)
            words.append(str(raised.value))
        for adam in (AdamParams(beta1=1.0), AdamParams(learning_rate=float("nan"))):
            with pytest.raises(UsageError, match="expected"):
                trainer.optim_step("a", adam)
        with pytest.raises(UsageError, match="no model 'x'; there are: 'a'|no model 'x'"):
            trainer.forward("x", data_of(1), "ppo", {}, backward=True)
        for spec, expected in ((AdapterSpec(2, 8.0, ("experts",)), "experts"), (AdapterSpec(0), "rank is 0")):
            with pytest.raises(UsageError, match=expected):
                trainer.create("b", spec, 1)
        with pytest.raises(UsageError, match="adapters are trained here"):
            trainer.put_in(path)
        wild = data_of(1, [3])
        wild[0].inputs["advantages"][:] = 3e38
        trainer.forward("a", wild, "importance_sampling", {}, backward=True)
        skipped = trainer.optim_step("a", ADAM)["skipped"]
        return before, flat(trainer.forward("a", data_of(1), "ppo", {}, backward=False)), skipped, words


def test_what_is_wrong_is_refused_by_name_and_changes_nothing(ranks, dense):
    before, after, skipped, words = ranks.run(case_wrong, 1, dense)[0]
    np.testing.assert_array_equal(before, after)
    assert skipped == 1
    for text, expected in zip(
        words, ["no datum", "target_tokens has shape", "vocabulary", "not finite", "64 tokens", "lacks logprobs"],
        strict=True,
    ):  # fmt: skip
        assert expected in text
