"""Inverse frequencies of rotary position embeddings, with the scalings that are implemented."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rltool.errors import UsageError

IMPLEMENTED = ("default", "linear", "llama3")


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json: {"rope_type", "rope_theta", and what the type needs}.

    transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling` (whose type was once called
    "type"). Raises UsageError for a type that is not implemented.
    """
    settings: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings["rope_theta"] = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    if settings["rope_type"] not in IMPLEMENTED:
        raise UsageError(
            f"config.json: rope type {settings['rope_type']!r} is not implemented; "
            f"implemented: {', '.join(IMPLEMENTED)}"
        )
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise UsageError("config.json: partial_rotary_factor below 1 is not implemented")
    return settings


def inverse_frequencies(head_dim: int, settings: dict[str, Any]) -> Tensor:
    """[head_dim / 2] float32: theta^(-2i/d) (Su et al. 2021), scaled by `rope_type`.

    "linear" divides all by `factor` (Chen et al. 2023). "llama3" divides long wavelengths by `factor`, keeps short ones
    and interpolates between, as in Llama 3.1's reference implementation.
    """
    frequencies = 1.0 / settings["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if settings["rope_type"] == "default":
        return frequencies
    if settings["rope_type"] == "linear":
        return frequencies / settings["factor"]
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    original_length = settings["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original_length / low, frequencies / factor, between)
    return torch.where(wavelengths < original_length / high, frequencies, scaled)
