"""Exported models in the real vLLM: the most peculiar families; `python -m tests.e2e.vllm_families` takes all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

IN_THE_SUITE = ["qwen3", "gemma3", "mixtral"]


def test_vllm_computes_with_exported_weights_what_transformers_does_with_the_original():
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.vllm_families", *IN_THE_SUITE], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    assert [entry["family"] for entry in found] == IN_THE_SUITE
    assert all(entry["difference"] < 1e-4 for entry in found), found
