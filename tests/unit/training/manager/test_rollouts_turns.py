"""The driver's part of colocated engines: it tells the rollout manager whose turn it is, and nothing twice."""

from __future__ import annotations

import io
import signal
import time
from types import SimpleNamespace

import pytest

from rltool.agents.gateway_process import GatewayPlace
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.weight_version import Lineage
from rltool.errors import OutputFailed, RltoolError, UsageError
from rltool.rollout.collector import CollectionInterrupted
from rltool.rollout.measure.evaluation import Evaluated
from rltool.terminal import Console
from rltool.training.manager import rollouts
from rltool.training.manager.batch import Rollout
from rltool.training.manager.rollouts import RolloutFiles, Rollouts
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.sync_report import SyncReport


class Manager:
    """The rollout manager's actor: what was asked of it, in order. fails: a call that does not succeed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""
        self.is_ready = True
        self.engines: tuple[EngineEndpoint, ...] = ()

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *arguments, **_: (name, arguments))

    def answer(self, refs, *_, **__):
        ((name, arguments),) = refs
        if name == "events":
            return [[]]
        if name == "add_engine":
            self.engines += arguments
        self.calls.append(" ".join([name, *map(str, arguments)]))
        if name == self.fails:
            raise RltoolError("no engine took the weights")
        answers = {
            "start": "", "close": [],
            "sync_weights": SyncReport("v", 1, 0.1), "next_batch": Rollout(None, {}, ()), "evaluate": Evaluated({}, {}),
            "present_engines": self.engines, "free_gpus": 0.0,
        }  # fmt: skip
        return [answers.get(name)]


@pytest.fixture
def manager(monkeypatch):
    made = Manager()
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **__: made))
    monkeypatch.setattr(rollouts, "RolloutActor", actor)
    monkeypatch.setattr(rollouts, "this_node", lambda: None)
    monkeypatch.setattr(rollouts, "get_all", made.answer)
    monkeypatch.setattr(rollouts, "is_ready", lambda ref: made.is_ready)
    return made


def driver(tmp_path, mode: str, *, dump_dir=None, **sections) -> Rollouts:
    config = TrainConfig(model={"path": "m"}, engines={"mode": mode, "groups": ({},)}, **sections)
    return Rollouts(
        config, SimpleNamespace(endpoints=(), router=None), SimpleNamespace(lineage=Lineage("a" * 32, 0)),
        RolloutFiles(
            dump_dir, tmp_path / "evals", None, tmp_path / "endpoints.json",
            GatewayPlace(tmp_path, tmp_path / "key", tmp_path / "log"),
        ),
        console=Console(file=io.StringIO()), stop=StopSignal(),
    )  # fmt: skip


def test_the_trainer_gets_the_gpus_once_and_a_sync_gives_them_back(manager, tmp_path):
    it = driver(tmp_path, "colocate")
    it.sync_weights(0)
    it.next_batch(0)
    for _ in range(3):  # log-probabilities, gradients, the optimizer
        it.free_gpus()
    it.sync_weights(1)
    it.next_batch(1)
    it.free_gpus()
    assert manager.calls == [
        "sync_weights 0", "next_batch 0", "free_gpus", "sync_weights 1", "next_batch 1", "free_gpus"
    ]  # fmt: skip


def test_what_the_turns_cost_is_told_beside_the_sync(manager, tmp_path, monkeypatch):
    """The driver's whole time is in the keys: of a sync of 0.9 s 0.3 s were the ranks giving memory away."""
    now, it = [0.0], driver(tmp_path, "colocate")
    monkeypatch.setattr(rollouts.time, "perf_counter", lambda: now[0])

    def answer(refs, *_, **__):
        ((name, _),) = refs
        now[0] += {"sync_weights": 0.9, "free_gpus": 0.6}.get(name, 0.0)
        return [{"sync_weights": SyncReport("v", 1, 0.5, wake=0.2, offload=0.3), "free_gpus": 0.4}.get(name, [])]

    monkeypatch.setattr(rollouts, "get_all", answer)
    found = it.sync_weights(0)
    assert found["time/sync_seconds"] == pytest.approx(0.6) and found["weights/sync_seconds"] == 0.5
    assert (found["time/offload_seconds"], found["time/wake_seconds"]) == (0.3, 0.2)
    assert it.free_gpus() == {"time/sleep_seconds": pytest.approx(0.2), "time/onload_seconds": 0.4}
    assert it.free_gpus() == {}, "they have gone"
    alone = driver(tmp_path, "managed")
    assert not {"time/offload_seconds", "time/wake_seconds"} & alone.sync_weights(0).keys()


def test_a_dump_that_cannot_be_written_is_an_error_on_which_the_run_saves(manager, tmp_path):
    (tmp_path / "rollouts").write_text("a file is in the way")
    it = driver(tmp_path, "colocate", dump_dir=tmp_path / "rollouts")
    with pytest.raises(OutputFailed, match=r"the rollout \(rollout.dump\) cannot be written to .*rollouts: "):
        it.next_batch(0)


def test_engines_that_slept_since_their_sync_are_synced_before_they_generate(manager, tmp_path):
    it = driver(tmp_path, "colocate")
    it.sync_weights(3)
    it.free_gpus()  # a checkpoint
    it.next_batch(3)
    it.free_gpus()
    it.start_evaluation(3)
    assert it.evaluated(wait=True) == {}
    assert manager.calls == [
        "sync_weights 3", "free_gpus", "sync_weights 3", "next_batch 3", "free_gpus", "sync_weights 3", "evaluate"
    ]  # fmt: skip
    assert it.weight_version.endswith(":3")


