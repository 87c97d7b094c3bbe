"""TRL's GRPOTrainer for whole_step_trl.py: runs where TRL is installed and imports nothing of rltool.

    python whole_step_trl_side.py SETTINGS.json

Prints `step I {json}` after each optimizer step, which is one rollout, and last `versions {json}`. SETTINGS.json is
written by whole_step_trl.Bench.settings.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig
from trl_side import Rewards, Timed  # beside this file: Python puts its directory first

GIB = 2**30


def finish_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class GpuTimed(Timed):
    """Its clocks wait for the GPU on both sides, and know the reward and the weight sync as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_vllm:
            send = self.vllm_generation.sync_weights

            def sync_weights() -> None:
                with self.clock("sync"):
                    send()

            self.vllm_generation.sync_weights = sync_weights

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        finish_gpu()
        with super().clock(name):
            yield
            finish_gpu()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("reward"):
            return super()._calculate_rewards(*args, **kwargs)


class StepLines(TrainerCallback):
    """Seconds of a step are those from the end of the step before; train is all that is not making the batch."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self.trainer: GpuTimed
        self.ended = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        finish_gpu()
        now = time.perf_counter()
        found, step, self.ended = self.trainer.seconds, now - self.ended, now
        record = {
            "step": step,
            "generate": found["generate"] - found["sync"],
            "sync": found["sync"],
            "reward": found["reward"],
            "logprobs": found["old_logprobs"],
            "other": found["generate_and_score"] - found["generate"] - found["reward"] - found["old_logprobs"],
            "train": step - found["generate_and_score"],
            "reward_mean": self.rewards.mean,
            "response_tokens": self.rewards.mean_tokens,
        }
        # |log-probability here - the engine's|: wrong weights on either side would show
        differences = self.trainer._metrics["train"]["sampling/sampling_logp_difference/mean"]
        if differences:
            record["logprob_difference"] = differences[-1]
        if torch.cuda.is_available():
            record["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            record["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        found.clear()
        print(f"step {state.global_step} {json.dumps(record)}", flush=True)


def grpo_config(settings: dict[str, Any]) -> GRPOConfig:
    """One optimizer step a rollout, and nothing on that only costs time; what is not named is TRL's default: its dapo
    loss (the mean over the batch's tokens), no KL term, fused AdamW, the correction for the engine's probabilities."""
    steps = settings["prompts"] * settings["samples"] // settings["micro_batch"]
    engine: dict[str, Any] = {"use_vllm": False}
    if settings["mode"] == "colocate":
        engine = dict(
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=settings["memory"],
            vllm_enable_sleep_mode=settings["sleep"], vllm_max_model_length=settings["longest"],
        )  # fmt: skip
    elif settings["mode"] == "server":
        engine = dict(
            use_vllm=True, vllm_mode="server", vllm_server_base_url=settings["server"],
            vllm_group_port=settings["group_port"], vllm_server_timeout=settings["server_seconds"],
        )  # fmt: skip
    return GRPOConfig(
        output_dir=settings["output"], max_steps=settings["steps"], per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=steps, steps_per_generation=steps, num_generations=settings["samples"],
        max_completion_length=settings["response_tokens"], temperature=1.0, shuffle_dataset=False,
        learning_rate=settings["lr"], lr_scheduler_type="constant", beta=0.0, bf16=True, use_cpu=settings["cpu"],
        gradient_checkpointing=settings["gradient_checkpointing"], save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True,
        model_init_kwargs={"dtype": settings["weights"], "attn_implementation": settings["attention"]}, **engine,
    )  # fmt: skip


def versions() -> dict[str, str]:
    found = {}
    for name in ("trl", "transformers", "torch", "accelerate", "datasets", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vLLM's CPU build has another name
            continue
    return found


def main(settings: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    rewards = Rewards("letter_share")
    lines = StepLines(rewards)
    adapters = None
    if settings["lora_rank"]:
        from peft import LoraConfig

        adapters = LoraConfig(
            r=settings["lora_rank"], lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = GpuTimed(
        peft_config=adapters, model=settings["model"], reward_funcs=rewards, args=grpo_config(settings),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[lines],
    )  # fmt: skip
    lines.trainer = trainer
    trainer.train()
    found = versions() | {"attention": trainer.model.config._attn_implementation}
    print(f"versions {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
