"""The driver's endpoint on a real socket: keys, errors, deadlines, where it listens, and its callers."""

from __future__ import annotations

import json
import os
import stat
import threading
from contextlib import ExitStack

import psutil
import pytest
import requests

from rltool.cli import main
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.run_client import Driver, choose_driver
from rltool.engines.run_status import run_status
from rltool.errors import EngineConflict, EngineError, EngineUnreachable, RltoolError, UnknownEngine, UsageError
from rltool.processes.run_directory import open_run
from rltool.processes.state import read_state, state_file, state_of_this_process, write_state
from rltool.training.observe.live_metrics import LiveMetrics
from rltool.training.run_server import Deadlines, RunServer, run_server
from tests.contract.fakes.vllm import FakeVllm

A, B, C = "http://127.0.0.1:7001", "http://127.0.0.1:7002", "http://127.0.0.1:7003"
VERSION = "119f:1:12"


class FakeRun:
    """A run of two engines, one of which was too slow for the last sync. `release` lets calls go on that hang."""

    def __init__(self):
        self.fleet = {url: self.entry(url, state) for url, state in ((A, "ready"), (B, "stale"))}
        self.calls = []
        self.equal = False
        self.present = []
        self.raises = None
        self.hangs = False
        self.release = threading.Event()

    @staticmethod
    def entry(url, state):
        return {
            "url": url,
            "state": state,
            "reason": "[no] answer in 30 s",
            "since_seconds": 300.0,
            "weight_version": VERSION,
            "takes_weights": True,
        }

    def answer(self, name, *arguments):
        self.calls.append((name, *arguments))
        if self.hangs:
            self.release.wait(30)
        if self.raises is not None:
            raise self.raises

    def status(self):
        self.answer("status")
        groups = {"issued": 70, "running": 8, "partial": 0, "ready": 20, "in_hand": 32, "trained": 9, "dropped": 1}
        return {
            "step": 12,
            "steps": 100,
            "weight_version": VERSION,
            "engines": list(self.fleet.values()),
            "groups": groups,
            "requests_in_flight": 64,
            "progress": "generating",
        }

    def engines(self):
        self.answer("engines")
        return list(self.fleet.values())

    def all_engines(self):
        self.answer("present")
        return self.present

    def add_engine(self, engine):
        self.answer("add", engine)
        if engine.url in self.fleet:
            raise EngineConflict(f"{engine.url} is an engine of this run already")
        self.fleet[engine.url] = self.entry(engine.url, "starting")
        return self.fleet[engine.url]

    def remove_engine(self, url):
        self.answer("remove", url)
        if url not in self.fleet:
            raise UnknownEngine(f"{url} is no engine of this run")
        self.fleet[url]["state"] = "draining"
        return self.fleet[url]

    def compare_weights(self, urls):
        self.answer("compare", urls)
        rows = [{"url": A, "equal": True, "lines": ["4 of 4"]}, {"url": B, "equal": self.equal, "lines": ["differs"]}]
        return {"weight_version": VERSION, "engines": [row for row in rows if not urls or row["url"] in urls]}


@pytest.fixture
def control():
    control = FakeRun()
    yield control
    control.release.set()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    return open_run("job", create=True)


@pytest.fixture
def served(run, control):
    """served(run) is the URL of the endpoint of this process as the driver of a run."""
    with ExitStack() as stack:

        def serve(which=run, **options):
            state = state_of_this_process("train", argv=["rltool", "train"])
            write_state(which, state)
            return stack.enter_context(run_server(which, state, control, **options))

        yield serve


@pytest.fixture
def url(served):
    return served()


@pytest.fixture
def ask(run, url):
    """ask(method, path) -> (status, decoded reply), with the run's key."""

    def send(method, path, key=None, **options):
        headers = {"Authorization": f"Bearer {key or run.key_file.read_text()}"}
        reply = requests.request(method, url + path, headers=headers, timeout=30, **options)
        return reply.status_code, reply.json()

    return send


# -- the server


