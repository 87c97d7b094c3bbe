"""Keeping processes company in the foreground: the first one that ends decides, and all end together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rltool.processes.spawn import RunningProcess, describe_exit
from rltool.processes.state import read_state, remove_state, write_state
from rltool.processes.stop import GRACE_SECONDS, stop_processes


def supervise(processes: Sequence[RunningProcess], *, poll: float = 0.2, sleep: Callable[[float], None] = time.sleep) -> None:
    """Block while all live. Returns when one has been stopped by `rltool stop`; raises ProcessFailed when one ends by itself.

    Leaves by KeyboardInterrupt on Ctrl-C. The caller stops the others, whatever the reason.
    """
    while True:
        for process in processes:
            code = process.exit_code()
            if code is None:
                continue
            if was_asked_to_stop(process):
                return
            raise process.failure(describe_exit(code))
        sleep(poll)


def was_asked_to_stop(process: RunningProcess) -> bool:
    """`rltool stop` marks the state before it signals, and removes it when the process is gone."""
    state = read_state(process.run, process.role)
    return state is None or state.pid != process.state.pid or state.stopping


def stop_all(processes: Sequence[RunningProcess], grace: float = GRACE_SECONDS) -> None:
    """Stop children of this process with their trees, reap them and remove their state files."""
    for process in processes:
        if read_state(process.run, process.role) == process.state:
            write_state(process.run, process.state.model_copy(update={"stopping": True}))
    stop_processes([process.state for process in processes], grace)
    for process in processes:
        process.popen.wait()
        remove_state(process.run, process.state)
