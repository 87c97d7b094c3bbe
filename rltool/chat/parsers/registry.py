"""Parsers by the name that --tool-parser takes."""

from __future__ import annotations

from rltool.chat.parsers.hermes import Hermes
from rltool.chat.parsers.parsed import Parser, Plain

PARSERS: dict[str, Parser] = {"hermes": Hermes(), "none": Plain()}
