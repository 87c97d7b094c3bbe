"""Checkpoints of clients' models, and their weights for sampling: what there is, and its files."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rltool.processes.files import full_disk
from rltool.tinker.journal import Call
from rltool.tinker.limits import Refused, no_room
from rltool.tinker.paths import SAMPLERS, SHARED, STATES, CheckpointPath

_REMOVED = ".removed-"
"""Begins names of directories that are being removed."""


@dataclass
class Saves:
    """Checkpoints of one kind. names: with the deleted ones. ttl: seconds that a save asked for, of weights without a
    name too; expires: set later, seconds of the clock, None for never."""

    names: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    ttl: dict[str, float] = field(default_factory=dict)
    expires: dict[str, float | None] = field(default_factory=dict)

    @property
    def kept(self) -> set[str]:
        return self.names - self.deleted


@dataclass(frozen=True)
class Saved:
    """A checkpoint. time, expires: seconds of the clock, expires None for never; size: in bytes."""

    path: CheckpointPath
    time: float
    size: int
    expires: float | None


class Checkpoints:
    """The files below `directory`. shared: a directory with checkpoints for all clients. Owned by one event loop, but
    for `date`, `remove_deleted`, `remove_copies` and `forget`, which the trainer's thread calls."""

    def __init__(self, directory: Path, shared: Path | None) -> None:
        self._directory, self._shared, self._copying = directory, shared, set[str]()
        self.deletions: list[Call] = []
        """Whose files may be there yet."""
        self.sizes: dict[CheckpointPath, int] = {}

    def at(self, path: CheckpointPath) -> Path:
        return self._directory / ("checkpoints" if path.kind == STATES else "samplers") / path.model / path.name

    def date(self, path: CheckpointPath) -> None:
        """Saved now, by the clock that all times here are of: a shared disk, and ranks elsewhere, have others."""
        now = time.time()
        with suppress(FileNotFoundError):  # deleted already
            os.utime(self.at(path), (now, now))

    def demand(self, path: CheckpointPath, saves: Saves) -> None:
        """404 for one that is deleted or not saved yet. saves: of its model and kind."""
        if path.name not in saves.kept or not self.at(path).exists():
            what = "are no weights" if path.kind == SAMPLERS else "is no checkpoint"
            whose = "their" if path.kind == SAMPLERS else "its"
            raise Refused(404, f"there {what} {str(path)!r}, or {whose} save has not ended")

    def of(self, model: str, kinds: Mapping[str, Saves]) -> list[Saved]:
        """A model's checkpoints and its named weights for sampling, oldest first."""
        found: list[Saved] = []
        for kind, saves in kinds.items():
            for name in saves.kept:
                path = CheckpointPath(model, kind, name)
                directory = self.at(path)
                if directory.exists():
                    made = directory.stat().st_mtime
                    if (size := self.sizes.get(path)) is None:  # a name is given once
                        size = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())
                        self.sizes[path] = size
                    ttl = saves.ttl.get(name)
                    expires = saves.expires.get(name, None if ttl is None else made + ttl)
                    found.append(Saved(path, made, size, expires))
        return sorted(found, key=lambda each: (each.time, each.path.kind, each.path.name))

    def expired(self, model: str, kinds: Mapping[str, Saves]) -> list[CheckpointPath]:
        """Those with a name whose time is over."""
        if not any(saves.ttl or saves.expires for saves in kinds.values()):
            return []
        now = time.time()
        return [each.path for each in self.of(model, kinds) if each.expires is not None and each.expires <= now]

    async def remove_unnamed(self, model: str, saves: Saves) -> None:
        """Weights for sampling without a name whose time is over."""
        for name, seconds in list(saves.ttl.items()):
            if (path := CheckpointPath(model, SAMPLERS, name)).is_unnamed:
                directory = self.at(path)
                if directory.exists() and directory.stat().st_mtime + seconds <= time.time():
                    await self.remove(path)

    async def remove(self, path: CheckpointPath) -> None:
        """At once for requests; beside the event loop, for files of all weights take their time."""
        directory = self.at(path)
        gone = directory.with_name(f"{_REMOVED}{secrets.token_hex(4)}")
        with suppress(OSError):  # it has gone already
            os.rename(directory, gone)
            await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)

    def newest_weights(self) -> Path | None:
        """Those for sampling that were saved last; None: there are none."""
        there = (self._directory / "samplers").glob("*/*")
        whole = [each for each in there if not each.name.endswith(".partial") and not each.name.startswith(_REMOVED)]
        return max(whole, key=lambda each: each.stat().st_mtime, default=None)

    def remove_deleted(self, after_snapshot: Collection[Call]) -> None:
        """The files of deleted checkpoints, but those that a call uses which the snapshot does not have."""
        for deletion in tuple(self.deletions):
            path = CheckpointPath(deletion.model, deletion.body["kind"], deletion.body["name"])
            if not any(call.number < deletion.number and _uses(call, path) for call in after_snapshot):
                directory = self.at(path)
                if directory.exists():
                    shutil.rmtree(directory, ignore_errors=path.kind == SAMPLERS)
                self.deletions.remove(deletion)

    def forget(self, model: str) -> None:
        for kind in ("checkpoints", "samplers"):
            shutil.rmtree(self._directory / kind / model, ignore_errors=True)

    # -- shared ones

    @asynccontextmanager
    async def copied(self, path: CheckpointPath, copy: str) -> AsyncIterator[None]:
        """A shared checkpoint under the name of `copy`, which stays at least until the block ends. Refused."""
        self._copying.add(copy)
        try:
            await asyncio.to_thread(self._copy, path, self.at(replace(path, name=copy)))
            yield
        finally:
            self._copying.discard(copy)

    def _copy(self, path: CheckpointPath, copy: Path) -> None:
        source = None if self._shared is None else self._shared / path.name
        if copy.exists():
            return
        if source is None or not source.is_dir():
            where = "--checkpoints was not given" if self._shared is None else f"{self._shared} has none"
            raise Refused(404, f"there is no checkpoint {str(path)!r}: {where}")
        partial = copy.with_name(f".{copy.name}-{secrets.token_hex(4)}")
        try:
            partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copytree(source, partial)
            partial.rename(copy)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if full := full_disk(error):
                raise no_room(self._directory, full) from error
            raise Refused(409, f"{source} could not be copied, so nothing was loaded: {error}") from error

    def remove_copies(self, after_snapshot: Iterable[Call]) -> None:
        """Those that no call needs which the snapshot does not have."""
        needed = {call.body["copy"] for call in after_snapshot if "copy" in call.body}
        for copy in (self._directory / "checkpoints" / SHARED).glob("*"):
            if copy.name not in needed | self._copying and not copy.name.startswith("."):
                shutil.rmtree(copy)

    def remove_begun(self) -> None:
        """What a kill has left of copies and removals."""
        for begun in (self._directory / "checkpoints" / SHARED).glob(".*"):
            shutil.rmtree(begun)
        for removed in (self._directory / "samplers").glob(f"*/{_REMOVED}*"):
            shutil.rmtree(removed, ignore_errors=True)


def _uses(call: Call, path: CheckpointPath) -> bool:
    """Whether a call writes or reads a checkpoint."""
    if call.kind == "load_weights":
        return call.body["path"] == str(path)
    saves = "save_weights" if path.kind == STATES else "save_weights_for_sampler"
    return call.kind == saves and call.model == path.model and call.body["name"] == path.name
