"""What the command passes to the gateway's process. Paths, no keys: it travels in argv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltool.config.base import Config
from rltool.engines.endpoints import EngineEndpoint
from rltool.models.pictures import Pictures


class Parts(Config):
    """tokenizer: a Hugging Face directory; max_model_len: tokens of prompt and response together; endpoints: the
    engines that it begins with, or the router alone; sessions: the directory of their files."""

    served_name: str
    max_model_len: int
    tokenizer: Path
    endpoints: tuple[EngineEndpoint, ...]
    sessions: Path
    key_file: Path
    stop_token_ids: tuple[int, ...] = ()
    """Beside those of the model's own files."""
    trust_remote_code: bool = False
    through_router: bool = False
    follows: bool = False
    """Whether views of a run's fleet come on standard input (gateway/fleet.py)."""
    pictures: Pictures | str = "the model takes text alone"
    """How the model takes them, or why it gets none."""
    lineage: dict[str, Any] | None = None
    """Of that run's weights, as JSON: turns that other weights have sampled are sampled again. None: any are taken."""
