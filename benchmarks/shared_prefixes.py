"""Forward and backward over branches of one context, each distinct token once against separate rows: tokens computed
and time as ratios, in turns, on the CPU in fp32; on a GPU in bf16 with random weights of a real shape.

    python -m benchmarks.shared_prefixes [branches] [context] [response] [rounds]
    python -m benchmarks.shared_prefixes --shape 1.5B 8 4096 128
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.trainer_speed import SHAPES, randomise
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


def batch_of(groups: int, branches: int, context: int, response: int, vocabulary: int) -> TrainBatch:
    """Branches of one context in each group, with losses on their own tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, shape, generator=generator)

    prompts, own = draw(groups, context).repeat_interleave(branches, 0), draw(groups * branches, response)
    mask = torch.cat([torch.zeros(context), torch.ones(response)]).repeat(groups * branches)
    return TrainBatch(
        tokens=torch.cat([prompts, own], dim=1).flatten(),
        lengths=torch.full((groups * branches,), context + response),
        loss_mask=mask,
        rewards=torch.zeros(groups * branches),
        group_ids=torch.arange(groups).repeat_interleave(branches),
        loss_weights=mask,
        advantages=torch.randn(len(mask), generator=generator) * mask,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("branches", 8), ("context", 1024), ("response", 128), ("rounds", 3)):
        parser.add_argument(name, type=int, nargs="?", default=default)
    parser.add_argument("--groups", type=int, default=1, help="one micro-batch where shared, else one for each")
    parser.add_argument("--shape", choices=SHAPES, help="of benchmarks.trainer_speed, on a GPU in bf16")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--profile", action="store_true", help="print what one more pass of each spends its time on")
    asked = parser.parse_args()
    branches, context, response, rounds = asked.branches, asked.context, asked.response, asked.rounds
    model, dtype, device = MODEL, "float32", "cpu"
    if asked.shape:
        model, dtype, device = MODEL | SHAPES[asked.shape], "bfloat16", "cuda"
    batch = batch_of(asked.groups, branches, context, response, model["vocab_size"])
    rows = [range(start, start + branches) for start in range(0, batch.num_samples, branches)]
    micro_batches = {True: [batch], False: [batch.micro_batch(list(group)) for group in rows]}
    with tempfile.TemporaryDirectory() as directory, reserved_ports(1) as held:
        held.release()
        (Path(directory) / "config.json").write_text(json.dumps(model))
        trainer = MegatronTrainer(
            ModelConfig(path=Path(directory), dtype=dtype),
            TrainerConfig(
                device=device, max_tokens_per_micro_batch=len(batch.tokens), recompute=asked.recompute
            ),
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

        def passed(shared: bool) -> None:
            trainer.config = trainer.config.model_copy(update={"shared_prefixes": shared})
            trainer.forward_backward(
                micro_batches[shared], global_loss_tokens=batch.num_loss_tokens, on_policy=True
            )

        seconds: dict[bool, list[float]] = {False: [], True: []}
        tokens: dict[bool, int] = {}
        for number in range(rounds + 1):
            for shared in (False, True):
                begun = time.perf_counter()
                passed(shared)
                if device == "cuda":
                    torch.cuda.synchronize()
                if number:  # the first is a warm-up
                    seconds[shared].append(time.perf_counter() - begun)
                tokens[shared] = sum(computed)
                computed.clear()
        for shared in (False, True) if asked.profile else ():
            with torch.profiler.profile() as profile:
                passed(shared)
            by = "self_cpu_time_total" if device == "cpu" else "self_cuda_time_total"
            print(profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))
        trainer.close()
    separate, shared = (statistics.median(seconds[which]) for which in (False, True))
    print(
        json.dumps(
            {
                "groups": asked.groups,
                "branches": branches,
                "context": context,
                "response": response,
                "tokens_separate": tokens[False],
                "tokens_shared": tokens[True],
                "tokens_by_distinct": tokens[True] / (asked.groups * (context + branches * response)),
                "seconds_separate": round(separate, 3),
                "seconds_shared": round(shared, 3),
                "times_as_fast": round(separate / shared, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
