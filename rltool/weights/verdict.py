"""Whether two sides hold the same weights: what checksums and log-probabilities together say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rltool.engines.checksums import Checksums, Compared
from rltool.engines.types import Completion, EngineInfo

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


def why_not_compared(info: EngineInfo, checksums: Checksums | None) -> str:
    """Why an engine's checksums say nothing about a model in Hugging Face's names."""
    who = f"{info.dialect} {info.engine_version}"
    if checksums is None:
        return f"checksums were not compared: {who} has none"
    if info.dialect != "vllm":
        return f"checksums were not compared: those of {who} are of its own layout, so only its like has the same"
    return "checksums were not compared: the engine's parameters are spread over several ranks"


def _of_parameters(compared: Compared) -> list[str]:
    """The first that differs is named first: what comes before it, in the order of the layers, is right."""
    total = compared.equal + len(compared.differing)
    lines = [f"checksums: {compared.equal} of {total} parameters are bit-equal"]
    if compared.unknown:
        lines[0] += f"; {len(compared.unknown)} more cannot be compared (packed, fused or named otherwise)"
    if compared.differing:
        rest = len(compared.differing) - NAMED
        named = ", ".join(compared.differing[1:NAMED])
        lines.append(
            f"the first parameter that differs: {compared.differing[0]}"
            + (f"; then {named}" if named else "")
            + (f" and {rest} more" if rest > 0 else "")
        )
    return lines
