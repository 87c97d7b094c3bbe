"""Which GPUs of this host a run takes: the given ones, or the first free ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import UsageError
from rltool.processes.gpus import gpus_in_use, restricts_by_uuid, visible_gpus
from rltool.processes.hosts import is_loopback


def choose_gpus(
    *, wanted: Sequence[int], needed: int, present: Sequence[int], held: Mapping[int, str]
) -> tuple[int, ...]:
    """`needed` of the GPUs `present` on this host, in order. Pure.

    wanted: what --gpus names, or nothing. held: index -> by whom. Raises UsageError for a wrong number, a GPU that is
    named twice, absent or held, and where too few are free.
    """
    if not wanted:
        free = [gpu for gpu in present if gpu not in held]
        if len(free) < needed:
            holders = "; ".join(f"GPU {gpu} by {who}" for gpu, who in sorted(held.items()) if gpu in present)
            raise UsageError(
                f"the run takes {needed} GPUs of this host, and {len(free)} of its {len(present)} are free"
                + (f" (held: {holders})" if holders else "")
                + ": lower trainer.world_size or the engines' count, end what holds them (`rltool stop`), or name GPUs "
                "with --gpus"
            )
        return tuple(free[:needed])
    twice = sorted({gpu for gpu in wanted if wanted.count(gpu) > 1})
    if twice:
        raise UsageError(f"--gpus names GPU {', '.join(map(str, twice))} twice")
    if len(wanted) != needed:
        raise UsageError(
            f"--gpus names {len(wanted)} GPUs ({','.join(map(str, wanted))}); the run takes {needed}: one for each of "
            "trainer.world_size ranks, then those of managed engines"
        )
    absent = [gpu for gpu in wanted if gpu not in present]
    if absent:
        raise UsageError(
            f"--gpus: not on this host: GPU {', '.join(map(str, absent))}; it has: "
            f"{','.join(map(str, present)) or 'none'} (less those that CUDA_VISIBLE_DEVICES hides)"
        )
    taken = [f"GPU {gpu} by {held[gpu]}" for gpu in wanted if gpu in held]
    if taken:
        raise UsageError(
            f"--gpus: held already: {'; '.join(taken)}. Name others, end its holder (`rltool stop`), or set "
            "trainer.share_gpus"
        )
    return tuple(wanted)


def gpus_of_this_host(
    wanted: Sequence[int], needed: int, engines: Sequence[EngineEndpoint], root: Path | None, *, shared: bool = False
) -> tuple[int, ...]:
    """`choose_gpus` by what this host has and holds: live runs below `root`, and engines that the run was given.
    shared: those that are named may be held.

    Empty where unknown: no driver that lists GPUs, or CUDA_VISIBLE_DEVICES with UUIDs, which the user then
    has chosen by.
    """
    present = [gpu.index for gpu in visible_gpus()]
    if not wanted and (not present or restricts_by_uuid()):
        return ()
    held = {} if wanted and shared else gpus_in_use(root) | held_by(engines)
    return choose_gpus(wanted=wanted, needed=needed, present=present, held=held)


def held_by(engines: Sequence[EngineEndpoint]) -> dict[int, str]:
    """GPU of this host -> the engine on it, as endpoints.json has it. Engines of other hosts hold none of these."""
    return {gpu: f"engine {engine.url}" for engine in engines if is_here(engine.url) for gpu in engine.gpus}


def is_here(url: str) -> bool:
    """Whether the address of an engine is one of this host's."""
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or any(
        entry.address == host for entries in psutil.net_if_addrs().values() for entry in entries
    )
