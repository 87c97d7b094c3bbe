"""Every metric that is logged is explained in docs/metrics.md, and nothing is explained that is not logged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.metric_names import PAGE, ROOMS, documented_names, undocumented

ROOT = Path(__file__).resolve().parents[3]
CODE = ("algorithms", "checkpoints", "megatron", "rollout", "training", "weights")
HOLE = "\0"
OF_ONE_UPDATE = {"train/skipped", "train/critic_skipped"}
"""The loop adds these up to train/skipped_steps, and logs no more of them."""


def names_in(source: str) -> set[str]:
    """Names of metrics in string constants and f-strings, with HOLE for what is put in."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if re.fullmatch(rf"(?:{ROOMS}|{HOLE})/[\w{HOLE}/]+", text) and not text.endswith(("/", "_")):
            found.add(text)
    return found


def names_in_code() -> set[str]:
    files = [file for room in CODE for file in sorted((ROOT / "rltool" / room).rglob("*.py"))]
    return {name for file in files for name in names_in(file.read_text(encoding="utf-8"))}


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, name.split(HOLE))))


def test_every_metric_of_the_code_is_explained():
    documented = documented_names()
    lacking = sorted(n for n in names_in_code() - OF_ONE_UPDATE if not any(pattern(n).fullmatch(d) for d in documented))
    assert [name.replace(HOLE, "{}") for name in lacking] == []


def test_every_metric_that_is_explained_is_in_the_code():
    code = [pattern(name) for name in names_in_code()]
    # loss_metrics and others give names without their room
    words = "\0".join(
        file.read_text(encoding="utf-8") for room in CODE for file in (ROOT / "rltool" / room).rglob("*.py")
    )
    for name in documented_names():
        last = re.sub(r"_REASON|_K\b|_total$|_seconds$|[A-Z]{3,}_?", "", name.rpartition("/")[2])
        assert any(found.fullmatch(name) for found in code) or f'"{last}' in words, name


@pytest.mark.parametrize(
    ("name", "explained"),
    [
        ("rollout/reward_mean", True),
        ("eval/my-set/pass_at_16_low", True),
        ("rollout/category/a b/pass_rate", True),
        ("rollout/zero_std_groups/0.5", True),
        ("rollout/dropped_groups_too_easy", True),
        ("rollout/reward_meen", False),
        ("eval/accuracy", False),
    ],
)
def test_names_with_words_of_the_users_are_recognised(name, explained):
    assert undocumented([name]) == ([] if explained else [name])


def test_each_row_says_what_the_metric_is():
    rows = re.findall(r"^\| `.*\| ?(.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 50 and all(len(meaning.strip()) > 3 for meaning in rows)
