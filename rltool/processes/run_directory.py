"""The directory that all commands of one run share: where everything is, and nothing about what is in it.

    runs/NAME/  config.json  endpoints.json  state/{run.json,key,ROLE.json}  logs/attempt_N/ROLE.log  logs/latest
                rollouts/  samples/  evals/NAME/  checkpoints/step_N/  sessions/  metrics.jsonl  report.html
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rltool import __version__
from rltool.errors import UsageError
from rltool.processes.files import replace_symlink, write_json_atomic
from rltool.processes.keys import make_key

RUNS_VARIABLE = "RLTOOL_RUNS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST_NAME = 128
"""Below what any file system takes (255 bytes), with room for what is put before and behind it in names of files."""


@dataclass(frozen=True)
class RunDirectory:
    """An absolute path and the names below it. Made by open_run, for its owner alone: files within need no modes."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def endpoints_file(self) -> Path:
        return self.path / "endpoints.json"

    @property
    def state_dir(self) -> Path:
        return self.path / "state"

    @property
    def quantized_dir(self) -> Path:
        """Models as engines read them that quantise nothing themselves."""
        return self.path / "quantized"

    @property
    def key_file(self) -> Path:
        """The bearer key of the run's engines and router; ensure_key() writes it."""
        return self.state_dir / "key"

    @property
    def gateway_key_file(self) -> Path:
        """The key that opens sessions of the run's gateway; not that of its engines, for agents' hosts have it."""
        return self.state_dir / "gateway.key"

    @property
    def sessions_dir(self) -> Path:
        return self.path / "sessions"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    @property
    def samples_dir(self) -> Path:
        """A few samples of each step, for people to look at (report/samples.py)."""
        return self.path / "samples"

    @property
    def evals_dir(self) -> Path:
        """Samples of evaluations, a directory for each set, where eval.dump is set."""
        return self.path / "evals"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def hf_export(self, step: int) -> Path:
        """Hugging Face directory with the weights after this many steps (checkpoint.save_hf_every, save_hf_at_end)."""
        return self.path / "hf" / f"step_{step}"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def is_used(self) -> bool:
        """It holds metrics or a checkpoint, so training may go on here only by resuming."""
        has_metrics = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        return has_metrics or any(self.checkpoints_dir.glob("step_*"))

    @property
    def run_id(self) -> str:
        """uuid4 hex, the same for the directory's whole life."""
        return _identity(self.path)["id"]

    @property
    def is_made(self) -> bool:
        """It has an identity: `open_run` has made it. Before that there may be a directory, for a mount beneath it."""
        return (self.state_dir / "run.json").exists()

    @property
    def attempt(self) -> int:
        """The newest attempt that has logs; 0 before the first."""
        return max((_attempt_number(path) for path in self.logs_dir.glob("attempt_*")), default=0)

    def ensure_key(self) -> Path:
        """The key file (0600), written at the first call with a new random key and never changed."""
        return make_key(self.key_file)

    def new_log(self, role: str) -> Path:
        """A new, empty log file for a process that is about to start.

        It goes into the newest attempt, unless this role has a log there already: then it was started again, and a new
        attempt begins. So an attempt is one life of the whole run, and attempt_of(log) is unique for a role.
        """
        attempt = max(self.attempt, 1)
        while True:
            log = self.logs_dir / f"attempt_{attempt}" / f"{role}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            try:
                log.touch(mode=0o600, exist_ok=False)  # SGLang writes its arguments into its log, the key among them
            except FileExistsError:
                attempt += 1
                continue
            replace_symlink(self.logs_dir / "latest", log.parent.name)
            return log


def attempt_of(log: Path) -> int:
    """The attempt that a path returned by new_log belongs to."""
    return _attempt_number(log.parent)


def runs_root(root: Path | None = None) -> Path:
    """Absolute path of the directory that holds runs: `root`, or $RLTOOL_RUNS, or ./runs."""
    return (root or Path(os.environ.get(RUNS_VARIABLE) or "runs")).absolute()


