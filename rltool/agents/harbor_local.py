"""An environment of Harbor's without its daemon: the task runs on this machine, in a root directory of its own.

    environment = {"import_path": "rltool.agents.harbor_local:LocalEnvironment", "kwargs": {"skip_run": True}}

Harbor's containers are images; here the programs are those of this machine (/usr, /etc, /opt, read-only), and all else
(/app, /logs, /tests, /tmp, /root, ...) is a new directory that ends with the trial, as do all processes. So the
absolute paths of tasks hold, and trials side by side do not meet. Of the task's Dockerfile WORKDIR, ENV and COPY are
followed and RUN is run, which fails where it installs something.

**It is no sandbox**: tasks and agents have the network, the kernel, the memory and the CPUs of this machine, and read
what is in /etc. Run it where nothing else is, or use one of Harbor's own environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.options import EnvironmentOptions
from harbor.environments.snowflake.dockerfile_replay import CopyStep, ReplayPlan, Step, plan_from_dockerfile
from harbor.environments.tar_transfer import extract_dir, pack_dir

from rltool.errors import UsageError

ENTER = ("--user", "--mount", "--pid", "--ipc", "--uts", "--preserve-credentials", "--")
WITHOUT = "-sys_admin,-sys_ptrace"
"""Rights with which a program could undo the read-only mounts."""
VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "USER": "root",
    "LANG": "C.UTF-8", "TERM": "xterm-256color", "DEBIAN_FRONTEND": "noninteractive",
}  # fmt: skip
ROOTS = (None, "root", 0, "0")
START_SECONDS = 30.0


class LocalOptions(EnvironmentOptions):
    """skip_run: leave the RUN lines of Dockerfiles out: what they would install is on this machine. shared: more
    directories of this machine that the task sees, read-only."""

    skip_run: bool = False
    shared: list[str] = []


class LocalEnvironment(BaseEnvironment):
    """See the module. Every command is run as root of a user namespace; other users are refused."""

    options_model = LocalOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._root: Path | None = None
        self._first: asyncio.subprocess.Process | None = None
        self._init = 0
        self._plan = ReplayPlan(base_image="")
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "rltool-local"

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        missing = [program for program in ("nsenter", "setpriv") if not shutil.which(program)]
        if missing:
            raise UsageError(f"{cls.__name__} needs {' and '.join(missing)} (util-linux)")

    def _validate_definition(self) -> None:
        """ValueError for what only containers have."""
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError(f"{self.environment_dir} has a docker-compose.yaml, which needs containers")
        if self._host_mounts:
            raise ValueError("mounts need containers; `shared` in kwargs shows a directory of this machine, read-only")
        dockerfile = self.environment_dir / "Dockerfile"
        if dockerfile.exists():
            self._plan = plan_from_dockerfile(dockerfile)

    async def start(self, force_build: bool) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="rltool-harbor-"))
        options = self.options
        assert isinstance(options, LocalOptions)
        order = {"root": str(self._root), "shared": options.shared}
        self._first = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rltool.agents.harbor_root", json.dumps(order),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            lines = [(await self._first.stdout.readline()).decode().strip() for _ in range(2)]
        number = next((line for line in lines if line.isdigit()), "")
        if "+" not in lines or not number:
            why = next((line[1:] for line in lines if line.startswith("-")), "its first process ended")
            raise SandboxBuildFailedError(
                f"{why}: LocalEnvironment needs Linux namespaces (`rltool doctor` tries them)"
            )
        self._init = int(number)
        await self._must(("mkdir", "-p", "-m", "0777", *self._mount_targets(), self._workdir()))
        for step in self._plan.steps:
            if isinstance(step, CopyStep) or not options.skip_run:
                await self._build(step)
        await self._upload_environment_dir_after_start()

    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._plan.workdir

    async def _build(self, step: Step) -> None:
        if not isinstance(step, CopyStep):
            done = await self.exec(step.command, cwd=step.workdir, env=step.env, user=step.user)
            if done.return_code:
                said = (done.stderr or done.stdout or "")[-500:]
                raise SandboxBuildFailedError(f"RUN {step.command}: exit code {done.return_code}: {said}")
            return
        for source in (path for pattern in step.sources for path in self._matching(pattern)):
            if source.is_dir():
                await self.upload_dir(source, step.dest)
            else:
                await self.upload_file(source, f"{step.dest}/{source.name}" if step.dest_is_dir else step.dest)
        if step.chmod:
            await self.exec(f"chmod -R {shlex.quote(step.chmod)} {shlex.quote(step.dest)}")

    def _matching(self, pattern: str) -> list[Path]:
        found = sorted(self.environment_dir.glob(pattern.lstrip("/")))
        if pattern in (".", "./"):
            found = [self.environment_dir]
        if not found:
            raise SandboxBuildFailedError(f"COPY {pattern}: not in {self.environment_dir}")
        return found

    async def stop(self, delete: bool) -> None:
        """Ends every process of the task; `delete`: its files too."""
        if self._first is not None:
            assert self._first.stdin is not None
            self._first.stdin.close()
            await self._first.wait()
            self._first = None
        if delete and self._root is not None:
            await asyncio.to_thread(_remove, self._root)
            self._root = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """RuntimeError behind its time, as with Harbor's Docker; then its process group is ended. Programs in a session
        of their own (tmux, daemons) stay until the end of the environment."""
        who = self._resolve_user(user)
        if who not in ROOTS:
            raise RuntimeError(f"user {who!r}: there is none but root without containers")
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            words = ("bash", "-c", command)
            code = await self._run(words, output, errors, cwd=cwd or self._workdir(), env=env, seconds=timeout_sec)
            return ExecResult(stdout=_text(output), stderr=_text(errors), return_code=code)

    async def _run(
        self,
        words: Sequence[str],
        output: IO[bytes],
        errors: IO[bytes],
        *,
        stdin: IO[bytes] | None = None,
        cwd: str = "/",
        env: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> int:
        if self._first is None or self._first.returncode is not None:
            raise RuntimeError("the environment does not run")
        start = ("sh", "-c", 'cd "$0" && exec "$@"', cwd, *words)
        process = await asyncio.create_subprocess_exec(
            "nsenter", "--target", str(self._init), *ENTER, "setpriv", "--bounding-set", WITHOUT, *start,
            env={**VARIABLES, **self._plan.env, **(self._merge_env(env) or {})}, start_new_session=True,
            stdin=stdin or asyncio.subprocess.DEVNULL, stdout=output, stderr=errors,
        )  # fmt: skip
        try:
            async with asyncio.timeout(seconds or None):
                return await process.wait()
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {seconds} seconds") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Into `target_path`, where that is a directory."""
        script = (
            'if [ -d "$0" ]; then set -- "$0/$1" "$2"; else set -- "$0" "$2"; fi; '
            'mkdir -p "$(dirname "$1")" && rm -f "$1" && cat > "$1" && chmod "$2" "$1"'
        )
        with await asyncio.to_thread(open, source_path, "rb") as file:
            mode = f"{os.fstat(file.fileno()).st_mode & 0o777:o}"
            await self._must(("sh", "-c", script, str(target_path), Path(source_path).name, mode), file)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with tempfile.TemporaryFile() as archive:
            pack_dir(source_dir, archive, compress=False, include_root=False)
            archive.seek(0)
            script = 'mkdir -p "$0" && tar -x --no-same-owner -C "$0"'
            await self._must(("sh", "-c", script, str(target_dir)), archive)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with tempfile.TemporaryFile() as content:
            await self._must(("cat", str(source_path)), output=content)
            await asyncio.to_thread(_write, content, Path(target_path), PurePosixPath(source_path).name)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Links that lead out of it are left out."""
        script = 'tar -c -C "$0" . || [ $? -eq 1 ]'  # 1: a file grew meanwhile, such as the log of a program
        with tempfile.TemporaryFile() as archive:
            await self._must(("sh", "-c", script, str(source_dir)), output=archive)
            for refused in extract_dir(archive, target_dir):
                self.logger.warning(f"{source_dir}: {refused}")

    async def _must(
        self, words: Sequence[str], stdin: IO[bytes] | None = None, output: IO[bytes] | None = None
    ) -> None:
        """Run it; `output` is rewound. RuntimeError with what it said."""
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as unread:
            if await self._run(words, output or unread, errors, stdin=stdin):
                raise RuntimeError(f"{shlex.join(words)}: {_text(errors)}")
        if output is not None:
            output.seek(0)


def _write(content: IO[bytes], target: Path, name: str) -> None:
    """As `target`, or into it where it is a directory."""
    path = target / name if target.is_dir() else target
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)


def _remove(root: Path) -> None:
    """With directories that programs made read-only (Go's module cache): only root removes these as they are."""
    root.chmod(0o700)
    for folder, names, _ in os.walk(root):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)


def _text(file: IO[bytes]) -> str | None:
    file.seek(0)
    return file.read().decode(errors="replace") or None
