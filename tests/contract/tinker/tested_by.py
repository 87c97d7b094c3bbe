"""The page of Tinker's API says which test calls a route; here is whether it does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rltool.tinker.server import PREFIX

_ROW = re.compile(r"^\| `([A-Z]+) (\S+)` \|.*\| `(test_\w+)` \|$", re.MULTILINE)


def routes_of(test: str) -> set[str]:
    """As TinkerServer.requests names them."""
    page = (Path(__file__).parents[3] / "docs" / "tinker-api.md").read_text(encoding="utf-8")
    return {f"{method} {PREFIX}{path}" for method, path, named in _ROW.findall(page) if named == test}


def check_called(test: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """before, after: the requests of the server that the test uses."""
    missing = {route for route in routes_of(test) if after.get(route, 0) <= before.get(route, 0)}
    assert not missing, f"docs/tinker-api.md says that {test} calls {', '.join(sorted(missing))}, and it does not"
