"""serve-engines, stop and router add beside runs that train: whom they ask, and what becomes of it. The runs are
stand-ins behind the driver's real endpoint."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rltool.cli import main
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet import joining
from rltool.engines.fleet.joining import join, leave, users_of_engines, users_of_router
from rltool.engines.launch.start import _beside, living_engines
from rltool.errors import EngineConflict, UnknownEngine, UsageError
from rltool.processes.run_directory import list_runs, open_run
from rltool.processes.state import free_role, state_of_this_process, write_state
from rltool.processes.supervise import ProcessGroup
from rltool.training.run_server import run_server

A, B = (EngineEndpoint(url=f"http://127.0.0.1:700{n}", dialect="vllm", key_file=Path("/keys/k")) for n in range(2))
ROUTER = "http://127.0.0.1:7100"


class FakeRun:
    """A run that trains. looks: how often an engine that leaves is still there when it is looked at."""

    def __init__(self, *urls: str, files: tuple[str, ...] = (), router: str | None = None) -> None:
        self.urls, self.files, self.router = list(urls), list(files), router
        self.calls: list[tuple] = []
        self.refusal: Exception | None = None
        self.looks = 0
        self.seconds = 30.0

    def status(self):
        return {"engines": self.rows(), "endpoints_files": self.files, "router": self.router}

    def rows(self):
        return [{"url": url, "state": "ready"} for url in self.urls]

    def engines(self):
        self.calls.append(("look",))
        if len([call for call in self.calls if call == ("look",)]) > self.looks:
            removed = {call[1] for call in self.calls if call[0] == "remove"}
            self.urls = [url for url in self.urls if url not in removed]
        return self.rows()

    def add_engine(self, engine):
        self.calls.append(("add", engine.url, engine.key_file, engine.group, engine.role))
        if self.refusal is not None:
            raise self.refusal
        if engine.url in self.urls:
            raise EngineConflict(f"{engine.url} is an engine of this run already")
        self.urls.append(engine.url)
        return {"url": engine.url, "state": "stale", "reason": "answered its first probe"}

    def remove_engine(self, url):
        self.calls.append(("remove", url))
        if url not in self.urls:
            raise UnknownEngine(f"{url} is no engine of this run")
        return {"url": url, "state": "draining", "leaves_within_seconds": self.seconds}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(name) makes a run directory; runs(name, control) one that trains."""
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(joining, "_POLL_SECONDS", 0.01)
    with ExitStack() as stack:

        def make(name, control=None):
            run = open_run(name, create=True)
            if control is not None:
                state = state_of_this_process("train", argv=["rltool", "train"])
                write_state(run, state)
                stack.enter_context(run_server(run, state, control))
            return run

        yield make


@pytest.fixture
def said():
    return []


def test_engines_join_the_run_itself_and_those_that_were_given_its_file(runs, said):
    own, other, stranger = FakeRun(), FakeRun(), FakeRun(files=("/elsewhere/endpoints.json",))
    run = runs("demo", own)
    other.files = [str(run.endpoints_file)]
    runs("other", other)
    runs("stranger", stranger)
    runs("idle")
    far = B.model_copy(update={"group": "far", "role": "decode"})
    join(users_of_engines(run), [A, far], said.append)
    assert own.calls == other.calls == [
        ("add", A.url, A.key_file, "default", "regular"), ("add", B.url, B.key_file, "far", "decode")
    ]  # fmt: skip
    assert stranger.calls == []
    assert f"{A.url} joins run demo (stale: answered its first probe)" in said and len(said) == 4


def test_a_refusal_is_said_and_the_next_engine_asked_for_all_the_same(runs, said):
    own = FakeRun(A.url)
    run = runs("demo", own)
    join(users_of_engines(run), [A, B], said.append)
    assert "already" in said[0] and "joins" in said[1]
    own.refusal = UsageError("has a vocabulary of 65")
    join(users_of_engines(run), [EngineEndpoint(url="http://127.0.0.1:7009")], said.append)
    assert "has not joined run demo" in said[2] and "vocabulary of 65" in said[2]


def test_leaving_waits_until_the_run_has_let_go(runs, said):
    own = FakeRun(A.url, B.url)
    own.looks = 3
    run = runs("demo", own)
    leave(users_of_engines(run), [A.url, "http://127.0.0.1:7009"], said.append)
    assert own.calls == [("remove", A.url), *[("look",)] * 4], "B stays, and one that it does not have is not asked for"
    assert own.urls == [B.url] and said == [f"{A.url} leaves run demo, within 30 s"]


