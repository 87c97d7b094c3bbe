"""Synchronous, one step off-policy and asynchronous training on the quickstart's task, on the same engines.

    make quickstart ARGS="--run base"
    python -m benchmarks.rollout_modes --quickstart runs/base --work runs/modes --steps 60

Takes the warm-started model, task and configuration of a finished quickstart, starts two vLLM engines once, and trains
with max_staleness 0, 1 and 4. Steps per minute leave the first five steps out. Then a run is interrupted in the middle
of a rollout: seconds from the signal to the end of the process, checkpoint included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODES: dict[str, list[str]] = {
    "0": [],
    "1": ["rollout.max_staleness=1", 'algorithm.is_weights="token"'],
    "4": ["rollout.max_staleness=4", 'algorithm.is_weights="token"'],
}
"""max_staleness -> settings. Off-policy tokens are corrected with truncated importance weights."""
LEFT_OUT = 5


class Bench:
    """`rltool` verbs in child processes, with runs under `work`."""

    def __init__(self, quickstart: Path, work: Path) -> None:
        self.quickstart, self.work = quickstart.resolve(), work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, "RLTOOL_RUNS": str(self.work), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "rltool", *words]

    def run(self, *words: str) -> None:
        subprocess.run(self.argv(*words), env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def train_words(self, run: str, sets: list[str], steps: int) -> list[str]:
        words = ["train", "--config", str(self.quickstart / "grpo.toml"), "--run", run, "--steps", str(steps)]
        words += ["--rollout-external", f"@{self.work}/engines/endpoints.json"]
        for item in ["checkpoint.every_steps=0", *sets]:
            words += ["--set", item]
        return words

    def metrics(self, run: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.work / run / "metrics.jsonl").read_text().splitlines()]

    def mode(self, staleness: str, steps: int) -> dict[str, float]:
        run = f"staleness-{staleness}"
        self.run(*self.train_words(run, MODES[staleness], steps))
        records = [record for record in self.metrics(run) if "train/loss" in record]
        measured = records[LEFT_OUT:-1]  # the last one evaluates
        accuracies = [record.get("eval/heldout/accuracy") for record in self.metrics(run)]
        evaluated = [accuracy for accuracy in accuracies if accuracy is not None]

        def mean(name: str) -> float:
            return round(statistics.mean(record[name] for record in measured), 3)

        return {
            "steps/min": round(60 / statistics.median(record["time/step_seconds"] for record in measured), 1),
            "reward, last 10": round(statistics.mean(record["rollout/reward_mean"] for record in records[-10:]), 3),
            "heldout before": round(evaluated[0], 3),
            "heldout after": round(evaluated[-1], 3),
            "staleness mean": mean("rollout/staleness_mean"),
            "staleness max": max(record["rollout/staleness_max"] for record in records),
            "wait s": mean("time/wait_seconds"),
            "train s": mean("time/train_seconds"),
            "sync s": mean("time/sync_seconds"),
        }

    def stop(self) -> dict[str, float]:
        """Ctrl-C while responses that would take minutes are generated."""
        sets = ["rollout.prompts_per_step=256", "rollout.samples_per_prompt=16", "eval.sets={}"]
        words = self.train_words("stopped", sets, 1000)
        with (self.work / "stopped.log").open("w") as log:
            process = subprocess.Popen(self.argv(*words), env=self.environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                while "step 1/" not in (self.work / "stopped.log").read_text():
                    time.sleep(0.1)
                time.sleep(1.0)
                process.send_signal(signal.SIGINT)
                started = time.monotonic()
                code = process.wait(120)
            finally:
                process.kill()
        return {"seconds from Ctrl-C to the prompt": round(time.monotonic() - started, 2), "exit code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    arguments = parser.parse_args()
    bench = Bench(arguments.quickstart, arguments.work)
    served = ["serve-engines", str(bench.quickstart / "model"), "--num-engines", "2", "--device", "cpu"]
    bench.run(*served, "--max-model-len", "32", "--run", "engines", "--detach")
    try:
        found = {f"max_staleness {mode}": bench.mode(mode, arguments.steps) for mode in arguments.modes}
        found["stop"] = bench.stop()
    finally:
        bench.run("stop", "--run", "engines")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
