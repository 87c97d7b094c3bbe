import threading

import pytest

from rltool.processes.waiting import waiting


def test_a_wait_says_what_it_is_for_at_once_and_that_it_goes_on_until_it_ends():
    lines, repeated = [], threading.Event()

    def log(line):
        lines.append(line)
        if len(lines) == 3:
            repeated.set()

    with waiting("starting Ray (deadlines.x = 9 s)", log, still=lambda: "no answer of b", every=0.001):
        assert lines[0] == "starting Ray (deadlines.x = 9 s)"
        assert repeated.wait(30)
    assert lines[1] == "starting Ray (deadlines.x = 9 s): 0 s so far, no answer of b"
    said = len(lines)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert len(lines) == said


def test_a_wait_that_fails_says_no_more():
    with pytest.raises(ValueError, match="no"), waiting("it", lambda line: None, every=0.001):
        raise ValueError("no")
    assert not any(thread.name == "progress" for thread in threading.enumerate())
