"""Evaluations that run beside training, with the rollout side replaced by one that ends them when it is told."""

from __future__ import annotations

import signal

import pytest

from rltool.config.train import TrainConfig
from rltool.errors import EngineError
from rltool.training.loop import Progress
from rltool.training.stopping import StopRequested
from tests.unit.training.test_loop import Run, Saves, World


class Beside(World):
    """ends: {step that an evaluation began after: looks until it has ended}; a wait ends any."""

    def __init__(self, ends):
        super().__init__()
        self.ends, self.running = dict(ends), None

    def start_evaluation(self, step):
        assert self.running is None, "one at a time"
        self._do(f"evaluate {step}")
        self.running = step

    def evaluated(self, *, wait):
        assert self.running is not None
        self.ends[self.running] = self.ends.get(self.running, 0) - 1
        if not wait and self.ends[self.running] >= 0:
            return None
        self._do(f"{'wait' if wait else 'ended'} {self.running}")
        step, self.running = self.running, None
        return {"eval/heldout/accuracy": self.accuracy, "eval/version_min": step, "eval/version_max": self.version}


class JudgedSaves(Saves):
    def __init__(self):
        self.told = []

    def awaits(self, step):
        self.told.append(step)

    def measured(self, step, metrics):
        self.told.append((step, metrics["eval/heldout/accuracy"]))


def run_beside(tmp_path, world, *, steps=6, every=2, progress=None, **settings):
    evaluation = {"sets": {"heldout": "h.jsonl"}, "every_steps": every, "blocking": False, **settings.pop("eval", {})}
    run = Run(tmp_path, world, steps=steps, eval=evaluation, progress=progress, **settings)
    run.loop.checkpoints = run.saves = JudgedSaves()
    run.loop.evaluations._checkpoints = run.saves
    run.said = []
    run.writer.log = run.said.append
    return run


def evaluated(run):
    """(step of the record, weight version, whether it is the record of a whole training step), in the file's order."""
    return [
        (r["step"], r["weight_version"], "time/step_seconds" in r)
        for r in run.records()
        if "eval/heldout/accuracy" in r
    ]


def of_evaluation(world):
    return [call for call in world.calls if call.split()[0] in ("evaluate", "ended", "wait", "sync", "rollout")]


def test_training_goes_on_and_what_was_found_stands_under_the_step_it_began_after(tmp_path):
    world = Beside({0: 1, 2: 1, 4: 1})
    run = run_beside(tmp_path, world)
    run.loop.run()
    assert evaluated(run) == [(-1, "v0", False), (1, "v2", False), (3, "v4", False), (5, "v6", True)]
    assert [r["step"] for r in run.records()] == [-1, 0, -1, 1, 2, 1, 3, 4, 3, 5]
    assert of_evaluation(world)[:8] == [
        "sync", "evaluate 0", "rollout", "sync", "rollout", "ended 0", "sync", "evaluate 2"
    ]  # fmt: skip
    assert run.records()[2]["eval/version_min"] == 0 and run.records()[2]["eval/version_max"] == 1


def test_the_last_evaluation_waits_for_the_one_before_and_is_waited_for(tmp_path):
    world = Beside({0: 99})
    run = run_beside(tmp_path, world, steps=3, every=0)
    run.loop.run()
    assert of_evaluation(world)[-5:] == ["rollout", "wait 0", "sync", "evaluate 3", "wait 3"]
    assert evaluated(run) == [(-1, "v0", False), (2, "v3", True)]
    assert run.records()[-1]["time/eval_seconds"] >= 0 and run.saves == [3]


def test_one_that_is_due_while_another_runs_is_skipped_and_counted(tmp_path):
    world = Beside({0: 3})
    run = run_beside(tmp_path, world, steps=5, every=1)
    run.loop.run()
    assert [call for call in world.calls if call.startswith("evaluate")] == ["evaluate 0", "evaluate 4", "evaluate 5"]
    assert [r["step"] for r in run.records() if r.get("eval/skipped")] == [0, 1, 2]
    assert "the evaluation after step 1 is skipped: that of step 0 still runs" in run.said


