"""The small files that travel with the weights: config, tokenizer, generation config. Pure files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def carried_files(source: Path) -> list[Path]:
    """Files of a model directory that are neither weights nor ours."""
    return sorted({path for pattern in PATTERNS for path in Path(source).glob(pattern) if path.is_file()})


def carry(source: Path, target: Path, *, dtype: str) -> list[str]:
    """Copies them; config.json gets the dtype of the weights beside it. Returns the names."""
    files = carried_files(source)
    for path in files:
        shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes "dtype", before it was "torch_dtype"; engines read either.
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [path.name for path in files]
