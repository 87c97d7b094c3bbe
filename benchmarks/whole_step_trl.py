"""Seconds of a whole RL step of TRL's GRPOTrainer with a vLLM server, on two GPUs: the other side of whole_step.

    python -m benchmarks.whole_step_trl --shape 1.5B --engine-gpu 0 --trainer-gpu 1 --work runs/whole-step-trl

Model, prompts, samples, lengths and learning rate are whole_step's; --micro-batch samples of 512 tokens are its 16,384
tokens. TRL (tried: 1.16.0) and datasets are imported from the environment that runs this; vLLM's own server is started
with the options that TRL's guide names, and TRL waits for it. Each of --weights is one run: float32 is TRL's default,
with bf16 autocast, as rltool's optimizer keeps float32 weights; bfloat16 holds weights, gradients and moments in bf16,
which is less work. The first --exclude steps are left out. Prints a table of medians and one line of JSON. generate is
the answer of the engine, HTTP and JSON included; logprobs those of the trainer that TRL's correction for the engine's
probabilities takes; other what TRL does besides to make a batch; train forward, backward and the optimizer.

--mode colocate has vLLM in the trainer's process and on its GPU, with --memory of it; awake all the time, which is
TRL's default, or with --sleep. --mode transformers generates in the trainer instead, as TRL does without vLLM; there
is no weight sync then. --cpu is for trying it: `--size tiny --cpu --mode transformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from benchmarks.children import end_session
from benchmarks.gpu_memory import gpu_memory_gib
from benchmarks.trainer_speed import SHAPES
from benchmarks.whole_step import make_prompts

SIDE = Path(__file__).with_name("whole_step_trl_side.py")
PHASES = ("step", "generate", "sync", "reward", "logprobs", "other", "train")
LOCAL = "127.0.0.1"


class Child:
    """A child process in a session of its own, its output in `log`; a context manager that ends the session."""

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | environment,
            )  # fmt: skip

    def poll(self) -> int | None:
        return self._process.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 30) -> str:
        """The end of its output, after the last lines that name an error: what follows those can be long."""
        text = self.text().splitlines()
        errors = [line for line in text[:-lines] if re.search(r"\w(Error|Exception)\b", line)]
        return "\n".join([*errors[-10:], "...", *text[-lines:]])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        end_session(self._process)


class OutOfMemory(RuntimeError):
    """The trainer's micro-batch does not fit its GPU."""


