"""Lays out build/pages, from which `make docs` builds the site: the pages, pictures and style of docs/."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = DOCS.parent / "build" / "pages"
KINDS = {".md", ".svg", ".json", ".css"}


def page(markdown: str) -> str:
    """`[text](../recipes/README.md)` becomes the text and the file's path: the site has no such page."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", markdown)


def lay_out() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for file in sorted(file for file in DOCS.iterdir() if file.suffix in KINDS):
        if file.suffix == ".md":
            (PAGES / file.name).write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(file, PAGES / file.name)


if __name__ == "__main__":
    lay_out()
