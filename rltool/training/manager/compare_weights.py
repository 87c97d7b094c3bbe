"""Does an engine hold the weights of a checkpoint, or of another engine? For `rltool debug weights`.

Two looks, for each misses something. Checksums compare every bit and name the parameter that differs: of a checkpoint,
whose layout in the engine is worked out, and of another engine of the same kind and layout. Values compare what the
engine computes, of any kind, layout and packing: it samples, and the other side scores the same
tokens.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltool.checkpoints.convert import torch_dist_to_hf
from rltool.checkpoints.logits import transformers_logits
from rltool.checkpoints.manifest import is_checkpoint
from rltool.engines.client import EngineClient
from rltool.engines.dialects.checksums import Compared, ParameterLayout, compare, with_ranks
from rltool.engines.dialects.table import dialect, inspects
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.disaggregation import samples_alone
from rltool.engines.transfer.wire import dtype_of
from rltool.engines.types import EngineInfo, GenerateRequest, SamplingParams
from rltool.errors import UsageError
from rltool.megatron.export_plan import ExportPlan, full_plan
from rltool.megatron.fp8 import fp8_plan
from rltool.models.hf_directory import HFTensors
from rltool.models.quantized import is_fp8
from rltool.models.registry import dtype_in, family_for, read_hf_config
from rltool.training.checks.preflight import with_model_config
from rltool.weights.verify.implied_checksums import implied_checksums, layout_of, why_no_checksums
from rltool.weights.verify.tolerances import check_tolerance
from rltool.weights.verify.verdict import Sampled, Verdict, verdict

PROMPTS = 4
PROMPT_TOKENS = 8
RESPONSE_TOKENS = 32


Score = Callable[[list[Sampled]], Awaitable[list[list[float]]]]
"""The other side's log-probabilities of the tokens that the engine sampled."""


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
        dtype = info.dtype or dtype_in(config)

        async def score(samples: list[Sampled]) -> list[list[float]]:
            tokens = torch.tensor([token for sample in samples for token in sample.token_ids])
            lengths = torch.tensor([len(sample.token_ids) for sample in samples])
            compute = getattr(torch, dtype)
            logits = await asyncio.to_thread(transformers_logits, family, directory, compute, tokens, lengths)
            return _of_responses(logits.log_softmax(-1), tokens, samples)

        samples = await _sample(client, engine, family.vocab_size, info.max_model_len, timeout)
        checksums = await client.checksums(engine, timeout=timeout) or {}
        layout = layout_of(info, checksums, dtype)
        if isinstance(layout, str):
            parameters: Compared | str = layout
        else:
            plan = fp8_plan(family) if is_fp8(info.model_config) else full_plan(family, getattr(torch, dtype))
            implied = await asyncio.to_thread(checksums_of_directory, directory, plan, layout)
            parameters = compare(checksums, with_ranks(checksums, implied))
        allowed = check_tolerance(tolerance, "float32", info.dtype, info.device)
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
                f"{sorted(vocabularies) or 'reported by neither'}"
            )
        lengths = [found.max_model_len for found in (info, other_info) if found.max_model_len is not None]
        samples = await _sample(client, engine, vocabularies.pop(), min(lengths, default=None), timeout)
        scores = [await client.score(other, sample.token_ids, timeout=timeout) for sample in samples]
        theirs = [list(score[-len(sample.logprobs) :]) for score, sample in zip(scores, samples, strict=True)]
        ours, others = [await client.checksums(one, timeout=timeout) for one in (engine, other)]
        if ours is None or others is None:
            lacking = info if ours is None else other_info
            parameters: Compared | str = why_no_checksums(lacking)
        elif not _alike(info, other_info) or ours.keys() != others.keys():
            parameters = "checksums were not compared: the two engines differ in kind, dtype, device or parallel layout"
        else:
            parameters = compare(ours, others)
        device = other_info.device if info.device == other_info.device else None
        allowed = check_tolerance(tolerance, info.dtype or "", other_info.dtype, device)
        return verdict(parameters, samples, theirs, allowed)


def _alike(info: EngineInfo, other: EngineInfo) -> bool:
    """Whether equal parameters have equal digests."""
    if inspects(info.dialect).digests_by_device and info.device != other.device:
        return False
    return (info.dialect, info.dtype) == (other.dialect, other.dtype)


def checksums_of_directory(directory: Path, plan: ExportPlan, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
    """An engine's digests of its parameters for the tensors of a Hugging Face directory."""
    with HFTensors(directory) as tensors:
        # What is in FP8 is not compared, nor its scales.
        names = (meta.name for meta in plan.tensors if dtype_of(meta.dtype).itemsize > 1 and meta.name in tensors.names)
        return implied_checksums(plan, ((name, tensors.read(name)) for name in names), layout)


async def _probed(client: EngineClient, engine: EngineEndpoint, timeout: float) -> tuple[EngineEndpoint, EngineInfo]:
    info = await client.probe(engine, timeout=timeout)
    if info.paused:
        raise UsageError(f"{engine.url} is paused, so it cannot sample: `rltool engines resume` frees it")
    engine = engine.probed(info)
    if not samples_alone(engine):
        raise UsageError(
            f"{engine.url} is a {engine.role} engine of {dialect(info.dialect).label}, which samples only together "
            "with another: a run compares both with its trainer (`rltool debug weights --run NAME`)"
        )
    return engine, with_model_config(info)


async def _sample(
    client: EngineClient, engine: EngineEndpoint, vocab_size: int, max_model_len: int | None, timeout: float
) -> list[Sampled]:
    """Responses to fixed prompts of pseudo-random tokens, over the whole vocabulary at temperature 1."""
    rng = random.Random(20260)
    room = (max_model_len or PROMPT_TOKENS + RESPONSE_TOKENS + 1) - PROMPT_TOKENS - 1  # scoring makes one token
    sampling = SamplingParams(max_tokens=min(RESPONSE_TOKENS, room), ignore_eos=True)
    samples = []
    for index in range(PROMPTS):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS))
        request = GenerateRequest(prompt, sampling, uuid.uuid4().hex, seed=index)
        [completion] = await client.generate(engine, request, timeout=timeout)
        samples.append(Sampled.of(prompt, completion))
    return samples


def _of_responses(logprobs: Tensor, tokens: Tensor, samples: Sequence[Sampled]) -> list[list[float]]:
    """logprobs: [T, vocabulary] after each token of the packed sequences."""
    found, end = [], 0
    for sample in samples:
        end += len(sample.token_ids)
        places = torch.arange(end - len(sample.logprobs), end)
        found.append(logprobs[places - 1, tokens[places]].tolist())
    return found
