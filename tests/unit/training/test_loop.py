"""The loop with all around it replaced by records of calls: what happens, in which order, what is saved when."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
import time
import weakref

import pytest
import torch

from rltool.algorithms.batch import TrainBatch, Wide
from rltool.config.rollout import EnginesConfig
from rltool.config.train import TrainConfig
from rltool.errors import EngineError, ExportFailed, OutputFailed, PartLost, RltoolError, SaveFailed, TrainingStopped
from rltool.report.samples import SampleRecord, read_samples
from rltool.terminal import Console
from rltool.training.checks.exact import LayerSearch
from rltool.training.loop import Loop, Parts, Progress
from rltool.training.observe.metrics import MetricsWriter, progress_line
from rltool.training.observe.sample_log import SampleLog
from rltool.training.sources import SourcedBatch
from rltool.training.stopping import StopRequested, StopSignal
from tests.full_disk import FullDisk
from tests.metric_names import undocumented


def make_batch(groups=(0, 0, 1, 1), version=0) -> TrainBatch:
    n = len(groups)
    mask = torch.tensor([0.0, 1.0] * n)
    return TrainBatch(
        tokens=torch.arange(2 * n), lengths=torch.full((n,), 2), loss_mask=mask, rewards=torch.arange(n).float(),
        group_ids=torch.tensor(groups), loss_weights=mask, rollout_logprobs=torch.full((2 * n,), -1.0) * mask,
        token_versions=torch.where(mask > 0, version, -1),
    )  # fmt: skip


class World:
    """Trainer, engines and source in one, writing down what was asked of them."""

    def __init__(self):
        self.calls: list[str] = []
        self.batches: list[TrainBatch] = []
        self.trainer_logprob = -1.0
        self.skipped = 0.0
        self.accuracy = 0.0
        self.fail_at: dict[str, BaseException] = {}
        self.version = 0

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if self.calls.count(what) - 1 == getattr(self, "fail_on_call", 0) and what in self.fail_at:
            raise self.fail_at.pop(what)

    # source
    def next_batch(self, step):
        self._do("rollout")
        return SourcedBatch(make_batch(version=step), {"rollout/reward_mean": 0.5}, (f"v{self.version}",))

    # engines
    @property
    def weight_version(self):
        return f"v{self.version}"

    def sync_weights(self, step):
        self._do("sync")
        self.version = step
        return {"time/sync_seconds": 0.1}

    def start_evaluation(self, step):
        self._do("evaluate")

    def evaluated(self, *, wait):
        return {"eval/heldout/accuracy": self.accuracy}

    # trainer
    def take_gpus(self):
        return {}

    def logprobs(self, batch, weights="policy"):
        self._do("logprobs" if weights == "policy" else weights)
        return torch.full((len(batch.tokens),), self.trainer_logprob)

    def train_step(self, batch):
        self.batches.append(batch)
        return {"train/loss": 0.1, **self.optimizer_step()}

    def forward_backward(self, batch, on_policy=False):
        self._do("gradients")
        self.batches.append(batch)
        return torch.full((len(batch.tokens),), self.trainer_logprob), {"train/loss": 0.1}

    def optimizer_step(self):
        self._do("update")
        return {"train/grad_norm": 1.0, "train/skipped": self.skipped}

    def discard_gradients(self):
        self._do("discard")


class Saves(list):
    """Checkpoints that are complete at once: the step of each."""

    def save(self, progress):
        self.append(progress.step)

    def check(self):
        return {}

    def holds(self, step, *, wait):
        return step in self

    def awaits(self, step):
        pass

    def measured(self, step, metrics):
        pass

    def finish(self, progress):
        if not progress.saved:
            self.save(progress)

    def wait(self):
        pass


class Exports(list):
    """Hugging Face exports: the step of each."""

    def save(self, step):
        self.append(step)

    def has(self, step):
        return step in self


class Run:
    def __init__(self, tmp_path, world, *, engines=True, progress=None, first_step=0, **settings):
        values = {"model": {"path": "m"}, "steps": 2, "eval": {"sets": {"heldout": "h.jsonl"}}, **settings}
        self.config = TrainConfig.model_validate(values)
        self.world, self.saves, self.exports = world, Saves(), Exports()
        self.file = tmp_path / "metrics.jsonl"
        self.writer = MetricsWriter(self.file, console=Console(file=io.StringIO()), first_step=first_step)
        self.stop = StopSignal()
        parts = Parts(world, world, world if engines else None, self.saves, self.exports, self.writer, self.stop)
        self.loop = Loop(self.config, parts, progress or Progress(0))

    def records(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def test_weights_are_synced_before_the_first_rollout_and_after_every_update(tmp_path):
    world = World()
    run = Run(tmp_path, world)
    run.loop.run()
    assert world.calls == [
        "sync",
        "evaluate",
        "rollout",
        "gradients",
        "update",
        "sync",
        "rollout",
        "gradients",
        "update",
        "sync",
        "evaluate",
    ]
    assert run.saves == [2]
    assert [r["step"] for r in run.records()] == [-1, 0, 1]
    assert run.records()[1]["weight_versions"] == ["v0"] and run.records()[1]["weight_version"] == "v1"


def test_each_optimizer_step_gets_whole_groups_with_weights_of_its_own_and_group_advantages(tmp_path):
    world = World()
    Run(tmp_path, world, steps=1, optimizer_steps_per_rollout=2, rollout={"prompts_per_step": 2}).loop.run()
    first, second = world.batches
    assert first.group_ids.tolist() == [0, 0] and second.group_ids.tolist() == [1, 1]
    assert first.advantages[1] == -first.advantages[3] != 0 and first.advantages[0] == 0
    assert first.loss_weights.sum() == first.num_loss_tokens
    assert first.old_logprobs is not None and first.ref_logprobs is None


@pytest.mark.parametrize(("groups", "steps"), [((0,) * 6 + (1,) * 6 + (2,) * 6 + (3,) * 6, 2), ((0, 0, 1, 1), 1)])
def test_a_trimmed_batch_has_no_more_optimizer_steps_than_configured_however_many_samples_an_episode_is(
    tmp_path, groups, steps
):
    world = World()
    run = Run(
        tmp_path, world, steps=1, optimizer_steps_per_rollout=2,
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "batch_size": "trim"},
    )  # fmt: skip
    world.next_batch = lambda step: SourcedBatch(make_batch(groups, version=step), {}, ("v0",))
    run.loop.run()
    assert world.calls.count("update") == steps <= run.config.policy_optimizer_steps


def test_the_reference_is_asked_only_when_there_is_a_kl_term(tmp_path):
    world = World()
    Run(tmp_path, world, steps=1, algorithm={"kl": {"kind": "loss", "coef": 0.1}}).loop.run()
    assert world.calls.count("reference") == 1 and world.batches[0].ref_logprobs is not None


def test_supervised_training_syncs_weights_only_to_evaluate(tmp_path):
    world = World()
    Run(
        tmp_path, world, steps=4, algorithm={"loss": "sft"}, eval={"sets": {"heldout": "h.jsonl"}, "every_steps": 2}
    ).loop.run()
    assert world.calls == [
        "sync",
        "evaluate",
        "rollout",
        "update",
        "rollout",
        "update",
        "sync",
        "evaluate",
        "rollout",
        "update",
        "rollout",
        "update",
        "sync",
        "evaluate",
    ]


def test_it_ends_once_the_goal_is_reached(tmp_path):
    world = World()
    world.accuracy = 0.4
    run = Run(tmp_path, world, steps=9, eval={"sets": {"heldout": "h.jsonl"}, "every_steps": 2, "stop_at": 0.3})
    assert run.loop.run().step == 2 and run.saves == [2]


@pytest.mark.parametrize("excess", [0.2, math.nan])
def test_a_difference_above_the_limit_stops_before_the_step_and_saves_the_state_before_the_rollout(tmp_path, excess):
    world = World()
    world.trainer_logprob = -1.0 + excess
    run = Run(tmp_path, world)
    with pytest.raises(TrainingStopped, match="no optimizer step was made"):
        run.loop.run()
    assert world.calls[-2:] == ["gradients", "discard"] and run.saves == [0]


@pytest.mark.parametrize(("excess", "said"), [(2**-23, "1.19e-07"), (0.5, "5.00e-01"), (math.nan, "nan")])
def test_with_exact_any_difference_from_one_bit_on_stops_before_the_step(tmp_path, excess, said):
    """As one of exact, also where it is above the limit of every run."""
    exact = {"algorithm": {"exact": True}, "model": {"path": "model", "dtype": "bfloat16"}}
    world = World()
    Run(tmp_path, world, steps=2, **exact).loop.run()
    world.trainer_logprob = -1.0 + excess
    run = Run(tmp_path, world, steps=2, **exact)
    with pytest.raises(TrainingStopped, match=rf"algorithm.exact: (\d+) of \1 log-probabilities are not .* {said}"):
        run.loop.run()
    assert world.calls[-2:] == ["gradients", "discard"] and run.saves == [0]


class Ranks:
    """What a trainer's group says of the layer; or the error that it raises."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def differing_layer(self, tokens, logprob, directory):
        self.asked.append((tokens, logprob, json.loads((directory / "row.json").read_text())))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "raised", "said"),
    [
        ("as a prompt the first part that differs is model.layers.12.mlp", TrainingStopped, "{answer} ({directory})"),
        (ExportFailed("disk full"), TrainingStopped, "the layer that differs could not be found: disk full"),
        (PartLost("rank 0 died"), PartLost, "Then, looking for the layer: rank 0 died"),
    ],
)
def test_with_exact_the_error_names_token_and_layer_and_keeps_the_first_error(tmp_path, answer, raised, said):
    """The first sample that differs has one more token before the difference than the one behind it."""
    world, ranks = World(), Ranks(answer)
    lines: list[str] = []
    run = Run(tmp_path, world, steps=2, algorithm={"exact": True}, model={"path": "model", "dtype": "bfloat16"})
    run.loop.layers = LayerSearch(ranks, tmp_path / "exact", lines.append)
    world.next_batch = lambda step: SourcedBatch(batch_of_lengths([3, 3, 3, 4]), {}, ("v0",))
    world.forward_backward = lambda batch, on_policy=False: (
        batch.rollout_logprobs + torch.tensor([0, 0, 0, 0, 0, 2**-20, 0, 2**-21, 0, 0, 0, 0, 2**-22]), {}
    )  # fmt: skip
    with pytest.raises(raised) as error:
        run.loop.run()
    assert "algorithm.exact: 3 of 9 log-probabilities are not the engines' (max 9.54e-07)" in str(error.value)
    assert "Step 0, sample 2, token 1 of 3 (id 7): trainer -0.99999952" in str(error.value)
    directory = tmp_path / "exact/step_0"
    assert said.format(answer=answer, directory=directory) in str(error.value) and len(lines) == 1
    [(tokens, logprob, row)] = ranks.asked
    assert tokens == [6, 7] and logprob == row["trainer"] == -1.0 + 2**-21
    assert row == {"step": 0, "sample": 2, "token": 1, "tokens": [6, 7, 8], "trainer": logprob, "engine": -1.0}


