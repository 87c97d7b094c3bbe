"""Sampling for clients of a served trainer: requests in the words of the client's API, engines, adapters by name.

An adapter is loaded at all engines when a request first names it, and goes when another needs its place and no request
runs with it; the next request brings it back, under another name: a name stands for one load. Where requests run with
all of them, the one that has been there longest gets no more, so that it can go. No engine is paused. One that was
started again refuses a name that it has not; then it is given what it lacks, and asked once more.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rltool.algorithms.named_losses import STABLE_REINFORCE
from rltool.engines.adapters import NamedAdapters, lacks_adapter
from rltool.engines.client import HEALTH_SECONDS, EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.types import Completion, EngineInfo, GenerateRequest, SamplingParams, TokenScores
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, UsageError
from rltool.processes.tasks import Background
from rltool.rollout.serving.data_plane import DataPlane
from rltool.rollout.serving.monitor import FleetMonitor
from rltool.rollout.serving.scores import Scores
from rltool.tinker.wire import SampledTokens, SampleOutput, Topk
from rltool.training.served import Values

T = TypeVar("T")

REQUESTS_PER_ENGINE = 256
MOST_SAMPLES = 1024
"""Of one request."""
RELOAD_ATTEMPTS, RELOAD_SECONDS = 60, 0.5
"""An engine that was started again serves some seconds before its probe says so."""
SLOTS_UNKNOWN = 4
"""Adapters at a time, where no engine reports how many it holds."""


@dataclass(frozen=True)
class SampleRequest:
    """n samples of a prompt. scored: how many of the prompt's last tokens get log-probabilities, None: they are not
    wanted; topk: of the most probable tokens in the place of each of these; topk_sampled: in the place of each sampled
    one."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    scored: int | None = None
    topk: int = 0
    topk_sampled: int = 0