def test_status_and_engines_are_what_the_run_says(ask, control):
    assert ask("GET", "/status") == (200, control.status())
    assert ask("GET", "/engines") == (200, list(control.fleet.values()))


def test_engines_come_and_go(ask, control, tmp_path):
    assert ask("POST", "/engines", json={"url": C + "/", "key_file": str(tmp_path / "key")}) == (200, control.fleet[C])
    assert ask("DELETE", "/engines", params={"url": "127.0.0.1:7001"}) == (200, control.fleet[A])
    assert control.calls == [("add", EngineEndpoint(url=C, key_file=tmp_path / "key")), ("remove", A)]


@pytest.mark.parametrize("said", [{}, {"group": "far"}, {"group": "far", "role": "prefill", "key_file": None}])
def test_an_engine_comes_with_its_group_and_role_and_with_the_defaults_where_it_says_none(ask, control, said):
    assert ask("POST", "/engines", json={"url": C, **said})[0] == 200
    assert control.calls == [("add", EngineEndpoint(url=C, **said))]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Bearer \xe9", "{key}"])
def test_nothing_is_done_without_the_key(run, url, control, method, header):
    headers = {"Authorization": header.replace("{key}", run.key_file.read_text())} if header else {}
    for path in ("/status", "/engines", "/engines?url=" + A, "/no-such-route"):
        reply = requests.request(method, url + path, headers=headers, json={"url": C}, timeout=30)
        assert (reply.status_code, list(reply.json())) == (401, ["error"])
    assert control.calls == []


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "said"),
    [
        ("POST", "/engines", {"data": "{"}, 400, "not JSON"),
        ("POST", "/engines", {"json": [A]}, 400, "wants"),
        ("POST", "/engines", {"json": {"key_file": None}}, 400, "wants"),
        ("POST", "/engines", {"json": {"url": C, "key": "secret"}}, 400, "wants"),
        ("POST", "/engines", {"json": {"url": C, "key_file": "key"}}, 400, "absolute"),
        ("POST", "/engines", {"json": {"url": C, "group": 1}}, 400, "group: "),
        ("POST", "/engines", {"json": {"url": C, "group": None}}, 400, "group: "),
        ("POST", "/engines", {"json": {"url": C, "role": "judge"}}, 400, "role: "),
        ("POST", "/engines", {"json": {"url": C, "takes_weights": False}}, 400, "wants"),
        ("POST", "/engines", {"json": {"url": "ftp://a:1"}}, 400, "not http"),
        ("POST", "/engines", {"json": {"url": "@runs/x/endpoints.json"}}, 400, "one engine"),
        ("POST", "/engines", {"json": {"url": "a:1,b:2"}}, 400, "one engine"),
        ("DELETE", "/engines", {}, 400, "?url="),
        ("DELETE", "/engines", {"params": {"url": A, "force": "1"}}, 400, "?url="),
        ("DELETE", "/engines", {"params": {"url": "nonsense"}}, 400, "no port"),
        ("DELETE", "/engines", {"params": {"url": C}}, 404, "no engine of this run"),
        ("POST", "/weights/compare", {"json": {}}, 400, "wants"),
        ("POST", "/weights/compare", {"json": {"engines": A}}, 400, "wants"),
        ("POST", "/weights/compare", {"json": {"engines": [], "tolerance": 1}}, 400, "wants"),
        ("GET", "/pause", {}, 404, "/pause"),
        ("PUT", "/engines", {}, 405, "Method Not Allowed"),
        ("POST", "/engines", {"json": {"url": A}}, 409, "already"),
    ],
)
def test_a_request_that_is_wrong_is_told_so_in_json(ask, method, path, options, status, said):
    found, reply = ask(method, path, **options)
    assert (found, list(reply)) == (status, ["error"])
    assert said in reply["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 400),
        (UnknownEngine("x"), 404),
        (EngineConflict("x"), 409),
        (EngineError("x"), 503),
        (RltoolError("x"), 503),
        (TimeoutError("x"), 503),
    ],
)
def test_what_the_run_raises_has_its_status(ask, control, error, status):
    control.raises = error
    assert ask("GET", "/status") == (status, {"error": "x"})