def batch_of_lengths(lengths):
    mask = torch.cat([torch.tensor([0.0] + [1.0] * (n - 1)) for n in lengths])
    return make_batch().replace(
        tokens=torch.arange(sum(lengths)), lengths=torch.tensor(lengths), loss_mask=mask, loss_weights=mask,
        rollout_logprobs=-mask, token_versions=torch.where(mask > 0, 0, -1),
    )  # fmt: skip


def test_a_replay_measures_the_logprob_difference_and_goes_on(tmp_path):
    world = World()
    world.trainer_logprob = -3.0
    run = Run(tmp_path, world, engines=False)
    run.loop.stops_on_difference = False
    run.loop.run()
    assert run.records()[0]["train/logprob_abs_diff_mean"] == 2.0


def test_skipped_steps_are_counted_and_too_many_in_a_row_stop_the_run(tmp_path):
    world = World()
    world.skipped = 1.0
    run = Run(tmp_path, world, steps=9, optimizer={"max_skipped_steps": 3})
    with pytest.raises(TrainingStopped, match="3 optimizer steps in a row"):
        run.loop.run()
    assert run.records()[-1]["train/skipped_steps"] == 1 and run.saves == [3]


@pytest.mark.parametrize("where", ["rollout", "sync"])
def test_an_engine_failure_between_steps_saves_before_it_is_raised(tmp_path, where):
    world = World()
    world.fail_on_call = 1
    world.fail_at = {where: EngineError("gone")}
    run = Run(tmp_path, world)
    with pytest.raises(EngineError, match="gone"):
        run.loop.run()
    assert run.saves == [1]


