"""The test of a model family that a user runs: tiny random weights, compared with transformers and with itself."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.parallel import ParallelLayout
from rltool.config.sections import ModelConfig, OptimizerConfig, TrainerConfig
from rltool.errors import UsageError
from rltool.megatron.model import global_names
from rltool.megatron.runtime import OtherRankFailed, Rendezvous, RendezvousFailed
from rltool.megatron.trainer import MegatronTrainer, TrainingRun
from rltool.models.base import FamilyDefinition
from rltool.models.hf_directory import HFTensors
from rltool.models.hub import local_model
from rltool.models.layout import check_layout
from rltool.models.registry import family_for, load_family, read_hf_config
from rltool.processes.ports import reserved_ports

LOGPROBS = 5e-5
"""Largest difference of a log-probability in float32; families that are right were 0 to 3e-5 apart, wrong ones 1e-2 and
more."""
GRADIENTS = 1e-4
"""Of a gradient's norm, relative."""
LENGTHS = (5, 17, 2, 9, 12, 3, 8, 40)
"""Of the samples: one is five times as long as a window of a tiny model."""
SECONDS = 120.0

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 131, "max_position_embeddings": 256,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "n_shared_experts": 2, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28,
    "query_pre_attn_scalar": 24, "original_max_position_embeddings": 64,
}  # fmt: skip
"""Sizes of a tiny model by the keys of config.json; smaller ones stay."""
WINDOW = 8


@dataclass(frozen=True)
class Finding:
    """ok: None where there was nothing to compare with."""

    what: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Measured:
    """Of rank 0. logprobs: [T] packed; alone: the same, sample by sample; gradients: of whole parameters, by Megatron's
    name, where one rank has them; exported: by HF's name."""

    logprobs: Tensor
    alone: Tensor
    loss: float
    norm: float
    gradients: dict[str, Tensor]
    exported: dict[str, Tensor]


def check_family(path: str, model: Path | None, work: Path) -> Iterator[Finding]:
    """path: import path of the definition; model: a checkpoint whose config.json is taken, with small sizes; None: the
    defaults of transformers' class. work: an empty directory.

    UsageError for what is no definition, and what the definition refuses.
    """
    definition = load_family(path, setting="rltool models check")
    config = small(_config_of(definition, model))
    reference = _save(config, definition, path, work)
    family = family_for(read_hf_config(work), path)
    yield Finding("tiny model", True, f"{family.architecture}, {family.num_layers} layers, random weights")
    batch = _batch(family.vocab_size)
    theirs = None if reference is None else _by_transformers(reference, batch)
    if theirs is None:
        yield Finding("transformers", None, f"has no {family.architecture}: this family is compared with itself alone")
    one = _run(path, work, 1)
    alone = list(_findings(one, theirs, family, work, "TP 1"))
    yield from alone
    if any(finding.ok is False for finding in alone):
        yield Finding("TP 2", None, "TP 1 differs already")
        return
    try:
        check_layout(family, ParallelLayout(2, tp=2), sequence_parallel=True)
    except UsageError as error:
        yield Finding("TP 2", None, str(error))
        return
    two = _run(path, work, 2)
    yield from _findings(two, theirs, family, work, "TP 2")
    yield _near("TP 2: log-probabilities of TP 1", two.logprobs, one.logprobs)
    same = abs(two.norm / one.norm - 1) < GRADIENTS
    yield Finding("TP 2: gradient norm of TP 1", same, f"{two.norm:.6g}, {one.norm:.6g}")


def _findings(ours: Measured, theirs: Measured | None, family: Any, work: Path, at: str) -> Iterator[Finding]:
    with HFTensors(work) as tensors:
        names = tensors.names - {"lm_head.weight"} if family.tied_embeddings else tensors.names
        wrong = sorted(names ^ ours.exported.keys())
        wrong += sorted(n for n in names & ours.exported.keys() if not torch.equal(tensors.read(n), ours.exported[n]))
    detail = f"differs: {', '.join(wrong[:3])}" if wrong else f"{len(names)} tensors, bit by bit"
    yield Finding(f"{at}: names and bytes of the export", not wrong, detail)
    yield _near(f"{at}: packed against one by one", ours.logprobs, ours.alone)
    if theirs is None:
        return
    yield _near(f"{at}: log-probabilities of transformers", ours.logprobs, theirs.logprobs)
    detail = f"norm {ours.norm:.6g}, transformers {theirs.norm:.6g}"
    ok = abs(ours.norm / theirs.norm - 1) < GRADIENTS
    if ours.gradients:
        worst, name, count = _worst_gradient(ours, theirs, family)
        ok = ok and worst < GRADIENTS
        detail += f"; {count} tensors, the largest difference is {worst:.1e} of its norm, of {name}"
    yield Finding(f"{at}: gradients of transformers", ok, detail)


