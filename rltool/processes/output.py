"""Where a process that Ray started writes what it prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(log_file: Path | None) -> None:
    """Send this process's stdout and stderr, and those of its libraries, to the run's log where the run directory is
    reachable."""
    if log_file is None or not log_file.parent.is_dir():
        return
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