def test_a_failure_between_the_optimizer_steps_of_one_rollout_saves_nothing(tmp_path):
    world = World()
    world.fail_on_call = 1
    world.fail_at = {"update": EngineError("gone")}
    run = Run(tmp_path, world, optimizer_steps_per_rollout=2, rollout={"prompts_per_step": 2})
    with pytest.raises(EngineError):
        run.loop.run()
    assert run.saves == []


def test_a_signal_during_a_rollout_gives_it_up_and_saves_the_step_before_it(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9)

    def rollout(step):
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
            run.stop.raise_if_requested()  # as the wait for the rollout manager does
        return World.next_batch(world, step)

    world.next_batch = rollout
    with run.stop.installed():
        assert run.loop.run().step == 1
    assert run.saves == [1] and run.stop.exit_code == 0


def test_a_signal_during_an_update_lets_the_step_finish(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9)
    plain = world.optimizer_step

    def update():
        signal.raise_signal(signal.SIGINT)
        return plain()

    world.optimizer_step = update
    with run.stop.installed():
        assert run.loop.run().step == 1
    assert run.saves == [1] and run.stop.exit_code == 130


def stops_in_update(number, run):
    """A signal during this one of all optimizer steps, from 1."""
    plain = run.world.optimizer_step

    def update():
        if run.world.calls.count("update") + 1 == number:
            signal.raise_signal(signal.SIGINT)
        return plain()

    run.world.optimizer_step = update


