"""Tiny Hugging Face models with random weights, and batches for them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from rltool.algorithms.batch import TrainBatch
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rltool.models.base import FamilyDefinition
from rltool.models.registry import definition_for, read_hf_config
from rltool.quickstart.tiny_model import make_tiny_model

VOCAB = 131
"""Odd, so that tensor parallelism has to pad it."""


DEVICE = os.environ.get("RLTOOL_TEST_DEVICE", "cpu")
"""Where the trainers of these tests run: cpu, or cuda on a host with two GPUs."""


KINDS = (
    "qwen2", "llama", "qwen3", "mistral", "gemma3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "glm4_moe_lite",
    "glm4", "olmo2", "olmo3", "olmoe", "smollm3", "phi3", "qwen2_moe", "gemma2", "gpt_oss", "qwen3_next",
    "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
EXPERTS = (
    "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "olmoe", "qwen2_moe", "gpt_oss", "qwen3_next",
    "qwen3_5_moe", "qwen3_vl_moe",
)  # fmt: skip
SEES = {"qwen3_vl": "Qwen3VLConfig", "qwen3_vl_moe": "Qwen3VLMoeConfig"}
"""With a vision tower: the whole's configuration."""
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""With gated delta nets."""
LATENT = {
    kind: dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6)
    for kind in ("deepseek_v3", "glm4_moe_lite")
}
"""The sizes that vLLM's attention for them is compiled for. transformers and the trainer take 1e-6 for the norms of
low-rank vectors whatever rms_norm_eps is, vLLM takes rms_norm_eps: with 1e-5 (GLM-4.7-Flash) these norms are a relative
2e-6 apart, and log-probabilities here 2e-5."""
ZERO_CENTRED = ("gemma2", "gemma3", *DELTA)
"""Norms multiply by 1 + weight, but for those of a gated delta net's output."""
FEW = (
    "llama", "mistral", "mixtral", "glm4", "olmo2", "olmo3", "olmoe", "smollm3", "phi3", "qwen2_moe", "gemma2",
    "qwen3_5_moe",
)  # fmt: skip
"""Of whom `make test` runs only some cases, and `make test-long` all: they differ from others in parts that others have
as well."""
VISION = dict(hidden_size=32, intermediate_size=48, num_heads=2, num_position_embeddings=16)
"""Of a vision tower."""
HEAD_DIM = 32
"""Where a family's head size is its own: not hidden_size / heads, and vLLM's smallest on the CPU."""


