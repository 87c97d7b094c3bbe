"""A reference that follows the policy: in the trainer, and through a checkpoint under any layout of ranks."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]
SETTINGS = {"algorithm": {"kl": {"kind": "loss", "coef": 0.3, "reference_update_steps": 1}}, "optimizer": {"lr": 1e-2}}
LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2)}


def scores(trainer, batch):
    """(the reference's, the policy's) log-probabilities, None but where they come back."""
    found = [trainer.compute_logprobs([batch], weights=weights) for weights in ("reference", "policy")]
    return None if found[0] is None else (found[0][0], found[1][0])


def step(trainer, batch):
    return trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)


# Cases: run in the ranks.


def case_save(place, path, tp, pp, batch, directory):
    from rltool.checkpoints.torch_dist import save_checkpoint

    with closing(make_trainer(place, path, tp=tp, pp=pp, **SETTINGS)) as trainer:
        initial = scores(trainer, batch)
        step(trainer, batch)
        updated = scores(trainer, batch)
        trainer.update_reference()
        step(trainer, batch)
        before, hashed = scores(trainer, batch), trainer.parameter_hash()
        save_checkpoint(trainer, directory, {"step": 2})
        assert trainer.parameter_hash() == hashed, "saving the reference leaves the policy in place"
        after = scores(trainer, batch)
        return initial, updated, before, after, step(trainer, batch), trainer.parameter_hash()


def case_resume(place, path, tp, pp, batch, directory, settings):
    from rltool.checkpoints.torch_dist import load_checkpoint

    with closing(make_trainer(place, path, tp=tp, pp=pp, **settings)) as trainer:
        load_checkpoint(trainer, directory)
        return scores(trainer, batch), step(trainer, batch), trainer.parameter_hash()


def case_scores(place, path, batch):
    with closing(make_trainer(place, path, **SETTINGS)) as trainer:
        return scores(trainer, batch)


# Tests.


def returned(results):
    return next(found for found in results if found[0] is not None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_updated_reference_survives_a_checkpoint(ranks, tmp_path, layout):
    path, batch, (world, tp, pp) = save_hf(tmp_path / "hf"), policy_batch(LENGTHS), LAYOUTS[layout]
    directory = tmp_path / "step_2"
    results = ranks.run(case_save, world, path, tp, pp, batch, directory)
    initial, updated, before, after, metrics, hashed = returned(results)
    torch.testing.assert_close(updated[0], initial[0], rtol=0, atol=0)
    assert (updated[1] - initial[1]).abs().max() > 1e-3, "the policy has moved, and the reference has not"
    torch.testing.assert_close(before[0], updated[1], rtol=0, atol=0)
    assert (before[1] - before[0]).abs().max() > 1e-3
    for kept, found in zip(before, after, strict=True):
        assert torch.equal(kept, found)
    again = ranks.run(case_resume, world, path, tp, pp, batch, directory, SETTINGS)
    found, metrics_again, hashed_again = returned(again)
    assert torch.equal(found[0], before[0]) and torch.equal(found[1], before[1])
    assert metrics_again == metrics and hashed_again == hashed
    other_world, other_tp, other_pp = LAYOUTS["pp2" if layout != "pp2" else "tp2"]
    moved, _, _ = returned(ranks.run(case_resume, other_world, path, other_tp, other_pp, batch, directory, SETTINGS))
    torch.testing.assert_close(moved[0], before[0], rtol=0, atol=2e-5)


def test_a_checkpoint_without_a_reference_leaves_the_initial_one(ranks, tmp_path):
    from tests.e2e.test_checkpoint_resume import case_train_and_save

    path, batch, directory = save_hf(tmp_path / "hf"), policy_batch(LENGTHS), tmp_path / "step_2"
    ranks.run(case_train_and_save, 1, path, 1, 1, batch, directory, {"optimizer": {"lr": 1e-2}})
    (reference, policy), _, _ = ranks.run(case_resume, 1, path, 1, 1, batch, directory, SETTINGS)[0]
    fresh = ranks.run(case_scores, 1, path, batch)[0]
    assert torch.equal(reference, fresh[0]) and (policy - reference).abs().max() > 1e-3