@pytest.mark.parametrize(
    ("every_steps", "stops_in", "updates", "done", "saves", "says"),
    [
        (1, 5, 5, 1, [1], "dropped after the optimizer step in progress"),  # of two epochs of two: the first
        (1, 8, 8, 2, [1, 2], "then a checkpoint is written"),  # the last
        (0, 5, 8, 2, [2], "come to their end first, for steps before it are in no checkpoint"),
        (0, 2, 2, 0, [], "dropped after the optimizer step in progress"),
    ],
)
def test_a_signal_in_the_training_on_a_rollout_gives_it_up_unless_that_would_cost_steps_before_it(
    tmp_path, every_steps, stops_in, updates, done, saves, says
):
    world, said = World(), []
    run = Run(
        tmp_path, world, steps=9, optimizer_steps_per_rollout=2, epochs_per_rollout=2, rollout={"prompts_per_step": 2},
        checkpoint={"every_steps": every_steps},
    )  # fmt: skip
    stops_in_update(stops_in, run)
    run.stop._log = said.append
    with run.stop.installed():
        assert run.loop.run().step == done
    assert world.calls.count("update") == updates and run.saves == saves and says in said[0]
    assert run.loop.between_updates == (updates % 4 != 0), "else half of a rollout's training would be exported"
    assert [record["step"] for record in run.records() if "train/loss" in record] == list(range(done))


def test_a_signal_before_the_first_optimizer_step_on_a_rollout_gives_it_up_and_saves_the_steps_before_it(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9, optimizer_steps_per_rollout=2, rollout={"prompts_per_step": 2})
    plain = world.logprobs

    def logprobs(batch, weights="policy"):
        if run.loop.progress.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return plain(batch, weights)

    world.logprobs = logprobs
    with run.stop.installed():
        assert run.loop.run().step == 1
    assert world.calls.count("update") == 2 and run.saves == [1] and not run.loop.between_updates


@pytest.mark.parametrize(
    ("mode", "sets", "syncs"),
    [
        ("managed", {}, 2),  # before each step, not after the last
        ("managed", {"heldout": "h.jsonl"}, 3),  # the last weights are evaluated
        ("external", {}, 3),  # engines that outlive the run hold its last weights
    ],
)
def test_engines_that_end_with_the_run_get_the_last_weights_only_where_they_are_evaluated(tmp_path, mode, sets, syncs):
    run = Run(tmp_path, World(), eval={"sets": sets})
    engines = EnginesConfig(mode=mode, groups=() if mode == "external" else ({"count": 1},))
    run.loop.config = run.config.model_copy(update={"engines": engines})
    run.loop.run()
    assert run.world.calls.count("sync") == syncs


def test_after_a_signal_no_sync_begins(tmp_path):
    run = Run(tmp_path, World(), steps=9)
    stops_in_update(1, run)
    with run.stop.installed():
        run.loop.run()
    assert run.world.calls.count("sync") == 1 and run.saves == [1]


