"""Makes a vLLM server on the CPU wait without taking a core.

vLLM's processes pass messages through shared memory, and a reader asks for the next one without pause for a second
after the last (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition: busy_loop_s, no setting). On a
GPU host that is a core of many for the sake of microseconds; on a CPU host the trainer waits for these cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

BUSY_LOOP_VARIABLE = "RLTOOL_BUSY_LOOP_SECONDS"
NAP_SECONDS = 5e-4


def limit_busy_loop(environment: Mapping[str, str] = os.environ) -> None:
    """Let a reader sleep between polls after the time that the environment sets; without the variable nothing
    changes. Idempotent.

    Lowering busy_loop_s would not do: it sends the reader to a socket, and vLLM looks again only after five seconds,
    which is what one rollout of some twenty took.
    """
    if BUSY_LOOP_VARIABLE not in environment:
        return
    seconds = float(environment[BUSY_LOOP_VARIABLE])
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:  # another vLLM, that waits in another way: an engine that takes a core is better than none
        return
    ask_again = getattr(SpinCondition.wait, "__wrapped__", SpinCondition.wait)

    def wait(self, timeout_ms: int | None = None) -> None:
        if seconds < time.monotonic() - self.last_read <= self.busy_loop_s:
            time.sleep(NAP_SECONDS)
        else:
            ask_again(self, timeout_ms)

    wait.__wrapped__ = ask_again  # type: ignore[attr-defined]
    SpinCondition.wait = wait
