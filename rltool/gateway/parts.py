"""What the command has found out and the gateway's process is told. Paths, no keys: it travels in argv."""

from __future__ import annotations

from pathlib import Path

from rltool.config.base import Config
from rltool.engines.endpoints import EngineEndpoint


class Parts(Config):
    """tokenizer: a Hugging Face directory; max_model_len: tokens of prompt and response together; endpoints: the
    engines, or the router alone; sessions: the directory of their files."""

    served_name: str
    max_model_len: int
    tokenizer: Path
    endpoints: tuple[EngineEndpoint, ...]
    sessions: Path
    key_file: Path
    stop_token_ids: tuple[int, ...] = ()
    """Beside those of the model's own files."""
    trust_remote_code: bool = False