def test_after_the_last_step_a_signal_promises_no_checkpoint_that_is_not_written(tmp_path):
    run, said = Run(tmp_path, World(), checkpoint={"save_at_end": False}), []
    run.stop._log = said.append
    plain = run.world.sync_weights

    def sync(step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return plain(step)

    run.world.sync_weights = sync
    with run.stop.installed():
        assert run.loop.run().step == 2
    assert run.saves == [] and "no checkpoint is written (checkpoint.save_at_end = false)" in said[0]


def test_what_fails_after_a_signal_is_said_and_the_run_ends_as_it_was_told_to(tmp_path):
    world, said = World(), []
    run = Run(tmp_path, world, steps=9)
    run.writer.log = said.append

    def sync(*_, **__):
        signal.raise_signal(signal.SIGINT)
        raise OutputFailed("the disk is full")

    plain = world.optimizer_step

    def update():
        world.sync_weights = sync
        return plain()

    world.optimizer_step = update
    with run.stop.installed():
        assert run.loop.run().step == 1
    assert run.saves == [1] and "after the signal: the disk is full" in said


def stops_in_the_second_evaluation(world, run):
    """Of weights of one step: as the wait for the rollout manager does, once a signal has come."""
    plain = world.evaluated

    def evaluated(*, wait):
        if world.calls.count("update") == 1:
            signal.raise_signal(signal.SIGTERM)
            run.stop.raise_if_requested()
        return plain(wait=wait)

    world.evaluated = evaluated


def test_a_signal_in_an_evaluation_costs_neither_the_record_nor_the_export_of_the_step_before_it(tmp_path):
    world = World()
    settings = {"eval": {"sets": {"heldout": "h.jsonl"}, "every_steps": 1}, "checkpoint": {"save_hf_every": 1}}
    run = Run(tmp_path, world, steps=3, **settings)
    stops_in_the_second_evaluation(world, run)
    with run.stop.installed():
        assert run.loop.run().step == 1
    run.writer.close()
    assert run.saves == [1] and run.exports == []
    record = run.records()[-1]
    assert (record["step"], record["weight_version"], record["weight_versions"]) == (0, "v1", ["v0"])
    assert {"train/loss", "time/step_seconds", "train/tokens_per_second", "time/sync_seconds"} <= record.keys()

    resumed = Run(tmp_path, World(), steps=3, progress=Progress(1, saved=True), first_step=1, **settings)
    resumed.loop.run()
    assert resumed.exports == [1, 2, 3]
    assert [(r["step"], "train/loss" in r) for r in resumed.records()] == [
        (-1, False), (0, True), (0, False), (1, True), (2, True),
    ]  # fmt: skip


def test_engines_that_cannot_be_synced_cost_no_record(tmp_path):
    world = World()
    world.fail_on_call, world.fail_at = 1, {"sync": EngineError("gone")}
    run = Run(tmp_path, world, eval={})
    with pytest.raises(EngineError, match="gone"):
        run.loop.run()
    assert run.saves == [1]
    [record] = run.records()
    assert (record["step"], record["weight_version"]) == (0, "v0"), "the engines have the weights of before"


def on_a_full_disk(writer):
    writer._file.close()
    writer._file = FullDisk()


def test_metrics_that_cannot_be_written_end_the_run_with_a_checkpoint(tmp_path):
    run = Run(tmp_path, World(), steps=9, eval={})
    on_a_full_disk(run.writer)
    with pytest.raises(OutputFailed, match="metrics cannot be written to on_a_full_disk: No space left"):
        run.loop.run()
    assert run.saves == [1]
    run.writer.close()  # raises nothing: it would take the place of the error that ended the run


def test_the_error_that_ends_a_step_is_not_hidden_by_a_record_that_cannot_be_written(tmp_path):
    world = World()
    world.fail_on_call, world.fail_at = 1, {"sync": EngineError("gone")}
    run = Run(tmp_path, world, eval={})
    on_a_full_disk(run.writer)
    said = []
    run.writer.log = said.append
    with pytest.raises(EngineError, match="gone"):
        run.loop.run()
    assert run.saves == [1] and "metrics cannot be written" in said[0]


def test_an_export_that_fails_ends_the_run_after_a_checkpoint(tmp_path):
    run = Run(tmp_path, World(), steps=9, eval={}, checkpoint={"save_hf_every": 3})

    def no_space(step):
        raise ExportFailed("no space")

    run.exports.save = no_space
    with pytest.raises(ExportFailed):
        run.loop.run()
    assert run.saves == [3]


def test_a_step_that_does_not_count_has_no_record(tmp_path):
    world = World()
    world.fail_on_call, world.fail_at = 1, {"update": EngineError("gone")}
    run = Run(tmp_path, world, eval={})
    with pytest.raises(EngineError, match="gone"):
        run.loop.run()
    assert [record["step"] for record in run.records()] == [0]


def test_an_export_that_is_there_or_was_not_due_is_not_made_when_a_run_resumes(tmp_path):
    for step, there, expected in ((2, [2], [2]), (3, [], []), (0, [], []), (2, [], [2])):
        steps, start = max(step, 1), Progress(step, saved=True)
        run = Run(tmp_path, World(), steps=steps, progress=start, checkpoint={"save_hf_every": 2})
        run.exports.extend(there)
        run.loop.run()
        assert run.exports == expected


def test_a_signal_before_the_first_step_is_done_leaves_no_checkpoint_of_the_untouched_model(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9)
    plain = world.next_batch

    def next_batch(step):
        signal.raise_signal(signal.SIGTERM)
        run.stop.raise_if_requested()
        return plain(step)

    world.next_batch = next_batch
    with run.stop.installed():
        assert run.loop.run().step == 0
    assert run.saves == []


def test_a_signal_in_the_first_sync_lets_it_end_and_begins_nothing_more(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9)
    plain = world.sync_weights

    def sync(step):
        signal.raise_signal(signal.SIGINT)
        return plain(step)

    world.sync_weights = sync
    world.start_evaluation = run.stop.raise_if_requested  # as the wait for the rollout manager does
    with run.stop.installed():
        assert run.loop.run().step == 0
    assert world.calls == ["sync"] and run.saves == [] and run.stop.exit_code == 130


def test_a_signal_in_a_save_lets_it_end_and_no_other_follows(tmp_path):
    run = Run(tmp_path, World(), steps=9, checkpoint={"every_steps": 2})
    plain = run.saves.save

    def save(progress):
        signal.raise_signal(signal.SIGINT)
        plain(progress)

    run.saves.save = save
    with run.stop.installed():
        assert run.loop.run().step == 2
    assert run.saves == [2] and run.stop.exit_code == 130


def test_a_signal_before_the_first_step_of_a_resumed_run_leaves_its_checkpoint_as_the_newest(tmp_path):
    run = Run(tmp_path, World(), steps=9, progress=Progress(4, saved=True))
    run.stop.requested = signal.SIGTERM
    assert run.loop.run().step == 4 and run.saves == []


@pytest.mark.parametrize("lost", [PartLost("trainer rank 1 died"), SaveFailed("no space")])
def test_with_a_part_of_the_run_lost_no_checkpoint_is_tried(tmp_path, lost):
    world = World()
    run = Run(tmp_path, world, steps=9)

    def next_batch(step):
        raise lost

    world.next_batch = next_batch
    with pytest.raises(type(lost)):
        run.loop.run()
    assert run.saves == []


def test_a_checkpoint_that_fails_after_an_error_is_told_beside_it_and_not_in_its_place(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=9)

    def fails(*_):
        raise RltoolError("the rollout manager died")

    def fails_to_deliver(step):
        raise RltoolError("failing rewards")

    world.next_batch, run.saves.finish = fails_to_deliver, fails
    said = []
    run.writer.log = said.append
    with pytest.raises(RltoolError, match="failing rewards"):
        run.loop.run()
    assert said[-1] == "no checkpoint of this state: the rollout manager died"


def test_the_first_signal_says_at_once_what_happens_now_and_the_second_does_not():
    said = []
    stop = StopSignal(said.append)
    with stop.installed():
        stop.consequence = "the start is given up"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert said == ["\nSIGTERM: the start is given up; Ctrl-C ends at once\n"]


def test_from_the_first_finished_step_on_a_signal_says_that_it_saves(tmp_path):
    run = Run(tmp_path, World())
    assert "checkpoint" not in run.stop.consequence
    run.loop.run()
    assert "a checkpoint is written" in run.stop.consequence


def test_a_second_interrupt_ends_at_once():
    stop = StopSignal()
    with stop.installed():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_checkpoints_and_exports_come_when_they_are_due_and_none_twice(tmp_path):
    world = World()
    run = Run(tmp_path, world, steps=4, checkpoint={"every_steps": 2, "save_hf_every": 3})
    run.loop.run()
    assert run.saves == [2, 4] and run.exports == [3]


class FailingSaves(Saves):
    """The second checkpoint fails, at the step boundary after it was begun.

    `ended` counts the waits for what is in flight.
    """

    ended = 0
    failing = False

    def save(self, progress):
        super().save(progress)
        self.failing = len(self) == 2

    def check(self):
        if self.failing:
            raise SaveFailed("no space")
        return {"checkpoint/bytes": 1.0}

    def wait(self):
        self.ended += 1


def test_a_save_that_fails_ends_the_run_at_the_next_step_boundary_and_none_is_tried_again(tmp_path):
    world = World()
    run = Run(tmp_path, world, engines=False, steps=9, checkpoint={"every_steps": 1})
    run.loop.checkpoints = saves = FailingSaves()
    with pytest.raises(SaveFailed, match="no space"):
        run.loop.run()
    assert saves == [1, 2] and world.calls.count("update") == 2
    assert run.records()[0]["checkpoint/bytes"] == 1.0


def test_a_failing_checkpoint_does_not_hide_the_error_that_ended_the_run(tmp_path):
    world = World()
    world.trainer_logprob = 3.0
    run = Run(tmp_path, world)

    def finish(progress):
        raise SaveFailed("no space")

    run.saves.finish = finish
    with pytest.raises(TrainingStopped, match="no optimizer step was made"):
        run.loop.run()


def test_an_error_between_two_updates_still_lets_the_save_in_flight_end(tmp_path):
    world = World()
    world.fail_on_call = 1
    world.fail_at = {"update": EngineError("gone")}
    run = Run(tmp_path, world, optimizer_steps_per_rollout=2, rollout={"prompts_per_step": 2})
    run.loop.checkpoints = saves = FailingSaves()
    with pytest.raises(EngineError):
        run.loop.run()
    assert saves == [] and saves.ended == 1


def test_a_checkpoint_knows_the_metrics_of_its_step(tmp_path):
    world = World()
    world.accuracy = 0.25
    run = Run(
        tmp_path, world, steps=2, checkpoint={"every_steps": 1}, eval={"sets": {"heldout": "h.jsonl"}, "every_steps": 1}
    )
    measured = []
    run.saves.save = lambda progress: measured.append((progress.step, progress.metrics["eval/heldout/accuracy"]))
    run.loop.run()
    assert measured == [(1, 0.25), (2, 0.25)]


def test_a_resumed_run_that_is_stopped_at_once_does_not_save_again(tmp_path):
    run = Run(tmp_path, World(), steps=4, progress=Progress(4, saved=True))
    run.loop.run()
    assert run.saves == []


def test_a_resumed_writer_drops_the_records_of_steps_that_will_be_done_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "torn')
    writer = MetricsWriter(file, console=Console(file=io.StringIO()), first_step=2)
    writer.write(2, "v", {"a": math.nan, "b": 1.0})
    writer.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2] and records[2]["a"] is None and records[2]["b"] == 1.0


