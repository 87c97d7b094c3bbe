"""rltool.megatron.exact: what it refuses, by name. Its arithmetic is in tests/e2e/test_megatron_trainer.py, with plain
functions for the kernels, and in tests/gpu/test_exact.py."""

from __future__ import annotations

import json

import pytest
import torch

from rltool.errors import UsageError
from rltool.megatron.exact import FAMILIES, use_engine_kernels


@pytest.mark.parametrize(
    ("architecture", "head", "named"),
    [
        ("Qwen3MoeForCausalLM", 128, "Qwen3MoeForCausalLM was not compared"),
        (FAMILIES[0], 96, "of other heads than those of 64 and 128"),
        (FAMILIES[0], 128, "on Hopper GPUs with model.dtype"),
    ],
)
def test_a_model_or_machine_that_was_not_compared_is_refused(tmp_path, architecture, head, named):
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": head}))
    with pytest.raises(UsageError, match=named):
        use_engine_kernels(torch.nn.Linear(2, 2, dtype=torch.bfloat16), tmp_path, architecture)  # type: ignore[arg-type]
