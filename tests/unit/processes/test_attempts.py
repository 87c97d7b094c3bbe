"""train --restarts without a trainer: children that end in every way."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from rltool.processes import attempts
from rltool.processes.attempts import ENDED_FOR_GOOD, Attempts
from rltool.processes.signals import deferred_interrupts


class Story:
    """Attempt n is chapters[n - 1], a line of sh."""

    def __init__(self, *chapters, restarts=1, stopped=False):
        self.chapters, self.said, self.begun = chapters, [], 0
        self.faults = 0
        self.attempts = Attempts(
            self.command, restarts=restarts, log=self.said.append, stopped=lambda pid: stopped, on_fault=self.fault
        )

    def command(self, number):
        self.begun += 1
        return ["sh", "-c", self.chapters[number - 1]]

    def fault(self):
        self.faults += 1
        return "checkpoint step_2"


def test_a_fault_is_followed_by_another_attempt_whose_code_counts():
    story = Story("exit 1", "kill -9 $$", "exit 0", restarts=3)
    assert story.attempts.run() == 0
    assert story.said == [
        "attempt 1 ended with exit code 1, see its error above: restart 1 of 3, from checkpoint step_2",
        "attempt 2 was killed by signal 9, see its error above: restart 2 of 3, from checkpoint step_2",
    ]


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (2, 2), (130, 130), (ENDED_FOR_GOOD, 1)])
def test_an_end_that_is_no_fault_is_final(code, seen):
    story = Story(f"exit {code}", restarts=5)
    assert story.attempts.run() == seen
    assert (story.begun, story.faults, story.said) == (1, 0, [])


def test_after_the_last_restart_the_fault_is_the_commands():
    story = Story("exit 1", "kill -6 $$", restarts=1)
    assert story.attempts.run() == 128 + 6
    assert story.said[-1] == "attempt 2 was killed by signal 6, and --restarts 1 is used up"


def test_an_attempt_that_rltool_stop_killed_is_not_begun_again():
    story = Story("kill -9 $$", restarts=5, stopped=True)
    assert story.attempts.run() == 128 + 9 and story.begun == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_attempt_once_and_ends_the_restarts(number, tmp_path):
    """The child tells this process that it listens by sending the signal that is to be forwarded to it."""
    heard = tmp_path / "heard"
    child = (
        "import os, signal, sys, time\n"
        f"def hear(n, _): open({str(heard)!r}, 'a').write(f'{{n}} '); sys.exit(1)\n"
        f"signal.signal({int(number)}, hear)\n"
        f"os.kill({os.getpid()}, {int(number)})\n"
        "time.sleep(60)\n"
    )
    story = Story("", restarts=5)
    story.command = lambda _: [sys.executable, "-c", child]
    story.attempts._command = story.command
    before = signal.getsignal(number)
    assert story.attempts.run() == 1
    assert heard.read_text().split() == [str(int(number))] and story.faults == 0
    assert signal.getsignal(number) is before


def test_the_terminals_ctrl_c_reaches_the_attempt_only_through_its_parent():
    story = Story("", restarts=0)
    in_its_own_group = "import os, sys; sys.exit(0 if os.getpgrp() == os.getpid() else 1)"
    story.attempts._command = lambda _: [sys.executable, "-c", in_its_own_group]
    assert story.attempts.run() == 0


def test_a_signal_between_two_attempts_ends_it_there():
    story = Story("exit 1", "exit 0", restarts=5)
    plain = story.fault

    def fault():
        signal.raise_signal(signal.SIGTERM)
        return plain()

    story.attempts._on_fault = fault
    assert story.attempts.run() == 1 and story.begun == 1


def test_a_signal_while_the_next_attempt_is_announced_ends_it_there():
    story = Story("exit 7", "exit 0", restarts=5)

    def log(line):
        story.said.append(line)
        signal.raise_signal(signal.SIGTERM)

    story.attempts._log = log
    assert story.attempts.run() == 7 and (story.begun, len(story.said)) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_attempt_keeps_it_from_starting(number, monkeypatch):
    @contextmanager
    def late():
        signal.raise_signal(number)
        with deferred_interrupts():
            yield

    monkeypatch.setattr(attempts, "deferred_interrupts", late)
    story = Story("exit 0")
    assert story.attempts.run() == 128 + number and story.begun == 0
