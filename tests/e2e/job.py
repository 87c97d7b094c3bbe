"""A training job as a user would set it up: data, run.toml, and the `rltool` command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DEADLINE = 240.0
STOP_SECONDS = 10.0
"""From a signal to the end of `train`, where no save is running: 3 s, and room for a busy host."""


@dataclass(frozen=True)
class Job:
    """`root` holds runs/; `endpoints` is the address to train against."""

    root: Path
    model: Path
    endpoints: str | None = None

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "RLTOOL_RUNS": str(self.runs),
            "COLUMNS": "250",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }

    def argv(self, verb: str, run: str, *more: str, sets: Sequence[str] = ()) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "rltool",
            *verb.split(),
            "--config",
            str(self.root / "run.toml"),
            "--run",
            run,
            *more,
        ]
        if self.endpoints is not None and verb in ("train", "debug rollout-only"):
            words += ["--rollout-external", self.endpoints]
        for item in sets:
            words += ["--set", item]
        return words

    def __call__(self, verb: str, run: str, *more: str, sets: Sequence[str] = (), code: int = 0) -> str:
        """Run it to its end; the exit code must be `code`. Returns stdout and stderr together."""
        done = subprocess.run(
            self.argv(verb, run, *more, sets=sets),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            cwd=self.root,
        )
        assert done.returncode == code, (
            f"rltool {verb} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout + done.stderr

    def start(self, verb: str, run: str, *more: str, sets: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Begin it, in a process group of its own; output goes to <root>/<run>.out."""
        with (self.root / f"{run}.out").open("w") as out:
            return subprocess.Popen(
                self.argv(verb, run, *more, sets=sets),
                env=self.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.root,
                process_group=0,
            )

    def output(self, run: str) -> str:
        return (self.root / f"{run}.out").read_text()

    def metrics(self, run: str) -> list[dict]:
        return [json.loads(line) for line in (self.runs / run / "metrics.jsonl").read_text().splitlines()]

    def steps(self, run: str) -> list[dict]:
        """Records of training steps (without the evaluation before the first)."""
        return [record for record in self.metrics(run) if "train/grad_norm" in record]


def write_job(root: Path, model: Path, endpoints: str | None) -> Job:
    """Prompts, labels and a run.toml in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    words = ["".join(chr(97 + (i * k) % 26) for k in range(1, 4)) for i in range(1, 41)]
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in words]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    (root / "run.toml").write_text(f"""
seed = 3
steps = 3
optimizer_steps_per_rollout = 2
[model]
path = "{model}"
[trainer]
torch_threads = 1
max_tokens_per_micro_batch = 256
[optimizer]
lr = 1e-3
[data]
train = ["{root}/train.jsonl"]
[eval]
sets = {{ heldout = "{root}/heldout.jsonl" }}
[rollout]
prompts_per_step = 8
samples_per_prompt = 4
dump = true
[sampling]
max_prompt_tokens = 16
max_response_tokens = 12
[reward]
function = "tests.e2e.rewards:lower_case_share"
[monitor]
logprob_difference_limit = 1e-4
""")
    return Job(root, model, endpoints)
