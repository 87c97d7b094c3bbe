"""rltool.api: names that users' functions import, which must not vanish."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rltool import api

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = {
    "AlgorithmConfig", "Completion", "ContractViolation", "DataConfig", "Environment", "EvalContext", "EvalSet",
    "Family", "FamilyDefinition", "GenerateContext",
    "GenerateRequest", "Group", "LoggedRun", "LossTokens", "Message", "RewardContext", "RolloutContext",
    "Sample", "SampleStatus", "SamplingParams", "Start", "Step", "Task", "TrainBatch", "Variant", "all_of",
    "check_advantage_function",
    "check_batch_hook", "check_data_source", "check_eval_function", "check_generate_function", "check_group_filter",
    "check_group_hook", "check_group_reward", "check_logger", "check_loss_function", "check_metrics_function",
    "check_reward_function", "check_rollout_function", "decoder", "refuse",
}  # fmt: skip
"""Written out: one that is taken away, or renamed, breaks users' code."""


def test_every_published_name_is_there():
    assert set(api.__all__) == PUBLISHED
    for name in PUBLISHED:
        assert getattr(api, name).__name__ == name
    with pytest.raises(AttributeError, match="has no 'Smaple'; it has AlgorithmConfig"):
        api.Smaple  # noqa: B018


def test_type_checkers_see_the_same_names_at_the_same_places():
    tree = ast.parse((ROOT / "rltool/api.py").read_text())
    seen = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rltool")
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in api._HOMES.items()}


def test_a_reward_that_needs_a_sample_loads_no_torch():
    code = "import sys; from rltool.api import Sample; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_examples_import_nothing_else_of_rltool():
    for file in [*(ROOT / "examples").glob("*.py"), ROOT / "recipes/arithmetic/reward.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rltool"):
                assert node.module == "rltool.api", f"{file.relative_to(ROOT)}, line {node.lineno}"