def parse_sample(body: Mapping[str, Any], *, vocab_size: int, max_model_len: int) -> SampleRequest:
    """Of the client's SampleRequest. UsageError by name for what is wrong or not supported."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info", "base_model", "model_path"):
        if body.get(name):
            why = f": the loss that it is for, stable_reinforce, {STABLE_REINFORCE}; choose another loss_fn"
            raise UsageError(f"{name} is not supported by this server{why if name == 'record_stability_info' else ''}")
    prompt = _tokens(body.get("prompt"), vocab_size)
    given = _object(body.get("sampling_params"), "sampling_params")
    unknown = set(given) - {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
    if unknown:
        raise UsageError(f"sampling_params: {', '.join(sorted(unknown))} is not supported by this server")
    room = max_model_len - len(prompt)
    most = given.get("max_tokens")
    most = room if most is None else _count(most, "sampling_params.max_tokens", least=1)
    if room < most or room < 1:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens and max_tokens = {most} are more than the {max_model_len} tokens of a "
            "sequence at this server's engines"
        )
    n = _count(body.get("num_samples", 1), "num_samples", least=1, most=MOST_SAMPLES)
    scored = len(prompt) - 1 if body.get("prompt_logprobs") or body.get("topk_prompt_logprobs") else None
    if (last := body.get("prompt_logprobs_last_n")) is not None:
        if scored is None:
            raise UsageError("prompt_logprobs_last_n needs prompt_logprobs or topk_prompt_logprobs")
        scored = _count(last, "prompt_logprobs_last_n", least=1, most=len(prompt) - 1)
    return SampleRequest(
        prompt, _sampling(given, most), n, given.get("seed"), scored,
        _count(body.get("topk_prompt_logprobs") or 0, "topk_prompt_logprobs"),
        _count(body.get("topk_sample_logprobs") or 0, "topk_sample_logprobs"),
    )  # fmt: skip


def _sampling(given: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    temperature, top_p, top_k = given.get("temperature", 1.0), given.get("top_p", 1.0), given.get("top_k", -1)
    if not _is_number(temperature) or not 0 <= temperature <= 100:
        raise UsageError(f"sampling_params.temperature is {temperature!r}, expected a number from 0 to 100")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise UsageError(f"sampling_params.top_p is {top_p!r}, expected a number above 0, at most 1")
    if top_k != -1:
        _count(top_k, "sampling_params.top_k", least=1)
    seed = given.get("seed")
    if seed is not None:
        _count(seed, "sampling_params.seed")
    stop = given.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not isinstance(stop, list):
        raise UsageError(f"sampling_params.stop is {stop!r}, expected a text, texts or token ids")
    texts = tuple(each for each in stop or () if isinstance(each, str) and each)
    ids = tuple(each for each in stop or () if isinstance(each, int) and not isinstance(each, bool))
    if len(texts) + len(ids) != len(stop or ()):
        raise UsageError(f"sampling_params.stop is {stop!r}, expected texts that are not empty, or token ids")
    return SamplingParams(
        max_tokens, float(temperature), float(top_p), top_k, stop_token_ids=ids, ignore_eos=stop == [], stop=texts
    )


def _tokens(prompt: object, vocab_size: int) -> tuple[int, ...]:
    chunks = _object(prompt, "prompt").get("chunks")
    if not isinstance(chunks, list) or not all(
        isinstance(chunk, dict) and isinstance(chunk.get("tokens"), list) for chunk in chunks
    ):  # fmt: skip
        raise UsageError("prompt has a picture or sound, or no chunks; text alone is supported")
    tokens = tuple(token for chunk in chunks for token in chunk["tokens"])
    if not tokens:
        raise UsageError("prompt has no tokens")
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise UsageError(f"prompt has tokens outside of the vocabulary of {vocab_size}")
    return tokens


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} is {value!r}, expected an object")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _count(value: object, what: str, *, least: int = 0, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f", at most {most}"
        raise UsageError(f"{what} is {value!r}, expected an integer of at least {least}{upper}")
    return value


@dataclass
class _Held:
    """load: counts up; draining: it gets no more requests, for another is to have its place."""

    name: str
    load: int
    users: int = 0
    draining: bool = False


class LoadedAdapters:
    """Adapters at the engines, `slots` at most. Owned by one event loop. deadline: seconds for one to load; prefix:
    begins their names."""

    def __init__(self, engines: EngineSet, *, slots: int, deadline: float, prefix: str) -> None:
        self._fleet, self._slots, self._prefix = engines.fleet, slots, prefix
        self._named, self._deadline = NamedAdapters(engines.client, deadline=deadline), deadline
        self._held: dict[Path, _Held] = {}
        """The least lately used first."""
        self._queue: dict[Path, int] = {}
        """Those that have no place, the first first: how many requests wait for each."""
        self._loads = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def using(self, directory: Path | None) -> AsyncIterator[str]:
        """Its name, while the block samples with it; "" for the model alone. EngineError where no engine takes it."""
        if directory is None:
            yield ""
            return
        held = await self._place(directory)
        try:
            await self.load(directory, held.name)
            yield held.name
        finally:
            async with self._changed:
                held.users -= 1
                self._changed.notify_all()

    async def load(self, directory: Path, name: str) -> None:
        """At engines that lack it. EngineError where none of them has it then. One that has just died counts as ready
        until it is probed: where none answers, they are asked again, until the deadline."""
        last = time.monotonic() + self._deadline
        while error := await self._load(directory, name):
            if not isinstance(error, EngineUnreachable) or time.monotonic() > last:
                raise error
            await asyncio.sleep(RELOAD_SECONDS)

    async def _load(self, directory: Path, name: str) -> EngineError | None:
        engines = [
            member.endpoint.model_copy(update={"boot_id": member.boot_id})
            for member in self._fleet.members(State.READY)
        ]
        failures = await self._named.publish(name, directory, engines)
        return next(iter(failures.values())) if failures and not self._named.holders(name) else None

    async def close(self) -> None:
        """Engines are left without them."""
        for held in self._held.values():
            await self._named.unload(held.name)
        self._held.clear()

    async def _place(self, directory: Path) -> _Held:
        async with self._changed:
            if not self._has_place(directory):
                self._queue[directory] = self._queue.get(directory, 0) + 1
                try:
                    while not self._has_place(directory):
                        if next(iter(self._queue)) != directory or not await self._make_place(directory):
                            await self._changed.wait()
                finally:
                    self._queue[directory] -= 1
                    if not self._queue[directory]:
                        del self._queue[directory]
                    self._changed.notify_all()
            held = self._held[directory] = self._held.pop(directory)
            held.users += 1
            return held

    def _has_place(self, directory: Path) -> bool:
        held = self._held.get(directory)
        return held is not None and not held.draining

    async def _make_place(self, directory: Path) -> bool:
        """For the first in line. Whether it has it now."""
        if directory in self._held:
            self._held[directory].draining = False
            return True
        if len(self._held) >= self._slots:
            idle = next((path for path, held in self._held.items() if not held.users), None)
            if idle is None:
                if not any(held.draining for held in self._held.values()):
                    min(self._held.values(), key=lambda held: held.load).draining = True
                return False
            await self._named.unload(self._held.pop(idle).name)
        self._loads += 1
        self._held[directory] = _Held(f"{self._prefix}-{self._loads}", self._loads)
        return True


class Held(Protocol):
    """What engines hold for the requests of a sampling session."""

    def using(self, directory: Path | None) -> AbstractAsyncContextManager[str]:
        """Inside the block engines sample with these weights; None: with the base model's. Gives the adapter that
        requests name, "": none. EngineError, UsageError where they cannot."""
        ...

    async def load(self, directory: Path, name: str) -> None:
        """An adapter at engines that lack it."""
        ...


class Samplers:
    """Requests of sampling sessions at engines. deadline: seconds for one of them at one engine."""

    def __init__(self, engines: EngineSet, plane: DataPlane, held: Held, *, deadline: float) -> None:
        self._plane, self._held = plane, held
        infos = [member.info for member in engines.fleet.members()]
        self.at_once = REQUESTS_PER_ENGINE * len(infos)
        self._scores = Scores("policy", engines, at_once=self.at_once, deadline=deadline)
        self.max_model_len = min((info.max_model_len for info in infos if info.max_model_len), default=2**31)

    @property
    def in_flight(self) -> int:
        return self._plane.in_flight

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput:
        """weights: an adapter in peft's format, or all weights in Hugging Face's; None: the base model. EngineError
        where no engine can."""
        async with self._held.using(weights) as name:
            return await self._sample(asked, name, weights if name else None)

    async def score(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities of the base model, of all tokens but the first."""
        return await self._scores.score(tokens)

    async def _sample(self, asked: SampleRequest, name: str, directory: Path | None) -> SampleOutput:
        request = GenerateRequest(asked.prompt, asked.sampling, uuid.uuid4().hex, asked.n, asked.seed, adapter=name)

        async def generate() -> list[Completion]:
            return await self._plane.generate(request.again())

        async def score(tokens: tuple[int, ...], topk: int) -> TokenScores:
            if topk:
                return await self._scores.score_topk(tokens, topk, name)
            return TokenScores(await self._scores.score(tokens, name), array("i"), array("f"))

        async def of_prompt() -> TokenScores | None:
            return await score(asked.prompt, asked.topk) if asked.scored else None

        again = self._with_adapter
        prompt = await again(name, directory, of_prompt)
        completions = await again(name, directory, generate)
        sequences: list[SampledTokens] = []
        for each in completions:
            if each.finish_reason == "abort":
                raise EngineError("an engine ended the request before its end, by no wish of this server")
            topk = None
            if asked.topk_sampled and each.token_ids:
                tokens = (*asked.prompt, *each.token_ids)
                found = await again(name, directory, partial(score, tokens, asked.topk_sampled))
                topk = _table(found, asked.topk_sampled, places=len(each.token_ids), scored=len(each.token_ids))
            sequences.append(SampledTokens(each.token_ids, each.logprobs, each.finish_reason, topk))
        cached = completions[0].cached_tokens or 0
        return SampleOutput(tuple(sequences), *_of_prompt(asked, prompt), cached)

    async def _with_adapter(self, name: str, directory: Path | None, ask: Callable[[], Awaitable[T]]) -> T:
        """`ask`, once more where an engine lacks the adapter."""
        for _ in range(RELOAD_ATTEMPTS):
            try:
                return await ask()
            except EngineRejected as error:
                if directory is None or not lacks_adapter(error, name):
                    raise
            await asyncio.sleep(RELOAD_SECONDS)
            await self._held.load(directory, name)
        return await ask()


