import pytest

from rltool.processes.readiness import decide


@pytest.mark.parametrize(
    ("now", "exit_code", "ready", "verdict"),
    [
        (0.0, None, False, "wait"),
        (9.9, None, True, "ready"),
        (10.0, None, False, "late"),
        (11.0, None, True, "ready"),
        (0.0, 0, False, "died"),
        (0.0, 1, True, "died"),
        (99.0, -9, False, "died"),
    ],
)
def test_readiness_verdicts(now, exit_code, ready, verdict):
    assert decide(now=now, deadline=10.0, exit_code=exit_code, ready=ready) == verdict
