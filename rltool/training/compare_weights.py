"""Does an engine hold the weights of a checkpoint, or of another engine? For `rltool debug weights`.

Two looks, for each misses something. Checksums compare every bit and name the parameter that differs, where both sides
have them under the same names (vLLM 0.32 with one rank and a checkpoint; engines of one kind among each other). Values
compare what the engine computes, whatever its kind, its layout and its packed copies: it samples, and the other side
scores the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rltool.checkpoints.convert import torch_dist_to_hf
from rltool.checkpoints.logits import transformers_logits
from rltool.checkpoints.manifest import is_checkpoint
from rltool.engines.checksums import Checksums, Compared, compare, of_one_rank, parts_of_parameters
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import Completion, EngineInfo, GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.models.hf_directory import HFTensors
from rltool.models.registry import family_for, read_hf_config
from rltool.training.preflight import with_model_config
from rltool.weights.tolerances import check_tolerance

PROMPTS = 4
PROMPT_TOKENS = 8
RESPONSE_TOKENS = 32
VOCABULARY_MULTIPLE = 64
"""vLLM pads the rows of an embedding to a multiple of it, with zeros."""
NAMED = 5
"""How many of the differing parameters a report names."""


@dataclass(frozen=True)
class Sampled:
    """One response of the engine: the whole sequence, and the log-probabilities of its last tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Score = Callable[[list[Sampled]], Awaitable[list[list[float]]]]
"""The other side's log-probabilities of the tokens that the engine sampled."""


@dataclass(frozen=True)
class Verdict:
    """equal: whether nothing was found to differ; lines: what was compared, for people."""

    equal: bool
    lines: list[str] = field(default_factory=list)


def compare_with_checkpoint(
    engine: EngineEndpoint, directory: Path, *, tolerance: float | None, timeout: float
) -> Verdict:
    """directory: Hugging Face or torch_dist. tolerance: mean |log-probability difference|, None: by the engine's dtype.

    Raises UsageError, EngineError.
    """
    if not is_checkpoint(directory):
        return asyncio.run(_with_directory(engine, directory, tolerance, timeout))
    with tempfile.TemporaryDirectory(prefix="rltool-weights-") as scratch:
        converted = Path(scratch) / "hf"
        torch_dist_to_hf(directory, converted, verify=False)
        return asyncio.run(_with_directory(engine, converted, tolerance, timeout))


async def _with_directory(engine: EngineEndpoint, directory: Path, tolerance: float | None, timeout: float) -> Verdict:
    config = read_hf_config(directory)
    family = family_for(config)
    async with EngineClient() as client:
        engine, info = await _probed(client, engine, timeout)
        dtype = getattr(torch, info.dtype or config.get("dtype") or config.get("torch_dtype") or "float32")

        async def score(samples: list[Sampled]) -> list[list[float]]:
            tokens = torch.tensor([token for sample in samples for token in sample.token_ids])
            lengths = torch.tensor([len(sample.token_ids) for sample in samples])
            logits = await asyncio.to_thread(transformers_logits, family, directory, dtype, tokens, lengths)
            return _of_responses(logits.log_softmax(-1), tokens, samples)

        samples = await _sample(client, engine, family.vocab_size, info.max_model_len, timeout)
        checksums = await client.checksums(engine, timeout=timeout)
        named = of_one_rank(checksums) if checksums is not None else None
        if named is None or info.dialect != "vllm":
            parameters: Compared | str = _why_not(info, checksums)
        else:
            parameters = compare(named, await asyncio.to_thread(implied_checksums, directory, dtype))
        allowed = check_tolerance(tolerance, "float32", info.dtype)
        return verdict(parameters, samples, await score(samples), allowed)


def compare_with_engine(
    engine: EngineEndpoint, other: EngineEndpoint, *, tolerance: float | None, timeout: float
) -> Verdict:
    """As compare_with_checkpoint; the other engine scores what the first one samples."""
    return asyncio.run(_with_engine(engine, other, tolerance, timeout))