@dataclass(frozen=True)
class Absent:
    """Engines that did not answer when the server was started again, and join when they do. problem: why one cannot,
    None: it can; EngineError where it is to be asked again."""

    endpoints: tuple[EngineEndpoint, ...]
    problem: Callable[[EngineEndpoint, EngineInfo], Awaitable[str | None]]

    async def join(self, endpoint: EngineEndpoint, engines: EngineSet, monitor: FleetMonitor) -> None:
        """Ends when it has joined, or can never."""
        while True:
            await asyncio.sleep(engines.fleet.policy.probe_seconds)
            try:
                info = await engines.client.probe(endpoint, timeout=HEALTH_SECONDS)
                problem = await self.problem(endpoint, info)
            except (EngineRejected, UsageError) as error:
                info, problem = None, str(error)
            except EngineError:
                continue
            if info is not None and problem is None:
                engines.fleet.add_probed(endpoint, info, takes_weights=False)
                await monitor.carry_out()
            else:
                engines.log(f"engine {endpoint.url} does not join: {problem}")
            return


@asynccontextmanager
async def adapter_samplers(
    endpoints: Mapping[EngineEndpoint, EngineInfo], absent: Absent, client: EngineClient, *, deadline: float,
    load_deadline: float, log: Callable[[str], None],
) -> AsyncIterator[Samplers]:  # fmt: skip
    """Over engines that hold the base model, and adapters beside it. deadline: seconds for a request at one engine;
    load_deadline: for an engine to load an adapter."""
    engines = EngineSet(Fleet(), client, log=log)
    for endpoint, info in endpoints.items():
        engines.fleet.add_probed(endpoint, info, takes_weights=False)
    engines.fleet.take_transitions()
    plane = DataPlane(engines, router=None, requests_per_engine=REQUESTS_PER_ENGINE, deadline=deadline)
    monitor = FleetMonitor(engines, on_change=plane.changed)
    slots = min((info.lora_slots for info in endpoints.values() if info.lora_slots), default=SLOTS_UNKNOWN)
    prefix = f"serve-{uuid.uuid4().hex[:12]}"
    adapters = LoadedAdapters(engines, slots=slots, deadline=load_deadline, prefix=prefix)
    monitor.start()
    joining = Background(lambda failure: log(str(failure)))
    for endpoint in absent.endpoints:
        joining.start(absent.join(endpoint, engines, monitor), f"waiting for {endpoint.url}")
    try:
        yield Samplers(engines, plane, adapters, deadline=deadline)
    finally:
        await joining.close()
        await monitor.close()
        await adapters.close()


def _of_prompt(asked: SampleRequest, found: TokenScores | None) -> tuple[Values | None, Topk | None]:
    """Log-probabilities of the prompt's tokens, and the most probable tokens in the place of each."""
    places, scored = len(asked.prompt), asked.scored
    if scored is None:
        return None, None
    logprobs = np.full(places, np.nan, np.float32)
    if found is None:  # of one token
        none = np.full((places, asked.topk), -1, np.int32), np.full((places, asked.topk), -np.inf, np.float32)
        return logprobs, Topk(*none) if asked.topk else None
    logprobs[places - scored :] = found.logprobs[-scored:]
    return logprobs, _table(found, asked.topk, places=places, scored=scored) if asked.topk else None


def _table(found: TokenScores, k: int, *, places: int, scored: int) -> Topk:
    """Of the last `scored` places; the others have none."""
    ids, logprobs = np.full((places, k), -1, np.int32), np.full((places, k), -np.inf, np.float32)
    ids[places - scored :] = np.array(found.topk_ids, np.int32).reshape(-1, k)[-scored:]
    logprobs[places - scored :] = np.array(found.topk_logprobs, np.float32).reshape(-1, k)[-scored:]
    return Topk(ids, logprobs)
