"""Rewards that a language model gives: a judge beside the policy, whose weights are never updated ([models.NAME]).

Its prompt is a template with {prompt}, {response} and {label}; the judge's own chat template is applied around it. What
the judge reads of the prompt is the text that the policy read.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import RewardContext

GRADE = """You grade the answer of an assistant.

[Question]
{prompt}

[Reference, which may be empty]
{label}

[Answer]
{response}

Say briefly what is right and wrong in it. Then grade it from 0 (useless) to 10 (perfect), on a line of its own, as
[[grade]]"""

YES_OR_NO = """[Question]
{prompt}

[Reference, which may be empty]
{label}

[Answer]
{response}

Is the answer correct? Reply with one word, Yes or No."""

COMPARE = """Two assistants answered a question.

[Question]
{prompt}

[Answer A]
{response}

[Answer B]
{other}

Which is better? Say briefly why, then [[A]], [[B]], or [[C]] where they are equally good."""


async def graded(
    sample: Sample, text: str, context: RewardContext, *, model: str = "judge", template: str | None = None,
    pattern: str = r"\[\[\s*(\d+(?:\.\d+)?)", scale: float = 10.0, max_tokens: int = 512, temperature: float = 0.0,
) -> float:  # fmt: skip
    """The judge's grade over `scale`: the last match of `pattern` in its reply, whose first group is a number.

    template: a file with the judge's prompt, None for GRADE. ValueError, which fails the sample, for a reply without a
    grade or one outside 0 .. scale.
    """
    reply = await _ask(context, model, _filled(template, GRADE, sample, text), max_tokens, temperature, sample.seed)
    found = re.findall(pattern, reply)
    if not found:
        raise ValueError(f"no grade in the judge's reply, which ends with {reply[-80:]!r}")
    grade = float(found[-1])
    if not 0 <= grade <= scale:
        raise ValueError(f"the judge's grade {grade:g} lies outside 0 .. {scale:g}")
    return grade / scale


async def probability_of_yes(
    sample: Sample, text: str, context: RewardContext, *, model: str = "judge", template: str | None = None,
) -> float:  # fmt: skip
    """The probability of "Yes" as a generative reward model sees it (Zhang et al. 2024, arXiv 2408.15240): of its
    most likely first token where that is a yes, one minus it where it is a no.

    template: as for `graded`. ValueError for a reply that begins with neither.
    """
    [reply] = await context.model(model).generate(
        _message(_filled(template, YES_OR_NO, sample, text)), max_tokens=1, temperature=0.0
    )
    word = reply.text.strip().lower()
    if not word or not ("yes".startswith(word) or "no".startswith(word)):
        raise ValueError(f"the judge replied {reply.text!r}, expected Yes or No")
    probability = math.exp(reply.logprobs[0])
    return probability if "yes".startswith(word) else 1.0 - probability


async def pairwise(
    group: list[Sample], texts: list[str], context: RewardContext, *, model: str = "judge", opponents: int = 2,
    template: str | None = None, max_tokens: int = 512, temperature: float = 0.0,
) -> list[float]:  # fmt: skip
    """For reward.group: the share of its comparisons that each response wins; a tie is half of one.

    Each is compared with the next `opponents` of its group, in a ring, so in twice as many comparisons, half of them as
    answer A and half as B: a judge's preference for the first place cancels out. A group of one gets 0.5. ValueError,
    which fails the group, for a reply without a verdict.
    """
    size = len(group)
    pairs = [(i, (i + step) % size) for step in range(1, min(opponents, size - 1) + 1) for i in range(size)]
    verdicts = await asyncio.gather(
        *(
            _ask(
                context, model, _filled(template, COMPARE, group[a], texts[a], other=texts[b]), max_tokens, temperature,
                group[a].seed,
            )
            for a, b in pairs
        )
    )  # fmt: skip
    won, played = [0.0] * size, [0] * size
    for (a, b), reply in zip(pairs, verdicts, strict=True):
        points = _points(reply)
        won[a], won[b] = won[a] + points, won[b] + 1.0 - points
        played[a], played[b] = played[a] + 1, played[b] + 1
    return [wins / count if count else 0.5 for wins, count in zip(won, played, strict=True)]


def _points(reply: str) -> float:
    """Of answer A: 1, 0 or a half."""
    found = re.findall(r"\[\[\s*([ABC])\s*\]\]", reply)
    if not found:
        raise ValueError(f"no verdict in the judge's reply, which ends with {reply[-80:]!r}")
    return {"A": 1.0, "B": 0.0, "C": 0.5}[found[-1]]


def _filled(file: str | None, shipped: str, sample: Sample, text: str, **more: str) -> str:
    """The template with its places filled, once: braces in an answer stay what they are."""
    template = shipped if file is None else _template(file)
    values = {"prompt": sample.prompt_text, "response": text, "label": sample.label or "", **more}
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


@functools.cache
def _template(file: str) -> str:
    """Read once: what an event loop must not do for every answer, and a run's answers are judged by one text."""
    return Path(file).read_text(encoding="utf-8")


def _message(text: str) -> Sequence[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def _ask(
    context: RewardContext, model: str, prompt: str, max_tokens: int, temperature: float, seed: int | None
) -> str:
    [reply] = await context.model(model).generate(
        _message(prompt), max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    return reply.text
