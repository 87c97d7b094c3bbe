"""Who a recorded process is: its pid, its start and the host's boot, whatever the clock says."""

import os
import socket

import psutil
import pytest

from rltool.processes import state as states
from rltool.processes.run_directory import open_run
from rltool.processes.state import free_role, is_alive, is_elsewhere, state_of_this_process, write_state


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


OTHER_BOOT, OTHER_CONTAINER, OTHER_HOST = {"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"host": "host-a"}


@pytest.mark.parametrize(
    ("changes", "elsewhere"),
    [
        ({}, False),
        (OTHER_BOOT, False),  # this host was started anew: it is dead
        (OTHER_CONTAINER, False),  # and so was this container
        (OTHER_HOST, False),  # it was given another name: the process is found all the same
        (OTHER_BOOT | OTHER_HOST, True),
        (OTHER_CONTAINER | OTHER_HOST, True),
        (OTHER_BOOT | {"host": ""}, False),  # as older versions wrote it
    ],
    ids=str,
)
def test_a_process_of_another_host_is_told_from_one_of_before_a_reboot(tmp_path, changes, elsewhere):
    state = state_of_this_process("me", argv=["x"])
    assert state.host == socket.gethostname()
    state = state.model_copy(update=changes)
    assert is_elsewhere(state) is elsewhere and not (elsewhere and is_alive(state))
    run = open_run("r", create=True, root=tmp_path)
    write_state(run, state)
    assert free_role("me", run) == ("me-2" if elsewhere or is_alive(state) else "me")
