"""On which device the trainer's ranks run: decided by what is there where they run, and checked by each of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RankDevice:
    """What one rank finds where it runs. gpu: name of the first GPU that torch sees in its process; None: none. run_id:
    of the run directory at the driver's path; None: none is there."""

    rank: int
    host: str
    gpu: str | None
    run_id: str | None = None


def visible_gpus() -> int:
    """How many GPUs torch sees in this process. Makes no CUDA context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(rank: int, run: RunDirectory | None = None) -> RankDevice:
    """Of the process that calls it."""
    gpu = torch.cuda.get_device_name(0) if visible_gpus() else None
    return RankDevice(rank, socket.gethostname(), gpu, run.run_id if run is not None and run.is_made else None)


def choose_device(*, ranks: int, gpus: float, where: str) -> Device:
    """What trainer.device = "auto" stands for: cuda where there are GPUs, one for each rank.

    gpus: how many there are where the ranks will run, in use or not
    where: whose they are, for the error
    UsageError for fewer GPUs than ranks: training on the CPUs beside them is never meant.
    """
    if gpus <= 0:
        return "cpu"
    if gpus < ranks:
        raise UsageError(
            f'trainer.device = "auto": {where} has {gpus:g} GPUs, but trainer.world_size = {ranks} needs one for each '
            f'rank; lower trainer.world_size, or set trainer.device = "cpu"'
        )
    return "cuda"


def check_rank_devices(planned: Device, found: Sequence[RankDevice]) -> None:
    """UsageError naming every rank, with its host, that was to have a GPU and sees none."""
    without = [at for at in found if at.gpu is None] if planned == "cuda" else []
    if without:
        named = ", ".join(f"rank {at.rank} on host {at.host}" for at in without)
        raise UsageError(
            f"the trainer runs on cuda, but torch sees no GPU in {named}: is torch built for CUDA there, and does "
            f'nvidia-smi work? Otherwise set trainer.device = "cpu"'
        )


def check_shared_run(run: RunDirectory, found: Sequence[RankDevice]) -> None:
    """UsageError naming every rank, with its host, that does not see the run directory: all write and read its
    checkpoints, of which one is written however the run ends."""
    without = [at for at in found if at.run_id != run.run_id]
    if without:
        named = ", ".join(f"rank {at.rank} on host {at.host}" for at in without)
        raise UsageError(
            f"checkpoints are written by all ranks to {run.checkpoints_dir}, and that run directory is not seen by "
            f"{named}: put the runs on a disk that the hosts of all ranks share, at one path (RLTOOL_RUNS)"
        )


def describe_devices(planned: Device, found: Sequence[RankDevice]) -> str:
    """Ranks by host and device, in the order of ranks."""
    places: dict[str, int] = {}
    for at in found:
        place = f"{at.gpu if planned == 'cuda' else 'CPU'} on {at.host}"
        places[place] = places.get(place, 0) + 1
    return ", ".join(f"{count} {'rank' if count == 1 else 'ranks'}: {place}" for place, count in places.items())
