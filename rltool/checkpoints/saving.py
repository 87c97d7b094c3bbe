"""Training checkpoints: the state is copied while training waits, and written, described and named while it goes on."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.carried import carry
from rltool.checkpoints.completion import EXTRA, STATE, Saved, finish
from rltool.checkpoints.manifest import Manifest
from rltool.errors import SaveFailed
from rltool.megatron.critic import Critic
from rltool.megatron.save_plan import SavePlan, plan_save
from rltool.megatron.trainer import MegatronTrainer

DEADLINE = timedelta(hours=1)
"""How long a rank that has written its files waits for the others."""


class CheckpointSaver:
    """One rank's side of all saves of a run. Every rank calls the same methods in the same order, from the trainer's
    thread.

    The thread that writes talks to the other ranks' over a process group of its own: a collective of a training group
    from a second thread could meet another rank's training in the wrong order.
    """

    def __init__(self, trainer: MegatronTrainer, *, asynchronous: bool, critic: Critic | None = None) -> None:
        self._trainer, self._critic = trainer, critic
        self._asynchronous = asynchronous
        # Declared as what it is to ranks outside of the group as well, of which there are none.
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=DEADLINE))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    def save(
        self,
        directory: Path,
        extra: dict[str, Any],
        metrics: dict[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Model, optimizer, schedule and random state of this moment into `directory`, which must not exist; then
        `latest` points at it.

        extra: what else the run needs to resume; JSON. Its "step", "weight_version" and "config" also go into the
        manifest, as do `metrics`. files: name -> content of further files, such as samples that were not trained on.
        The directory must be one that all ranks see.

        Asynchronous: returns once the state is copied; synchronous: when it is written. Either way `wait` tells how it
        ended. An earlier save is waited for first, and raises here if it failed and nobody has asked. SaveFailed:
        nothing of that name appears, and the last good one stays.
        """
        if self._writing is not None:
            self.wait()
        started = time.monotonic()
        trainer, final = self._trainer, Path(directory)
        partial = directories.partial_of(final)
        trainer.runtime.on_rank_zero(lambda: _begin(final), f"creating {partial}")
        try:
            plan = plan_save(trainer.runtime, self._state(), partial / STATE)
            staged = _attempt(lambda: plan.stage(copy=self._asynchronous), plan.bytes)
        except BaseException:
            if trainer.coordinates.rank == 0:
                directories.abandon(partial)
            raise
        complete = self._completion(final, partial, extra, metrics or {}, files or {})
        self._writing = self._worker.submit(self._write, plan, staged, final, partial, complete, started)
        if not self._asynchronous:
            futures.wait([self._writing])

    def _state(self) -> dict[str, Any]:
        state = self._trainer.sharded_state(loading=False)
        if self._critic is not None:
            state["critic"] = self._critic.sharded_state(loading=False)
        return state

    @property
    def has_ended(self) -> bool:
        """No save is being written by this rank: `wait` would not wait. Ranks may differ for a moment."""
        return self._writing is None or self._writing.done()

    def wait(self) -> Saved | None:
        """Waits for the save in flight. The checkpoint that it made, once; None when there is none.
        Raises SaveFailed, once."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        """Waits for a save in flight, whatever comes of it."""
        self._worker.shutdown(wait=True)

    def _completion(
        self, final: Path, partial: Path, extra: dict[str, Any], metrics: dict[str, float], files: Mapping[str, bytes]
    ) -> Callable[[dict[str, Any]], None]:
        """What rank 0 does when all files of the state are there.
        Everything in it is fixed now, at the step of the save."""
        trainer, text = self._trainer, json.dumps(extra)
        manifest = Manifest(
            kind="training",
            architecture=trainer.family.architecture,
            dtype=str(trainer.dtype).removeprefix("torch."),
            step=extra.get("step"),
            weight_version=extra.get("weight_version"),
            layout=trainer.coordinates.layout,
            distributed_optimizer=trainer.config.distributed_optimizer,
            config=extra.get("config") or {},
            metrics=metrics,
        )

        def complete(described: dict[str, Any]) -> None:
            (partial / EXTRA).write_text(text, encoding="utf-8")
            for name, content in files.items():
                (partial / name).write_bytes(content)
            carry(trainer.model_path, partial, dtype=manifest.dtype)
            finish(partial, final, manifest, described)
            directories.set_latest(final)

        return complete

    # -- in the thread that writes

    def _write(
        self,
        plan: SavePlan,
        staged: _Failure | None,
        final: Path,
        partial: Path,
        complete: Callable[[dict[str, Any]], None],
        started: float,
    ) -> Saved:
        share = staged or _attempt(lambda: _write_share(plan, partial), plan.bytes)
        rank, world = self._trainer.coordinates.rank, self._trainer.coordinates.layout.world_size
        shares: list[Any] = [None] * world
        dist.gather_object(share, shares if rank == 0 else None, dst=0, group=self._group)
        outcome: list[Any] = [None]
        if rank == 0:
            total = sum(share.bytes for share in shares)
            failed = next((share for share in shares if isinstance(share, _Failure)), None)
            outcome = [failed or _attempt(lambda: _complete(plan, shares, complete), total)]
            if isinstance(outcome[0], _Failure):
                outcome = [replace(outcome[0], text=_explain(outcome[0], final, total))]
                directories.abandon(partial)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], _Failure):
            raise SaveFailed(outcome[0].text)
        return Saved(final, outcome[0], time.monotonic() - started)


@dataclass(frozen=True)
class _Failure:
    """What went wrong, as text: exceptions of other ranks are not unpickled.
    bytes: of the tensors that should have been written."""

    text: str
    bytes: int
    disk_full: bool = False


@dataclass(frozen=True)
class _Share:
    """A rank's part that is on disk: what Megatron knows of it, and its files for the manifest.
    bytes: of its tensors."""

    results: list[Any]
    files: dict[str, dict[str, Any]]
    bytes: int


def _attempt(action: Callable[[], Any], size: int) -> Any:
    """Its result, or what went wrong: every rank goes on to the exchange, else the others would wait for it."""
    try:
        return action()
    except Exception as error:
        return _failure(error, size)


def _failure(error: Exception, size: int) -> _Failure:
    """Torch's file writer, interrupted by a full disk, raises a RuntimeError about positions;
    the OSError is what that came of."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    why = link or error
    return _Failure(
        f"{type(why).__name__}: {why}", size, isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def _begin(final: Path) -> None:
    try:
        (directories.begin(final) / STATE).mkdir()
    except OSError as error:
        directories.abandon(directories.partial_of(final))
        raise SaveFailed(_explain(_failure(error, 0), final, 0)) from error


def _write_share(plan: SavePlan, partial: Path) -> _Share:
    results = plan.write()
    described = manifests.side_by_side(manifests.describe_file, [partial / STATE / name for name in plan.files])
    files = {f"{STATE}/{name}": entry for name, entry in zip(plan.files, described, strict=True)}
    return _Share(results, files, plan.bytes)


def _complete(plan: SavePlan, shares: list[_Share], complete: Callable[[dict[str, Any]], None]) -> int:
    """Rank 0: turns the ranks' files into a checkpoint. Returns their bytes."""
    plan.finish([share.results for share in shares])
    described = {name: entry for share in shares for name, entry in share.files.items()}
    complete(described)
    return sum(entry["bytes"] for entry in described.values())


def _explain(failure: _Failure, final: Path, size: int) -> str:
    """The error as its reader needs it: where, why, and for a full disk how much was to be written and how much room
    there is."""
    text = f"checkpoint {final} was not written: {failure.text}. The checkpoints before it are untouched"
    if not failure.disk_full:
        return text
    there = next(place for place in final.parents if place.exists())
    needed = f"this one needs {size:,} bytes and a little more, and " if size else ""
    free = shutil.disk_usage(there).free
    return (
        f"{text}; {needed}{free:,} bytes are free in {there} now. "
        "Free space there, or keep fewer with checkpoint.keep_last"
    )
