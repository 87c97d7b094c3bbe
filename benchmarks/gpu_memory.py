"""Memory in use on a GPU, as the driver counts it."""

from __future__ import annotations

import shutil
import subprocess


def gpu_memory_gib(gpu: str) -> float | None:
    """Memory in use on this GPU, by nvidia-smi; None where that does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout) / 1024
    except (subprocess.SubprocessError, ValueError):
        return None