def hf_config(kind: str, tied: bool, **sizes):
    """A transformers configuration in which all that the family has acts: scaling, windows, unnormalised routing."""
    import transformers

    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    plain = dict(rope_parameters=dict(rope_type="default", rope_theta=5000.0))
    yarn = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=64)
    yarn |= dict(mscale=0.7, mscale_all_dim=0.9, beta_fast=4, beta_slow=1)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2)
    experts |= dict(routed_scaling_factor=1.7, first_k_dense_replace=1, num_nextn_predict_layers=1)
    # Of the files on the hub, which vLLM reads and transformers does not.
    experts |= dict(topk_method="noaux_tc", scoring_func="sigmoid")
    latent = dict(kv_lora_rank=24, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=28, num_key_value_heads=4)
    # transformers gives the embedding of padding no gradient.
    olmo = dict(pad_token_id=None)
    # A state of one token gives q k v, of which the norm behind keeps the sign of q k: near zero that is rounding.
    delta = dict(rms_norm_eps=1e-4)
    delta |= dict(linear_key_head_dim=32, linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4)
    delta |= dict(layer_types=["linear_attention", "full_attention"] * 2)  # one of each on either pipeline stage
    quarter = dict(rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.25))
    shared = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40)
    axes = dict(rope_type="default", rope_theta=5000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
    axes = dict(rope_parameters=axes)
    odd = dict(num_attention_heads=6)  # which do not divide the hidden size
    name, special = {
        "qwen2": ("Qwen2Config", plain),
        "llama": ("LlamaConfig", dict(rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, **llama3))),
        "qwen3": ("Qwen3Config", plain | dict(head_dim=HEAD_DIM)),
        "mistral": ("MistralConfig", plain | dict(head_dim=HEAD_DIM, sliding_window=None)),
        "mixtral": ("MixtralConfig", plain | dict(num_local_experts=4, num_experts_per_tok=2)),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            plain | dict(head_dim=HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        ),
        "gemma3": (
            "Gemma3TextConfig",
            dict(
                head_dim=HEAD_DIM,
                query_pre_attn_scalar=24,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"] * 2,
                rope_parameters=dict(
                    sliding_attention=dict(rope_type="default", rope_theta=500.0),
                    full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
                ),
            ),
        ),
        "gemma2": (
            "Gemma2Config",
            plain
            | dict(head_dim=HEAD_DIM, query_pre_attn_scalar=24, sliding_window=8, attn_implementation="eager")
            | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, pad_token_id=None),
        ),
        "glm4": (
            "Glm4Config",
            dict(
                rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
                head_dim=HEAD_DIM,
                pad_token_id=None,
            ),
        ),
        "olmo2": ("Olmo2Config", plain | olmo | odd),
        "olmo3": (
            "Olmo3Config",
            olmo
            | dict(num_key_value_heads=4)
            | dict(
                sliding_window=8,
                rope_parameters=dict(
                    sliding_attention=dict(rope_type="default", rope_theta=5000.0),
                    full_attention=yarn,
                ),
            ),
        ),
        "olmoe": ("OlmoeConfig", plain | olmo | dict(num_key_value_heads=4, num_experts=4, num_experts_per_tok=2)),
        "smollm3": ("SmolLM3Config", plain | dict(no_rope_layers=[1, 0, 1, 0], pad_token_id=None)),
        "phi3": (
            "Phi3Config",
            odd
            | dict(pad_token_id=None, original_max_position_embeddings=64)
            | dict(rope_parameters=longrope(sizes.get("hidden_size", 64) // sizes.get("num_attention_heads", 6))),
        ),
        "qwen2_moe": (
            "Qwen2MoeConfig",
            plain
            | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
            | dict(shared_expert_intermediate_size=40, mlp_only_layers=[1]),
        ),
        "qwen3_next": (
            "Qwen3NextConfig",
            delta | quarter | shared | dict(head_dim=HEAD_DIM, mlp_only_layers=[1]),
        ),
        "qwen3_5": ("Qwen3_5TextConfig", delta | quarter | dict(head_dim=HEAD_DIM)),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", delta | quarter | shared | dict(head_dim=HEAD_DIM)),
        "qwen3_vl": ("Qwen3VLTextConfig", axes | dict(head_dim=HEAD_DIM)),
        "qwen3_vl_moe": (
            "Qwen3VLMoeTextConfig",
            axes
            | dict(head_dim=HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
            | dict(norm_topk_prob=True),  # of the files on the hub, likewise
        ),
        "glm4_moe": (
            "Glm4MoeConfig",
            experts
            | dict(
                rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
                head_dim=HEAD_DIM,
                attention_bias=True,
                use_qk_norm=True,
            ),
        ),
        "deepseek_v3": (
            "DeepseekV3Config",
            experts
            | latent
            | dict(rope_parameters=yarn, q_lora_rank=None, n_routed_experts=8, num_experts_per_tok=4)
            | dict(n_group=4, topk_group=2, rms_norm_eps=1e-6),
        ),
        "gpt_oss": (
            "GptOssConfig",
            dict(
                rope_parameters=dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, truncate=False)
                | dict(original_max_position_embeddings=64, beta_fast=4.0, beta_slow=1.0),
                head_dim=HEAD_DIM,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=8,
            ),
        ),
        "glm4_moe_lite": ("Glm4MoeLiteConfig", experts | latent | plain | dict(q_lora_rank=20, n_group=1)),
    }[kind]
    common = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    config = getattr(transformers, name)(**common | special | sizes)
    if kind not in SEES:
        return config
    # Of which transformers has no language model with its head but in the whole. Three layers get features.
    vision = VISION | dict(depth=4, deepstack_visual_indexes=[0, 1, 3], out_hidden_size=config.hidden_size)
    ids = dict(image_token_id=VOCAB - 4, video_token_id=VOCAB - 3)
    ids |= dict(vision_start_token_id=VOCAB - 2, vision_end_token_id=VOCAB - 1)
    return getattr(transformers, SEES[kind])(
        text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=tied, **ids
    )


def longrope(head_dim: int) -> dict[str, Any]:
    """Of a context of 64 tokens. transformers computes with the short factors up to there."""
    size = head_dim * 3 // 4 // 2
    return dict(
        rope_type="longrope", rope_theta=5000.0, partial_rotary_factor=2 * size / head_dim,
        original_max_position_embeddings=64, short_factor=[1.0 + 0.1 * i for i in range(size)],
        long_factor=[2.0 + i for i in range(size)],
    )  # fmt: skip


def architecture_of(kind: str) -> str:
    """As config.json names it."""
    from transformers.models.auto import modeling_auto

    model_type = hf_config(kind, tied=False).model_type
    known = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known[model_type]


def definition_of(kind: str) -> FamilyDefinition:
    """What the family's file says of itself."""
    return definition_for({"architectures": [architecture_of(kind)]})[1]


def auto_class(kind: str):
    """transformers' that opens this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if kind in SEES else AutoModelForCausalLM


def hf_model(kind: str, tied: bool, seed: int = 0, **sizes):
    """A transformers model of 4 layers, fp32, whose logits are spread enough for errors to show."""
    model = auto_class(kind).from_config(hf_config(kind, tied, **sizes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "sinks" in name or "gate_up_proj_bias" in name:  # which act, and reach gpt-oss's clamp
                noise *= 30
            centre = 0.0 if kind in ZERO_CENTRED and "linear_attn.norm" not in name else 1.0
            parameter.copy_(centre + 0.1 * noise if "norm" in name else 0.15 * noise)
            if name.endswith("A_log"):  # a state keeps most of what it has
                parameter.sub_(2.0)
    return model.eval()


def save_hf(
    directory: Path, kind: str = "qwen2", tied: bool = True, seed: int = 0, sizes: Any = None, **options
) -> Path:
    """sizes: of the model; options: of save_pretrained."""
    return save_as_released(hf_model(kind, tied, seed, **sizes or {}), directory, **options)


def save_for_runs(directory: Path, tied: bool, sizes: Any) -> Path:
    """A Qwen3 of these sizes beside the tokenizer of the quickstart's model."""
    tiny = make_tiny_model(directory / "tiny", seed=0)
    own = {key: read_hf_config(tiny)[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    save_hf(directory / "model", "qwen3", tied, sizes=sizes | own)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / name, directory / "model")
    return directory / "model"


def save_as_released(model, directory: Path, **options) -> Path:
    """Qwen3-VL's experts lie as [inputs, outputs] in files on the hub and for vLLM; transformers 5.19 reads these, and
    writes them as it has them, the other way round."""
    model.save_pretrained(directory, **options)
    if type(model).__name__ == "Qwen3VLMoeForConditionalGeneration":
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            turned = {name: t.mT.contiguous() for name, t in tensors.items() if ".mlp.experts." in name}
            save_file(tensors | turned, file, {"format": "pt"})
    return directory


class InFloat64(TorchFunctionMode):
    """What a model computes in float32 whatever its dtype (norms, routers, angles) is in float64, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})


def in_float64(kind: str, model: Any) -> InFloat64:
    """Within, transformers' model, in float32 or peft's of it, computes in float64 alone, and stays so."""
    model.double()
    if kind in EXPERTS:
        (model.get_base_model() if hasattr(model, "get_base_model") else model).set_experts_implementation("eager")
    return InFloat64()  # other implementations of experts have no float64


WITH_TOWER = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}


def save_with_tower(directory: Path, kind: str, text: Any = None) -> Path:
    """A model with pictures of Qwen3.5's architecture in bfloat16; text: its language model, else `hf_model`'s of this
    kind."""
    import transformers

    text, name = text or hf_model(kind, tied=False), WITH_TOWER[kind]
    vision = VISION | dict(depth=1, out_hidden_size=text.config.hidden_size)
    config = getattr(transformers, f"{name}Config")(
        text_config=text.config.to_dict() | {"dtype": "bfloat16"}, vision_config=vision
    )
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.bfloat16().save_pretrained(directory)
    return directory


def hf_logprobs(model, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T]: log p(tokens[t] | before), 0 for the first."""
    logprobs = torch.log_softmax(model(tokens[None]).logits[0].float() / temperature, dim=-1)
    return torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)])


