"""Logits in fp32 from vLLM engines whose weights have 16 bits.

The trainer computes logits in fp32 (rltool.megatron.products); a bfloat16 head rounds those of 16 to 32 to multiples of
0.125, which is most of the difference between an engine's log-probabilities and the trainer's (MiniMax-M1,
arXiv:2506.13585, section 3.2; ScaleRL, arXiv:2510.13786). On a GPU vLLM's fp32 head is the same product of the same
16-bit matrices that is not rounded at its end.

Source: vllm/config/model.py (head_dtype), vllm/model_executor/layers/logits_processor.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from rltool.config.serve import EngineLaunch

OVERRIDES = "--hf-overrides"
QUANTIZATION = ("--quantization", "-q")


def head_dtype_flags(launch: EngineLaunch) -> list[str]:
    """For a vLLM engine that samples. None where the head's weights may be quantized, which vLLM refuses, where the
    user overrides the model's configuration, and on a CPU, where vLLM would copy the head into fp32 at every step."""
    named = {flag.partition("=")[0].replace("_", "-") for flag in launch.extra_args}
    if launch.device == "cpu" or _overridden(named) or named & set(QUANTIZATION) or _quantized(launch):
        return []
    return [OVERRIDES, json.dumps({"head_dtype": "float32"})]


def _overridden(named: Iterable[str]) -> bool:
    return any(name == OVERRIDES or name.startswith(OVERRIDES + ".") for name in named)


def _quantized(launch: EngineLaunch) -> bool:
    if launch.model.suffix == ".gguf":
        return True
    try:
        config = json.loads((launch.model / "config.json").read_text())
    except (OSError, ValueError):
        return False  # vLLM itself will say what is wrong with the model directory
    return "quantization_config" in config or "compression_config" in config
