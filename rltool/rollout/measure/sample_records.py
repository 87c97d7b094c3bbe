"""From samples to the records that people read: with texts, which only who has the tokenizer can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rltool.report.samples import SampleRecord, spread
from rltool.rollout.pictures import shown_pictures
from rltool.rollout.sample import Sample
from rltool.rollout.tokenizer import Tokenizer

SIGNIFICANT = 7
"""Digits of a log-probability that are kept: those of a float32."""


def sample_record(sample: Sample, tokenizer: Tokenizer | None) -> SampleRecord:
    """tokenizer None: tokens are shown as their ids."""
    ids = sample.response_ids
    if tokenizer is None:
        tokens = tuple(f"<{token}>" for token in ids)
        text = "".join(tokens)
    else:
        texts = {token: tokenizer.decode_everything([token]) for token in set(ids)}
        tokens, text = tuple(texts[token] for token in ids), tokenizer.decode(ids)
    return SampleRecord(
        group=sample.group_id, index=sample.index, prompt=_read(sample, tokenizer), text=text, reward=sample.reward,
        status=str(sample.status), prompt_tokens=len(sample.prompt_ids), tokens=tokens, token_ids=tuple(ids),
        mask=tuple(sample.response_mask), engine_logprobs=tuple(map(_rounded, sample.response_logprobs)),
        label=sample.label, versions=tuple((span.version, span.start, span.end) for span in sample.versions),
        pictures=shown_pictures(sample.multimodal_inputs) if sample.picture_places else (),
        metadata=sample.metadata, train_metadata=sample.train_metadata,
    )  # fmt: skip


def _read(sample: Sample, tokenizer: Tokenizer | None) -> str:
    """What the model has read before it wrote. An agent's prompt is not its row's text."""
    if tokenizer is None or sample.picture_places:  # a page of placeholders otherwise
        return sample.prompt_text
    whole = tokenizer.decode_everything(sample.prompt_ids)
    return sample.prompt_text if whole.endswith(sample.prompt_text) else whole  # all but a BOS


def records_to_keep(samples: Sequence[Sample], count: int, tokenizer: Tokenizer | None) -> Mapping[int, SampleRecord]:
    """Row of the batch -> record, of at most `count` samples from the worst to the best reward (report.samples.spread).

    samples: scored, in the order of the batch's rows.
    """
    chosen = spread([sample.reward or 0.0 for sample in samples], count)
    return {row: sample_record(samples[row], tokenizer) for row in sorted(chosen)}


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")