def test_a_signal_never_raises_out_of_its_handler_for_inside_a_wait_of_ray_that_ends_as_a_system_error():
    with StopSignal().installed() as stop:
        signal.raise_signal(signal.SIGTERM)  # raises nothing
        assert stop.requested == signal.SIGTERM
        with pytest.raises(StopRequested):
            stop.raise_if_requested()


def test_a_run_whose_directory_is_removed_says_so_at_once_and_at_its_end_and_keeps_the_metrics_from_then_on(tmp_path):
    screen, file = io.StringIO(), tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    writer = MetricsWriter(file, console=Console(file=screen, width=400))
    writer.write(0, "v", {})
    shutil.rmtree(file.parent)
    for step in (1, 2):
        writer.write(step, "v", {})
    assert screen.getvalue().count("was removed, with all its records: they go on in a new file") == 1
    writer.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
    assert "was removed during the run: it lacks the steps before that" in screen.getvalue().splitlines()[-1]


# -- samples that are kept


class Reference:
    """To a block of samples."""


def test_references_to_wide_fields_are_dropped_before_the_weights_are_synced(tmp_path):
    class WideWorld(World):
        held: tuple[weakref.ref[Reference], ...] = ()

        def next_batch(self, step):
            blocks = Reference(), Reference()
            self.held = tuple(map(weakref.ref, blocks))
            wide = Wide(("teacher_topk_ids",), blocks, torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]))
            return SourcedBatch(make_batch(version=step).replace(wide=(wide,)), kept={0: kept_record(0)})

        def train_step(self, batch):
            assert batch.has("teacher_topk_ids") and all(block() is not None for block in self.held)
            return {"train/loss": 0.1, **self.optimizer_step()}

        def sync_weights(self, step):
            assert not any(block() for block in self.held)
            return super().sync_weights(step)

    world = WideWorld()
    rollout, kl = {"prompts_per_step": 2}, {"kl": {"kind": "loss", "coef": 0.1}}
    run = run_with_samples(tmp_path, world, algorithm=kl, optimizer_steps_per_rollout=2, rollout=rollout)
    run.loop.run()
    assert world.calls.count("update") == 4 and world.calls.count("sync") == 3 and len(world.held) == 2