def test_a_run_that_does_not_let_go_holds_nobody_for_ever(runs, said, monkeypatch):
    monkeypatch.setattr(joining, "_MARGIN_SECONDS", 0.1)
    own = FakeRun(A.url)
    own.looks, own.seconds = 10**9, 0.1
    leave(users_of_engines(runs("demo", own)), [A.url], said.append)
    assert said[-1] == f"run demo has not released {A.url} in time"


def test_engines_are_started_beside_living_ones(runs):
    run = runs("demo")
    for role, url in (("engine-0", "http://127.0.0.1:7000"), ("engine-3", None), ("serve-engines", None)):
        write_state(run, state_of_this_process(role, argv=["x"], url=url))
    dead = state_of_this_process("engine-7", argv=["x"])
    write_state(run, dead.model_copy(update={"start_time": dead.start_time - 3600}))
    assert living_engines(run) == {0: "http://127.0.0.1:7000", 3: None}
    assert free_role("serve-engines", run) == "serve-engines-2" and free_role("router", run) == "router"


NEW = {"policy": ModelEndpoints(engines=(B,))}


def test_a_start_keeps_living_engines_in_the_file_and_forgets_those_of_an_earlier_start(runs):
    run, gone = runs("demo"), EngineEndpoint(url="http://127.0.0.1:7009")
    file = Endpoints(models={"policy": ModelEndpoints(engines=(A, gone), data_url=ROUTER)})
    found = _beside(file, NEW, run, {0: A.url})
    assert found.models["policy"] == ModelEndpoints(engines=(A, B), data_url=ROUTER)
    alone = _beside(file, NEW, run, {})
    assert alone == Endpoints(models={"policy": ModelEndpoints(engines=(B,))}), "nor its router"


def test_engines_of_another_model_are_written_beside_them(runs):
    run, judge = runs("demo"), ModelEndpoints(update_weights=False, engines=(B,))
    file = Endpoints(models={"policy": ModelEndpoints(engines=(A,), data_url=ROUTER)})
    found = _beside(file, {"judge": judge}, run, {0: A.url})
    assert found.models == {"policy": ModelEndpoints(engines=(A,), data_url=ROUTER), "judge": judge}


def test_a_start_beside_a_run_that_trains_forgets_none_of_its_engines(runs):
    run = runs("demo", FakeRun(A.url))
    file = Endpoints(models={"policy": ModelEndpoints(engines=(A,))})
    assert _beside(file, NEW, run, {}).models["policy"].engines == (A, B)


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_a_damaged_or_deleted_run_beside_it_keeps_no_engine_from_leaving(runs, said, content, monkeypatch):
    own = FakeRun(A.url)
    run, marker = runs("demo", own), runs("other").state_dir / "run.json"
    if content is None:  # between listing and reading
        marker.rename(marker.with_name("moved"))
        listed = [run.state_dir / "run.json", marker]
        monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(listed))
    else:
        marker.write_text(content)
    assert [user.run.name for user in users_of_engines(run)] == ["demo"]
    if content is not None:
        with pytest.raises(UsageError, match=r"other/state/run\.json"):
            list_runs()


# -- the orderly end


@pytest.mark.parametrize(
    ("error", "called"), [(None, True), (KeyboardInterrupt, True), (RuntimeError, False)], ids=str
)
def test_engines_leave_before_an_orderly_end_and_not_after_a_failure(runs, error, called):
    events = []

    def body():
        with ProcessGroup(runs("demo")) as group:
            group.processes.append(_Child(events))  # pyright: ignore[reportArgumentType]
            group.before_stop = lambda: events.append("leave")
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(error):
            body()
    assert events == (["leave", "stopped"] if called else ["stopped"])


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), UsageError("no such run"), TypeError("a bug")])
@pytest.mark.parametrize("end", [None, KeyboardInterrupt()], ids=["done", "interrupted"])
def test_what_goes_wrong_before_an_orderly_end_is_noted_and_keeps_no_process_alive(runs, error, end):
    def leave_nobody():
        raise error

    def note(line):
        noted.append(line)
        raise OSError(5, "Input/output error")  # the terminal is gone

    events, noted = [], []
    with suppress(KeyboardInterrupt), ProcessGroup(runs("demo"), note=note) as group:
        group.processes.append(_Child(events))  # pyright: ignore[reportArgumentType]
        group.before_stop = leave_nobody
        if end is not None:
            raise end
    assert events == ["stopped"] and len(noted) == 1
    assert f"{type(error).__name__}: {error}" in noted[0]
    assert end is None or end.__notes__[-1] == noted[0]


