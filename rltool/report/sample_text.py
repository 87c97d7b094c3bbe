"""Samples as text for a terminal: rich's, which leaves colours out where there is no terminal. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rltool.report.samples import SampleRecord, Span, mean_difference
from rltool.terminal import visible

LARGE = 0.1
"""Nats from which a token's log-probability difference is red; from a tenth of it yellow. In float32 on both sides 1e-6
is usual, in bf16 a few hundredths."""
SHOWN_TOKENS = 5
"""Tokens with the largest differences that are listed where not all are asked for."""


def sample_view(record: SampleRecord, title: str, *, all_tokens: bool, terminal: bool) -> RenderableType:
    """One sample: what is known of it, prompt, answer span by span, and its tokens. terminal: whether it is shown on
    one, with colours and rules."""
    parts: list[RenderableType] = [
        Rule(title, align="left") if terminal else Text(f"--- {title}"),
        Text(facts(record)),
        _block("prompt", Text(visible(record.prompt))),
    ]
    if record.pictures:
        parts.append(_block("pictures", Text(visible("\n".join(name for name, _ in record.pictures)))))
    if record.label is not None:
        parts.append(_block("label", Text(visible(record.label))))
    if record.train_metadata:
        shown = json.dumps(dict(record.train_metadata), ensure_ascii=False, default=str)
        parts.append(_block("train_metadata", Text(visible(shown))))
    spans = record.spans
    for number, span in enumerate(spans, 1):
        what = "answer" if len(spans) == 1 else f"span {number}: {_kind(span)}"
        parts.append(_block(what, _colored(record, span) if terminal else Text(_text(record, span))))
    if not spans:
        parts.append(_block("answer", Text("(no token)")))
    parts += _token_table(record, all_tokens)
    return Group(*parts)


def facts(record: SampleRecord) -> str:
    """One line: reward, status, lengths, spans, weights, difference."""
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    sampled = sum(record.mask)
    parts = [f"group {record.group} sample {record.index}", reward, record.status]
    parts.append(f"{record.prompt_tokens} prompt tokens, {len(record.tokens)} response tokens")
    if sampled < len(record.tokens):
        parts.append(f"{sampled} sampled (mask 1), {len(record.tokens) - sampled} inserted (mask 0)")
    if versions := [version.rpartition(":")[2] for version, _, _ in record.versions]:
        parts.append("weights of step " + ", ".join(dict.fromkeys(versions)))
    if (mean := mean_difference(record)) is not None:
        largest = max(abs(value) for value in record.differences if value is not None)
        parts.append(f"|trainer - engine| mean {mean:.1e}, max {largest:.1e}")
    return "; ".join(parts)


def _kind(span: Span) -> str:
    return f"{'sampled' if span.mask else 'inserted'}, mask {span.mask}, tokens {span.start} to {span.end - 1}"


def _text(record: SampleRecord, span: Span) -> str:
    """Tokens as they are, but characters that would move the cursor."""
    return "".join(map(visible, record.tokens[span.start : span.end]))


def _colored(record: SampleRecord, span: Span) -> Text:
    text = Text()
    differences = record.differences
    for position in range(span.start, span.end):
        text.append(visible(record.tokens[position]), style=_style(span.mask, differences[position]))
    return text


def _style(mask: int, difference: float | None) -> str:
    if not mask:
        return "dim"
    if difference is None or abs(difference) < LARGE / 10:
        return ""
    return "red" if abs(difference) >= LARGE else "yellow"


def _block(name: str, text: Text) -> RenderableType:
    return Group(Text(f"{name}:", style="bold"), text)


def _token_table(record: SampleRecord, all_tokens: bool) -> Iterator[RenderableType]:
    """All tokens, or those with the largest differences; nothing where nothing was compared and not all are asked
    for."""
    differences = record.differences
    positions = list(range(len(record.tokens)))
    if not all_tokens:
        compared = [position for position in positions if differences[position] is not None]
        positions = sorted(compared, key=lambda position: -abs(differences[position] or 0.0))[:SHOWN_TOKENS]
        if not positions:
            yield Text("not compared with the trainer's log-probabilities")
            return
    table = Table("token", "text", "mask", "engine", "trainer", "difference", box=None, pad_edge=False)
    for position in positions:
        trainer = None if record.trainer_logprobs is None else record.trainer_logprobs[position]
        difference = differences[position]
        table.add_row(
            str(position),
            Text(repr(record.tokens[position])),
            str(record.mask[position]),
            f"{record.engine_logprobs[position]:.4f}" if record.mask[position] else "-",
            "-" if trainer is None else f"{trainer:.4f}",
            Text("-" if difference is None else f"{difference:+.1e}", style=_style(1, difference)),
        )
    yield table
