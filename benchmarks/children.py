"""The end of what a benchmark has started."""

from __future__ import annotations

import os
import signal
import subprocess

SECONDS = 15.0
"""For each of the two signals."""


def end_session(process: subprocess.Popen) -> None:
    """SIGTERM, and then SIGKILL, to the session that this process leads (start_new_session)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
