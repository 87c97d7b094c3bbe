"""Reward functions that misbehave, by what a sample's metadata asks for. They run in worker processes, hence a module
of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def plain(sample, text):
    """`do` in the metadata: what to do instead of returning the text as a number."""
    match sample.metadata.get("do"):
        case None:
            return float(text)
        case "raise":
            raise KeyError("answer")
        case "stop_iteration":
            return next(iter([]))
        case "return":
            return eval(sample.metadata["value"])
        case "awaitable":
            return awaits(sample, text)
        case "hang":
            time.sleep(600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(3)
        case "print":
            print("printed by the reward", text)
            subprocess.run(["echo", "printed by its child"], check=True)
            return float(text)
        case "change":
            sample.metadata["seen"] = True
            return float(text)
        case "pid":
            return os.getpid()
        case "meet":
            return meet(Path(sample.metadata["dir"]), sample.metadata["parties"])
        case "spawn_and_hang":
            child = subprocess.Popen(["sleep", "600"])
            Path(sample.metadata["file"]).write_text(str(child.pid))
            time.sleep(600)
    return None


def meet(directory: Path, parties: int) -> float:
    """Returns once so many processes are here at the same time."""
    (directory / str(os.getpid())).touch()
    while len(list(directory.iterdir())) < parties:
        time.sleep(0.001)
    return float(parties)


async def awaits(sample, text):
    """`do` in the metadata: what to do instead of returning the text as a number."""
    match sample.metadata.get("do"):
        case "raise":
            raise KeyError("answer")
        case "exit":
            raise SystemExit(3)
        case "hang":
            await asyncio.sleep(600)
        case "ignore_cancellation":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    if sample.metadata.get("end") and sample.metadata["end"].is_set():
                        raise
        case "together":
            sample.metadata["here"].append(1)
            while len(sample.metadata["here"]) < sample.metadata["parties"]:
                await asyncio.sleep(0)
        case "change":
            sample.metadata["seen"] = True
    return float(text)


class Judge:
    async def __call__(self, sample, text):
        return 3


judge = Judge()
