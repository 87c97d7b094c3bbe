"""Every family in the real vLLM on the CPU: exported, with the trainer's weights synced before and after two optimizer
steps, and after an update that was given up."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.megatron_models import DELTA, KINDS

SECONDS = 600
"""A minute on two idle cores. What vLLM knows of an architecture it asks a process of its own, once on each
machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(SECONDS)]

EQUAL = 5e-5
"""Largest difference of fp32 log-probabilities, vLLM's kernels against torch's: where the numbers amplify rounding,
both are off float64 by more than 1e-5."""
NEAR = 1e-5
DIFFERENT = 0.1
ROUNDED = 0.1
"""Largest mean difference where vLLM computes in bf16 alone (gated delta nets on a CPU), against fp32: 0.02 to 0.06 was
seen. Other weights are off by more than four times this."""

LATENT = ("deepseek_v3", "glm4_moe_lite")
USUAL = ("qwen2", "gemma3", "qwen3_moe", "phi3", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "qwen3_vl_moe")
"""One of each way in which weights arrive: tied, norms about zero, experts, fused files, latent attention without and
with low-rank queries, biased experts, experts in one tensor beside a tower. `make test-long` has all families."""
LONG = tuple(kind for kind in KINDS if kind not in USUAL)
FAMILIES = [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS]


@functools.cache
def found_of(kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What tests.e2e.vllm_families says of each family. One process, and one engine at a time, for all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.vllm_families", *kinds], capture_output=True, text=True, timeout=SECONDS - 30
    )
    assert done.returncode == 0, done.stderr[-4000:]
    entries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    return {entry["family"]: entry for entry in entries}


def equal(found: dict[str, Any]) -> float:
    return ROUNDED if found["family"] in DELTA else EQUAL


@pytest.fixture
def found(kind: str) -> dict[str, Any]:
    return found_of(LONG if kind in LONG else USUAL)[kind]


@pytest.mark.parametrize("kind", FAMILIES)
def test_vllm_computes_with_exported_weights_what_transformers_does_with_the_original(found):
    assert found["exported"] < equal(found), found


@pytest.mark.parametrize("kind", FAMILIES)
def test_vllm_is_about_as_near_to_float64_as_transformers_in_float32(found):
    """So what is left between them is rounding: of the exported weights and after each sync."""
    exact = found["exact"]
    assert exact["vllm"] < max(NEAR, 3 * exact["transformers"]), found


@pytest.mark.parametrize("kind", LATENT)
def test_the_trainers_latent_attention_is_nearer_to_transformers_than_either_is_to_float64(found):
    exact = found["exact"]
    assert found["trainer"] < NEAR and exact["trainer"] < 1.5 * exact["transformers"], found


@pytest.mark.parametrize("kind", FAMILIES)
def test_trainer_and_engine_agree_on_a_prompt_before_and_after_two_optimizer_steps(found):
    """Synced over gloo, in the mean of the prompt's tokens, while the steps move them by ten thousand times as much."""
    assert found["stepped"] > DIFFERENT, found
    assert all(difference < (ROUNDED if found["family"] in DELTA else NEAR) for difference in found["trained"]), found
    assert found["trainer"] < 2 * NEAR, found


@pytest.mark.parametrize("kind", FAMILIES)
def test_after_each_sync_vllm_computes_what_transformers_does_with_these_weights(found):
    """Two over gloo, the last over disk; on a CPU vLLM multiplies with packed copies of the weights."""
    assert all(moved > max(DIFFERENT, 4 * equal(found)) for moved in found["moved"]), found
    assert all(difference < equal(found) for difference in found["synced"]), found


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sync_replaces_packed_copies_and_keeps_none_of_the_old(found):
    after, before = found["copies"]
    assert after == before > 0, found


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_update_that_is_given_up_half_way_leaves_an_engine_that_computes(found):
    assert found["abandoned"] < equal(found), found
