"""Recipes of tinker-cookbook, unmodified and in processes of their own, train against `rltool serve-trainer`.

Each reads its model and its data by their names on the Hub, which are folders of the directory that it runs in.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
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
from tests.e2e.test_tinker import CLIENT, KEYS, serving
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
    key: str

    def run(self, recipe: str, name: str, **options: object) -> list[dict[str, Any]]:
        """The metrics that it logged, by step."""
        log = self.root / name
        given = {"base_url": self.url, "model_name": MODEL, "log_path": log, **options}
        words = [f"{key.replace('__', '.')}={value}" for key, value in given.items()]
        self._say(name, "-m", f"tinker_cookbook.recipes.{recipe}", *words)
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def result(self, script: str, *more: str) -> Any:
        """Of tests/e2e/tinker_client.py, run in the cookbook's environment."""
        [line] = [
            line for line in self._say(script, str(CLIENT), self.url, self.key, script, *more).splitlines()
            if line.startswith("RESULT ")
        ]  # fmt: skip
        return json.loads(line.removeprefix("RESULT "))

    def _say(self, name: str, *words: str) -> str:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root), "TINKER_API_KEY": self.key, "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        out = self.root / f"{name}.out"
        with out.open("wb") as file:
            done = subprocess.run(
                [str(cookbook_python()), *words], cwd=self.root, env=environment, stdout=file, stderr=file, timeout=600
            )
        assert done.returncode == 0, out.read_text()[-6000:]
        return out.read_text()

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
            "serve-engines", str(model), "--device", "cpu", "--max-model-len", "4096", "--lora-rank", "32",
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
        yield Kitchen(root, f"http://127.0.0.1:{port}", "tml-cook")


@pytest.fixture(scope="module")
def learned(kitchen: Kitchen) -> list[dict[str, Any]]:
    """Of sl_loop: half of the answers that it learns are right."""
    return kitchen.run("sl_loop", "sl", batch_size=16, learning_rate=1e-2, lora_rank=16, save_every=3)


def check_of_numerics(step: dict[str, Any]) -> None:
    """The cookbook's comparison: moments of what the engines' log-probabilities differ from the trainer's by."""
    assert abs(step["optim/kl_sample_train_v1"]) < EXACT
    assert math.sqrt(2 * step["optim/kl_sample_train_v2"]) < EXACT
    assert step["optim/entropy"] > 0


@pytest.mark.long
def test_sl_loop_learns_answers_and_its_checkpoints_are_there(kitchen, learned):
    losses = [step["train_mean_nll"] for step in learned]
    assert len(losses) == 16 and losses[0] > 3
    assert max(losses[-3:]) < 0.3  # which of two answers it is cannot be learned: log(2) in ten tokens
    saved = kitchen.checkpoints("sl")
    named = [(f"{step:06}", step) for step in range(3, 16, 3)]
    assert [(each["name"], each["batch"]) for each in saved] == [*named, ("final", 16)]
    assert re.fullmatch("tinker://.+/sampler_weights/final", saved[-1]["sampler_path"])


@pytest.mark.long
@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_rl_loop_goes_on_from_there_and_its_reward_rises(kitchen, learned, loss):
    log = kitchen.root / f"rl-{loss}"
    write_rows(log / "checkpoints.jsonl", [kitchen.checkpoints("sl")[-1] | {"batch": 0}])
    steps = kitchen.run(
        "rl_loop", log.name, batch_size=4, group_size=8, learning_rate=3e-3, lora_rank=16, max_tokens=16, max_steps=8,
        loss_fn=loss, save_every=3,
    )  # fmt: skip
    rewards = [step["reward/total"] for step in steps]
    assert 0.1 < rewards[0] < 0.8
    assert min(rewards[-2:]) > 0.9
    assert [each["name"] for each in kitchen.checkpoints(log.name)[1:]] == ["000003", "000006", "final"]


@pytest.mark.long
def test_dpo_comes_to_prefer_what_was_chosen(kitchen, learned):
    steps = kitchen.run(
        "preference.dpo.train", "dpo", dataset="hhh", learning_rate=1e-3, lr_schedule="constant", batch_size=8,
        max_length=256, max_steps=8, load_checkpoint_path=kitchen.checkpoints("sl")[-1]["state_path"],
    )  # fmt: skip
    # Trainer and engines have the same weights then: it is the logarithm of 2 as far as their log-probabilities agree.
    assert steps[0]["dpo_loss"] == pytest.approx(math.log(2), abs=EXACT)
    assert steps[-1]["dpo_loss"] < 0.5 and steps[-1]["accuracy"] == 1
    assert steps[-1]["margin"] > 1 and steps[-1]["rejected_reward"] < -1
    [saved] = kitchen.checkpoints("dpo")
    assert {"state_path", "sampler_path"} <= set(saved)


@pytest.mark.long
def test_on_policy_distillation_comes_near_its_teacher_and_samples_as_it_trains(kitchen, learned):
    student, teacher = kitchen.checkpoints("sl")[0], kitchen.checkpoints("sl")[-1]
    steps = kitchen.run(
        "distillation.on_policy_distillation", "distilled", dataset="deepmath", teacher_model=MODEL,
        teacher_checkpoint=teacher["sampler_path"], load_checkpoint_path=student["state_path"], groups_per_batch=8,
        group_size=4, learning_rate=2e-3, lora_rank=16, max_tokens=12, max_steps=16, save_every=5, eval_every=0,
        compute_post_kl=True,
    )  # fmt: skip
    first, last = (statistics.mean(step["teacher_kl"] for step in some) for some in (steps[:2], steps[-4:]))
    assert last < 0.5 * first, [step["teacher_kl"] for step in steps]
    for step in steps:
        check_of_numerics(step)
    assert [each["name"] for each in kitchen.checkpoints("distilled")] == ["000005", "000010", "000015", "final"]


@pytest.mark.long
def test_the_cookbooks_checks_of_numerics_find_none_between_engines_and_trainer(kitchen):
    steps = kitchen.run(
        "rl_numerics_check.train", "numerics", learning_rate=1e-2, lora_rank=16, group_size=2, groups_per_batch=2,
        max_tokens=64, max_trajectory_tokens=3000, task__num_pages_min=1, task__num_pages_max=2, task__page_chars=200,
        max_steps=3, save_every=0,
    )  # fmt: skip
    trained = [step for step in steps if "optim/entropy" in step]
    assert len(trained) == 3
    for step in trained:
        check_of_numerics(step)
    compared = kitchen.result("compared", MODEL, Path(__file__).read_text()[:1500])
    assert compared["mse"] < EXACT**2 and compared["begun"] - compared["trained"] > 1


def test_sl_loop_trains_a_real_rank_without_engines(tmp_path):
    model = tmp_path / MODEL
    write_chat_model(model)
    write_data(tmp_path)
    with serving(model, tmp_path / "server", name=MODEL) as server:
        kitchen = Kitchen(tmp_path, server.url, KEYS["alice"])
        steps = kitchen.run("sl_loop", "sl", batch_size=16, learning_rate=1e-2, lora_rank=8, max_steps=6, save_every=3)
        assert steps[-1]["train_mean_nll"] < 0.4 * steps[0]["train_mean_nll"]
        assert [each["name"] for each in kitchen.checkpoints("sl")] == ["000003", "final"]
