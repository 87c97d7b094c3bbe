"""Models with a classification head, such as reward models: how engines are started for them, and asked for scores. The
part of both dialects for `task = "classify"`.

Sources: vllm/entrypoints/pooling/classify, vllm/config/model.py (runner and convert); sglang/srt/entrypoints/
http_server.py, sglang/srt/managers/io_struct.py (EmbeddingReqInput), sglang/srt/models/qwen2_classification.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rltool.config.serve import EngineLaunch
from rltool.engines.dialects.table import dialect, launches
from rltool.engines.types import HttpRequest
from rltool.errors import EngineError, UsageError
from rltool.models.weight_files import read_header, weight_files

CLASSIFY_PATH = "/classify"
"""Of both engines. Their bodies and replies differ."""

HEAD_BIAS = "score.bias"

CONVERTED = ("ForCausalLM", "ForConditionalGeneration")
"""Architectures that vLLM's --convert auto would make embedding models of; others name their head themselves."""


class VllmClassification:
    """See rltool.engines.dialects.protocol.Inspects."""

    def classify(self, token_ids: Sequence[int], *, use_activation: bool) -> HttpRequest:
        body = {"input": list(token_ids), "use_activation": use_activation}
        return HttpRequest("POST", CLASSIFY_PATH, body)

    def parse_classify(self, reply: Any) -> tuple[float, ...]:
        [found] = reply["data"]  # called probs whatever use_activation is
        return _finite(found["probs"])


class SglangClassification:
    """See rltool.engines.dialects.protocol.Inspects."""

    def classify(self, token_ids: Sequence[int], *, use_activation: bool) -> HttpRequest:
        if use_activation:
            raise UsageError(
                "SGLang gives what the model's head gives and applies no activation: leave use_activation out, or "
                "serve the model with vLLM"
            )
        return HttpRequest("POST", CLASSIFY_PATH, {"input_ids": list(token_ids)})

    def parse_classify(self, reply: Any) -> tuple[float, ...]:
        return _finite(reply["embedding"])


def vllm_flags(launch: EngineLaunch) -> list[str]:
    """Of a classifier, in place of those for sampling and for weight updates."""
    converted = _architecture(launch).endswith(CONVERTED)
    return ["--runner", "pooling", *(["--convert", "classify"] if converted else [])]


def check_head(launch: EngineLaunch) -> None:
    """UsageError for a classifier whose scores the engine would add random numbers to (Launches.biased_heads). Reads
    headers alone."""
    if launch.task != "classify" or _architecture(launch) not in launches(launch.engine).biased_heads:
        return
    for path in weight_files(launch.model):
        with path.open("rb") as stream:
            if HEAD_BIAS in read_header(path, stream)[0]:
                return
    raise UsageError(
        f"MODEL {launch.model}: {dialect(launch.engine).label} gives the head of a {_architecture(launch)} a bias, of "
        "random numbers where the checkpoint has none, as this one; serve it with --engine vllm, or add "
        f"{HEAD_BIAS}, one zero for each label, to the checkpoint"
    )


def _architecture(launch: EngineLaunch) -> str:
    try:
        return json.loads((launch.model / "config.json").read_text())["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # vLLM itself reports what is wrong with the model directory


def _finite(values: Sequence[Any]) -> tuple[float, ...]:
    if not values or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise EngineError(f"{CLASSIFY_PATH} gave {values!r}, expected one finite number for each label")
    return tuple(map(float, values))