def kept_record(row):
    return SampleRecord(
        group=row, index=0, prompt="p", text="a", reward=float(row), status="completed", prompt_tokens=1, tokens=("a",),
        token_ids=(5,), mask=(1,), engine_logprobs=(-1.0,),
    )  # fmt: skip


class WorldWithSamples(World):
    def next_batch(self, step):
        sourced = super().next_batch(step)
        kept = {row: kept_record(row) for row in (0, 3)}
        return SourcedBatch(sourced.batch, sourced.metrics, sourced.weight_versions, kept)


def run_with_samples(tmp_path, world, **settings):
    run = Run(tmp_path, world, **settings)
    run.loop.samples = SampleLog(tmp_path / "samples")
    return run


def test_kept_samples_have_the_log_probabilities_of_the_pass_that_was_compared(tmp_path):
    world = WorldWithSamples()
    world.trainer_logprob = -1.001
    run = run_with_samples(tmp_path, world)
    run.loop.run()
    found = [read_samples(tmp_path / "samples", step) for step in (0, 1)]
    assert [(step.of, [r.group for r in step.samples]) for step in found] == [(4, [0, 3])] * 2
    assert [r.differences[0] for r in found[0].samples] == pytest.approx([-0.001] * 2, abs=1e-6)


def test_of_several_optimizer_steps_the_first_ones_samples_have_been_compared(tmp_path):
    world = WorldWithSamples()
    run = run_with_samples(
        tmp_path, world, steps=1, optimizer_steps_per_rollout=2, rollout={"prompts_per_step": 2},
    )  # fmt: skip
    run.loop.run()
    whole_batch = "logprobs" in world.calls  # old log-probabilities in a pass of their own
    first, last = read_samples(tmp_path / "samples", 0).samples
    assert first.trainer_logprobs == (-1.0,) and last.trainer_logprobs == ((-1.0,) if whole_batch else None)


def test_the_samples_on_which_trainer_and_engines_disagreed_are_kept(tmp_path):
    world = WorldWithSamples()
    world.trainer_logprob = -9.0
    with pytest.raises(TrainingStopped, match="disagree"):
        run_with_samples(tmp_path, world).loop.run()
    assert [r.differences for r in read_samples(tmp_path / "samples", 0).samples] == [(-8.0,), (-8.0,)]


