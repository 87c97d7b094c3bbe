"""Inverse frequencies of rotary position embeddings, with the scalings that are implemented."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rltool.config.base import is_list
from rltool.errors import UsageError
from rltool.models.base import Rotary

IMPLEMENTED = ("default", "linear", "llama3", "yarn", "longrope")


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json: {"rope_type", "rope_theta", and what the type needs}.

    transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling` (whose type was once called
    "type"). Raises UsageError for a type that is not implemented.
    """
    settings = _settings(config)
    if settings["rope_type"] not in IMPLEMENTED:
        raise UsageError(
            f"config.json: rope type {settings['rope_type']!r} is not implemented; "
            f"implemented: {', '.join(IMPLEMENTED)}"
        )
    return settings


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings["rope_theta"] = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    return settings


def rotary(head_dim: int, config: dict[str, Any], settings: dict[str, Any] | None = None) -> Rotary:
    """Of a config.json. head_dim: size of what may be turned; settings: in place of the file's `rope_settings`."""
    settings = settings or rope_settings(config)
    context = config.get("max_position_embeddings")
    if settings["rope_type"] == "longrope":
        return _longrope(head_dim, settings, context, longest_of(config))
    scale = attention_factor(settings) if settings["rope_type"] == "yarn" else 1.0
    return Rotary(inverse_frequencies(head_dim, {"max_position_embeddings": context, **settings}), scale)


def longest_of(config: dict[str, Any]) -> int | None:
    """Tokens of a sequence at most, where the trainer has rotary positions for short ones alone: longrope's."""
    settings = _settings(config)
    if settings["rope_type"] != "longrope":
        return None
    found = settings.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if not found:
        raise UsageError("config.json: rope type 'longrope' needs original_max_position_embeddings")
    return found


def _longrope(head_dim: int, settings: dict[str, Any], context: int | None, longest: int | None) -> Rotary:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753) up to the context of pretraining: frequencies divided by
    `short_factor`, cosines and sines multiplied for the whole context.

    What is longer has other factors. transformers takes them for a whole batch that has one longer sequence; vLLM for
    all sequences of an engine that takes longer ones: then one token of a packed batch would have two meanings.
    """
    short, factor = settings.get("short_factor"), settings.get("factor")
    if not is_list(short) or len(short) != head_dim // 2 or not longest:
        raise UsageError(f"config.json: rope type 'longrope' needs a short_factor of {head_dim // 2} numbers")
    factor = factor or (context or longest) / longest
    scale = settings.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(longest)) if factor > 1 else 1.0
    plain = inverse_frequencies(head_dim, {**settings, "rope_type": "default"})
    return Rotary(plain / torch.tensor(short, dtype=torch.float32), scale, longest=longest)


def two_rotaries(head_dim: int, config: dict[str, Any], *, sliding_theta: float) -> Rotary:
    """Of layers that see everything, and in `Rotary.sliding` of those with a window.

    config.json has an entry per kind of layer since transformers 5; before, `rope_theta` and the scaling were those of
    the full layers alone.
    """
    by_kind: dict[str, Any] = config.get("rope_parameters") or {}
    full: dict[str, Any] = by_kind.get("full_attention") or config.get("rope_scaling") or {}
    sliding: dict[str, Any] = by_kind.get("sliding_attention") or {}
    settings = (
        rope_settings({"rope_theta": config.get("rope_theta"), "rope_parameters": full}),
        rope_settings({"rope_theta": sliding_theta, "rope_parameters": sliding}),
    )
    of_full, of_sliding = (rotary(head_dim, config, each) for each in settings)
    return replace(of_full, sliding=of_sliding)


def inverse_frequencies(head_dim: int, settings: dict[str, Any]) -> Tensor:
    """[head_dim / 2] float32: theta^(-2i/d) (Su et al. 2021), scaled by `rope_type`.

    "linear" divides all by `factor` (Chen et al. 2023). "llama3" divides long wavelengths by `factor`, keeps short ones
    and interpolates between, as in Llama 3.1's reference implementation. "yarn" does so by the number of turns within
    the original context (Peng et al. 2023, arXiv 2309.00071, section 3.2).
    """
    frequencies = 1.0 / settings["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if settings["rope_type"] == "default":
        return frequencies
    if settings["rope_type"] == "linear":
        return frequencies / settings["factor"]
    if settings["rope_type"] == "yarn":
        return _yarn(frequencies, head_dim, settings)
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    original_length = settings["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original_length / low, frequencies / factor, between)
    return torch.where(wavelengths < original_length / high, frequencies, scaled)


def _yarn(frequencies: Tensor, head_dim: int, settings: dict[str, Any]) -> Tensor:
    original, base = _original_context(settings), settings["rope_theta"]

    def dimension(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(settings.get("beta_fast") or 32)
    last = dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    divided = ramp.clamp(0, 1)
    return frequencies / settings["factor"] * divided + frequencies * (1 - divided)


def _original_context(settings: dict[str, Any]) -> int:
    length = settings.get("original_max_position_embeddings") or settings.get("max_position_embeddings")
    if not length:
        raise UsageError("config.json: rope type 'yarn' needs original_max_position_embeddings")
    return length


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention's temperature for a context longer by `factor` (equation 22 of the paper)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(settings: dict[str, Any]) -> float:
    """What YaRN multiplies cosines and sines with."""
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    factor, of, all_dim = settings["factor"], settings.get("mscale"), settings.get("mscale_all_dim")
    return mscale(factor, of) / mscale(factor, all_dim) if of and all_dim else mscale(factor)