def policy_batch(lengths: list[int], seed: int = 1) -> TrainBatch:
    """Random samples whose first third is prompt, with plausible old and reference log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([(torch.arange(n) >= max(1, n // 3)).float() for n in lengths])
    noise = lambda: torch.randn(total, generator=generator)  # noqa: E731
    return TrainBatch(
        tokens=torch.randint(0, VOCAB, (total,), generator=generator),
        lengths=torch.tensor(lengths),
        loss_mask=mask,
        rewards=torch.randn(len(lengths), generator=generator),
        group_ids=torch.arange(len(lengths)) // 2,
        loss_weights=mask * (0.5 + torch.rand(total, generator=generator)),
        rollout_logprobs=(-5 + noise()) * mask,
        advantages=noise() * mask,
        old_logprobs=(-5 + noise()) * mask,
        ref_logprobs=-5 + 0.5 * noise(),
    )


def make_trainer(place, path, **options):
    """A MegatronTrainer with HF weights loaded. options: tp, pp, optimizer, algorithm, temperature, steps,
    dtype, load, lora."""
    from rltool.megatron.runtime import Rendezvous
    from rltool.megatron.trainer import MegatronTrainer, TrainingRun

    trainer = MegatronTrainer(
        ModelConfig(path=path, dtype=options.get("dtype", "float32")),
        TrainerConfig(
            world_size=place.world_size,
            device=DEVICE,
            tensor_parallel=options.get("tp", 1),
            pipeline_parallel=options.get("pp", 1),
            context_parallel=options.get("cp", 1),
            **options.get("trainer", {}),
            expert_parallel=options.get("ep", 1),
            torch_threads=1,
        ),
        OptimizerConfig(**{"lr": 1e-3, **options.get("optimizer", {})}),
        AlgorithmConfig(**options.get("algorithm", {})),
        Rendezvous(place.rank, "127.0.0.1", place.port, timeout=60),
        TrainingRun(options.get("steps", 10), temperature=options.get("temperature", 1.0)),
        LoraConfig(**options.get("lora", {})),
    )
    if options.get("load", True):
        trainer.load_hf_weights(path)
    return trainer


def plain_kernels() -> None:
    """In the places where rltool.megatron.exact calls vLLM's, by the names that they have there."""
    import vllm._custom_ops as ops
    from vllm.model_executor.determinism import batch_invariant
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    from rltool.megatron import exact, kernels, trainer

    def add_and_norm(x, residual, weight, eps):
        residual += x
        x.copy_(torch.nn.functional.rms_norm(residual, (x.size(-1),), weight, eps))

    def of_tokens(logits, ids):
        return torch.log_softmax(logits.float(), -1).gather(-1, ids)

    exact.replace_layers.__globals__["_silu_and_mul"] = lambda x: kernels.swiglu(x)
    trainer.use_engine_kernels = lambda model, path, _: exact.replace_layers(model, path)
    batch_invariant.linear_batch_invariant = torch.nn.functional.linear
    batch_invariant.rms_norm_batch_invariant = lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps)
    ops.fused_add_rms_norm, logprob.compute_token_logprobs = add_and_norm, of_tokens
    gumbel.apply_temperature = lambda logits, rows, temperature: logits.div_(temperature[rows.long()][:, None])