def open_run(name: str | None, *, create: bool, root: Path | None = None) -> RunDirectory:
    """The run called `name`; without a name a new one (create=True) or the newest (create=False).

    create=True with a name opens it, making it if need be. Raises UsageError if there is no such run, or for a name
    that is not a plain directory name.
    """
    root = runs_root(root)
    _check_name(name, root)
    if create:
        return _create(root / (name or _fresh_name()))
    runs = list_runs(root)
    if name is None:
        if not runs:
            raise UsageError(
                f"there is no run in {root}: start one with `rltool serve-engines`, or set RLTOOL_RUNS"
            )
        return runs[-1]
    for run in runs:
        if run.name == name:
            return run
    for directory in (root / name, root / name / "state"):
        if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            raise UsageError(
                f"run {name}: no permission to read {directory}: it is the run of another user (id "
                f"{directory.stat().st_uid}), and rltool runs here as user id {os.geteuid()}"
            )
    known = ", ".join(run.name for run in reversed(runs[-5:])) or "none"
    raise UsageError(f"no run {name} in {root}; the newest ones: {known}")


def plan_run(name: str | None, *, root: Path | None = None) -> RunDirectory:
    """The run that `open_run(name, create=True)` would open or make, without making it: for checks that shall leave no
    trace."""
    _check_name(name, runs_root(root))
    return RunDirectory(runs_root(root) / (name or _fresh_name()))


def check_writable(run: RunDirectory) -> None:
    """UsageError, naming the path and the fix, where the run's files cannot be written. Nothing is made.

    Looks at what is there: the directories of the run, or the one in which they would be made. Access is asked of the
    kernel, which knows of read-only file systems.
    """
    for path in (run.path, run.state_dir, run.logs_dir, run.checkpoints_dir):
        there = path
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise _not_writable(run, f"{there} is there, and is no directory")
        if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
            raise _not_writable(run, f"no permission to write into {there}, or its file system is read-only")


def _not_writable(run: RunDirectory, why: str) -> UsageError:
    return UsageError(
        f"run {run.name} cannot be written: {why}; choose another --run, or another directory for runs with "
        f"{RUNS_VARIABLE}=DIRECTORY"
    )


def list_runs(root: Path | None = None, *, damaged: bool = True) -> list[RunDirectory]:
    """All runs below the root, oldest first. One whose run.json cannot be read is a UsageError; with damaged=False it
    is left out."""
    found = []
    for marker in runs_root(root).glob("*/state/run.json"):
        path = marker.parent.parent
        try:
            found.append((_identity(path)["created"], path))
        except UsageError:  # also one that is being deleted
            if damaged:
                raise
    return [RunDirectory(path) for _, path in sorted(found)]


def _check_name(name: str | None, root: Path) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"run {name[:_LONGEST_NAME]!r}: a run's name is letters, digits, '.', '_' and '-', not a path (runs are "
            f"in {root})"
        )
    if name is not None and len(name) > _LONGEST_NAME:
        raise UsageError(f"a run's name has at most {_LONGEST_NAME} characters; this one has {len(name)}")


def _create(path: Path) -> RunDirectory:
    check_writable(RunDirectory(path))
    # Other users share the host, and prompts, answers, weights and settings are none of their business.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        with contextlib.suppress(PermissionError):  # made by another user, as a mount is: who may enter is for him
            path.chmod(0o700)
    state = path / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    state.chmod(0o700)  # even in a public directory: here are argv, urls and the key
    if not RunDirectory(path).is_made:
        created = datetime.now().astimezone().isoformat()
        write_json_atomic(state / "run.json", {"id": uuid.uuid4().hex, "created": created, "rltool": __version__})
    return RunDirectory(path)


def _identity(path: Path) -> dict[str, str]:
    marker = path / "state" / "run.json"
    try:
        found = json.loads(marker.read_text())
        return {name: found[name] for name in ("id", "created")}
    except FileNotFoundError:
        raise UsageError(f"{path} is not a run directory: {marker} is missing") from None
    except OSError as error:
        raise UsageError(f"{marker} cannot be read: {error.strerror}; is it another user's run?") from error
    except ValueError as error:  # not JSON, not UTF-8
        raise UsageError(f"{marker} is not JSON ({error}); move the directory away, or restore the file") from error
    except (KeyError, TypeError) as error:
        raise UsageError(f"{marker} does not name id and date; move the directory away, or restore the file") from error


def _fresh_name() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _attempt_number(path: Path) -> int:
    number = path.name.removeprefix("attempt_")
    return int(number) if number.isdigit() else 0