def test_samples_that_cannot_be_written_end_the_run_with_the_weights_under_their_own_step(tmp_path):
    (tmp_path / "samples").write_text("a file is in the way")
    run = run_with_samples(tmp_path, WorldWithSamples(), eval={}, steps=9)
    with pytest.raises(OutputFailed, match=r"the step's samples cannot be written to .*samples: "):
        run.loop.run()
    assert run.world.calls.count("update") == 1 and run.saves == [1], "one update, and it is saved as step 1"
    assert [record["step"] for record in run.records()] == [0]


def test_a_disagreement_is_not_hidden_by_samples_that_cannot_be_written(tmp_path):
    (tmp_path / "samples").write_text("a file is in the way")
    world = WorldWithSamples()
    world.trainer_logprob = -9.0
    with pytest.raises(TrainingStopped, match="disagree"):
        run_with_samples(tmp_path, world).loop.run()


def test_every_metric_of_the_loop_is_explained_in_the_docs(tmp_path):
    run = Run(tmp_path, World())
    run.loop.run()
    names = {name for record in run.records() for name in record if "/" in name}
    assert undocumented(names) == []
    assert {"train/effective_sample_fraction", "train/tokens_per_second", "time/non_generation_seconds"} <= names


def test_the_parts_of_a_step_are_the_whole_step(tmp_path, monkeypatch):
    """By a clock that only the parts move. What is inside another part (wake, logprobs, generate) is not added."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Turns(World):
        def next_batch(self, step):
            now[0] += 10
            return super().next_batch(step)

        def take_gpus(self):
            now[0] += 0.3
            return {"time/sleep_seconds": 0.1, "time/onload_seconds": 0.2}

        def optimizer_step(self):
            now[0] += 3
            return super().optimizer_step()

        def update_reference(self):
            now[0] += 0.7

        def sync_weights(self, step):
            now[0] += 0.9
            return {**super().sync_weights(step), "time/offload_seconds": 0.4, "time/sync_seconds": 0.5}

        def evaluated(self, *, wait):
            now[0] += 2
            return super().evaluated(wait=wait)

    algorithm = {"kl": {"kind": "loss", "coef": 0.1, "reference_update_steps": 1}}
    run = Run(tmp_path, Turns(), steps=3, algorithm=algorithm, eval={"sets": {"heldout": "h"}, "every_steps": 1})
    run.loop.run()
    steps = [record for record in run.records() if "train/loss" in record]
    parts = ("wait", "sleep", "onload", "train", "reference", "offload", "sync", "eval")
    for record in steps:
        assert sum(record.get(f"time/{part}_seconds", 0.0) for part in parts) == pytest.approx(
            record["time/step_seconds"]
        )
    assert {f"time/{part}_seconds" for part in parts} <= steps[0].keys()


def test_a_long_rollout_says_how_long_it_will_take():
    line = "rollout: 30 s, 8 of 32 groups ready, 24 running, about 90 s left"
    assert progress_line(30.0, ready=8, needed=32, running=24, serving=2) == line
    assert "left" not in progress_line(30.0, ready=0, needed=32, running=32, serving=2)
    assert "left" not in progress_line(30.0, ready=32, needed=32, running=0, serving=2)
    alone = progress_line(30.0, ready=8, needed=32, running=24, serving=0)
    assert "no engine serves" in alone and "left" not in alone


def test_without_a_checkpoint_at_the_end_only_what_ends_a_run_early_writes_one(tmp_path):
    settings = {"every_steps": 2, "save_at_end": False}
    for steps, saves in ((3, [2]), (4, [2, 4])):
        run = Run(tmp_path, World(), steps=steps, checkpoint=settings)
        run.loop.run()
        assert run.saves == saves

    good = Run(tmp_path, World(), steps=9, checkpoint={"save_at_end": False})
    good.loop.evaluations.reached = True
    good.loop.run()
    assert good.saves == [1], "eval.stop_at"

    stopped = Run(tmp_path, World(), steps=9, checkpoint=settings)
    sync = stopped.world.sync_weights
    stopped.world.sync_weights = lambda step: setattr(stopped.stop, "requested", step and signal.SIGTERM) or sync(step)
    stopped.loop.run()
    assert stopped.saves == [1]

    failing = Run(tmp_path, World(), steps=9, checkpoint=settings)
    given = failing.world.next_batch

    def fails(step):
        if step == 1:
            raise RltoolError("failing rewards")
        return given(step)

    failing.world.next_batch = fails
    with pytest.raises(RltoolError, match="failing rewards"):
        failing.loop.run()
    assert failing.saves == [1]
