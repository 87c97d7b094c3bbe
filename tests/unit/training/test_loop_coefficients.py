"""Weights of KL and entropy, and the reference, from step to step: what the ranks get, what is recorded and kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rltool.algorithms.controllers import Coefficients
from rltool.engines.weight_version import Lineage
from rltool.training.loop import Progress
from rltool.training.session import _load
from tests.unit.training.test_loop import Run, World

BOTH = {"kl": {"kind": "loss", "coef": 0.1, "target": 0.05}, "entropy": {"kind": "bonus", "target": 0.2}}


class Measuring(World):
    """KL far above its target and an entropy below its own, at every step."""

    def forward_backward(self, batch, on_policy=False):
        logprobs, metrics = super().forward_backward(batch, on_policy)
        return logprobs, metrics | {"train/kl": 9.0, "train/entropy": 0.1}


def run(tmp_path, steps: int, progress: Progress | None = None, **algorithm: Any) -> tuple[Run, World]:
    world = Measuring()
    made = Run(tmp_path, world, progress=progress, steps=steps, algorithm=algorithm)
    made.loop.run()
    return made, world


def test_each_step_trains_with_what_the_step_before_it_measured(tmp_path):
    made, world = run(tmp_path, 3, **BOTH)
    for step, batch in enumerate(world.batches):
        assert batch.kl_coefs.tolist() == pytest.approx([0.1 * 1.02**step] * batch.num_samples)
        assert batch.entropy_coefs.tolist() == pytest.approx([0.005 * step] * batch.num_samples)
    recorded = [record["train/kl_coef"] for record in made.records() if "train/kl_coef" in record]
    assert recorded == pytest.approx([0.1, 0.102, 0.10404])


def test_a_resumed_run_goes_on_with_the_weights_that_it_had(tmp_path):
    (tmp_path / "whole").mkdir()
    _, whole = run(tmp_path / "whole", 4, **BOTH)
    (tmp_path / "first").mkdir()
    half, _ = run(tmp_path / "first", 2, **BOTH)
    kept = half.loop.progress.coefficients
    assert kept == Coefficients(pytest.approx(0.10404), pytest.approx(0.01), pytest.approx(0.01))
    (tmp_path / "second").mkdir()
    _, rest = run(tmp_path / "second", 4, Progress(2, saved=True, coefficients=kept), **BOTH)
    for found, expected in zip(rest.batches, whole.batches[2:], strict=True):
        assert torch.equal(found.kl_coefs, expected.kl_coefs) and torch.equal(
            found.entropy_coefs, expected.entropy_coefs
        )


@pytest.mark.parametrize("kept", [None, Coefficients(0.3, 0.02, 0.0)])
def test_a_checkpoint_hands_them_back(kept):
    saved = {"step": 3, "lineage": Lineage("run", 1).to_json(), "source": {}}
    saved["coefficients"] = None if kept is None else asdict(kept)
    trainer: Any = SimpleNamespace(load_checkpoint=lambda *_: json.loads(json.dumps(saved)))
    config = SimpleNamespace(weights=SimpleNamespace(lora_sync="merged"))
    prepared: Any = SimpleNamespace(resume_from=Path("step_3"), config=config)
    run_directory: Any = SimpleNamespace(run_id="run")
    assert _load(prepared, run_directory, trainer, 2, lambda: None).progress.coefficients == kept


def test_a_penalty_in_the_reward_is_weighed_by_the_present_coefficient(tmp_path):
    world = World()
    world.known = {"policy": -1.0, "reference": -1.5}
    world.logprobs = lambda batch, weights="policy": torch.full((len(batch.tokens),), world.known[weights])
    algorithm = {"kl": {"kind": "reward", "coef": 0.1, "target": 0.25, "estimator": "k1"}}
    made = Run(tmp_path, world, steps=2, algorithm={"advantage": "reinforce_pp", **algorithm})
    made.loop.run()
    # k1 is 0.5 at each token, twice the target: the weight grows by 2 % a step.
    assert [batch.token_rewards.min().item() for batch in world.batches] == pytest.approx([-0.05, -0.051])


def test_the_reference_follows_every_so_many_steps_before_the_engines_are_told(tmp_path):
    world = World()
    world.update_reference = lambda: world._do("new reference")
    Run(
        tmp_path, world, steps=5, eval={}, algorithm={"kl": {"kind": "loss", "coef": 0.1, "reference_update_steps": 2}}
    ).loop.run()
    told = [call for call in world.calls if call in ("sync", "new reference", "reference")]
    assert told == ["sync", *["reference", "sync", "reference", "new reference", "sync"] * 2, "reference", "sync"]


def test_fixed_weights_travel_with_no_batch_and_no_checkpoint(tmp_path):
    made, world = run(tmp_path, 2, kl={"kind": "loss", "coef": 0.1}, entropy={"kind": "bonus", "coef": 0.01})
    assert all(batch.kl_coefs is None and batch.entropy_coefs is None for batch in world.batches)
    assert made.loop.progress.coefficients is None
