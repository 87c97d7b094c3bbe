"""Trainer speed: tokens/s, MFU and peak memory of one optimizer step, on random weights of a real shape.

    python -m benchmarks.trainer_speed --shape 1.5B --layout packed --recompute full --recompute-layers 12

Prints one line of JSON. Lengths are log-normal with a long tail, as those of reasoning samples are. --layout padded
gives the same samples to the same trainer the way that a batch without packing holds them: in order of arrival, every
sample of a micro-batch padded to its longest, and as many of them as then fit. MFU (model FLOPs utilisation) counts
6 x tokens x weights that a token is multiplied with, and causal attention, of real tokens only and without what is
computed again, against --peak-tflops; of the forward pass for log-probabilities a third of that. With --lora-rank it
is 4 x, for frozen weights have no gradients; adapters' own products are not counted. Every token but the
first of a sample has a loss, so no shortcut over prompts helps.

--logprobs-only leaves training out; --profile and --trace are then of one pass of log-probabilities.

--against CHECKOUT runs the same with the code of another commit, in turns with this one, --pairs times, and prints
ratios, this one / the other, of processor seconds of an optimizer step: a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.schedule import plan_micro_batches
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.megatron import attention
from rltool.megatron.experts import GroupedExperts
from rltool.megatron.runtime import Rendezvous
from rltool.megatron.trainer import MegatronTrainer, TrainingRun
from rltool.processes.ports import reserved_ports

EXPERTS: dict[str, Any] = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", norm_topk_prob=True)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True,
    ),
    "small": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=True,
    ),
    "20M": dict(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=7, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=512, tie_word_embeddings=True,
    ),
    "0.5B": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ),
    "1.5B": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ),
    "7B": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    ),
    "qwen3-0.6B": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "30B-A3B": dict(
        **EXPERTS, hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128,
        num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "moonlight": dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=2048, intermediate_size=11264,
        moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.446, first_k_dense_replace=1, q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, vocab_size=163840, tie_word_embeddings=False,
        attention_bias=False, topk_method="noaux_tc", scoring_func="sigmoid",
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", hidden_size=2880, intermediate_size=2880,
        num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, sliding_window=128, vocab_size=201088, tie_word_embeddings=False,
        attention_bias=True,
    ),
    "olmo3-7B": dict(
        architectures=["Olmo3ForCausalLM"], model_type="olmo3", hidden_size=4096, intermediate_size=11008,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, sliding_window=4096, vocab_size=100278,
        tie_word_embeddings=False,
    ),
    "qwen3.5-4B": dict(
        architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", hidden_size=2560, intermediate_size=9216,
        num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        full_attention_interval=4, vocab_size=248320, tie_word_embeddings=True, attention_bias=False,
        rope_parameters=dict(rope_type="default", rope_theta=10_000_000, partial_rotary_factor=0.25),
    ),
    "small-experts": dict(
        **EXPERTS, hidden_size=256, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=128, head_dim=32,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Those of Qwen2.5's published configurations; four layers of Qwen3-30B-A3B's with its embedding as the head, four of
Moonlight-16B-A3B's (one of them dense), two of gpt-oss-20b's; OLMo 3's of 7B, Qwen3.5's of 4B; and four for the CPU."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--layers", type=int, help="of the model, in place of the shape's own")
    parser.add_argument("--layout", choices=("packed", "padded"), default="packed")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch, padding included")
    parser.add_argument("--logprob-tokens", type=int, help="of one that is not trained on; default: as --tokens")
    parser.add_argument("--samples", type=int, default=96, help="per optimizer step and data-parallel rank")
    parser.add_argument("--median", type=float, default=900.0, help="of the lengths")
    parser.add_argument("--sigma", type=float, default=0.9, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2, help="measured; their median is reported")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--recompute-layers", type=int)
    parser.add_argument("--residual", default="model", choices=("model", "float32"))
    parser.add_argument("--eager", action="store_true", help="compile no kernels")
    parser.add_argument("--head-chunk", type=int, default=2048)
    parser.add_argument("--keep-head", action="store_true", help="keep the head's probabilities for the backward pass")
    parser.add_argument(
        "--attention", default="auto", choices=("auto", "torch", "flash_attention_4", "transformer_engine")
    )
    parser.add_argument("--expert-products", default="auto", choices=("auto", "grouped", "sequential"))
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank on all linear layers")
    parser.add_argument("--threads", type=int, help="CPU threads of each rank; default: the trainer's own choice")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--peak-tflops", type=float, default=990.0, help="dense, in --dtype, of one device")
    parser.add_argument("--logprobs-only", action="store_true", help="no training steps, the forward pass alone")
    parser.add_argument("--profile", type=Path, help="write tables of one more step here: by kind, and by kernel")
    parser.add_argument("--trace", type=Path, help="write that step's timeline here, for a trace viewer (.json.gz)")
    parser.add_argument("--against", type=Path, help="root of a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=5)
    return parser.parse_args()


def compare(other: Path, pairs: int) -> dict[str, Any]:
    """Of this command without --against and --pairs, in this checkout and in the other."""
    here = Path(__file__).parent.parent
    words = without(sys.argv[1:], ("--against", "--pairs"))

    def seconds(checkout: Path) -> float:
        command = [sys.executable, "-m", "benchmarks.trainer_speed", *words]
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")
        return statistics.median(json.loads(done.stdout.splitlines()[-1])["processor_seconds"])

    found = [(seconds(here), seconds(other)) for _ in range(pairs)]
    ratios = [a / b for a, b in found]
    return {
        "processor_seconds": [[round(a, 3), round(b, 3)] for a, b in found],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 4),
    }


def without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """Less these options, each with its value."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """The shape, with --layers applied. Two runs of different depth tell what a layer costs without the head."""
    return SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})


def lengths_of(args: argparse.Namespace, count: int) -> list[int]:
    draw = random.Random(0)
    return [
        min(args.longest, max(16, round(draw.lognormvariate(math.log(args.median), args.sigma)))) for _ in range(count)
    ]


def batch_of(lengths: list[int], real: list[int], vocabulary: int) -> TrainBatch:
    """Samples of these lengths, of which the first `real` tokens are no padding.

    Padding has log-probabilities too, of weight 0: a trainer that pads computes the logits of all that it is given.
    """
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    sizes, genuine = torch.tensor(lengths), torch.tensor(real)
    position = torch.arange(total) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    mask = (position > 0).float()
    weights = mask * (position < genuine.repeat_interleave(sizes))
    return TrainBatch(
        tokens=torch.randint(0, vocabulary, (total,), generator=generator),
        lengths=sizes,
        loss_mask=mask,
        rewards=torch.zeros(len(lengths)),
        group_ids=torch.arange(len(lengths)),
        loss_weights=weights,
        advantages=torch.randn(total, generator=generator) * weights,
    )


def micro_batches_of(
    args: argparse.Namespace, lengths: list[int], shards: int, vocabulary: int, tokens: int
) -> list[list[TrainBatch]]:
    """By data-parallel rank, each of so many tokens at most."""
    if args.layout == "packed":
        whole = batch_of(lengths, lengths, vocabulary)
        plan = plan_micro_batches(lengths, max_tokens=tokens, data_parallel=shards)
        return [[whole.micro_batch(samples) for samples in rank] for rank in plan]
    cut = padded_micro_batches(lengths, tokens)
    cut = cut[: len(cut) - len(cut) % shards] or cut
    return [
        [batch_of([max(part)] * len(part), part, vocabulary) for part in cut[rank::shards]] for rank in range(shards)
    ]


def padded_micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """In order of arrival, each as many samples as fit when all are padded to its longest."""
    cut: list[list[int]] = [[]]
    for length in lengths:
        if cut[-1] and (len(cut[-1]) + 1) * max(*cut[-1], length) > max_tokens:
            cut.append([])
        cut[-1].append(length)
    return cut


def randomise(trainer: MegatronTrainer) -> None:
    with torch.no_grad():
        for name, parameter in trainer.gpt.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    with trainer.runtime.mode():
        trainer.weights_changed(initial=False)


def measure(rank: int, args: argparse.Namespace, directory: Path, port: int) -> dict[str, Any] | None:
    model, shards = model_of(args), args.ranks // args.tensor_parallel // args.context_parallel
    trainer = MegatronTrainer(
        ModelConfig(path=directory, dtype=args.dtype),
        TrainerConfig(
            world_size=args.ranks,
            tensor_parallel=args.tensor_parallel,
            context_parallel=args.context_parallel,
            expert_parallel=args.expert_parallel,
            sequence_parallel=args.sequence_parallel,
            distributed_optimizer=args.distributed_optimizer,
            recompute=args.recompute,
            recompute_layers=args.recompute_layers,
            residual=args.residual,
            head_chunk_tokens=args.head_chunk,
            recompute_head=not args.keep_head,
            attention=args.attention,
            expert_products=args.expert_products,
            torch_threads=args.threads,
            compile=not args.eager,
        ),
        OptimizerConfig(lr=1e-6),
        AlgorithmConfig(),
        Rendezvous(rank, "127.0.0.1", port, timeout=300.0),
        TrainingRun(1000),
        LoraConfig(rank=args.lora_rank),
    )
    cuda = trainer.runtime.device.type == "cuda"
    with closing(trainer):
        randomise(trainer)
        lengths = lengths_of(args, args.samples * shards)
        everyone = micro_batches_of(args, lengths, shards, model["vocab_size"], args.tokens)
        larger = micro_batches_of(args, lengths, shards, model["vocab_size"], args.logprob_tokens or args.tokens)
        mine, untrained = (of_ranks[trainer.coordinates.dp_rank] for of_ranks in (everyone, larger))
        loss_tokens = int(sum(micro.loss_weights.sum() for rank in everyone for micro in rank))
        samples = sum(int(micro.loss_weights.sum() > 0) and micro.num_samples for rank in everyone for micro in rank)
        real_tokens = loss_tokens + samples

        def timed(action: Callable[[], Any]) -> tuple[float, float]:
            """Wall-clock and processor seconds."""
            if cuda:
                torch.cuda.synchronize()
            started, worked = time.perf_counter(), time.process_time()
            action()
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - started, time.process_time() - worked

        def train(batches: list[TrainBatch]) -> None:
            trainer.forward_backward(batches, global_loss_tokens=loss_tokens, on_policy=True)
            trainer.optimizer_step()

        first = time.perf_counter()
        for _ in range(0 if args.logprobs_only else args.warmup):
            # Three micro-batches of different lengths compile and allocate all that the rest uses.
            train(mine[:2] + mine[-1:])
        trainer.compute_logprobs(untrained if args.logprobs_only else untrained[:1])
        warm = time.perf_counter() - first
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = [timed(lambda: train(mine)) for _ in range(0 if args.logprobs_only else args.steps)]
        scored = [timed(lambda: trainer.compute_logprobs(untrained)) for _ in range(args.steps)]
        peak = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else None
        scoring = min(wall for wall, _ in scored)
        cost = trainer.family.cost()
        forward = cost.batch_flops(lengths[:samples]) / 3
        flops = 3 * forward - (2 * cost.products * real_tokens if args.lora_rank else 0)
        result = {
            "shape": args.shape,
            "layers": model["num_hidden_layers"],
            "layout": args.layout,
            "dtype": args.dtype,
            "ranks": args.ranks,
            "tensor_parallel": args.tensor_parallel,
            "context_parallel": args.context_parallel,
            "distributed_optimizer": args.distributed_optimizer,
            "recompute": args.recompute,
            "recompute_layers": args.recompute_layers,
            "residual": args.residual,
            "compiled": not args.eager,
            "head_kept": args.keep_head,
            "attention": kernel_name(trainer) if cuda else "padded",
            "experts": expert_products(trainer),
            "threads": torch.get_num_threads(),
            "lora_rank": args.lora_rank,
            "products": cost.products,
            "samples": samples,
            "real_tokens": real_tokens,
            "computed_tokens": sum(len(micro.tokens) for rank in everyone for micro in rank),
            "micro_batches": len(mine),
            "logprob_micro_batches": len(untrained),
            "tokens_per_micro_batch": args.tokens,
            "longest": max(lengths),
            "mean_length": round(statistics.mean(lengths)),
            "step_flops": flops,
            "seconds": [round(wall, 4) for wall, _ in steps],
            "processor_seconds": [round(worked, 3) for _, worked in steps or scored],
            "warmup_seconds": round(warm, 1),
            "logprob_seconds": round(scoring, 4),
            "logprob_tokens_per_second_per_device": round(real_tokens / scoring / args.ranks),
            "logprob_mfu": round(forward / scoring / args.ranks / args.peak_tflops / 1e12, 4),
            "torch": torch.__version__,
        }
        if steps:
            took = statistics.median(wall for wall, _ in steps)
            result["tokens_per_second_per_device"] = round(real_tokens / took / args.ranks)
            result["mfu"] = round(flops / took / args.ranks / args.peak_tflops / 1e12, 4)
        if peak is not None:
            result["device"] = torch.cuda.get_device_name()
            result["peak_allocated_gib"], result["peak_reserved_gib"] = (round(value / 2**30, 2) for value in peak)
        if args.profile or args.trace:

            def profiled() -> tuple[float, float]:
                return timed(lambda: trainer.compute_logprobs(untrained) if args.logprobs_only else train(mine[:2]))

            if rank == 0:
                write_profile(args.profile, args.trace, profiled, cuda, scoring if args.logprobs_only else None)
            else:
                profiled()  # it needs all ranks
        return result if rank == 0 else None


def kernel_name(trainer: MegatronTrainer) -> str:
    """Of the attention kernel that was chosen for this model."""
    config = trainer.gpt.config
    assert config.num_query_groups is not None and config.kv_channels is not None, "megatron sets both"
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    groups = config.num_query_groups // config.tensor_model_parallel_size
    blocks, own = trainer.coordinates.layout.cp > 1, trainer.family.attention
    groups, dim = (heads, own.latent.head) if own.latent else (groups, config.kv_channels)
    shape = attention.Shape(trainer.runtime.device, trainer.dtype, heads, groups, dim, None, None, blocks)
    if trainer.dtype is torch.float32:
        return "padded"
    return attention.judged(shape, "torch" if own.sinks else trainer.config.attention).__name__


def expert_products(trainer: MegatronTrainer) -> str:
    """What this model's experts ran by in the steps before."""
    if not trainer.family.num_experts:
        return ""
    layer: Any = trainer.gpt.decoder.layers[-1]  # the first may be dense
    experts = layer.mlp.experts
    return "grouped" if isinstance(experts, GroupedExperts) and experts.grouped else "sequential"


