"""The trainer's measurements on the GPUs of this host, one after the other, each in its own process, beside the goals.

    python -m benchmarks.trainer_gpus --json result.json              # all that the host's GPUs allow
    python -m benchmarks.trainer_gpus --only 1.5B 1.5B-padded         # some, by name
    python -m benchmarks.trainer_gpus --list

Each is a run of benchmarks.trainer_speed. A run that fails or is late is reported, and the next one starts. With
--profiles DIR the slowest kernels of each run are written there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ONE_CONFIGURATION = ("--shape", "1.5B", "--recompute", "full", "--recompute-layers", "8", "--samples", "256")
"""In which speed, memory, packing and scaling of the 1.5B shape are measured."""
EXPERTS = ("--shape", "30B-A3B", "--samples", "48")
"""In which grouped products of experts are measured against one expert after the other."""


@dataclass(frozen=True)
class Run:
    """gpus: how many it takes, which is also its --ranks."""

    name: str
    arguments: tuple[str, ...]
    gpus: int = 1
    goal: str = ""


RUNS = (
    Run("1.5B", ONE_CONFIGURATION, goal="MFU >= 0.30, peak <= 48 GiB"),
    Run("1.5B-padded", (*ONE_CONFIGURATION, "--layout", "padded", "--steps", "1"), goal="packed is >= 1.8 x this"),
    Run("7B", ("--shape", "7B", "--recompute", "full", "--tokens", "8192", "--samples", "48"), goal="MFU >= 0.45"),
    Run(
        "0.5B",
        ("--shape", "0.5B", "--keep-head", "--head-chunk", "4096"),
        goal="MFU >= 0.45, log-probabilities >= 0.60",
    ),
    Run("1.5B-fast", ("--shape", "1.5B", "--keep-head"), goal="MFU >= 0.50, log-probabilities >= 0.60"),
    Run("1.5B-selective", ("--shape", "1.5B", "--recompute", "selective")),
    Run("1.5B-eager", (*ONE_CONFIGURATION, "--eager", "--steps", "1")),
    Run("30B-A3B", (*EXPERTS, "--expert-products", "grouped")),
    Run("30B-A3B-sequential", (*EXPERTS, "--expert-products", "sequential")),
    Run("1.5B-4", (*ONE_CONFIGURATION, "--distributed-optimizer"), gpus=4, goal="tokens/s >= 3.6 x one GPU's"),
    Run("1.5B-2", (*ONE_CONFIGURATION, "--distributed-optimizer"), gpus=2),
    Run("7B-2", ("--shape", "7B", "--recompute", "full", "--distributed-optimizer"), gpus=2, goal="MFU >= 0.45"),
    Run(
        "7B-4",
        ("--shape", "7B", "--recompute", "selective", "--distributed-optimizer"),
        gpus=4,
        goal="MFU >= 0.55, log-probabilities >= 0.60",
    ),
    Run("1.5B-tp2", (*ONE_CONFIGURATION, "--tensor-parallel", "2", "--sequence-parallel"), gpus=2),
    Run("1.5B-cp2", (*ONE_CONFIGURATION, "--context-parallel", "2"), gpus=2),
)
COLUMNS = (
    "tokens_per_second_per_device",
    "mfu",
    "logprob_mfu",
    "attention",
    "experts",
    "peak_allocated_gib",
    "micro_batches",
    "warmup_seconds",
)


def measure(run: Run, extra: list[str], profiles: Path | None, timeout: float) -> dict[str, Any]:
    """trainer_speed's result, or {"error": the end of its output}."""
    command = [sys.executable, "-m", "benchmarks.trainer_speed", *run.arguments, "--ranks", str(run.gpus), *extra]
    if profiles is not None:
        command += ["--profile", str(profiles / f"{run.name}.txt")]
    # A session of its own, so that a run that is late ends with all its ranks: they would go on, on GPUs that the next
    # run measures.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout)
        except BaseException as stopped:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(stopped, subprocess.TimeoutExpired):
                return {"error": f"no result within {timeout:g} s"}
            raise
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if child.returncode == 0 and lines else {"error": (output + errors)[-3000:]}


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of whole tokens/s: packing's gain, what several GPUs give of one's, grouped products' gain."""

    def speed(name: str) -> float | None:
        found = results.get(name, {})
        return found["tokens_per_second_per_device"] * found["ranks"] if "ranks" in found else None

    wanted = {
        "packed / padded, 1.5B": ("1.5B", "1.5B-padded"),
        "4 GPUs / 1, 1.5B": ("1.5B-4", "1.5B"),
        "2 GPUs / 1, 1.5B": ("1.5B-2", "1.5B"),
        "grouped / sequential, 30B-A3B": ("30B-A3B", "30B-A3B-sequential"),
    }
    pairs = {name: (speed(above), speed(below)) for name, (above, below) in wanted.items()}
    return {name: round(above / below, 3) for name, (above, below) in pairs.items() if above and below}


def markdown(runs: list[Run], results: dict[str, dict[str, Any]]) -> str:
    lines = [f"| run | GPUs | {' | '.join(COLUMNS)} | goal | arguments |", f"|{'---|' * (len(COLUMNS) + 4)}"]
    for run in runs:
        found = results[run.name]
        values = (
            [str(found.get(column, "")) for column in COLUMNS]
            if "error" not in found
            else ["failed", *[""] * (len(COLUMNS) - 1)]
        )
        lines.append(f"| {run.name} | {run.gpus} | {' | '.join(values)} | {run.goal} | `{' '.join(run.arguments)}` |")
    return "\n".join([*lines, "", *(f"{name}: {value}  " for name, value in ratios(results).items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[run.name for run in RUNS],
        help="runs by name; default: all for which there are GPUs",
    )
    parser.add_argument("--list", action="store_true", help="print the runs and start none")
    parser.add_argument("--json", type=Path, help="write all results here, after every run")
    parser.add_argument("--profiles", type=Path, help="directory for the slowest kernels of each run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="what follows goes to every run")
    options = parser.parse_args()
    import torch

    present = torch.cuda.device_count()
    runs = (
        [run for run in RUNS if run.name in options.only]
        if options.only
        else [run for run in RUNS if run.gpus <= present]
    )
    if options.list:
        for run in RUNS:
            print(f"{run.name:16} {run.gpus} GPU  {' '.join(run.arguments)}")
        return
    if not runs:
        parser.error("this host has no GPU that torch finds; --only NAME --extra ... runs one all the same")
    if options.profiles is not None:
        options.profiles.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for run in runs:
        results[run.name] = measure(run, options.extra, options.profiles, options.timeout)
        print(run.name, json.dumps(results[run.name]), flush=True)
        if options.json is not None:
            options.json.write_text(
                json.dumps({"results": results, "ratios": ratios(results)}, indent=1), encoding="utf-8"
            )
    print(markdown(runs, results))
    sys.exit(any("error" in found for found in results.values()))


if __name__ == "__main__":
    main()