def step_lines(text: str) -> tuple[list[dict[str, float]], dict[str, str]]:
    """(records of the steps, versions) of the trainer's output; versions are empty if it has not ended."""
    steps, versions = [], {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "step":
            steps.append(json.loads(rest.partition(" ")[2]))
        elif word == "versions":
            versions = json.loads(rest)
    return steps, versions


def medians(steps: list[dict[str, float]], exclude: int, samples: int) -> dict[str, float]:
    """Of the steps after the first `exclude`; samples: of one step. ValueError where none is left."""
    measured = steps[exclude:]
    if not measured:
        raise ValueError(f"{len(steps)} steps ended, of which {exclude} are left out")
    found = {name: statistics.median(step[name] for step in measured) for name in measured[0]}
    tokens = samples * found["response_tokens"]
    found["tokens/s"], found["tokens/s while generating"] = tokens / found["step"], tokens / found["generate"]
    return found | {"measured_steps": len(measured)}


def table(results: dict[str, dict[str, float]]) -> str:
    columns = (*PHASES, "tokens/s", "tokens/s while generating", "allocated_gib", "reserved_gib")
    columns += ("trainer_gpu_gib", "engine_gpu_gib", "logprob_difference")
    lines = ["| weights | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, found in results.items():
        cells = (f"{found[column]:.4g}" if found.get(column) is not None else "-" for column in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return probe.getsockname()[1]


class Bench:
    """Everything lies in --work: model, prompts, logs; a model that is there is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.longest = 64 + args.response_tokens + 16
        self.model = self.work / f"model-{args.shape}"
        self.data = make_prompts(self.work / "prompts.jsonl")

    def make_model(self) -> None:
        """In a process of its own, which leaves nothing on a GPU."""
        code = "import sys; from pathlib import Path; from benchmarks.whole_step import make_model; "
        code += "make_model(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
        argv = [sys.executable, "-c", code, str(self.model), self.args.shape, str(self.longest)]
        subprocess.run(argv, env=os.environ | self._environment(self.args.trainer_gpu), check=True, timeout=300)

    def _environment(self, gpu: str) -> dict[str, str]:
        found = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        found |= {"VLLM_HOST_IP": LOCAL, "NO_PROXY": LOCAL, "no_proxy": LOCAL}
        if self.args.cpu:
            found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return found

    def serve(self, port: int) -> Child:
        """vLLM's server, as TRL's guide starts it: its development routes, the NCCL backend of weight transfers and
        log-probabilities after temperature."""
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        argv += ["--host", LOCAL, "--port", str(port), "--max-model-len", str(self.longest), "--dtype", "bfloat16"]
        argv += ["--weight-transfer-config", json.dumps({"backend": "nccl"}), "--max-logprobs", "-1"]
        argv += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
        argv += ["--max-num-seqs", "16", "--enforce-eager"] if self.args.cpu else ["--max-num-seqs", "1024"]
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment = self._environment(self.args.engine_gpu) | more
        return Child([*argv, *self.args.engine_args.split()], self.work / "trl-server.log", environment)

    def settings(self, url: str | None, weights: str, micro_batch: int) -> dict[str, Any]:
        args = self.args
        return {
            "model": str(self.model), "data": str(self.data), "output": str(self.work / "trl-output"),
            "mode": args.mode, "memory": args.memory, "sleep": args.sleep, "longest": self.longest,
            "server": url, "group_port": free_port(), "server_seconds": args.server_seconds, "cpu": args.cpu,
            "weights": weights, "attention": args.attention, "gradient_checkpointing": args.gradient_checkpointing,
            "micro_batch": micro_batch, "steps": args.steps, "prompts": args.prompts, "samples": args.samples,
            "response_tokens": args.response_tokens, "lr": 1e-5 if args.lora_rank else 1e-6,
            "lora_rank": args.lora_rank,
        }  # fmt: skip

    def train(self, server: Child | None, url: str | None, weights: str, micro_batch: int) -> dict[str, Any]:
        """Medians, versions and peaks of one run of the trainer; of the steps that ended, where it did not end well.

        Raises OutOfMemory, and RuntimeError with the logs' ends where no step can be measured.
        """
        args = self.args
        file = self.work / "trl-settings.json"
        file.write_text(json.dumps(self.settings(url, weights, micro_batch)))
        argv = [sys.executable, str(SIDE), str(file)]
        log = self.work / f"trl-trainer-{weights}-{micro_batch}.log"
        gpus = {"trainer_gpu_gib": args.trainer_gpu, "engine_gpu_gib": args.engine_gpu}
        peaks: dict[str, float] = {}
        failure = None
        with Child(argv, log, self._environment(args.trainer_gpu)) as trainer:
            end = time.monotonic() + args.trainer_seconds
            # once it has printed its versions it is done, whatever holds up its end
            while trainer.poll() is None and failure is None and "\nversions {" not in trainer.text():
                for name, gpu in gpus.items():
                    peaks[name] = max(peaks.get(name, 0.0), gpu_memory_gib(gpu) or 0.0)
                if server is not None and server.poll() is not None:
                    failure = f"the server ended with status {server.poll()}"
                elif time.monotonic() > end:
                    failure = f"the trainer has not ended after {args.trainer_seconds} s"
                time.sleep(1.0)
            if failure is None and trainer.poll():
                failure = f"the trainer ended with status {trainer.poll()}"
        text = trainer.text()
        steps, versions = step_lines(text)
        if failure is not None:
            if "OutOfMemoryError" in text and len(steps) <= args.exclude:
                raise OutOfMemory(f"a micro-batch of {micro_batch} samples does not fit")
            ends = "".join(f"\n--- {c.log} ends:\n{c.tail()}" for c in (trainer, server) if c is not None)
            if len(steps) <= args.exclude:
                raise RuntimeError(failure + ends)
            print(f"{failure}; {len(steps)} steps had ended{ends}", file=sys.stderr, flush=True)
        found = medians(steps, args.exclude, args.prompts * args.samples)
        found |= {name: peak for name, peak in peaks.items() if peak}
        return found | {"micro_batch": micro_batch, "failure": failure, "versions": versions}

    def run(self, server: Child | None, url: str | None, weights: str) -> dict[str, Any]:
        """With the first of --micro-batch that fits."""
        for micro_batch in self.args.micro_batch:
            try:
                return self.train(server, url, weights, micro_batch)
            except OutOfMemory as error:
                print(f"{weights}: {error}", file=sys.stderr, flush=True)
        raise RuntimeError(f"none of --micro-batch {self.args.micro_batch} fits the trainer's GPU")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", "--size", choices=SHAPES, default="0.5B")
    parser.add_argument("--mode", choices=("server", "colocate", "transformers"), default="server")
    parser.add_argument("--memory", type=float, default=0.3, help="vllm_gpu_memory_utilization of --mode colocate")
    parser.add_argument("--sleep", action="store_true", help="vllm_enable_sleep_mode of --mode colocate")
    parser.add_argument("--engine-gpu", default="0")
    parser.add_argument("--trainer-gpu", help="1, and 0 where one process does all")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("runs/whole-step-trl"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--exclude", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--weights", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[32, 16], help="samples; the first that fits")
    parser.add_argument("--lora-rank", type=int, default=0, help="peft's adapters of all linear layers, alpha 32")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--server", metavar="URL", help="a server that --serve-only started")
    parser.add_argument("--serve-only", action="store_true", help="start the server and leave it until a signal")
    parser.add_argument("--port", type=int, help="of the server; else a free one")
    parser.add_argument("--server-seconds", type=float, default=300, help="until the server answers")
    parser.add_argument("--trainer-seconds", type=float, default=420, help="of one run, start included")
    parser.add_argument("--engine-args", default="", metavar="WORDS", help="further arguments of the server, as one")
    args = parser.parse_args()
    args.trainer_gpu = args.trainer_gpu or ("1" if args.mode == "server" else "0")
    return args


def _end(number: int, _frame: object) -> None:
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main() -> None:
    args = options()
    bench = Bench(args)
    bench.make_model()
    port = args.port or free_port()
    signal.signal(signal.SIGTERM, _end)  # which must not leave the server behind
    with ExitStack() as stack:
        server = url = None
        if args.mode == "server":
            url = args.server or f"http://{LOCAL}:{port}"
            server = None if args.server else stack.enter_context(bench.serve(port))
        if args.serve_only:
            if server is None:
                raise SystemExit("--serve-only goes with --mode server and without --server")
            print(url, flush=True)
            while server.poll() is None:
                time.sleep(1.0)
            raise SystemExit(f"the server ended with status {server.poll()}\n{server.tail()}")
        results = {}
        for weights in args.weights:
            results[weights] = bench.run(server, url, weights)
            print(weights, json.dumps(results[weights]), flush=True)  # a later run that fails takes none with it
    print(table(results))
    print(json.dumps({"shape": args.shape, "mode": args.mode, **results}))


if __name__ == "__main__":
    main()
