"""A served trainer over Ray ranks: they are killed, and what was acknowledged goes on from a snapshot bit by bit."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest

from rltool.config.train import TrainConfig
from rltool.errors import RunFault, UsageError
from rltool.training.served import AdamParams, AdapterSpec
from rltool.training.served_session import served_trainer
from tests.e2e.megatron_models import save_hf
from tests.e2e.served_ranks import data_of

pytestmark = pytest.mark.e2e


def call(trainer, name, i):
    if i % 3 == 2:
        return np.array(list(trainer.optim_step(name, AdamParams(learning_rate=1e-2)).values()))
    out = trainer.forward(name, data_of(i), "ppo", {}, backward=True)
    return np.concatenate([*out.logprobs, *out.elementwise_loss])


def rank_pids() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "TrainerActor" in " ".join(child.cmdline())]


def test_a_killed_rank_loses_no_call_that_a_snapshot_holds(tmp_path):
    path, names = save_hf(tmp_path / "model", "qwen3", tied=True), ("a", "b")
    config = TrainConfig.model_validate(
        {
            "model": {"path": path, "dtype": "float32"},
            "trainer": {"world_size": 2, "cpus_per_rank": 0.5, "max_tokens_per_micro_batch": 64, "torch_threads": 1},
            "sampling": {"max_prompt_tokens": 32, "max_response_tokens": 32},
        }
    )
    found = {name: [] for name in names}
    with served_trainer(config, tmp_path) as session:
        trainer = session.trainer
        trainer.create("a", AdapterSpec(4, 6.0), 1)
        trainer.create("b", AdapterSpec(2, 8.0, ("qkv",)), 2)
        with pytest.raises(UsageError, match="'a' is there already"):
            trainer.create("a", AdapterSpec(4, 6.0), 1)
        for i in range(4):
            for name in names:
                found[name].append(call(trainer, name, i))
        trainer.snapshot(tmp_path / "snapshot")
        for i in range(4, 7):
            for name in names:
                found[name].append(call(trainer, name, i))
        trainer.save("a", tmp_path / "a", optimizer=True)
        trainer.save("b", tmp_path / "b", optimizer=False)
        assert len(rank_pids()) == 2
        os.kill(rank_pids()[1], signal.SIGKILL)
        with pytest.raises(RunFault, match="rank 1|rank 0"):
            call(trainer, "a", 0)
    with served_trainer(config, tmp_path) as session:
        trainer = session.trainer
        trainer.restore(tmp_path / "snapshot")
        for i in range(4, 7):
            for name in names:
                np.testing.assert_array_equal(call(trainer, name, i), found[name][i])
        trainer.drop("b")
        trainer.load("a", tmp_path / "a", optimizer=True)
        last = trainer.forward("a", data_of(6), "ppo", {}, backward=False)
        assert np.isfinite(np.concatenate(last.logprobs)).all()
