"""SIGTERM ends a foreground command, also where it was started with `&` from a script, which makes it ignore SIGINT."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rltool.processes.signals import deferred_interrupts

COMMAND = """
import signal, sys, time
from rltool.processes.signals import deferred_interrupts, termination_interrupts
with termination_interrupts() as ending:
    try:
        with {block}:
            print("ready", flush=True)
            time.sleep({sleep})
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit(3 if ending.signal is signal.{name} else 4)
"""


def test_an_interrupt_that_is_ignored_hides_none_that_came_with_it(monkeypatch):
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.getsignal(number)(number, None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised == [signal.SIGTERM]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["in the foreground", "by &"])
@pytest.mark.parametrize(("block", "sleep"), [("deferred_interrupts()", 0.3), ("open('/dev/null')", 600)])
def test_a_command_is_interrupted_by_the_signals_that_end_services(name, sigint, block, sleep):
    argv = [sys.executable, "-c", COMMAND.format(block=block, sleep=sleep, name=name)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, sigint)
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            process.send_signal(getattr(signal, name))
            assert process.wait(60) == 3
        finally:
            process.kill()