def _worst_gradient(ours: Measured, theirs: Measured, family: Any) -> tuple[float, str, int]:
    worst, found, count = 0.0, "none", 0
    for name, gradient in ours.gradients.items():
        parameter = family.parameter(name)
        # Experts that lie in one tensor have no gradients of their own there; the norm compares them.
        if parameter.experts or any(hf not in theirs.gradients for hf, _ in parameter.hf):
            continue
        expected = parameter.merge([theirs.gradients[hf] for hf, _ in parameter.hf])
        difference = float((gradient[: len(expected)] - expected).norm() / (expected.norm() + 1e-3 * theirs.norm))
        count += 1
        if difference >= worst:
            worst, found = difference, name
    return worst, found, count


def _near(what: str, found: Tensor, expected: Tensor) -> Finding:
    difference = float((found - expected).abs().max())
    return Finding(what, difference < LOGPROBS, f"largest difference {difference:.1e} (allowed: {LOGPROBS:g})")


# -- the tiny model


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json with SMALL sizes. Lists with an entry for each layer keep one of each kind."""
    layers = config.get("num_hidden_layers") or SMALL["num_hidden_layers"]
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    result = {key: _small(key, value, layers) for key, value in config.items() if key != "quantization_config"}
    if window and context and window < context:
        result["sliding_window"] = WINDOW
    if (config.get("n_group") or 1) > 1:  # twice as many experts as chosen groups, as DeepSeek-V3
        result |= {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    heads = config.get("num_attention_heads")
    if heads is not None and config.get("num_key_value_heads") == heads:
        result["num_key_value_heads"] = result["num_attention_heads"]
    if "qk_rope_head_dim" in result:  # which transformers derives these from
        rotary = result["qk_rope_head_dim"]
        result |= {"head_dim": rotary, "qk_head_dim": rotary + result["qk_nope_head_dim"]}
    # transformers gives the row of the padding token no gradient.
    return result | {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32"}


def _small(key: str, value: Any, layers: int) -> Any:
    if isinstance(value, dict):
        return {inner: _small(inner, each, layers) for inner, each in value.items()}
    if isinstance(value, list) and len(value) == layers > SMALL["num_hidden_layers"]:
        first = value[: SMALL["num_hidden_layers"]]
        missing = [kind for kind in dict.fromkeys(value) if kind not in first]
        return [*first[: len(first) - len(missing)], *missing]
    return min(value, SMALL[key]) if key in SMALL and isinstance(value, int) else value


def _config_of(definition: FamilyDefinition, model: Path | None) -> dict[str, Any]:
    if model is not None:
        config = read_hf_config(local_model(model, setting="--model", files=("config.json",)))
        if not set(config.get("architectures") or ()) & set(definition.architectures):
            raise UsageError(
                f"--model {model} is a {config.get('architectures')}; the family builds "
                f"{', '.join(definition.architectures)}"
            )
        return config
    for architecture in definition.architectures:
        model_type = _model_type(architecture)
        if model_type is not None:
            from transformers import AutoConfig

            return AutoConfig.for_model(model_type).to_dict() | {"architectures": [architecture]}
    raise UsageError(
        f"transformers has no {', '.join(definition.architectures)}; give a checkpoint's config.json with --model"
    )


def _model_type(architecture: str) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    return found[0] if found else None


def _save(config: dict[str, Any], definition: FamilyDefinition, path: str, work: Path) -> Any:
    """Writes config.json and random weights; returns transformers' model, None where there is none."""
    architecture = next(name for name in config["architectures"] if name in definition.architectures)
    generator, model_type = torch.Generator().manual_seed(0), _model_type(architecture)
    if model_type is None:
        from safetensors.torch import save_file

        (work / "config.json").write_text(json.dumps(config), encoding="utf-8")
        shapes = family_for(config, path).hf_tensors()
        weights = {name: _random(torch.full(shape, float(len(shape) == 1)), generator) for name, shape in shapes}
        save_file(weights, work / "model.safetensors", {"format": "pt"})
        return None
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    given = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    hf_config = AutoConfig.for_model(model_type, **given)
    # Windows, sinks and softcaps: transformers' own loops have all of them.
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
    buffers = [buffer for name, buffer in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            tensor.copy_(_random(tensor, generator))
    disable_progress_bar()
    model.save_pretrained(work)
    return model


def _random(value: Tensor, generator: torch.Generator) -> Tensor:
    """Spread enough for errors to show; norms and biases stay near their first values."""
    noise = torch.randn(value.shape, generator=generator)
    return value + 0.1 * noise if value.dim() == 1 else 0.15 * noise


def _batch(vocabulary: int) -> TrainBatch:
    generator, total = torch.Generator().manual_seed(1), sum(LENGTHS)
    mask = torch.cat([(torch.arange(n) >= max(1, n // 3)).float() for n in LENGTHS])
    return TrainBatch(
        tokens=torch.randint(0, vocabulary, (total,), generator=generator), lengths=torch.tensor(LENGTHS),
        loss_mask=mask, rewards=torch.zeros(len(LENGTHS)), group_ids=torch.arange(len(LENGTHS)), loss_weights=mask,
    )  # fmt: skip


def _by_transformers(model: Any, batch: TrainBatch) -> Measured:
    rows = []
    for tokens in batch.tokens.split(list(LENGTHS)):
        logprobs = torch.log_softmax(model(tokens[None]).logits[0].float(), dim=-1)
        rows.append(torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)]))
    logprobs = torch.cat(rows)
    loss = -(logprobs * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    return Measured(logprobs.detach(), logprobs.detach(), float(loss.detach()), norm, gradients, {})


# -- the trainer


def _run(path: str, work: Path, ranks: int) -> Measured:
    """One rank in this process, several in processes of their own."""
    if ranks == 1:
        return measure(path, work, 1, 0, 0)
    with reserved_ports(1) as reserved:
        [port] = reserved.ports
    with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(measure, path, work, ranks, rank, port) for rank in range(ranks)]
        failures = [error for each in started if (error := each.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, (OtherRankFailed, RendezvousFailed))):
            raise error
        return started[0].result()


def measure(path: str, work: Path, ranks: int, rank: int, port: int) -> Measured:
    """What the trainer computes with the model of `work`, its tensors cut over `ranks`."""
    with closing(
        MegatronTrainer(
            ModelConfig(path=work, family=path),
            TrainerConfig(
                world_size=ranks, device="cpu", tensor_parallel=ranks, sequence_parallel=ranks > 1, torch_threads=1
            ),
            OptimizerConfig(lr=1e-3, clip_grad=0.0),
            AlgorithmConfig(loss="sft"),
            Rendezvous(rank, "127.0.0.1", port, timeout=SECONDS),
            TrainingRun(1),
        )
    ) as trainer:
        trainer.load_hf_weights(work)
        stream = trainer.export_weights(everywhere=True)
        exported = {meta.name: tensor.clone() for meta, tensor in stream if tensor is not None}
        batch = _batch(trainer.family.vocab_size)
        packed = trainer.compute_logprobs([batch])
        alone = trainer.compute_logprobs([batch.select([i]) for i in range(len(LENGTHS))])
        _, metrics = trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
        named = global_names(trainer.gpt) if ranks == 1 else {}
        gradients = {name: cast(Any, p).main_grad.clone() for name, p in named.items() if hasattr(p, "main_grad")}
        done = trainer.optimizer_step()
        together, single = (torch.cat(rows) if rows is not None else torch.zeros(0) for rows in (packed, alone))
        return Measured(together, single, metrics["train/loss"], done["train/grad_norm"], gradients, exported)
