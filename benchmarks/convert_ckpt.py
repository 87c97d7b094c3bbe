"""Conversion speed against a plain copy of the same bytes, in one run.

    python -m benchmarks.convert_ckpt [--gigabytes 1.5] [--dtype bfloat16] [--rounds 3] [--directory DIR]

Writes a synthetic Qwen2-shaped model, then times, each made durable (fsync): a copy of its files; convert-ckpt to
torch_dist without and with verification; and back to Hugging Face. Every step starts with the source in the page cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rltool.checkpoints import directory as directories
from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf
from rltool.models.registry import family_for
from rltool.models.tensor_files import write_tensor_file

HIDDEN, FFN, HEADS, GROUPS, VOCAB = 1536, 8960, 12, 2, 32000
"""Qwen2.5-1.5B's layers; a smaller vocabulary, so that layers are most of the bytes."""


def write_model(directory: Path, gigabytes: float, dtype: torch.dtype) -> int:
    """Returns the bytes of its tensors."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    one, two = (size_of({**config, "num_hidden_layers": n}, dtype) for n in (1, 2))
    config["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - one) / (two - one)) + 1)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    layout = [(name, dtype, shape) for name, shape in family_for(config).hf_tensors()]
    noise = 0.02 * torch.randn(
        max(math.prod(shape) for _, _, shape in layout), generator=torch.Generator().manual_seed(0)
    )
    noise = noise.to(dtype)
    tensors = (noise[: math.prod(shape)].view(shape) for _, _, shape in layout)
    write_tensor_file(directory / "model.safetensors", layout, tensors)
    return size_of(config, dtype)


def size_of(config: dict, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for _, shape in family_for(config).hf_tensors()) * dtype.itemsize


def copy(source: Path, target: Path) -> None:
    partial = directories.begin(target)
    for path in source.iterdir():
        # By reading and writing: a copy inside the kernel would measure the file system's sharing of blocks.
        with path.open("rb") as read, (partial / path.name).open("wb") as write:
            shutil.copyfileobj(read, write, 1 << 20)
    directories.commit(partial, target)


def seconds(action: Callable[[Path], object], target: Path) -> float:
    os.sync()
    started = time.perf_counter()
    action(target)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temporary directory")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        work = Path(name)
        size = write_model(work / "hf", options.gigabytes, getattr(torch, options.dtype))
        # Imports and process groups are not what is measured.
        write_model(work / "small", 0.0, getattr(torch, options.dtype))
        hf_to_torch_dist(work / "small", work / "small_dist")
        steps = {
            "copy": lambda to: copy(work / "hf", to),
            "to torch_dist": lambda to: hf_to_torch_dist(work / "hf", to, verify=False),
            "to hf": lambda to: torch_dist_to_hf(work / "dist", to, verify=False),
            "to torch_dist, verified": lambda to: hf_to_torch_dist(work / "hf", to),
        }
        hf_to_torch_dist(work / "hf", work / "dist", verify=False)
        times: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(options.rounds):
            for step, action in steps.items():
                times[step].append(seconds(action, work / "target"))
                shutil.rmtree(work / "target")
    print(
        f"{size / 1e6:,.0f} MB of {options.dtype}; {platform.machine()}, {os.cpu_count()} cores; "
        f"median of {options.rounds}"
    )
    medians = {step: statistics.median(measured) for step, measured in times.items()}
    for step, median in medians.items():
        spread = f"{min(times[step]):.1f} to {max(times[step]):.1f} s"
        ratio = medians["copy"] / median
        print(
            f"{step:<25}{median:6.1f} s ({spread:>14}) {size / 1e6 / median:7.0f} MB/s  "
            f"{ratio:5.2f} of the copy's speed"
        )


if __name__ == "__main__":
    main()
