"""A model larger than memory is converted: the peak does not depend on the number of layers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rltool.models.registry import family_for
from rltool.models.tensor_files import write_tensor_file
from tests.e2e.megatron_models import hf_config, save_hf

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LAYERS, HIDDEN, FFN, VOCAB = 14, 1280, 5120, 8192


def write_large(directory: Path) -> tuple[int, int]:
    """A Qwen2 of 1.5 GB in fp32, written tensor by tensor into two files; bytes of all and of the largest layer."""
    sizes = dict(hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, vocab_size=VOCAB)
    config = hf_config("qwen2", tied=False, **sizes, num_attention_heads=16, num_key_value_heads=16, layer_types=None)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(directory)
    family = family_for(json.loads((directory / "config.json").read_text()))
    layout = [(name, torch.float32, shape) for name, shape in family.hf_tensors()]
    noise = 0.02 * torch.randn(FFN * HIDDEN * 2, generator=torch.Generator().manual_seed(0))

    def tensors(part):
        for number, (_, _, shape) in enumerate(part):
            size = torch.Size(shape).numel()
            yield noise[number : number + size].view(shape)

    middle = len(layout) // 2
    index = {}
    for number, part in enumerate((layout[:middle], layout[middle:]), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        write_tensor_file(directory / name, part, tensors(part))
        index |= {tensor: name for tensor, _, _ in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    by_layer: dict[int | str, int] = {}
    for parameter in family.parameters:
        key = parameter.name if parameter.layer is None else parameter.layer
        by_layer[key] = by_layer.get(key, 0) + 4 * torch.Size(parameter.merged_shape).numel()
    return sum(by_layer.values()), max(by_layer.values())


def test_peak_memory_stays_below_twice_the_largest_layer(tmp_path):
    tiny, large, work = save_hf(tmp_path / "tiny", tied=False), tmp_path / "large", tmp_path / "work"
    work.mkdir()
    try:
        total, layer = write_large(large)
        assert total > 1.4e9 and layer < total / 10
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.convert_memory", str(tiny), str(large), str(work)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        peaks = json.loads(done.stdout.splitlines()[-1])
        print(f"{total / 1e6:.0f} MB, largest layer {layer / 1e6:.0f} MB; peaks", peaks)
        assert peaks["to_torch_dist"] < 2 * layer, peaks
        assert peaks["to_hf"] < 2 * layer, peaks
    finally:
        shutil.rmtree(large, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