def test_a_fault_of_ours_is_not_hidden(ask, control, caplog):
    control.raises = KeyError("groups")
    assert ask("GET", "/status") == (500, {"error": "KeyError: 'groups'"})
    assert "Traceback" in caplog.text


def test_a_call_that_hangs_is_answered_at_its_deadline_and_the_next_one_is_served(served, run, control):
    url = served(deadlines=Deadlines(read=0.2, change=30.0))
    headers = {"Authorization": f"Bearer {run.key_file.read_text()}"}
    control.hangs = True
    reply = requests.get(url + "/status", headers=headers, timeout=30)
    assert (reply.status_code, "within 0.2 s" in reply.json()["error"]) == (503, True)
    control.hangs = False
    assert requests.get(url + "/engines", headers=headers, timeout=30).status_code == 200


def test_calls_that_hang_do_not_pile_up(served, run, control):
    url = served(deadlines=Deadlines(read=0.01))
    headers = {"Authorization": f"Bearer {run.key_file.read_text()}"}
    control.hangs = True
    said = [requests.get(url + "/status", headers=headers, timeout=30).json()["error"] for _ in range(20)]
    assert len(control.calls) == 16 and "16 calls are waiting" in said[-1]
    control.hangs = False
    control.release.set()
    while requests.get(url + "/status", headers=headers, timeout=30).status_code != 200:  # as soon as they are back
        pass


