"""Forward and backward over branches of one context, each distinct token once against separate rows: tokens computed
and time as ratios, in turns, on the CPU in fp32.

    python -m benchmarks.shared_prefixes [branches] [context] [response] [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.trainer_speed import randomise
from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.megatron.runtime import Rendezvous
from rltool.megatron.trainer import MegatronTrainer, TrainingRun
from rltool.processes.ports import reserved_ports

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


def batch_of(branches: int, context: int, response: int) -> TrainBatch:
    """Branches of one context, with losses on their own tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, MODEL["vocab_size"], (context,), generator=generator)
    own = torch.randint(0, MODEL["vocab_size"], (branches, response), generator=generator)
    mask = torch.cat([torch.zeros(context), torch.ones(response)]).repeat(branches)
    return TrainBatch(
        tokens=torch.cat([torch.cat([prompt, row]) for row in own]),
        lengths=torch.full((branches,), context + response),
        loss_mask=mask,
        rewards=torch.zeros(branches),
        group_ids=torch.zeros(branches, dtype=torch.int64),
        loss_weights=mask,
        advantages=torch.randn(len(mask), generator=generator) * mask,
    )


def main() -> None:
    branches, context, response, rounds = [*map(int, sys.argv[1:]), *[8, 1024, 128, 3][len(sys.argv) - 1 :]]
    batch = batch_of(branches, context, response)
    with tempfile.TemporaryDirectory() as directory, reserved_ports(1) as held:
        held.release()
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        trainer = MegatronTrainer(
            ModelConfig(path=Path(directory), dtype="float32"),
            TrainerConfig(device="cpu", max_tokens_per_micro_batch=len(batch.tokens)),
            OptimizerConfig(),
            AlgorithmConfig(),
            Rendezvous(0, "127.0.0.1", held.ports[0], timeout=60.0),
            TrainingRun(1),
            LoraConfig(),
        )
        randomise(trainer)
        computed: list[int] = []
        trainer.gpt.register_forward_pre_hook(
            lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        seconds: dict[bool, list[float]] = {False: [], True: []}
        tokens: dict[bool, int] = {}
        for number in range(rounds + 1):
            for shared in (False, True):
                trainer.config = trainer.config.model_copy(update={"shared_prefixes": shared})
                begun = time.perf_counter()
                trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens, on_policy=True)
                if number:  # the first is a warm-up
                    seconds[shared].append(time.perf_counter() - begun)
                tokens[shared] = computed[-1]
        trainer.close()
    separate, shared = (statistics.median(seconds[which]) for which in (False, True))
    print(
        json.dumps(
            {
                "branches": branches,
                "context": context,
                "response": response,
                "tokens_separate": tokens[False],
                "tokens_shared": tokens[True],
                "tokens_by_distinct": tokens[True] / (context + branches * response),
                "seconds_separate": round(separate, 3),
                "seconds_shared": round(shared, 3),
                "times_as_fast": round(separate / shared, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
