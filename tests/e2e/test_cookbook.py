"""Recipes of tinker-cookbook, unmodified and in processes of their own, train against `rltool serve-trainer`.

Each reads its model and its data by their names on the Hub, which are folders of the directory that it runs in.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rltool.processes.run_directory import open_run
from rltool.processes.stop_run import stop_run
from tests.e2e.engines import cookbook_python, free_port
from tests.e2e.job import Job
from tests.tiny_models import VOCAB_SIZE, write_tiny_qwen2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""What the cookbook knows a chat format of, qwen3_instruct; it is a folder with a tiny model here."""
EXACT = 1e-5
"""Between engine and trainer, both in float32 on a CPU."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
RIGHT, WRONG = r"\boxed{7}", r"\boxed{3}"
QUESTIONS = [f"What is {a} + {b}?" for a in range(8) for b in range(8)]


def write_chat_model(directory: Path) -> None:
    """A tiny Qwen2 with qwen3's chat tokens: a token per character. Random weights, of which an adapter can make any
    sure answer: its head is wide."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_tiny_qwen2(directory, tied=False)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 4
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    names = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127)), *SPECIAL]
    vocabulary = {name: i for i, name in enumerate(names)}
    vocabulary |= {f"<extra_{i}>": i for i in range(len(names), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=list(SPECIAL), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(directory)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(root: Path) -> None:
    """Of four recipes and of the check of numerics, in `root`. Half of the answers to learn from are right."""
    spoken = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for i, question in enumerate(QUESTIONS * 4) for answer in [(RIGHT, WRONG)[i % 2]]
    ]  # fmt: skip
    write_rows(root / "HuggingFaceH4/no_robots/train.jsonl", spoken)
    write_rows(root / "openai/gsm8k/train.jsonl", [{"question": q, "answer": "#### 7"} for q in QUESTIONS * 4])
    named = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    (root / "openai/gsm8k/README.md").write_text(named)
    pairs = [
        {name: f"\n\nHuman: {q}\n\nAssistant: {a}" for name, a in (("chosen", RIGHT), ("rejected", WRONG))}
        for q in QUESTIONS * 4
    ]
    for split, rows in {"train": pairs, "test": pairs[:4]}.items():
        write_rows(root / f"Anthropic/hh-rlhf/{split}.jsonl", rows)
    write_rows(root / "zwhe99/DeepMath-103K/train.jsonl", [{"question": q} for q in QUESTIONS * 4])
    text = " ".join(f"line {i} was written before the others until later ;" for i in range(400))
    write_rows(root / "Salesforce/wikitext/train.jsonl", [{"text": text}])
    (root / "Salesforce/wikitext/README.md").write_text(named.replace("main", "wikitext-103-raw-v1"))


@dataclass(frozen=True)
class Kitchen:
    """A directory that recipes run in, and the server that they train with."""

    root: Path
    url: str

    def run(self, recipe: str, name: str, **options: object) -> list[dict[str, Any]]:
        """The metrics that it logged, by step."""
        log = self.root / name
        given = {"base_url": self.url, "model_name": MODEL, "log_path": log, **options}
        command = [str(cookbook_python()), "-m", f"tinker_cookbook.recipes.{recipe}"]
        command += [f"{key.replace('__', '.')}={value}" for key, value in given.items()]
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root), "TINKER_API_KEY": "tml-cook", "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        out = self.root / f"{name}.out"
        with out.open("wb") as file:
            done = subprocess.run(command, cwd=self.root, env=environment, stdout=file, stderr=file, timeout=600)
        assert done.returncode == 0, out.read_text()[-6000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """That a recipe wrote down."""
        return [json.loads(line) for line in (self.root / name / "checkpoints.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    cookbook_python()
    root = tmp_path_factory.mktemp("kitchen")
    model = root / MODEL
    write_chat_model(model)
    write_data(root)
    keys = root / "keys"
    keys.mkdir()
    (keys / "cook").touch(mode=0o600)
    (keys / "cook").write_text("tml-cook")
    with ExitStack() as stack:
        job = Job(root, model)
        job.say(
            "serve-engines", str(model), "--device", "cpu", "--max-model-len", "2048", "--lora-rank", "32",
            "--lora-slots", "4", "--run", "kitchen", "--detach",
        )  # fmt: skip
        run = open_run("kitchen", create=False, root=job.runs)
        stack.callback(stop_run, run)
        port = free_port()
        job.say(
            "serve-trainer", str(model), "--rollout-external", f"@{run.endpoints_file}", "--keys", str(keys),
            "--port", str(port), "--lora-rank", "32", "--served-name", MODEL, "--set", "model.dtype=float32",
            "--set", "trainer.torch_threads=1", "--set", "trainer.max_tokens_per_micro_batch=4096", "--detach",
        )  # fmt: skip
        yield Kitchen(root, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def learned(kitchen: Kitchen) -> list[dict[str, Any]]:
    """Of sl_loop."""
    return kitchen.run("sl_loop", "sl", batch_size=16, learning_rate=1e-2, lora_rank=16, max_steps=40, save_every=10)


def test_sl_loop(kitchen, learned):
    losses = [step["train_mean_nll"] for step in learned]
    print(losses)
    assert 0
