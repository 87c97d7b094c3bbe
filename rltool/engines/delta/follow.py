"""A directory in Hugging Face's layout that follows the versions of a store, for engines that load whole directories.

DIR/RUN-ATTEMPT-N appears, complete, when the version can be loaded. A follower of an engine records in the store how
far it is (`Report`), so that the writer knows when that engine can load it, and from where.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from safetensors.torch import load_file, save_file
from torch import Tensor

from rltool.engines.delta import chain
from rltool.engines.delta.chain import Held, Manifest
from rltool.engines.delta.rebuild import Rebuilt, bring
from rltool.engines.delta.store import KeyMissing, Store, StoreError
from rltool.errors import RltoolError

KEPT = 2
"""Versions in the directory: the engine may be loading the one before."""

_OURS = re.compile(r"[0-9a-f]{32}-\d+-\d+")


class DirectoryCopy:
    """See rltool.engines.delta.rebuild.Copy. Holds one shard in memory at a time; the older version stays readable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: Held | None = None
        self.path: Path | None = None
        """The directory of what is held."""
        self._partial = root / ".partial"
        self._source: Path | None = None
        self._shards = 0

    def replaced(self, manifest: Manifest, model_files: Mapping[str, bytes]) -> None:
        self._begin(manifest.shards)
        for name, data in model_files.items():
            (self._partial / name).write_bytes(data)

    def load(self, shard: int) -> dict[str, Tensor]:
        assert self.path is not None, "nothing is held"
        if self._source is None:
            self._begin(self._shards)
            self._source = self.path
            for file in self.path.glob("*.json"):
                shutil.copy2(file, self._partial / file.name)
        # Read, not mapped: what a mapping shows would change with the file.
        return {name: tensor.clone() for name, tensor in load_file(self._source / self._name(shard)).items()}

    def store(self, shard: int, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self._partial / self._name(shard), metadata={"format": "pt"})

    def complete(self, manifest: Manifest) -> None:
        self.path = self.root / chain.directory(manifest.version)
        shutil.rmtree(self.path, ignore_errors=True)
        os.replace(self._partial, self.path)
        self._source = None
        for old in _versions(self.root)[:-KEPT]:
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)

    def _begin(self, shards: int) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._source, self._shards = None, shards

    def _name(self, shard: int) -> str:
        return chain.shard_name("anchor", shard, self._shards)


@dataclass(frozen=True)
class Report:
    """What a follower has for its engine, nothing yet where version is None. directory: of `version`, on the engine's
    host; error: why it does not have the newest one."""

    engine: str
    version: str | None
    directory: str | None
    error: str | None

    @classmethod
    def read(cls, store: Store, engine: str) -> Report | None:
        """None where no follower of this engine was ever there. Raises StoreError."""
        try:
            return cls(**json.loads(store.get(_report_key(engine))))
        except KeyMissing:
            return None
        except (ValueError, TypeError) as error:
            raise StoreError(f"the report of the follower of {engine} is damaged: {error}") from error

    def write(self, store: Store) -> None:
        store.put(_report_key(self.engine), json.dumps(asdict(self)).encode())


def follow(
    store: Store,
    directory: Path,
    *,
    engine: str,
    every: float,
    deadline: float,
    log: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """Rebuild each newest version of `store` below `directory` until `stopped`.

    engine: its URL as the trainer has it; every: seconds between two looks at the store; deadline: seconds for one
    version. What goes wrong with one version is logged and reported, and tried again. Raises StoreError where the store
    cannot be written at the start.
    """
    Report(engine, None, None, None).write(store)
    copy = DirectoryCopy(directory)
    directory.mkdir(parents=True, exist_ok=True)
    last_error = ""
    while not stopped():
        try:
            version = newest(store)
            if version is not None and (copy.held is None or copy.held != version):
                rebuilt = bring(copy, store, version.version, seconds=deadline)
                Report(engine, version.version, str(copy.path), None).write(store)
                log(_line(rebuilt))
                last_error = ""
        except (RltoolError, OSError) as error:
            if str(error) != last_error:
                log(str(error))
                _report_failure(store, engine, copy, str(error))
                last_error = str(error)
        time.sleep(every)


def newest(store: Store) -> Held | None:
    """What the writer of this store has completed last; None before its first version. Raises StoreError."""
    try:
        return Held(**json.loads(store.get(chain.HEAD)))
    except KeyMissing:
        return None
    except (ValueError, TypeError) as error:
        raise StoreError(f"{chain.HEAD} of the store is damaged: {error}") from error


def _report_failure(store: Store, engine: str, copy: DirectoryCopy, error: str) -> None:
    held = copy.held
    try:
        Report(engine, held.version if held else None, str(copy.path) if held else None, error).write(store)
    except StoreError:
        return  # it is the store that fails, which is logged already


def _line(rebuilt: Rebuilt) -> str:
    kind = "anchor" if rebuilt.anchor else "patches"
    return f"weights {rebuilt.held.version}: {kind}, {rebuilt.bytes / 1e6:.1f} MB in {rebuilt.seconds:.2f} s"


def _report_key(engine: str) -> str:
    return f"followers/{quote(engine, safe='')}.json"


def _versions(root: Path) -> list[Path]:
    """Version directories below `root`, by their age."""
    found = [path for path in root.iterdir() if path.is_dir() and _OURS.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime)
