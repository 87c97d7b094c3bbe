"""For mkdocs: what the site does with links that leave docs/, which lead to files of the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[text](../recipes/README.md)` becomes the text and the file's path: the site has no such page."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", markdown)
