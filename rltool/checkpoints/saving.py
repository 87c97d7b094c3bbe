"""Training checkpoints: the state is copied while training waits, and written, described and named while it goes on."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from rltool.checkpoints import directory as directories
from rltool.checkpoints import manifest as manifests
from rltool.checkpoints.carried import carry, carry_tensors
from rltool.checkpoints.completion import EXTRA, STATE, Saved, finish
from rltool.checkpoints.lora import describe_base, describe_lora
from rltool.checkpoints.manifest import Manifest
from rltool.errors import DiskFull, SaveFailed
from rltool.megatron.critic import Critic
from rltool.megatron.save_plan import SavePlan, plan_save
from rltool.megatron.trainer import MegatronTrainer

DEADLINE = timedelta(hours=1)
"""How long a rank that has written its files waits for the others."""
CLOSE_SECONDS = 300.0
"""For a save in flight at the end. It may wait for a rank that never comes: its thread ends with the process."""


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
        self._writing: Future[Saved] | None = None
        self._base: dict[str, dict[str, Any]] = {}

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

        Asynchronous: returns once the state is copied; synchronous: when it is written. Either way `wait` has how it
        ended. An earlier save is waited for first, and raises here if it failed unnoticed. SaveFailed:
        nothing of that name appears, and the last good one stays.
        """
        if self._writing is not None:
            self.wait()
        started = time.monotonic()
        trainer, final = self._trainer, Path(directory)
        partial = directories.partial_of(final)
        trainer.runtime.on_rank_zero(lambda: _begin(final), f"creating {partial}")
        state = _attempt(self._state, 0)
        self._demand_all(state, final, partial)  # or those that have theirs would plan without the others
        plan = _attempt(lambda: plan_save(trainer.runtime, state, partial / STATE), 0)
        if not isinstance(plan, _Failure):
            plan = _attempt(lambda: plan.stage(copy=self._asynchronous), plan.bytes) or plan
        complete = self._completion(final, partial, extra, metrics or {}, files or {})
        self._writing = _in_a_thread(lambda: self._write(plan, final, partial, complete, started))
        if not self._asynchronous:
            futures.wait([self._writing])

    def _demand_all(self, state: Any, final: Path, partial: Path) -> None:
        """SaveFailed on every rank, where one has none."""
        mine = state if isinstance(state, _Failure) else None
        found: list[Any] = [None] * self._trainer.coordinates.layout.world_size
        dist.all_gather_object(found, mine, group=self._group)
        if failed := next(filter(None, found), None):
            if self._trainer.coordinates.rank == 0:
                directories.abandon(partial)
            raise _explained(replace(failed, text=_explain(failed, final, 0)))

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
        """Waits for a save in flight to end or fail, for CLOSE_SECONDS at most."""
        if self._writing is not None:
            futures.wait([self._writing], timeout=CLOSE_SECONDS)

    def _completion(
        self, final: Path, partial: Path, extra: dict[str, Any], metrics: dict[str, float], files: Mapping[str, bytes]
    ) -> Callable[[dict[str, Any]], str]:
        """What rank 0 does when all files of the state are there; returns a warning or "".
        Everything in it is fixed now, at the step of the save."""
        trainer, text = self._trainer, json.dumps(extra)
        lora = trainer.lora
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

        def complete(described: dict[str, Any]) -> str:
            (partial / EXTRA).write_text(text, encoding="utf-8")
            for name, content in files.items():
                (partial / name).write_bytes(content)
            carry(trainer.model_path, partial, dtype=manifest.dtype)
            if lora.rank:
                # The model does not change in a run: its files are hashed once.
                self._base = self._base or describe_base(trainer.model_path)
                lora_and_base = describe_lora(lora, trainer.model_path, self._base)
                finish(partial, final, replace(manifest, lora=lora_and_base), described)
            else:
                carry_tensors(trainer.model_path, partial, trainer.family.carried)
                finish(partial, final, manifest, described)
            return directories.set_latest(final)

        return complete

    # -- in the thread that writes

    def _write(
        self,
        plan: SavePlan | _Failure,
        final: Path,
        partial: Path,
        complete: Callable[[dict[str, Any]], str],
        started: float,
    ) -> Saved:
        rank, world = self._trainer.coordinates.rank, self._trainer.coordinates.layout.world_size
        share = plan if isinstance(plan, _Failure) else _attempt(lambda: _write_share(plan, partial), plan.bytes)
        shares: list[Any] = [None] * world
        outcome: list[Any] = [None]
        try:
            dist.gather_object(share, shares if rank == 0 else None, dst=0, group=self._group)
            if rank == 0:
                outcome = [_outcome(plan, shares, final, complete)]
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        except Exception as error:  # of the exchange: a rank has died, or has not come within DEADLINE
            if outcome == [None]:  # else rank 0 knows how it ended
                outcome = [replace(lost := _failure(error, 0), text=_explain(lost, final, 0))]
        if rank == 0 and isinstance(outcome[0], _Failure):
            directories.abandon(partial)
        if isinstance(outcome[0], _Failure):
            raise _explained(outcome[0])
        size, warning = outcome[0]
        return Saved(final, size, time.monotonic() - started, warning)


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


def _explained(failure: _Failure) -> SaveFailed:
    return (DiskFull if failure.disk_full else SaveFailed)(failure.text)


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


def _in_a_thread(write: Callable[[], Saved]) -> Future[Saved]:
    """Not an executor's, which the end of the process would wait for."""
    writing: Future[Saved] = Future()

    def run() -> None:
        try:
            writing.set_result(write())
        except BaseException as error:
            writing.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return writing


def _begin(final: Path) -> None:
    try:
        (directories.begin(final) / STATE).mkdir()
    except OSError as error:
        directories.abandon(directories.partial_of(final))
        raise _explained(replace(lost := _failure(error, 0), text=_explain(lost, final, 0))) from error


def _write_share(plan: SavePlan, partial: Path) -> _Share:
    results = plan.write()
    described = manifests.side_by_side(manifests.describe_file, [partial / STATE / name for name in plan.files])
    files = {f"{STATE}/{name}": entry for name, entry in zip(plan.files, described, strict=True)}
    return _Share(results, files, plan.bytes)


def _outcome(
    plan: SavePlan | _Failure, shares: list[Any], final: Path, complete: Callable[[dict[str, Any]], str]
) -> tuple[int, str] | _Failure:
    """Rank 0: the checkpoint's bytes and a warning or "", or what all ranks are to raise."""
    total = sum(share.bytes for share in shares)
    failed = next((share for share in shares if isinstance(share, _Failure)), None)
    outcome = failed or _attempt(lambda: _complete(cast(SavePlan, plan), shares, complete), total)
    return replace(outcome, text=_explain(outcome, final, total)) if isinstance(outcome, _Failure) else outcome


def _complete(plan: SavePlan, shares: list[_Share], complete: Callable[[dict[str, Any]], str]) -> tuple[int, str]:
    """Rank 0: turns the ranks' files into a checkpoint. Returns their bytes, and a warning or ""."""
    plan.finish([share.results for share in shares])
    described = {name: entry for share in shares for name, entry in share.files.items()}
    warning = complete(described)
    return sum(entry["bytes"] for entry in described.values()), warning


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
