"""The Python sandbox: real processes, each with its limits."""

from __future__ import annotations

import asyncio
import socket
import sys

import psutil
import pytest

from rltool.environments import sandbox
from rltool.environments.sandbox import Limits, Ran, python, run_program, told
from rltool.environments.tools import make_tool
from rltool.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

SMALL = Limits(seconds=20.0, cpu_seconds=1, memory_bytes=256 * 1024 * 1024, file_bytes=4096, output_characters=50)


def run(code: str, limits: Limits = SMALL, *, network: bool = False) -> Ran:
    return asyncio.run(run_program(code, limits, network=network))


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    """Where the host allows none, the refusal is all that can be tested."""
    try:
        run("pass")
    except UsageError:
        pytest.skip("this host allows no namespaces")


def test_a_program_says_what_it_prints():
    assert told(run("print('ü', 1 + 1)")) == "ü 2"
    assert told(run("pass")) == "(no output)"


def test_it_starts_anew_with_an_empty_directory_and_without_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    ran = run("import os; print(os.listdir('.'), 'SECRET_OF_THE_RUN' in os.environ, __name__)")
    assert told(ran) == "[] False __main__"


def test_there_is_no_network_not_even_to_this_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('reached')"
        ran = run(code, Limits())
    assert ran.isolated and "reached" not in ran.output and "OSError" in ran.output


def test_other_processes_cannot_be_reached():
    assert told(run("import os; print(os.getpid(), os.getppid())")) == "1 0"


def test_errors_are_told_with_the_program_s_own_lines():
    ran = run("x = 1\n1 / 0", Limits())
    assert ran.exit_code == 1 and 'File "program.py", line 2' in ran.output and "sandbox_child" not in ran.output
    assert told(run("import sys; sys.exit(3)")) == "(exit code 3)"
    assert "SyntaxError" in run("x = ", Limits()).output


def test_memory_cpu_files_and_output_are_bounded():
    assert "MemoryError" in run("x = bytearray(10**9)", Limits(memory_bytes=SMALL.memory_bytes)).output
    assert told(run("while True: pass")).startswith("(ended by signal")
    assert "File too large" in run("open('a', 'wb', buffering=0).write(b'x' * 8192); open('a', 'ab', 0).write(b'y')",
                                   Limits(file_bytes=4096)).output  # fmt: skip
    ran = run("print('x' * 1_000_000)")
    assert ran.cut and ran.output == "x" * 50 and "(output cut)" in told(ran)


def test_what_takes_too_long_is_ended_with_all_that_it_started():
    started = "import subprocess, time; subprocess.Popen(['sleep', '98765'], start_new_session=True); time.sleep(60)"
    ran = run(started, Limits(seconds=1.0))
    assert ran.exit_code is None and told(ran) == "(ended: it took too long)"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]]


def test_a_host_without_namespaces_is_an_error_unless_the_network_is_allowed(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("libc.unshare(", "bool(") + "\n")
    child.write_text(
        child.read_text().replace("bool(CLONE_NEWUSER | apart) == 0", "False").replace("bool(apart) == 0", "False")
    )
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(UsageError, match="namespaces"):
        run("print(1)")
    with pytest.raises(UsageError):  # nor is it told to the model as if it were the program's fault
        asyncio.run(make_tool(python).call({"code": "1"}, seconds=5.0))
    allowed = run("print(1)", network=True)
    assert told(allowed) == "1" and not allowed.isolated
