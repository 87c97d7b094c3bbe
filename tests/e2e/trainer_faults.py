"""A supervised training of two ranks on the CPU, and a look at each of its processes: for tests that break one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rltool.checkpoints import directory as directories
from rltool.processes.marks import MARK_VARIABLE
from rltool.processes.run_directory import RunDirectory
from tests.e2e.job import DEADLINE, Job

SETS = (
    'algorithm.loss="sft"', "eval.sets={}", "trainer.world_size=2", "trainer.cpus_per_rank=0.5",
    "optimizer_steps_per_rollout=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=1", "rollout.dump=false",
    "checkpoint.every_steps=4", "checkpoint.keep_last=2", "monitor.tensorboard=false",
)  # fmt: skip
ENDLESS = 1_000_000


class Training:
    """`rltool train` of a run that goes on until something happens to it."""

    def __init__(self, job: Job, run: str, *more: str, sets: Sequence[str] = (), steps: int = ENDLESS) -> None:
        self.job, self.run = job, RunDirectory(job.runs / run)
        self.process = job.start("train", run, "--steps", str(steps), *more, sets=[*SETS, *sets])

    def said(self) -> str:
        return " ".join(self.job.output(self.run.name).split())

    def newest(self) -> Path | None:
        return directories.latest_checkpoint(self.run.checkpoints_dir)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it is true. The process must live so long."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said()[-3000:]}"
            assert time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.02)

    def wait_for_a_checkpoint(self, beyond: Path | None = None) -> None:
        self.wait_for(lambda: self.newest() not in (None, beyond))

    def end(self) -> int:
        return self.process.wait(DEADLINE)

    def processes(self) -> list[psutil.Process]:
        """All that bear the mark of this run, whoever their parent is."""
        return [process for process in psutil.process_iter() if self._marked(process)]

    def rank(self, number: int) -> psutil.Process:
        """The process that writes the log of this rank, in the newest attempt."""
        log = str((self.run.logs_dir / "latest").resolve() / f"trainer_rank{number}.log")
        [found] = [process for process in self.processes() if _stdout(process) == log]
        return found

    def named(self, name: str) -> psutil.Process:
        [found] = [process for process in self.processes() if process.name() == name]
        return found

    def kill(self) -> None:
        """Whatever is left, whatever state it is in."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and f" {self.run.path.resolve()} " in process.environ().get(MARK_VARIABLE, "")
        return False


def listening(process: psutil.Process) -> list[str]:
    """Addresses that TCP sockets of this process listen on; an IPv4 one in IPv6 clothes as the former."""
    found = [it.laddr.ip for it in process.net_connections("tcp") if it.status == psutil.CONN_LISTEN]
    return [address.removeprefix("::ffff:") for address in found]


@contextmanager
def training(job: Job, run: str, *more: str, sets: Sequence[str] = (), steps: int = ENDLESS) -> Iterator[Training]:
    """It runs inside the block; afterwards nothing of it is left, however the test ended."""
    begun = Training(job, run, *more, sets=sets, steps=steps)
    try:
        yield begun
    finally:
        begun.kill()


def rltool(job: Job, *words: str, code: int = 0) -> str:
    """A verb that takes no configuration. Returns what it said, on one line."""
    return " ".join(job.say(*words, code=code).split())


def _stdout(process: psutil.Process) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/fd/1")
    return ""
