"""How many CPU threads torch takes in a trainer rank on a GPU.

Left to itself torch starts one for every core of the host in every rank. They have next to nothing to do there, but
wait for work by spinning: on 64 cores each rank burnt 11 to 15 of them, and the thread that launches kernels came too
late.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import torch

VARIABLE = "OMP_NUM_THREADS"
ENOUGH = 4
"""Threads of a rank whose work is on a GPU: batches are cut and packed on the CPU, in microseconds."""


def gpu_rank_threads(ranks_on_host: int, cpus: int) -> int:
    """`ENOUGH`, or fewer where the ranks of this host would not get that many CPUs each."""
    return max(1, min(ENOUGH, cpus // max(1, ranks_on_host)))


def wanted_threads(
    configured: int | None, *, on_gpu: bool, ranks_on_host: int, environment: Mapping[str, str] = os.environ
) -> int | None:
    """trainer.torch_threads, else on a GPU `gpu_rank_threads`; None: torch's own choice.

    OMP_NUM_THREADS is torch's own choice as well: a user sets it, or Ray does, to the CPUs of the actor.
    """
    if configured is not None or not on_gpu or VARIABLE in environment:
        return configured
    return gpu_rank_threads(ranks_on_host, usable_cpus())


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(count: int | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """For torch in this process, and for the libraries that read the variable when they are loaded later, and for
    children."""
    if count is not None:
        environment[VARIABLE] = str(count)
        torch.set_num_threads(count)
