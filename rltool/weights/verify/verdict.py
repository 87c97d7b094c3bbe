"""Whether two sides hold the same weights: checksums and log-probabilities taken together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rltool.engines.dialects.checksums import Compared
from rltool.engines.types import Completion

NAMED = 5
"""How many of the differing parameters a report names."""


@dataclass(frozen=True)
class Sampled:
    """One response of the engine: the whole sequence, and the log-probabilities of its last tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, prompt: tuple[int, ...], completion: Completion) -> Sampled:
        return cls((*prompt, *completion.token_ids), completion.logprobs)


@dataclass(frozen=True)
class Verdict:
    """equal: whether nothing was found to differ; lines: what was compared, for people."""

    equal: bool
    lines: list[str] = field(default_factory=list)


def verdict(
    parameters: Compared | str, samples: Sequence[Sampled], theirs: Sequence[Sequence[float]], allowed: float
) -> Verdict:
    """parameters: what the checksums showed, or why there was nothing to compare; theirs: the other side's
    log-probabilities of the sampled tokens; allowed: their mean |difference|."""
    lines = [parameters] if isinstance(parameters, str) else _of_parameters(parameters)
    differences = [
        abs(ours - other)
        for sample, scores in zip(samples, theirs, strict=True)
        for ours, other in zip(sample.logprobs, scores, strict=True)
    ]
    mean = sum(differences) / len(differences)
    # Written so that NaN is no agreement.
    agree = mean <= allowed
    lines.append(
        f"log-probabilities of {len(differences)} sampled tokens {'agree' if agree else 'differ'}: mean difference "
        f"{mean:.2e}, largest {max(differences):.2e} (allowed: {allowed:g} on average)"
    )
    return Verdict(agree and (isinstance(parameters, str) or not parameters.differing), lines)


def _of_parameters(compared: Compared) -> list[str]:
    """The first that differs is named first: what comes before it, in the order of the layers, is right."""
    differing = [_named(name, ranks, compared.ranks) for name, ranks in compared.differing.items()]
    lines = [f"checksums: {compared.equal} of {compared.equal + len(differing)} parameters are bit-equal"]
    if differing:
        lines[0] += f", {len(differing)} differ"
    if compared.ranks > 1:
        lines[0] += f" (over {compared.ranks} ranks)"
    if compared.unknown:
        lines[0] += f"; {len(compared.unknown)} more cannot be compared (packed, derived or named otherwise)"
    if differing:
        rest = len(differing) - NAMED
        named = ", ".join(differing[1:NAMED])
        lines.append(
            f"the first parameter that differs: {differing[0]}"
            + (f"; then {named}" if named else "")
            + (f" and {rest} more" if rest > 0 else "")
        )
    return lines


def _named(parameter: str, differing: Sequence[str], ranks: int) -> str:
    """With the ranks where it differs, if it does not on all of the engine's."""
    return parameter if len(differing) == ranks else f"{parameter} (of {', '.join(differing)})"
