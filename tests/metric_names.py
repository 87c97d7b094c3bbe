"""The names of metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
ROOMS = "rollout|train|eval|weights|time|engines|checkpoint"


def documented_names() -> list[str]:
    return re.findall(rf"`((?:{ROOMS})/[^`\s]+)`", PAGE.read_text(encoding="utf-8"))


def undocumented(names: Iterable[str]) -> list[str]:
    """Those that no documented name covers; in these, words in capitals stand for anything."""
    patterns = [re.compile(re.sub(r"[A-Z]+", "[^/]+", re.escape(name))) for name in documented_names()]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))
