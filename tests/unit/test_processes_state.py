"""Who a recorded process is: its pid, its start and the host's boot, whatever the clock says."""

import os

import psutil
import pytest

from rltool.processes import state as states
from rltool.processes.state import is_alive, state_of_this_process


@pytest.mark.parametrize("seconds", [-86400.0, 3600.0])
def test_a_clock_that_is_set_makes_no_process_another_one(monkeypatch, seconds):
    recorded = state_of_this_process("me", argv=["x"])
    booted, created = psutil.boot_time, psutil.Process.create_time
    # Linux counts a process's start from the boot, and gives the boot's time by the clock of now.
    monkeypatch.setattr(psutil, "boot_time", lambda: booted() + seconds)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + seconds)
    assert is_alive(recorded)


def test_the_same_pid_with_another_start_or_after_another_boot_is_another_process(monkeypatch):
    recorded = state_of_this_process("me", argv=["x"])
    assert is_alive(recorded)
    assert not is_alive(recorded.model_copy(update={"start_time": recorded.start_time - 2.0}))
    monkeypatch.setattr(states, "boot", lambda: "another boot")
    assert not is_alive(recorded)


def test_the_same_pid_in_another_pid_namespace_is_another_process():
    recorded = state_of_this_process("me", argv=["x"])
    assert recorded.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert not is_alive(recorded.model_copy(update={"pid_namespace": "pid:[1]"}))
    assert is_alive(recorded.model_copy(update={"pid_namespace": ""})), "as older versions wrote it"
