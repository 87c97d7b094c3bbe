"""Random weights in the shapes of real models, under Hugging Face's names, and what an engine must make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rltool.engines.dialects.checksums import ParameterLayout
from rltool.megatron.export_plan import full_plan
from rltool.models.registry import family_for, read_hf_config
from rltool.weights.verify.implied_checksums import implied_checksums

Implied = dict[str, tuple[str, ...]]
"""The engine's name of a parameter -> its digest on each rank."""

SIZES: dict[str, dict[str, int | bool]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
"""Of Qwen2.5, and one for a CPU."""

def write_model(directory: Path, size: str, dtype: torch.dtype) -> Path:
    """A directory with a config.json alone: engines are started with --load-format dummy."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **SIZES[size],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def parameter_shapes(size: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    model = SIZES[size]
    hidden, inner, vocabulary = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    keys = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        for part, rows in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{layer}self_attn.{part}_proj.weight", (rows, hidden)
            yield f"{layer}self_attn.{part}_proj.bias", (rows,)
        yield f"{layer}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not model["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def random_weights(size: str, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name, in Hugging Face's order."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(size):
        weights[name] = torch.empty(shape, device=device, dtype=dtype)
        randomize(name, weights[name], generator, last_norm="model.norm.weight")
    return weights


def randomize(name: str, tensor: Tensor, generator: torch.Generator, *, last_norm: str) -> None:
    """In place. A large last norm spreads the logits, so that wrong weights show in log-probabilities."""
    tensor.normal_(generator=generator)
    if name.endswith("norm.weight"):
        tensor.mul_(0.1).add_(1.0).mul_(4.0 if name == last_norm else 1.0)
    else:
        tensor.mul_(0.1 if name.endswith("bias") else 0.02)


def vllm_checksums(model: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, ranks: int) -> Implied:
    """What vLLM's /weight_checker says of these weights on each of so many tensor-parallel ranks. model: their
    config.json."""
    plan = full_plan(family_for(read_hf_config(model)), dtype)
    layout = ParameterLayout(str(dtype).removeprefix("torch."), ranks)
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(".".join(name.split(".")[:3]), []).append(name)

    def digests(names: list[str]) -> Implied:
        return implied_checksums(plan, ((name, weights[name]) for name in names), layout)

    with ThreadPoolExecutor(16) as pool:
        return {name: found for layer in pool.map(digests, layers.values()) for name, found in layer.items()}
