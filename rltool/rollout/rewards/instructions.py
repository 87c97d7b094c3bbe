"""Whether a response follows instructions that a program can check, by the ids of IFEval (Zhou et al. 2023,
arXiv 2311.07911): metadata holds `instruction_id_list`, and `kwargs`, the arguments of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from rltool.rollout.sample import Sample

Check = Callable[..., bool]


def instructions_followed(sample: Sample, text: str, *, all_or_nothing: bool = False) -> float:
    """The share of the sample's instructions that the response follows; with all_or_nothing 1.0 or 0.0.

    ValueError for a sample without instructions, and for an id that is not checked here: nothing passes unseen.
    """
    ids, arguments = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not ids:
        raise ValueError("metadata has no instruction_id_list")
    given = arguments or [{}] * len(ids)
    if len(given) != len(ids):
        raise ValueError(f"metadata has {len(ids)} instructions and kwargs for {len(given)}")
    followed = [_follows(name, own, text) for name, own in zip(ids, given, strict=True)]
    return float(all(followed)) if all_or_nothing else sum(followed) / len(followed)


def _follows(name: str, arguments: dict[str, Any] | None, text: str) -> bool:
    check = CHECKS.get(name)
    if check is None:
        raise ValueError(f"instruction {name!r} is none of those that are checked: {', '.join(CHECKS)}")
    # Tables of one schema have a column for each argument of any instruction: those that are null are not meant.
    own = {key: value for key, value in (arguments or {}).items() if value is not None}
    return bool(text.strip()) and check(text, **own)


def _compare(count: int, relation: str, wanted: int) -> bool:
    if relation == "at least":
        return count >= wanted
    if relation == "less than":
        return count < wanted
    raise ValueError(f"relation {relation!r}: expected 'at least' or 'less than'")


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _number_words(text: str, *, relation: str, num_words: int) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def _number_sentences(text: str, *, relation: str, num_sentences: int) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if re.search(r"\w", part)]
    return _compare(len(sentences), relation, num_sentences)


def _number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    return len([part for part in re.split(r"\s?\*\*\*\s?", text) if part.strip()]) == num_paragraphs


def _frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def _json_format(text: str) -> bool:
    body = re.sub(r"^```(?:json|JSON)?|```$", "", text.strip()).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):  # the second of thousands of brackets
        return False
    return True


def _number_placeholders(text: str, *, num_placeholders: int) -> bool:
    # Also what is never closed is taken, once: no placeholder begins in it.
    closed = re.findall(r"\[[^\]\n]++(\]?)", text)
    return sum(map(len, closed)) >= num_placeholders


def _number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*+(?:\*(?!\*)|-)\s++\S", text, re.MULTILINE)) == num_bullets


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, *, keywords: all(_has(text, word) for word in keywords),
    "keywords:forbidden_words": lambda text, *, forbidden_words: not any(_has(text, w) for w in forbidden_words),
    "keywords:frequency": _frequency,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:english_lowercase": lambda text: text == text.lower(),
    "change_case:english_capital": lambda text: text == text.upper(),
    "startend:end_checker": lambda text, *, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "detectable_format:json_format": _json_format,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:title": lambda text: re.search(r"<<[^\w\n<>]*+\w[^\n<>]*+>>", text) is not None,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": lambda text, *, postscript_marker: postscript_marker.lower() in text.lower(),
}
"""Instruction id -> whether a text follows it. Of IFEval's 25 those that need neither a language detector nor the
prompt."""