def test_an_evaluation_is_asked_for_its_metrics_only_when_it_has_ended_or_is_waited_for(manager, tmp_path):
    it = driver(tmp_path, "managed")
    it.sync_weights(2)
    it.start_evaluation(2)
    manager.is_ready = False
    assert it.evaluated(wait=False) is None and manager.calls == ["sync_weights 2"]
    manager.is_ready = True
    assert it.evaluated(wait=False) == {} and manager.calls[-1] == "evaluate"
    it.start_evaluation(2)
    manager.is_ready = False
    assert it.evaluated(wait=True) == {}


def test_engines_for_evaluation_alone_get_the_weights_before_it_starts(manager, tmp_path):
    it = driver(tmp_path, "managed", eval={"engines": ["h:1"], "sets": {"a": "a.jsonl"}})
    it.sync_weights(2)
    it.start_evaluation(2)
    assert manager.calls == ["sync_weights 2", "hold_evaluation_engines 2"]
    assert it.evaluated(wait=True) == {} and manager.calls[-1] == "evaluate"


def test_a_run_that_ends_says_that_it_dropped_an_evaluation_and_how_that_ended_is_nobodys_matter(manager, tmp_path):
    it = driver(tmp_path, "managed")
    it.start()
    it.start_evaluation(4)
    manager.fails = "evaluate"
    it.close()
    assert manager.calls[-1] == "evaluate", "its failure was read, or Ray would print it"
    assert "the evaluation of step 4 was dropped" in it.console.file.getvalue()


def test_after_a_sync_that_failed_the_trainer_gets_its_memory_back(manager, tmp_path):
    it = driver(tmp_path, "colocate")
    it.sync_weights(0)
    it.free_gpus()
    manager.fails = "sync_weights"
    with pytest.raises(RltoolError):
        it.sync_weights(1)
    it.free_gpus()  # for the checkpoint that is written then
    assert manager.calls[-1] == "free_gpus"


def test_engines_with_gpus_of_their_own_keep_them(manager, tmp_path):
    it = driver(tmp_path, "managed")
    it.sync_weights(0)
    it.free_gpus()
    it.next_batch(0)
    assert manager.calls == ["sync_weights 0", "next_batch 0"]


def test_engines_of_others_do_not_join_those_on_the_trainers_gpus(manager, tmp_path):
    it = driver(tmp_path, "colocate")
    with pytest.raises(UsageError, match="change engines.groups"):
        it.add_engine(EngineEndpoint(url="http://h:1"))
    with pytest.raises(UsageError, match="change engines.groups"):
        it.remove_engine("http://h:1")
    assert manager.calls == []


def test_an_engine_that_joins_keeps_its_group_and_role_also_for_the_run_that_resumes(manager, tmp_path):
    it = driver(tmp_path, "managed")
    late = EngineEndpoint(url="http://h:1", key_file=tmp_path / "key", group="far", role="decode")
    it.add_engine(late)
    assert manager.engines == (late,)
    assert Endpoints.load(tmp_path / "endpoints.json").models["policy"].engines == (late,)


def test_what_a_rollout_or_an_evaluation_that_a_stop_cuts_off_raises_is_read(manager, tmp_path, monkeypatch):
    """Ray prints the exception of a call that nobody reads, eleven lines of it."""
    it = driver(tmp_path, "external")

    def answer(refs, *arguments, while_waiting=None, **_):
        if while_waiting is not None:
            while_waiting(0.0)
        if refs[0][0] in ("next_batch", "evaluate"):
            manager.calls.append(f"{refs[0][0]} is read")
            raise CollectionInterrupted("the run is stopping")
        return manager.answer(refs)

    monkeypatch.setattr(rollouts, "get_all", answer)
    it._stop.requested = signal.SIGTERM
    with pytest.raises(StopRequested):
        it.next_batch(0)
    assert manager.calls == ["interrupt", "next_batch is read"]
    it.start_evaluation(0)
    with pytest.raises(StopRequested):
        it.evaluated(wait=True)
    assert manager.calls[2:] == ["interrupt", "evaluate is read"]


def test_the_driver_gives_signs_of_life_one_at_a_time_from_the_start_to_the_end_whatever_it_does(
    manager, tmp_path, monkeypatch
):  # fmt: skip
    said, read = [], []
    monkeypatch.setattr(rollouts, "SIGN_SECONDS", 0.01)
    monkeypatch.setattr(rollouts, "ray", SimpleNamespace(get=read.append))
    manager.driver_is_there = SimpleNamespace(remote=lambda: said.append(len(said)) or said[-1])
    it = driver(tmp_path, "managed")
    it.start()

    def more_than(count: int) -> bool:
        ends = time.monotonic() + 10.0
        while len(said) <= count and time.monotonic() < ends:
            time.sleep(0.01)  # the main thread asks for nothing
        return len(said) > count

    assert more_than(3)
    manager.is_ready = False
    time.sleep(0.05)
    count = len(said)
    time.sleep(0.1)
    assert len(said) == count == len(read) + 1, "of a manager that is busy one is asked for, and no other before"
    manager.is_ready = True
    assert more_than(count)
    it.close()
    count = len(said)
    time.sleep(0.1)
    assert len(said) == count, "a call after the end of Ray would start another"
