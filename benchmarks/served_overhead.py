"""What a step through `rltool serve-trainer` costs beside the same step of `train`'s own trainer, on this CPU.

    RLTOOL_CLIENTS_PYTHON=$PWD/.venv-clients/bin/python python -m benchmarks.served_overhead

Adapters on a model of 20 million parameters with random weights, one rank a side, each with one thread. The released
client makes a forward_backward ("ppo") and an optim_step over HTTP, with protobuf and the journal on this disk, from
the numbers in its arrays to the results; the driver of `train` hands the same batch to its ranks, and waits for the
step. In turns, who is first as well. Prints JSON: medians of seconds, the ratio served / own by pair (median, and the
middle half of them), what the client waited beyond the trainer's own work on its calls, as a share of the step
(median), and the largest difference of a loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.children import end_session
from rltool.algorithms.batch import TrainBatch
from rltool.config.train import TrainConfig
from rltool.processes.ports import reserved_ports
from rltool.processes.run_directory import open_run
from rltool.processes.stop_run import stop_run
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.ray_cluster import placed, ray_cluster
from rltool.training.ranks.trainer_group import TrainerGroup
from rltool.training.served import Datum, batch_of

VOCABULARY, RANK = 512, 8
CLIENT = Path(__file__).with_name("served_client.py")
WARM_UP = 2
"""Pairs that are not counted."""

Step = Callable[[int], tuple[float, float, float]]
"""Number of a step -> loss, norm of the gradient, seconds."""


def data_of(pairs: int, samples: int, tokens: int) -> dict[str, Any]:
    """[pairs, samples, tokens] each. Losses are means over all tokens, by the weights."""
    draw, shape = np.random.default_rng(0), (pairs, samples, tokens)
    every = draw.integers(0, VOCABULARY, (*shape[:2], tokens + 1))
    return {
        "tokens": every[..., :-1], "target_tokens": every[..., 1:],
        "weights": np.full(shape, 1 / (samples * tokens), np.float32),
        "logprobs": np.full(shape, -np.log(VOCABULARY), np.float32),
        "advantages": draw.standard_normal(shape).astype(np.float32),
    }  # fmt: skip


def config_of(model: Path, tokens: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "seed": 0,
            "model": {"path": model, "dtype": "float32"},
            "trainer": {"torch_threads": 1, "device": "cpu", "max_tokens_per_micro_batch": 16 * tokens},
            "lora": {"rank": RANK, "alpha": 32},
            "optimizer": {"lr": 1e-3},
            "algorithm": {"old_logprobs": "rollout"},
        },
        context={"rules": ()},
    )


@contextmanager
def own_trainer(config: TrainConfig, data: dict[str, Any]) -> Iterator[Step]:
    plan = plan_placement(config, gpu=False, generates=False)
    with (
        ray_cluster(
            config.ray, plan, gpus=(), deadline=config.deadlines.start, preflight=config.deadlines.preflight,
            while_waiting=lambda _: None, logs=None,
        ),
        placed(plan, config.deadlines.start, lambda _: None) as group,
    ):  # fmt: skip
        ranks = TrainerGroup(config, plan, group, None)
        ranks.start(10**6)
        ranks.load_weights()

        def step(number: int) -> tuple[float, float, float]:
            rows = {name: values[number] for name, values in data.items()}
            began = time.perf_counter()
            metrics = ranks.train_step(batch_of_rows(rows))
            return metrics["train/loss"], metrics["train/grad_norm"], time.perf_counter() - began

        yield step
        ranks.close()


def batch_of_rows(rows: dict[str, Any]) -> TrainBatch:
    """As `train` has it: weights of 1, divided by their number in the step."""
    named = ("logprobs", "advantages")
    return batch_of(
        [
            Datum(tokens, rows["target_tokens"][i], {name: rows[name][i] for name in named})
            for i, tokens in enumerate(rows["tokens"])
        ]
    ).replace(target_ids=None)


@contextmanager
def served_trainer(model: Path, root: Path, data: Path, tokens: int) -> Iterator[Step]:
    with reserved_ports(1) as held:
        port = held.ports[0]
    environment = {**os.environ, "RLTOOL_RUNS": str(root / "runs"), "OMP_NUM_THREADS": "1"}
    words = [
        "serve-trainer", str(model), "--served-name", "20M", "--port", str(port), "--run", "served", "--detach",
        "--lora-rank", str(RANK),
    ]  # fmt: skip
    for name, value in (("model.dtype", "float32"), ("trainer.torch_threads", "1"), ("trainer.device", "cpu"),
                        ("trainer.max_tokens_per_micro_batch", str(16 * tokens))):  # fmt: skip
        words += ["--set", f"{name}={value}"]
    with ExitStack() as stack:
        run = open_run("served", create=True, root=root / "runs")
        stack.callback(stop_run, run)
        subprocess.run([sys.executable, "-m", "rltool", *words], env=environment, check=True, stdout=sys.stderr)
        key = (run.state_dir / "clients" / "default").read_text().strip()
        client = subprocess.Popen(
            [os.environ["RLTOOL_CLIENTS_PYTHON"], str(CLIENT), f"http://127.0.0.1:{port}", key, str(data), str(RANK)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": str(root), "TINKER_TELEMETRY": "0"},
        )  # fmt: skip
        stack.callback(end_session, client)
        assert client.stdin is not None and client.stdout is not None
        answers, asked = client.stdout, client.stdin

        def step(number: int) -> tuple[float, float, float]:
            asked.write(f"{number}\n")
            asked.flush()
            loss, norm, seconds = json.loads(answers.readline())
            return loss, norm, seconds

        assert json.loads(answers.readline()) == "ready"
        yield step


def measure(pairs: int, samples: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        root = Path(directory)
        (root / "model").mkdir()
        model = make_tiny_model(root / "model", seed=0, layers=7, hidden=512, vocabulary=VOCABULARY)
        data = data_of(pairs + WARM_UP, samples, tokens)
        np.savez(root / "data.npz", **data)
        sides = {
            "served": stack.enter_context(served_trainer(model, root, root / "data.npz", tokens)),
            "own": stack.enter_context(own_trainer(config_of(model, tokens), data)),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
        for number in range(pairs + WARM_UP):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                found[name].append(sides[name](number))
            print(number, {name: each[-1] for name, each in found.items()}, file=sys.stderr, flush=True)
        history = (root / "runs" / "served" / "served" / "history.jsonl").read_text().splitlines()
    calls = [call for call in map(json.loads, history) if call.get("kind") in ("forward_backward", "optim_step")]
    trainer = [one["seconds"] + other["seconds"] for one, other in zip(calls[::2], calls[1::2], strict=True)]
    seconds = {name: [each[2] for each in rows[WARM_UP:]] for name, rows in found.items()}
    ratios = [one / other for one, other in zip(seconds["served"], seconds["own"], strict=True)]
    middle = quantiles(ratios, n=4)
    beyond = [1 - own / whole for own, whole in zip(trainer[WARM_UP:], seconds["served"], strict=True)]
    differences = [abs(one[0] - other[0]) for one, other in zip(found["served"], found["own"], strict=True)]
    return {
        "tokens": samples * tokens, "pairs": pairs, "seconds": {name: median(each) for name, each in seconds.items()},
        "ratio": median(ratios), "middle_half": [middle[0], middle[2]],
        "beyond_the_trainer": median(beyond), "largest_difference_of_loss": max(differences),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32, help="of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    options = parser.parse_args()
    print(json.dumps(measure(options.pairs, options.samples, options.tokens), indent=2))


if __name__ == "__main__":
    main()