async def _with_engine(
    engine: EngineEndpoint, other: EngineEndpoint, tolerance: float | None, timeout: float
) -> Verdict:
    async with EngineClient() as client:
        (engine, info), (other, other_info) = await asyncio.gather(
            _probed(client, engine, timeout), _probed(client, other, timeout)
        )
        vocabularies = {found.vocab_size for found in (info, other_info) if found.vocab_size is not None}
        if len(vocabularies) != 1:
            raise UsageError(
                f"{engine.url} and {other.url} cannot be compared: their vocabularies are "
                f"{sorted(vocabularies) or 'told by neither'}"
            )
        lengths = [found.max_model_len for found in (info, other_info) if found.max_model_len is not None]
        samples = await _sample(client, engine, vocabularies.pop(), min(lengths, default=None), timeout)
        scores = [await client.score(other, sample.token_ids, timeout=timeout) for sample in samples]
        theirs = [list(score[-len(sample.logprobs) :]) for score, sample in zip(scores, samples, strict=True)]
        ours, others = [await client.checksums(one, timeout=timeout) for one in (engine, other)]
        if ours is None or others is None:
            parameters: Compared | str = _why_not(info if ours is None else other_info, None)
        elif (info.dialect, info.dtype) != (other_info.dialect, other_info.dtype) or ours.keys() != others.keys():
            parameters = "checksums were not compared: the two engines differ in kind, dtype or parallel layout"
        else:
            parameters = compare(ours, others)
        return verdict(parameters, samples, theirs, check_tolerance(tolerance, info.dtype or "", other_info.dtype))


def implied_checksums(directory: Path, dtype: torch.dtype) -> dict[str, str]:
    """vLLM's digests of its parameters for the tensors of a Hugging Face directory: SHA-256 of the bytes in `dtype`,
    projections that vLLM keeps in one matrix below each other, embeddings padded."""
    digests = {}
    with HFTensors(directory) as tensors:
        for name, parts in parts_of_parameters(sorted(tensors.names)).items():
            tensor = torch.cat([tensors.read(part).to(dtype) for part in parts])
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensor = _padded(tensor)
            digests[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
    return digests


def _padded(tensor: Tensor) -> Tensor:
    rows = -len(tensor) % VOCABULARY_MULTIPLE
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])]) if rows else tensor


async def _probed(client: EngineClient, engine: EngineEndpoint, timeout: float) -> tuple[EngineEndpoint, EngineInfo]:
    info = await client.probe(engine, timeout=timeout)
    if info.paused:
        raise UsageError(f"{engine.url} is paused, so it cannot sample: `rltool engines resume` frees it")
    return engine.model_copy(update={"dialect": info.dialect, "plugin": info.plugin}), with_model_config(info)


async def _sample(
    client: EngineClient, engine: EngineEndpoint, vocab_size: int, max_model_len: int | None, timeout: float
) -> list[Sampled]:
    """Responses to fixed prompts of pseudo-random tokens, over the whole vocabulary at temperature 1."""
    rng = random.Random(20260)
    room = (max_model_len or PROMPT_TOKENS + RESPONSE_TOKENS + 1) - PROMPT_TOKENS - 1  # whoever scores makes a token
    sampling = SamplingParams(max_tokens=min(RESPONSE_TOKENS, room), ignore_eos=True)
    samples = []
    for index in range(PROMPTS):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS))
        request = GenerateRequest(prompt, sampling, uuid.uuid4().hex, seed=index)
        [completion] = await client.generate(engine, request, timeout=timeout)
        samples.append(_whole(prompt, completion))
    return samples


def _whole(prompt: tuple[int, ...], completion: Completion) -> Sampled:
    return Sampled((*prompt, *completion.token_ids), completion.logprobs)


def _of_responses(logprobs: Tensor, tokens: Tensor, samples: Sequence[Sampled]) -> list[list[float]]:
    """logprobs: [T, vocabulary] after each token of the packed sequences."""
    found, end = [], 0
    for sample in samples:
        end += len(sample.token_ids)
        places = torch.arange(end - len(sample.logprobs), end)
        found.append(logprobs[places - 1, tokens[places]].tolist())
    return found


def _why_not(info: EngineInfo, checksums: Checksums | None) -> str:
    who = f"{info.dialect} {info.engine_version}"
    if checksums is None:
        return f"checksums were not compared: {who} has none"
    if info.dialect != "vllm":
        return f"checksums were not compared: those of {who} are of its own layout, so only its like has the same"
    return "checksums were not compared: the engine's parameters are spread over several ranks"


def verdict(
    parameters: Compared | str, samples: Sequence[Sampled], theirs: Sequence[Sequence[float]], allowed: float
) -> Verdict:
    """parameters: what the checksums showed, or why there was nothing to compare; theirs: the other side's
    log-probabilities of the sampled tokens; allowed: their mean |difference|. Pure."""
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
