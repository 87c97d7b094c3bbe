import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rltool.errors import UsageError
from rltool.processes.files import write_json_atomic
from rltool.processes.run_choice import run_to_train
from rltool.processes.run_directory import attempt_of, check_writable, list_runs, open_run, plan_run, runs_root


def test_named_run_is_made_once_and_keeps_its_identity(tmp_path):
    first = open_run("a", create=True, root=tmp_path)
    again = open_run("a", create=True, root=tmp_path)
    assert first == again
    assert first.run_id == again.run_id
    assert first.path.is_absolute()


def test_without_a_name_create_makes_a_fresh_run_each_time(tmp_path):
    names = {open_run(None, create=True, root=tmp_path).name for _ in range(3)}
    assert len(names) == 3


def test_without_a_name_the_newest_run_is_opened(tmp_path):
    for name in ("zebra", "apple"):
        open_run(name, create=True, root=tmp_path)
    open_run("zebra", create=True, root=tmp_path)  # opening again does not make it newer
    assert open_run(None, create=False, root=tmp_path).name == "apple"


def test_a_missing_run_is_a_usage_error_that_lists_the_known_ones(tmp_path):
    open_run("known", create=True, root=tmp_path)
    with pytest.raises(UsageError, match="known"):
        open_run("unknown", create=False, root=tmp_path)


def test_no_run_at_all_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no run"):
        open_run(None, create=False, root=tmp_path)


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a b", "/etc"])
def test_a_run_name_that_is_a_path_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="a run.s name is"):
        open_run(name, create=True, root=tmp_path)


def test_the_environment_variable_moves_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "elsewhere"))
    assert open_run("a", create=True).path == tmp_path / "elsewhere" / "a"
    assert runs_root(tmp_path) == tmp_path


def test_a_directory_without_marker_is_no_run(tmp_path):
    (tmp_path / "stray").mkdir()
    assert list_runs(tmp_path) == []


def test_the_key_is_private_and_never_changes(tmp_path):
    run = open_run("a", create=True, root=tmp_path)
    key = run.ensure_key().read_text()
    assert len(key) >= 32
    assert run.ensure_key().read_text() == key
    assert stat.S_IMODE(run.key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.state_dir.stat().st_mode) == 0o700


def test_metrics_or_a_checkpoint_make_a_run_used(tmp_path):
    run = open_run("a", create=True, root=tmp_path)
    run.metrics_file.touch()
    assert not run.is_used
    (run.checkpoints_dir / "step_3").mkdir(parents=True)
    assert run.is_used
    other = open_run("b", create=True, root=tmp_path)
    other.metrics_file.write_text("{}\n")
    assert other.is_used


def test_roles_share_an_attempt_until_one_is_started_again(tmp_path):
    run = open_run("a", create=True, root=tmp_path)
    assert run.attempt == 0
    engine, router = run.new_log("engine-0"), run.new_log("router")
    assert attempt_of(engine) == attempt_of(router) == run.attempt == 1
    again = run.new_log("router")
    assert attempt_of(again) == run.attempt == 2
    assert (run.logs_dir / "latest").resolve() == again.parent
    assert attempt_of(run.new_log("engine-0")) == 2


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "x.json"
    write_json_atomic(target, {"a": 1})
    write_json_atomic(target, {"a": 2}, mode=0o600)
    assert json.loads(target.read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path):
    target = tmp_path / "x.json"
    write_json_atomic(target, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_name_that_no_file_system_takes_is_refused_in_one_line(tmp_path):
    assert plan_run("a" * 128, root=tmp_path).name == "a" * 128
    for name in ("a" * 129, "a" * 300, "/" * 300):
        with pytest.raises(UsageError) as error:
            plan_run(name, root=tmp_path)
        assert len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("blocked", ["runs", "runs/a", "runs/a/state", "runs/a/logs", "runs/a/checkpoints"])
def test_a_file_where_a_directory_of_the_run_belongs_is_found_before_anything_is_loaded(tmp_path, blocked):
    (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocked).write_text("")
    with pytest.raises(UsageError, match=rf"run a cannot be written: .*{blocked} is there, and is no directory"):
        run_to_train("a", resume=False, endpoints_files=[], resumable=lambda run: False, root=tmp_path / "runs")
    assert (tmp_path / blocked).read_text() == ""


def test_a_run_that_is_there_and_one_that_is_not_are_writable(tmp_path):
    check_writable(plan_run("new", root=tmp_path / "deep" / "runs"))
    run = open_run("a", create=True, root=tmp_path)
    run.new_log("train")
    check_writable(run)
    assert not (tmp_path / "deep").exists()


AS_SOMEBODY_ELSE = """
import os, sys
from pathlib import Path
from rltool.errors import UsageError
from rltool.processes.run_directory import check_writable, open_run, plan_run
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)  # nobody: permissions do not bind root
for attempt in (lambda: check_writable(plan_run("a", root=Path(sys.argv[1]))),
                lambda: open_run("a", create=True, root=Path(sys.argv[1]))):
    try:
        attempt()
    except UsageError as error:
        print(error)
"""


def test_a_directory_without_permission_is_found_before_anything_is_loaded():
    with tempfile.TemporaryDirectory() as directory:
        runs = Path(directory) / "runs"
        runs.mkdir()
        Path(directory).chmod(0o755)
        runs.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_SOMEBODY_ELSE, str(runs)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == 2 * [
            f"run a cannot be written: no permission to write into {runs}, or its file system is read-only; choose "
            "another --run, or another directory for runs with RLTOOL_RUNS=DIRECTORY"
        ]
        assert not os.listdir(runs)


OF_SOMEBODY_ELSE = """
import os, sys
from pathlib import Path
from rltool.errors import UsageError
from rltool.processes.run_directory import list_runs, open_run
open_run("mine", create=True, root=Path(sys.argv[1]))
closed = Path(sys.argv[1], "mine", *sys.argv[2:])
closed.parent.chmod(0o755)
closed.chmod(0o700 if os.geteuid() == 0 else 0o000)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
assert list_runs(Path(sys.argv[1])) == []
try:
    open_run("mine", create=False, root=Path(sys.argv[1]))
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("inner", [(), ("state",)])
def test_a_run_of_another_user_is_not_called_absent(inner):
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", OF_SOMEBODY_ELSE, directory, *inner], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        closed = Path(directory, "mine", *inner)
        assert f"no permission to read {closed}: it is the run of another user" in done.stdout
        closed.chmod(0o700)


@pytest.mark.parametrize("before", ["nothing", "the root", "a mount point", "a run of an earlier release"])
def test_a_run_is_its_owners_alone_whatever_was_there_before(tmp_path, before):
    root, run = tmp_path / "runs", tmp_path / "runs" / "a"
    if before == "the root":
        root.mkdir(mode=0o755)
    elif before == "a mount point":
        run.mkdir(parents=True)
    elif before == "a run of an earlier release":
        open_run("a", create=True, root=root)
        run.chmod(0o755)
        (run / "state").chmod(0o755)
    umask = os.umask(0)
    try:
        made = open_run("a", create=True, root=root)
    finally:
        os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made.path, made.state_dir)} == {0o700}


def test_looking_at_a_run_changes_no_permissions(tmp_path):
    made = open_run("a", create=True, root=tmp_path)
    made.path.chmod(0o750)
    open_run("a", create=False, root=tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o750
