"""One block of TRL's GRPOTrainer for grpo_vs_trl.py: runs in TRL's own environment and imports nothing of rltool.

    python trl_side.py SETTINGS.json

Prints one line per rollout, `step I/N {json}`, and last `versions {json}`. SETTINGS.json holds grpo_vs_trl.Settings and
the paths `model`, `data` and `output`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rewards import share_of_letters  # beside this file: Python puts its directory first
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """GRPOTrainer with a clock around its phases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        super().__init__(*args, **kwargs)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def _generate_and_score_completions(self, *args: Any) -> Any:
        with self.clock("generate_and_score"):
            return super()._generate_and_score_completions(*args)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # once for the old policy, without gradients; the others are the training forwards
        with self.clock("forward" if torch.is_grad_enabled() else "old_logprobs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def training_step(self, *args: Any) -> Any:
        with self.clock("training_step"):
            return super().training_step(*args)


class Rewards:
    """The reward of that name as rltool's side has it, and what the last rollout got."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.mean = self.mean_tokens = 0.0

    def __call__(
        self, completions: list[str], label: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        if self.__name__ == "exact_match":
            rewards = [float(text.strip() == wanted.strip()) for text, wanted in zip(completions, label, strict=True)]
        else:
            rewards = [
                share_of_letters(text, len(ids)) for text, ids in zip(completions, completion_ids, strict=True)
            ]
        self.mean = sum(rewards) / len(rewards)
        self.mean_tokens = sum(map(len, completion_ids)) / len(completion_ids)
        return rewards


class StepLines(TrainerCallback):
    """A TRL step is an optimizer step; a line is printed after the last one of each rollout."""

    def __init__(self, settings: dict[str, Any], rewards: Rewards) -> None:
        self.settings = settings
        self.rewards = rewards
        self.trainer: Timed

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        per_rollout = self.settings["optimizer_steps"]
        if state.global_step % per_rollout:
            return
        found = self.trainer.seconds
        seconds = {
            "generate": found["generate"],
            "score": found["generate_and_score"] - found["generate"] - found["old_logprobs"],
            "old_logprobs": found["old_logprobs"],
            "forward": found["forward"],
            "backward": found["training_step"] - found["generate_and_score"] - found["forward"],
        }
        found.clear()
        record = {"reward": self.rewards.mean, "response_tokens": self.rewards.mean_tokens, "seconds": seconds}
        print(f"step {state.global_step // per_rollout}/{self.settings['steps']} {json.dumps(record)}", flush=True)


def grpo_config(settings: dict[str, Any]) -> GRPOConfig:
    """Everything that rltool's side sets, and nothing on that only costs time: no checkpoints, trackers, bars or
    recomputation."""
    samples = settings["prompts"] * settings["samples"]
    return GRPOConfig(
        output_dir=settings["output"], seed=settings["seed"], max_steps=settings["steps"] * settings["optimizer_steps"],
        per_device_train_batch_size=samples // settings["optimizer_steps"],
        steps_per_generation=settings["optimizer_steps"], gradient_accumulation_steps=1, num_iterations=1,
        num_generations=settings["samples"], shuffle_dataset=False,
        max_completion_length=settings["max_response_tokens"], temperature=settings["temperature"], top_p=1.0, top_k=0,
        learning_rate=settings["lr"], lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["lr_warmup_steps"], adam_beta1=settings["beta1"], adam_beta2=settings["beta2"],
        adam_epsilon=settings["eps"], weight_decay=0.0, max_grad_norm=settings["clip_grad"],
        # bnpo: the mean over the tokens of each optimizer step's batch, which is rltool's loss_reduction = "token"
        loss_type="bnpo", scale_rewards="group", epsilon=settings["clip"], beta=0.0, disable_dropout=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_steps=1_000_000, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip


def main(settings: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows])
    rewards = Rewards(settings["reward"])
    lines = StepLines(settings, rewards)
    trainer = Timed(
        model=settings["model"], reward_funcs=rewards, args=grpo_config(settings), train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]), callbacks=[lines],
    )  # fmt: skip
    lines.trainer = trainer
    trainer.train()
    found = {name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "datasets")}
    print(f"versions {json.dumps(found | {'torch_threads': torch.get_num_threads()})}", flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
