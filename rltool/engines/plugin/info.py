"""What a vLLM server reports of itself on /rltool/info, and what sglang-router asks for when it registers a worker."""

from __future__ import annotations

from typing import Any

import rltool

PLUGIN_PROTOCOL = 5
"""Of the requests that trainer and plugin exchange, counted up with each change of what one of them has to know of the
other. 1, which reports no number: /rltool/finish_weight_update leaves the engine paused. 2: an adapter comes into
its place by /rltool/publish_adapter, and since by /rltool/prefetch. 3: sharded
transfers. 4: /generate streams. 5: sharded transfers over NCCL, CUDA IPC and disk."""


async def describe(state: Any, boot_id: str | None) -> dict[str, Any]:
    """`state` is the FastAPI app's. Keys are those that rltool.engines.dialects.vllm reads; model_config is the HF
    config of the text model."""
    # Its public name is this one; type checkers take it for a private import.
    from vllm.version import __version__ as vllm_version  # pyright: ignore[reportPrivateImportUsage]

    config = state.vllm_config
    lora = config.lora_config
    model, parallel, transfer = config.model_config, config.parallel_config, config.weight_transfer_config
    return {
        "rltool_version": rltool.__version__,
        "plugin_protocol": PLUGIN_PROTOCOL,
        "vllm_version": vllm_version,
        "boot_id": boot_id,
        "model_path": model.model,
        "served_name": model.served_model_name,
        "vocab_size": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": config.device_config.device_type,
        "max_model_len": model.max_model_len,
        "logprobs_mode": str(model.logprobs_mode),
        "max_logprobs": model.max_logprobs,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "weight_backend": transfer.backend if transfer else None,
        "sleep_mode": model.enable_sleep_mode,
        "weight_version": await state.engine_client.get_weight_version(),
        "model_config": model.hf_text_config.to_dict(),
        "task": _task(state),
        "routed_experts": _returns_routed_experts(config),
        "exact": _is_exact(config),
        "lora_rank": lora.max_lora_rank if lora else 0,
        "lora_slots": min(lora.max_loras, lora.max_cpu_loras or lora.max_loras) if lora else 0,
    }


def _returns_routed_experts(config: Any) -> bool:
    outputs = getattr(config, "aux_output_config", None)  # since 0.32
    return bool(outputs is not None and outputs.enable_return_routed_experts)


def _is_exact(config: Any) -> bool:
    """As `serve-engines --exact` starts it: batch-invariant kernels, nothing fused by torch.compile, the head in the
    model's dtype."""
    from vllm import envs

    head = getattr(config.model_config, "head_dtype", config.model_config.dtype)
    uncompiled = int(config.compilation_config.mode or 0) == 0
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)) and uncompiled and head == config.model_config.dtype


def _task(state: Any) -> str:
    """generate, classify, or pooling: an embedding model."""
    if state.vllm_config.model_config.runner_type != "pooling":
        return "generate"
    return "classify" if getattr(state, "serving_classification", None) is not None else "pooling"


async def checksums(state: Any) -> dict[str, Any]:
    """As vLLM's own /weight_checker gives them, which zeroes all weights for another argument."""
    found: dict[str, str] = {}
    for of_worker in await state.engine_client.compute_weight_checksums():
        found |= of_worker
    return {"checksums": found}


def sglang_server_info(facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of SGLang's /server_info that sglang-router reads."""
    return {
        "model_path": facts["model_path"],
        "tokenizer_path": facts["model_path"],
        "served_model_name": facts["served_name"],
        "is_generation": facts["task"] == "generate",
        "tp_size": facts["tp"],
        "pp_size": facts["pp"],
        "dp_size": facts["dp"],
        "context_length": facts["max_model_len"],
        "max_running_requests": facts["max_num_seqs"],
        "disaggregation_mode": "null",
        "weight_version": facts["weight_version"],
        "version": f"vllm-{facts['vllm_version']}",
        "status": "ready",
    }


def sglang_model_info(facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of SGLang's /model_info."""
    return {
        "model_path": facts["model_path"],
        "tokenizer_path": facts["model_path"],
        "is_generation": facts["task"] == "generate",
        "weight_version": facts["weight_version"],
        "model_type": facts["model_config"].get("model_type"),
        "architectures": facts["model_config"].get("architectures"),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
    }