class _Child:
    """A process that has ended, as ProcessGroup stops it."""

    def __init__(self, events):
        self.events = events
        self.run, self.role = open_run("demo", create=True), "engine-0"
        ended = state_of_this_process(self.role, argv=["x"])
        self.state = ended.model_copy(update={"start_time": ended.start_time - 3600, "session_leader": False})
        self.popen = self

    def wait(self):
        self.events.append("stopped")


# -- stop


def run_main(*argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code


@pytest.fixture
def stopped(monkeypatch):
    """What `rltool stop` would have stopped; nothing is."""
    calls = []
    monkeypatch.setattr("rltool.commands.stop.stop_run", lambda run, roles, **_: calls.append((run.name, roles)) or [])
    return calls


def test_an_engine_that_is_stopped_alone_leaves_the_living_run_first(runs, stopped):
    own = FakeRun(A.url, B.url)
    run = runs("demo", own)
    write_state(run, state_of_this_process("engine-0", argv=["x"], url=A.url))
    assert run_main("stop", "--run", "demo", "engine-0") == 0
    assert own.calls == [("remove", A.url), ("look",)] and stopped == [("demo", ["engine-0"])]


def test_an_engine_of_another_host_is_not_stopped_from_here_and_leaves_no_run(runs, stopped):
    own = FakeRun(A.url, B.url)
    engine = state_of_this_process("engine-0", argv=["x"], url=A.url)
    write_state(runs("demo", own), engine.model_copy(update={"boot": "of-host-a", "host": "host-a"}))
    assert run_main("stop", "--run", "demo", "engine-0") == 0
    assert own.calls == []


def test_a_whole_run_that_is_stopped_asks_only_the_others_that_use_its_engines(runs, stopped):
    own, other = FakeRun(A.url), FakeRun(A.url)
    run = runs("demo", own)
    other.files = [str(run.endpoints_file)]
    runs("other", other)
    write_state(run, state_of_this_process("engine-0", argv=["x"], url=A.url))
    assert run_main("stop", "--run", "demo") == 0
    assert own.calls == [], "its trainer ends before its engines"
    assert other.calls == [("remove", A.url), ("look",)]


# -- the router


@pytest.fixture
def router(runs, monkeypatch):
    """The router of run demo; `changes`: what was asked of it directly."""
    changes = []
    runs("demo")
    endpoint = EngineEndpoint(url=ROUTER, dialect="sglang", key_file=Path("/keys/router"))
    monkeypatch.setattr("rltool.commands.router.running_router", lambda run: endpoint)
    monkeypatch.setattr(
        "rltool.commands.router.add_worker", lambda r, e, timeout: changes.append(("add", e.url, e.key_file)) or e
    )
    monkeypatch.setattr(
        "rltool.commands.router.remove_worker", lambda r, url, timeout: changes.append(("remove", url)) or False
    )
    return changes


def test_an_engine_that_is_added_to_a_router_joins_the_run_that_trains_through_it(runs, router, capsys):
    through, beside = FakeRun(router=ROUTER), FakeRun(router="http://127.0.0.1:1")
    run = runs("train", through)
    runs("other", beside)
    assert [user.run.name for user in users_of_router(run, ROUTER)] == ["train"]
    assert run_main("router", "add", A.url, "--run", "demo") == 0
    assert through.calls == [("add", A.url, Path("/keys/router"), "default", "regular")] and beside.calls == []
    assert router == [], "the run adds it itself, once it has the weights"
    assert run_main("router", "remove", A.url, "--run", "demo") == 0
    assert through.calls[1:] == [("remove", A.url), ("look",)] and router == [("remove", A.url)]


def test_without_a_run_that_trains_or_with_no_join_the_router_itself_is_asked(runs, router):
    assert run_main("router", "add", A.url, "--run", "demo") == 0
    through = FakeRun(router=ROUTER)
    runs("train", through)
    assert run_main("router", "add", B.url, "--run", "demo", "--no-join") == 0
    assert through.calls == [] and router == [("add", e.url, Path("/keys/router")) for e in (A, B)]
