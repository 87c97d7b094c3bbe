"""The experts that a fake engine's router chooses: a function of the token and the layer."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from rltool.engines.types import Routing


def chosen(tokens: Sequence[int], routing: Routing) -> np.ndarray:
    """[tokens - 1, layers, top_k] int32: of all tokens but the last, which was sampled and never forwarded; 0 for each
    choice of a dense layer."""
    first = np.add.outer(7 * np.asarray(tokens[:-1], np.int32), 3 * np.arange(routing.layers))
    found = ((first[:, :, None] + np.arange(routing.top_k)) % routing.experts).astype(np.int32)
    found[:, list(routing.dense)] = 0
    return found


def to_npy(found: np.ndarray) -> str:
    """As vLLM sends an array (vllm/utils/serial_utils.py, numpy2base64)."""
    file = io.BytesIO()
    np.save(file, found, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
