"""Parsers by the name that --tool-parser takes."""

from __future__ import annotations

from rltool.chat.parsers import hermes
from rltool.chat.parsers.parsed import Parser, plain

PARSERS: dict[str, Parser] = {"hermes": hermes.parse, "none": plain}
