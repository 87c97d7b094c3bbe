"""Logits in fp32 from vLLM engines whose weights have 16 bits.

The trainer computes logits in fp32 (rltool.megatron.products); a bfloat16 head rounds those of 16 to 32 to multiples of
0.125, which is a part of the difference between an engine's log-probabilities and the trainer's (MiniMax-M1,
arXiv:2506.13585, section 3.2; ScaleRL, arXiv:2510.13786). On a GPU vLLM's fp32 head is the same product of the same
16-bit matrices that is not rounded at its end.

Source: vllm/config/model.py (head_dtype), vllm/model_executor/layers/logits_processor.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rltool.config.serve import EngineLaunch
from rltool.engines.types import json_object

OVERRIDES = "--hf-overrides"
DECIDES = (OVERRIDES, "--config", "--quantization", "-q")
"""vLLM's flags that override the model's configuration themselves, may do so in a file (which ours would win over), or
quantize."""
QUANTIZED = ("quantization_config", "compression_config")


def head_dtype(launch: EngineLaunch) -> dict[str, Any]:
    """Of --hf-overrides, for a vLLM engine that samples. Empty where the head's weights may be quantized, which vLLM
    refuses, where the user overrides the model's configuration, and on a CPU, where vLLM would copy the head into fp32
    at every step."""
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
