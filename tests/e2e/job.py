"""A training job as a user would set it up: data, run.toml, and `rltool` commands in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.commands import Command, completed

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

    def words(self, verb: str, run: str, *more: str, sets: Sequence[str] = ()) -> list[str]:
        """What stands behind `rltool`."""
        words = [*verb.split(), "--config", str(self.root / "run.toml"), "--run", run, *more]
        if self.endpoints is not None and verb in ("train", "debug rollout-only"):
            words += ["--rollout-external", self.endpoints]
        for item in sets:
            words += ["--set", item]
        return words

    def argv(self, verb: str, run: str, *more: str, sets: Sequence[str] = ()) -> list[str]:
        """The same command for an interpreter of its own."""
        return [sys.executable, "-m", "rltool", *self.words(verb, run, *more, sets=sets)]

    def __call__(self, verb: str, run: str, *more: str, sets: Sequence[str] = (), code: int = 0) -> str:
        """Run it to its end; the exit code must be `code`. Returns stdout and stderr together."""
        return self.say(*self.words(verb, run, *more, sets=sets), code=code)

    def say(self, *words: str, code: int = 0) -> str:
        """`rltool WORDS` in `root`, as __call__."""
        found, said = completed(
            words, env=self.environment(), cwd=self.root, out=self.root / f"{uuid.uuid4().hex}.out", timeout=DEADLINE
        )
        assert found == code, f"rltool {' '.join(words)} ended with {found}:\n{said[-8000:]}"
        return said

    def start(self, verb: str, run: str, *more: str, sets: Sequence[str] = ()) -> Command:
        """Begin it, in a process group of its own; output goes to <root>/<run>.out."""
        words, out = self.words(verb, run, *more, sets=sets), self.root / f"{run}.out"
        return Command(words, env=self.environment(), cwd=self.root, out=out)

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