def test_supervised_training_does_not_change_the_weights_that_are_being_evaluated(tmp_path):
    world = Beside({0: 2})
    run_beside(tmp_path, world, steps=3, every=1, algorithm={"loss": "sft"}).loop.run()
    assert world.calls.count("sync") == 2, "before the first step and after the last"


def test_a_goal_ends_the_run_when_it_is_known_to_be_reached(tmp_path):
    world = Beside({0: 0, 2: 1})
    world.accuracy = 0.4
    run = run_beside(tmp_path, world, steps=9, eval={"stop_at": 0.3})
    assert run.loop.run().step == 4 and run.saves == [4]
    assert "evaluate 4" not in world.calls, "nothing more begins"
    assert run.said.index("eval/heldout/accuracy has reached eval.stop_at = 0.3: the run ends here") > 0


def test_checkpoints_hear_what_is_being_evaluated_and_what_came_of_it(tmp_path):
    world = Beside({0: 0, 2: 1})
    run = run_beside(tmp_path, world, steps=4)
    run.loop.run()
    assert run.saves.told == [0, (0, 0.0), 2, (2, 0.0), 4, (4, 0.0)]


def test_an_evaluation_that_fails_ends_the_run_with_a_checkpoint(tmp_path):
    world = Beside({0: 2})
    world.fail_at = {"ended 0": EngineError("too few engines")}
    run = run_beside(tmp_path, world)
    with pytest.raises(EngineError, match="too few engines"):
        run.loop.run()
    assert run.saves == [3]


def test_a_signal_ends_the_wait_for_the_last_one_and_saves(tmp_path):
    world = Beside({})
    run = run_beside(tmp_path, world, steps=2, every=0)
    plain = world.evaluated

    def waits(*, wait):
        if wait:
            run.stop.requested = signal.SIGTERM
            raise StopRequested
        return None if world.running == 0 else plain(wait=wait)

    world.evaluated = waits
    assert run.loop.run().step == 2 and run.saves == [2]


def test_a_stop_does_not_wait_for_an_evaluation(tmp_path):
    world = Beside({0: 99})
    run = run_beside(tmp_path, world)
    plain = world.optimizer_step

    def update():
        if run.loop.progress.step == 2:
            run.stop.requested = signal.SIGTERM
        return plain()

    world.optimizer_step = update
    assert run.loop.run().step == 3 and not any(call.startswith("wait") for call in world.calls)


def test_a_resumed_run_starts_the_evaluation_of_its_checkpoint_again(tmp_path):
    world = Beside({})
    run = run_beside(tmp_path, world, progress=Progress(4, saved=True))
    run.loop.run()
    assert evaluated(run) == [(3, "v4", False), (5, "v6", True)]


def test_colocated_engines_cannot_evaluate_beside_training():
    values = {"model": {"path": "m"}, "engines": {"mode": "colocate", "groups": [{}]}, "eval": {"blocking": False}}
    with pytest.raises(ValueError, match="eval.blocking = false and engines.mode"):
        TrainConfig.model_validate(values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"engines": {"mode": "colocate", "groups": [{}]}}, "only while its own engines take them"),
        ({"rollout": {"agent": "a:b"}}, "the run's gateway"),
        ({"eval": {"engines": ["h:1"]}}, "would never be asked"),
    ],
)
def test_engines_for_evaluation_alone_are_refused_where_they_cannot_be_used(changes, said):
    values = {"model": {"path": "m"}, "eval": {"engines": ["h:1"], "sets": {"a": "a.jsonl"}}, **changes}
    if said is None:
        TrainConfig.model_validate(values)
        with pytest.raises(ValueError, match="would never be asked"):
            TrainConfig.model_validate({**values, "algorithm": {"loss": "sft"}})
        return
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate(values)
