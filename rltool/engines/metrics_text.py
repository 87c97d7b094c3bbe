"""What engines measure of themselves, as one page of Prometheus' text format: one scrape target for all of them, which
has their keys.

Every series gets the labels instance (HOST:PORT, as Prometheus would name an engine that it scrapes itself, so that
dashboards of vLLM and SGLang fit), group and run; the scrape configuration sets `honor_labels: true`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp

from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import UsageError

SCRAPE_SECONDS = 4.0
"""For all engines, side by side; Prometheus itself waits 10 by default."""
MOST_BYTES = 4 * 1024 * 1024
"""Of one engine's reply; those of vLLM and SGLang have some 100 KB."""
UP = "rltool_engine_up"

_LABEL = r'([a-zA-Z_]\w*)="(?:[^"\\]|\\.)*+"'
_LABELS = re.compile(rf"(?:\s*{_LABEL}\s*(?:,|$))*+", re.ASCII)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*", re.ASCII)
_META = re.compile(
    r"# (?:HELP ([a-zA-Z_:][\w:]*)(?: .*)?|TYPE ([a-zA-Z_:][\w:]*) (?:counter|gauge|histogram|summary|untyped))",
    re.ASCII,
)
_SUFFIXES = ("", "_bucket", "_sum", "_count", "_total", "_created")


async def scrape(engines: Sequence[EngineEndpoint], run: str) -> str:
    """The metrics of all that answer; of the others that they are down. Raises nothing for an engine."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_SECONDS)) as session:
        replies = await asyncio.gather(*(_fetch(session, engine) for engine in engines))
    return merged(list(zip(engines, replies, strict=True)), run)


async def _fetch(session: aiohttp.ClientSession, engine: EngineEndpoint) -> str | None:
    """None where it does not answer, or not as it should."""
    try:
        key = engine.read_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with session.get(f"{engine.url}/metrics", headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return None
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MOST_BYTES:
                    return None
            return body.decode("utf-8", "replace")
    except (aiohttp.ClientError, OSError, TimeoutError, UsageError):
        return None


def merged(replies: Sequence[tuple[EngineEndpoint, str | None]], run: str) -> str:
    """One page of these. A line that is not of the format is left out: for one of them Prometheus would refuse all.
    Pure."""
    meta: dict[str, list[str]] = {UP: [f"# TYPE {UP} gauge"]}
    samples: dict[str, list[str]] = {UP: []}
    for engine, text in replies:
        own = {"instance": urlsplit(engine.url).netloc, "group": engine.group, "run": run}
        samples[UP].append(f"{UP}{{{written(own)}}} {int(text is not None)}")
        family, known = "", set(meta)
        for line in (text or "").split("\n"):
            if found := _META.fullmatch(line):
                family = found[1] or found[2]
                if family not in known:  # of the first engine that has it: a second one would be an error
                    meta.setdefault(family, []).append(line)
            elif (sample := _sample(line, own)) is not None:
                name, labelled = sample
                family = family if name.removeprefix(family) in _SUFFIXES else name
                samples.setdefault(family, []).append(labelled)
    return "".join(f"{line}\n" for family, lines in samples.items() for line in (*meta.get(family, ()), *lines))


def _sample(line: str, own: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, the line with the labels of `own` that it does not have); None for a comment or what is no sample."""
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return None
    name, labels, value = found[1], (found[2] or "").strip().rstrip(","), found[3]
    if not _LABELS.fullmatch(labels) or not _is_number(value):
        return None
    theirs = {each[1] for each in re.finditer(_LABEL, labels, re.ASCII)}
    added = written({key: text for key, text in own.items() if key not in theirs})
    return name, f"{name}{{{','.join(filter(None, (added, labels)))}}} {value}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def written(labels: Mapping[str, str]) -> str:
    """Labels of a series as Prometheus reads them, without braces."""
    return ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
