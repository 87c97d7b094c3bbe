"""The experts that an engine's router chose for each token in each layer, as replies have them (rollout routing replay;
Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370).

A reply covers the prompt and the response but for its last token, which was sampled and never forwarded. Its layers are
all of the model's, those without experts among them: both engines leave 0 for each choice there.

Sources: vllm/entrypoints/scale_out/token_in_token_out/serving.py and utils/serial_utils.py (numpy2base64) of vLLM 0.32;
sglang/srt/state_capturer and managers/tokenizer_manager.py of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import io
from array import array
from typing import Any

from rltool.engines.types import UNROUTED, RoutedExperts, Routing
from rltool.errors import EngineError

FLAG = "--enable-return-routed-experts"
"""Of vLLM's server and of SGLang's."""

NUMPY_NAMES = {"B": "uint8", "h": "int16"}
"""Of array's type codes."""


def from_npy(text: Any, routing: Routing, *, tokens: int) -> RoutedExperts:
    """vLLM's: base64 of a .npy file [tokens, layers, top_k] of integers. EngineError for anything else, and where it is
    missing."""
    import numpy as np  # a part of rltool[train]: the commands alone do without

    data = _bytes(text)
    try:
        found: Any = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:  # the last: of a header that promises too much
        raise EngineError(f"routed_experts is no .npy file: {error}") from error
    if getattr(getattr(found, "dtype", None), "kind", "") not in ("i", "u"):
        raise EngineError(f"routed_experts is no array of integers: {getattr(found, 'dtype', type(found).__name__)}")
    shape = (tokens, routing.layers, routing.top_k)
    if found.shape != shape:
        raise EngineError(f"routed_experts has shape {found.shape}; {_expected(routing, tokens)} make {shape}")
    return _checked(found, routing)


def from_int32(text: Any, routing: Routing, *, tokens: int) -> RoutedExperts:
    """SGLang's: base64 of little-endian int32 [tokens, layers, top_k]. Errors as of `from_npy`."""
    import numpy as np

    data = _bytes(text)
    size = 4 * tokens * routing.per_token
    if len(data) != size:
        raise EngineError(f"routed_experts has {len(data)} bytes; {_expected(routing, tokens)} make {size} of int32")
    return _checked(np.frombuffer(data, "<i4"), routing)


def _bytes(text: Any) -> bytes:
    if text is None:
        raise EngineError(
            f"a sample came without routed_experts: was the engine started without {FLAG} (`rltool serve-engines "
            "--return-routed-experts`)?"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise EngineError(f"routed_experts is no base64: {error}") from error


def _expected(routing: Routing, tokens: int) -> str:
    return f"{tokens} forwarded tokens x {routing.layers} layers x {routing.top_k} experts"


def _checked(found: Any, routing: Routing) -> RoutedExperts:
    """found: an array of integers, in the order of RoutedExperts."""
    import numpy as np

    each_layer = found.reshape(-1, routing.layers, routing.top_k)
    chosen = np.delete(each_layer, routing.dense, axis=1) if routing.dense else each_layer
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < routing.experts:
        raise EngineError(
            f"routed_experts names experts {chosen.min()} to {chosen.max()}, and the model has {routing.experts} a "
            "layer"
        )
    in_order = np.sort(chosen, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise EngineError("routed_experts names an expert twice for one token and layer")
    code = routing.code
    kept = each_layer.astype(NUMPY_NAMES[code])
    kept[:, list(routing.dense)] = UNROUTED[code]
    return RoutedExperts(array(code, kept.tobytes()), routing.per_token)