def test_it_listens_on_loopback_alone(url):
    port = int(url.rpartition(":")[2])
    listening = [
        c.laddr.ip
        for c in psutil.Process(os.getpid()).net_connections("tcp")
        if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_the_key_is_in_a_private_file_and_the_url_in_the_state_while_it_serves(run, control):
    state = state_of_this_process("train", argv=["rltool", "train"])
    write_state(run, state)
    with run_server(run, state, control) as url:
        assert read_state(run, "train").url == url
        assert stat.S_IMODE(run.key_file.stat().st_mode) == 0o600
        assert run.key_file.read_text() not in state_file(run, "train").read_text()
        write_state(run, read_state(run, "train").model_copy(update={"stopping": True}))
    assert read_state(run, "train") == state.model_copy(update={"stopping": True})
    with pytest.raises(requests.ConnectionError):
        requests.get(url + "/status", timeout=30)


def test_it_can_be_closed_while_a_call_hangs(run, control):
    server = RunServer(control, "key", deadlines=Deadlines(read=600.0))
    server.start()
    control.hangs = True
    failed = threading.Event()

    def ask():
        try:
            requests.get(server.url + "/status", headers={"Authorization": "Bearer key"}, timeout=600)
        except requests.ConnectionError:
            failed.set()

    threading.Thread(target=ask, daemon=True).start()
    while not control.calls:
        pass
    server.close()
    server.close()
    assert failed.wait(30)


def test_an_endpoint_without_a_key_is_refused(control):
    with pytest.raises(ValueError, match="never without a key"):
        RunServer(control, "")


# -- its callers


def run_main(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_the_engines_of_the_run_that_trains_are_listed(url, wide, capsys):
    open_run("newer", create=True)  # not the newest run, but the one that trains
    code, output = run_main(capsys, "engines", "list")
    assert code == 0
    assert "run job" in output
    [row] = [[cell.strip() for cell in line.split("│")][1:-1] for line in output.splitlines() if B in line]
    assert row == [B, "stale", "5 min", VERSION, "[no] answer in 30 s"]


def test_an_engine_is_added_with_its_key_and_removed(url, control, wide, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_main(capsys, "engines", "add", "127.0.0.1:7003", "--key-file", "key") == (
        0,
        f"{C}: added to run job (starting: [no] answer in 30 s)\n",
    )
    assert run_main(capsys, "engines", "remove", C) == (0, f"{C}: leaves run job (draining: [no] answer in 30 s)\n")
    assert control.calls == [("add", EngineEndpoint(url=C, key_file=tmp_path / "key")), ("remove", C)]


def test_engines_of_a_file_are_added_with_the_key_the_group_and_the_role_that_it_names(url, control, capsys, tmp_path):
    engines = [{"url": C, "key_file": "key", "group": "far", "role": "decode", "dialect": "vllm"}]
    (tmp_path / "e").write_text(json.dumps({"version": 1, "models": {"policy": {"engines": engines}}}))
    assert run_main(capsys, "engines", "add", f"@{tmp_path}/e")[0] == 0
    assert control.calls == [("add", EngineEndpoint(url=C, key_file=tmp_path / "key", group="far", role="decode"))]
    (tmp_path / "e").write_text(
        json.dumps({"version": 1, "models": {"policy": {"update_weights": False, "engines": engines}}})
    )
    code, output = run_main(capsys, "engines", "add", f"@{tmp_path}/e")
    assert code == 2 and "update_weights is false" in output
    assert len(control.calls) == 1


@pytest.mark.parametrize(
    ("verb", "address", "code", "said"), [("add", A, 1, "already"), ("remove", C, 1, "no engine of this run")]
)
def test_the_reason_of_a_refusal_is_what_the_user_reads(url, capsys, verb, address, code, said):
    found, output = run_main(capsys, "engines", verb, address)
    assert found == code and said in output and "{" not in output


def test_a_run_compares_its_engines_with_itself_and_one_that_differs_is_exit_code_1(url, control, wide, capsys):
    code, output = run_main(capsys, "debug", "weights", "--run", "job")
    assert code == 1 and f"{A}: the same weights as the trainer of run job ({VERSION})\n  4 of 4\n" in output
    assert f"{B}: other weights than the trainer of run job" in output
    control.equal = True
    assert run_main(capsys, "debug", "weights", "--run", "job")[0] == 0
    assert run_main(capsys, "debug", "weights", "127.0.0.1:7001", "--run", "job")[0] == 0
    assert control.calls == [("compare", []), ("compare", []), ("compare", [A])]


def test_without_a_run_that_trains_the_message_says_so(run, capsys):
    code, output = run_main(capsys, "engines", "list")
    assert code == 2 and "no run in" in output and "is training" in output
    code, output = run_main(capsys, "engines", "list", "--run", "job")
    assert code == 2 and "run job is not training" in output


def test_several_runs_that_train_have_to_be_told_apart(served, capsys):
    served()
    served(open_run("other", create=True))
    code, output = run_main(capsys, "engines", "list")
    assert code == 2 and "several runs are training" in output and "job" in output and "other" in output
    assert choose_driver("other")[0].name == "other"


def test_a_state_of_a_driver_that_has_ended_is_not_asked(run, url):
    state = read_state(run, "train")
    write_state(run, state.model_copy(update={"start_time": state.start_time - 3600}))
    with pytest.raises(UsageError, match="not training"):
        choose_driver("job")


def test_a_foreign_key_and_a_driver_that_does_not_answer_are_errors_of_their_own(
    run, url, tmp_path, control, monkeypatch
):
    (tmp_path / "key").write_text("wrong")
    with pytest.raises(RltoolError, match="refuses the key"):
        Driver(url, tmp_path / "key").status()
    control.raises = TimeoutError("busy")
    with pytest.raises(EngineUnreachable, match="busy"):
        Driver(url, run.key_file).status()


def test_status_shows_step_groups_and_engines_of_the_living_run(run, url, wide, capsys):
    code, output = run_main(capsys, "status")
    assert code == 0
    assert "step 12 of 100; 1 of 2 engines serve; prompt groups: 70 issued, 8 running, 0 partial" in output
    assert "32 in hand" in output and "64 requests in flight" in output and "generating" in output and "stale" in output
    [shown] = json.loads(run_main(capsys, "status", "--json")[1])["runs"]
    assert shown["training"]["groups"]["issued"] == 70
    [row] = shown["processes"]
    assert (row["role"], row["health"], row["weight_version"], row["url"]) == ("train", "ok", VERSION, url)


def test_status_of_a_driver_that_does_not_answer_says_why_and_shows_the_rest(run, url, control, wide, capsys):
    control.raises = TimeoutError("busy")
    report = run_status(run)
    assert report.training is None and report.processes[0].health == "does not answer: busy"
    assert run_main(capsys, "status")[0] == 0


def test_status_without_a_driver_has_no_training(run):
    assert (run_status(run).processes, run_status(run).training) == ([], None)


def test_prometheus_and_history_are_served_with_the_key_and_without_the_rollout_manager(served, run, control):
    live = LiveMetrics("job")
    live.log(0, {"rollout/reward_mean": 0.5})
    url = served(live=live)
    key = {"Authorization": f"Bearer {run.key_file.read_text().strip()}"}
    assert requests.get(f"{url}/metrics", timeout=60.0).status_code == 401
    reply = requests.get(f"{url}/metrics", headers=key, timeout=60.0)
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'rltool_rollout_reward_mean{run="job"} 0.5' in reply.text and 'rltool_step{run="job"} 12.0' in reply.text
    control.raises = EngineError("the manager has gone")
    reply = requests.get(f"{url}/metrics", headers=key, timeout=60.0)
    assert reply.status_code == 200 and "rltool_rollout_reward_mean" in reply.text and "rltool_step" not in reply.text
    assert Driver(url, run.key_file).history()["records"] == [{"step": 0, "metrics": {"rollout/reward_mean": 0.5}}]


def test_the_metrics_of_all_engines_are_one_page_with_their_keys_and_an_engine_that_is_down_is_0(
    served, run, control, tmp_path, monkeypatch
):
    url = served(live=LiveMetrics("job"))
    (tmp_path / "key").write_text("engine-key")

    def page() -> list[str]:
        reply = requests.get(f"{url}/metrics/engines", headers={"Authorization": run.key_file.read_text()}, timeout=60)
        assert reply.status_code == 401
        key = {"Authorization": f"Bearer {run.key_file.read_text().strip()}"}
        reply = requests.get(f"{url}/metrics/engines", headers=key, timeout=60.0)
        assert reply.status_code == 200 and reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return reply.text.splitlines()

    with FakeVllm(key="engine-key") as one, FakeVllm(key="engine-key") as two, FakeVllm(key="another") as three:
        control.present = [
            EngineEndpoint(url=engine.url, group=group, key_file=tmp_path / "key")
            for engine, group in ((one, "a"), (two, "b"), (three, "b"))
        ]
        instances = [engine.url.removeprefix("http://") for engine in (one, two, three)]
        lines = page()
        assert [line for line in lines if line.startswith("rltool_engine_up")] == [
            f'rltool_engine_up{{instance="{instance}",group="{group}",run="job"}} {up}'
            for instance, group, up in zip(instances, "abb", (1, 1, 0), strict=True)
        ]
        running = [line for line in lines if line.startswith("vllm:num_requests_running")]
        assert running == [
            f'vllm:num_requests_running{{instance="{instance}",group="{group}",run="job",engine="0",'
            f'model_name="{one.model_id}"}} 0.0'
            for instance, group in zip(instances[:2], "ab", strict=True)
        ]
        assert lines.count("# TYPE vllm:num_requests_running gauge") == 1
        monkeypatch.setattr("rltool.engines.metrics_text.MOST_BYTES", 100)
        two.fail("/metrics", 500)
        assert not [line for line in page() if line.startswith("vllm:")]
    assert {line[-1] for line in page()[1:]} == {"0"}


def test_top_prints_one_frame_of_a_living_run(served, run, capsys):
    live = LiveMetrics("job")
    live.log(0, {"rollout/reward_mean": 0.5, "rollout/staleness_max": 1.0})
    served(live=live)
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "\x1b" not in out
    assert "run job" in out and "step 12 of 100" in out and A in out and "staleness, oldest" in out


def test_top_without_a_run_that_trains_says_so(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once"])
    assert ended.value.code == 2 and "is training" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error_that_names_the_setting(served, run, control):
    taken = int(served().rpartition(":")[2])
    with pytest.raises(RltoolError, match="monitor.endpoint_port"):
        RunServer(control, "key", port=taken).start()