def write_profile(
    path: Path | None, trace: Path | None, action: Callable[[], tuple[float, float]], cuda: bool, usual: float | None
) -> None:
    """usual: seconds of the same without a profiler, which slows the host: what the GPU did not work of these it
    waited."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        seconds, _ = action()
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    if path is not None:
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        lines = [f"{busy_seconds(recorded):.4f} s of kernels in {seconds:.4f} s", "kind\tcalls\tms\tTFLOP/s"]
        if usual is not None:
            lines[0] += f", {usual:.4f} s without the profiler"
        starts = [event.time_range.start for event in gpu_events(recorded)]
        if starts:
            first = min(event.time_range.start for event in recorded.events() or ())
            lines[0] += f"; the first after {(min(starts) - first) / 1e6:.4f} s"
        for kind, (calls, took, flops) in sorted(by_kind(recorded, cuda).items(), key=lambda item: -item[1][1]):
            lines.append(f"{kind}\t{calls}\t{1e3 * took:.3f}\t{flops / took / 1e12 if flops else 0:.1f}")
        table = recorded.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=110)
        path.write_text("\n".join([*lines, table]), encoding="utf-8")


def by_kind(recorded: Any, cuda: bool) -> dict[str, tuple[int, float, float]]:
    """(calls, seconds, FLOPs) of matrix products by "product K x N", and of all else by the kernel's name; on a CPU by
    the operator's."""
    found: dict[str, tuple[int, float, float]] = {}

    def add(kind: str, microseconds: float, flops: float = 0.0, calls: int = 1) -> None:
        before = found.get(kind, (0, 0.0, 0.0))
        found[kind] = (before[0] + calls, before[1] + microseconds / 1e6, before[2] + flops)

    # Kernels as they ran: what the profiler itself does meanwhile has an operator's kernels too.
    for event in gpu_events(recorded) if cuda else recorded.events():
        add(event.name, event.time_range.elapsed_us() if cuda else event.self_cpu_time_total)
    for event in recorded.events():
        if cuda:
            kernels = [(kernel.duration, kernel.name) for kernel in event.kernels]
        else:
            kernels = [(event.self_cpu_time_total, event.name)]
        matrices = [shape for shape in event.input_shapes or () if len(shape) == 2]
        if event.name in ("aten::mm", "aten::addmm") and len(matrices) >= 2 and kernels:
            (rows, inner), (_, columns) = matrices[-2:] if event.name == "aten::addmm" else matrices[:2]
            took, name = max(kernels)  # the others clear memory for it
            add(f"product {inner} x {columns}", took, 2.0 * rows * inner * columns)
            add(name, -took, calls=-1)
    return {kind: entry for kind, entry in found.items() if entry[0]}


def gpu_events(recorded: Any) -> list[Any]:
    """Kernels and copies."""
    events = [event for event in recorded.events() if str(event.device_type).endswith("CUDA")]
    return [event for event in events if not getattr(event, "is_user_annotation", False)]


def busy_seconds(recorded: Any) -> float:
    """How long the GPU had at least one kernel or copy to run."""
    total, reached = 0.0, -math.inf
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in gpu_events(recorded)):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def run_rank(rank: int, args: argparse.Namespace, directory: Path, port: int) -> None:
    result = measure(rank, args, directory, port)
    if result is not None:
        print(json.dumps(result), flush=True)


def main() -> None:
    args = options()
    if args.against is not None:
        print(json.dumps(compare(args.against.resolve(), args.pairs)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            **model_of(args),
        }
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with reserved_ports(1) as held:
            [port] = held.ports
        if args.ranks == 1:
            run_rank(0, args, directory, port)
        else:
            torch.multiprocessing.spawn(run_rank, (args, directory, port), nprocs=args.ranks)  # pyright: ignore[reportPrivateImportUsage]  # public


if __name__ == "__main__":
    main()
