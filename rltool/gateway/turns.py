"""One turn: limits, plan, engine, reply, record. Translators make the agent's response of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rltool.chat.conversation import Conversation, Message, RawPrompt, Reply
from rltool.chat.rendering import Renderer
from rltool.config.gateway import GatewayConfig
from rltool.engines.types import Completion, GenerateRequest, Picture, SamplingParams, TokenStream, VersionSpan
from rltool.errors import EngineRejected, UsageError
from rltool.gateway.apis.base import NOTHING, Answer, Asked
from rltool.gateway.errors import BadRequest, EnginesFailed, NotFound, TooMany
from rltool.gateway.fleet import Engines
from rltool.gateway.pictures import SentPictures
from rltool.gateway.planning import ANOTHER, Plan, Rendering, plan_turn
from rltool.gateway.registry import Sessions
from rltool.gateway.session import UNRECEIVED, Session
from rltool.gateway.streaming import Live
from rltool.gateway.trajectory import TurnRecord, before
from rltool.rollout.generate import MAX_CONTINUATIONS, GenerateContext, continue_response
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.data_plane import BrokenStream, PoisonousRequest, Trace
from rltool.rollout.stop_strings import cut_at_stop


@dataclass(frozen=True)
class Model:
    """The policy as agents know it. max_model_len: tokens of prompt and response together."""

    name: str
    aliases: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True)
class Ended:
    """A turn that is recorded."""

    answer: Answer
    record: TurnRecord


class Turns:
    """clock: seconds since the epoch."""

    def __init__(
        self,
        config: GatewayConfig,
        model: Model,
        *,
        rendering: Rendering,
        engines: Engines,
        sessions: Sessions,
        pictures: SentPictures,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self.model, self._rendering, self._engines = config, model, rendering, engines
        self._renderer = renderer = rendering.renderer
        self._sessions, self._store, self._pictures, self._clock = sessions, sessions.store, pictures, clock
        self.sampling = SamplingParams(
            max_tokens=config.max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(sorted(renderer.stop_ids)),
        )
        self.counts: Counter[str] = Counter()
        """Since the start: turns, sampled_tokens, branches, continued_requests, abandoned (their clients had gone
        before their answer was written)."""

    @property
    def engine_counts(self) -> Counter[str]:
        return self._engines.plane.counts

    @property
    def engine_states(self) -> dict[str, str]:
        """URL -> state; empty behind a router."""
        return {member.url: member.state.value for member in self._engines.fleet.members()}

    async def run(
        self, session: Session, api: str, asked: Asked, not_followed: tuple[str, ...], *, left_out: bool = False,
        live: Live | None = None,
    ) -> Ended:  # fmt: skip
        """Generate, record, answer; in this order. live: of an answer that is streamed, told of tokens as they come.

        Cancelled, the engine is asked no longer, and nothing is recorded but what an agent has been sent of a stream.
        Raises RequestError.
        """
        self._check(session, asked)
        began = self._clock()
        session.in_progress += 1
        self._sessions.touch(session)
        turn_id, plan, trace = uuid.uuid4().hex, None, Trace()
        sample = Sample(0, 0, 0, [])
        try:
            prompt, sizes = await self._pictures.read(session, asked.prompt)
            asked = replace(asked, prompt=prompt)
            plan = await self._rendering.run(prompt, lambda own: plan_turn(session, prompt, own, sizes))
            pictures = await self._pictures.for_engine(session, plan.pictures)
            sample.prompt_ids = list(plan.prompt_ids)
            if live is not None:
                live.open(self._opening(turn_id, asked, len(plan.prompt_ids), began), plan, self._rendering)
            if session.turns and (last := session.turns[-1].engine):  # of another process, or before a restart
                self._engines.plane.settle(session.id, last)
            await self._generate(session.id, sample, self._limited(plan, asked), pictures, trace, live)
            sampled, engine = sample, trace.engine
            said = await self._rendering.run(asked.prompt, lambda own: _read(own, sampled, plan, asked, turn_id))
            turn = _Sampled(api, turn_id, plan, sampled, engine, asked, said)
            record = self._keep(session, turn, began, not_followed, left_out=left_out)
        except asyncio.CancelledError:
            self.counts["abandoned"] += 1
            if plan is not None and live is not None and live.delivered:
                kept = _delivered(sample, live)
                turn = _Sampled(api, turn_id, plan, kept, trace.engine, asked, _Said("", "", NOTHING, ()))
                await self._keep_cut(session, turn, began, not_followed, left_out=left_out)
            raise
        finally:
            session.in_progress -= 1
            self._sessions.touch(session)
        reply = Reply(
            message=said.message,
            finish_reason="length" if record.finish_reason == "length" else "stop",
            prompt_tokens=len(plan.prompt_ids),
            sampled_tokens=len(record.sampled_ids),
            raw=said.shown,
            logprobs=said.logprobs,
        )
        return Ended(Answer(turn_id, self.model.name, int(record.time), asked, reply), record)

    def _opening(self, turn_id: str, asked: Asked, prompt_tokens: int, began: float) -> Answer:
        return Answer(turn_id, self.model.name, int(began), asked, Reply(NOTHING, "stop", prompt_tokens, 0, ""))

    async def _keep_cut(
        self, session: Session, turn: _Sampled, began: float, not_followed: tuple[str, ...], *, left_out: bool
    ) -> None:
        """Record what an agent has been sent of a stream before it hung up."""
        said = await self._rendering.run(
            turn.asked.prompt, lambda own: _read(own, turn.sampled, turn.plan, turn.asked, turn.id)
        )
        if session.ended is not None or not turn.sampled.response_ids:
            return
        self._keep(session, replace(turn, said=said), began, not_followed, left_out=left_out)
        if not self._config.train_cancelled:
            self.mark(session, turn.id, left_out=UNRECEIVED)

    def unreceived(self, session: Session, record: TurnRecord) -> None:
        """Its client had gone before the answer was written."""
        self.counts["abandoned"] += 1
        with suppress(NotFound):  # it has ended meanwhile
            self.mark(session, record.id, left_out=UNRECEIVED)

    def mark(self, session: Session, turn: str, *, left_out: str | None = None, reward: float | None = None) -> None:
        """See Session.mark."""
        with self._store.writing(session) as file:
            if session.ended is not None:
                raise NotFound(f"session {session.id} has ended: {session.ended}")
            session.mark(turn, left_out=left_out, reward=reward)
            file.mark(turn, left_out=left_out, reward=reward)

    def record(self, session: Session) -> dict[str, Any]:
        """Session.to_json, with the pictures themselves, digest -> data URL. In any thread."""
        seen = [seen for trajectory in session.trajectories for seen in trajectory.pictures]
        return session.to_json() | {"pictures": self._pictures.urls(session.id, seen)}

    async def count(self, session: Session, asked: Asked) -> int:
        """Tokens of the prompt, as a turn would have them now."""
        self._check(session, asked)
        prompt, sizes = await self._pictures.read(session, asked.prompt)
        plan = await self._rendering.run(prompt, lambda own: plan_turn(session, prompt, own, sizes))
        return len(plan.prompt_ids)

    def _check(self, session: Session, asked: Asked) -> None:
        config = self._config
        characters, most = asked.prompt.characters, self.model.max_model_len
        if characters > most * self._renderer.longest_token:
            raise BadRequest(
                f"the prompt has {characters} characters, and the model's context is {most} tokens",
                field="prompt" if isinstance(asked.prompt, RawPrompt) else "messages",
                code="context_length_exceeded",
            )
        if asked.model not in (self.model.name, *self.model.aliases):
            raise NotFound(
                f"there is no model {asked.model!r} here: this gateway serves {self.model.name!r} "
                "(--aliases gives it further names)",
                field="model",
                code="model_not_found",
            )
        if session.in_progress >= config.max_turns_at_once:
            raise TooMany(f"{session.in_progress} turns of this session are in progress (--max-turns-at-once)")
        if len(session.turns) + session.in_progress >= config.max_turns:
            raise BadRequest(f"this session has had its {config.max_turns} turns (--max-turns)", code="session_limit")
        if session.tokens >= config.max_session_tokens:
            raise BadRequest(
                f"this session has recorded {session.tokens} tokens (--max-session-tokens)", code="session_limit"
            )

    def _limited(self, plan: Plan, asked: Asked) -> SamplingParams:
        room = self.model.max_model_len - len(plan.prompt_ids)
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(plan.prompt_ids)} tokens, and the model's context is "
                f"{self.model.max_model_len}: nothing can follow it",
                field="messages" if isinstance(asked.prompt, Conversation) else "prompt",
                code="context_length_exceeded",
            )
        most = min(room, self.sampling.max_tokens, asked.max_tokens or room)
        return replace(self.sampling, max_tokens=most, stop=asked.stop)

    async def _generate(
        self, session_id: str, sample: Sample, sampling: SamplingParams, pictures: tuple[Picture, ...], trace: Trace,
        live: Live | None,
    ) -> None:  # fmt: skip
        """Fill the sample; trace: filled in as well. Raises EnginesFailed."""
        requests = 0

        async def generate(request: GenerateRequest) -> list[Completion]:
            nonlocal requests
            requests += 1
            request = replace(request, seed=None, session=session_id, pictures=pictures)
            if live is not None:
                live.stream = TokenStream(live.heard)
            completions = await self._engines.plane.generate(
                request, trace=trace, stream=live.stream if live is not None else None
            )
            if not request.sampling.stop:
                return completions
            return await self._rendering.run(
                RawPrompt(()), lambda own: [cut_at_stop(one, request, own.decode) for one in completions]
            )

        context = GenerateContext(generate, sampling, self._renderer.vocab_size, require_versions=False)
        try:
            async with asyncio.timeout(self._config.turn_timeout):
                await continue_response(sample, context)
        except TimeoutError:
            why = f"the last failure: {trace.failures[-1]}" if trace.failures else self._engines.why_not()
            raise EnginesFailed(
                f"no engine has finished this turn within {self._config.turn_timeout:g} s (--turn-timeout)"
                + (f"; {why}" if why else ""),
                code="turn_timeout",
            ) from None
        except EngineRejected as error:
            raise EnginesFailed(f"the engine refuses the request: {error}") from error
        except UsageError as error:
            if not pictures:
                raise
            raise BadRequest(f"images are not served: {error}", field="messages", code="unsupported_content") from error
        except (PoisonousRequest, BrokenStream) as error:
            raise EnginesFailed(str(error)) from error
        finally:
            self.counts["continued_requests"] += max(0, requests - 1)
        if sample.status is SampleStatus.ABORTED:
            raise EnginesFailed(f"the engines aborted this turn {MAX_CONTINUATIONS} times")

    def _record(self, session: Session, turn: _Sampled, began: float) -> TurnRecord:
        """Where the turn belongs is decided now: another turn may have extended the trajectory meanwhile."""
        if session.ended is not None:
            raise NotFound(f"session {session.id} has ended while this turn was generated: {session.ended}")
        plan, sampled = turn.plan, turn.sampled
        prompt_ids: array[int] = plan.prompt_ids
        index, parent, shared = session.place(prompt_ids, plan.base, plan.cut, plan.pictures)
        branches = index == len(session.trajectories) and bool(session.trajectories)
        sampled_ids = sampled.response_ids
        chat = turn.asked.prompt if isinstance(turn.asked.prompt, Conversation) else None
        now = self._clock()
        return TurnRecord(
            id=turn.id,
            time=now,
            seconds=now - began,
            api=turn.api,
            trajectory=index,
            parent=parent,
            shared=shared,
            reason=(plan.reason or ANOTHER) if branches else "",
            base=plan.base.id if plan.base else None,
            context_ids=prompt_ids[shared:],
            sampled_ids=sampled_ids,
            logprobs=sampled.response_logprobs,
            versions=tuple(sampled.versions),
            finish_reason="length" if sampled.status is SampleStatus.TRUNCATED else "stop",
            stopped=bool(sampled_ids) and sampled_ids[-1] in self._renderer.stop_ids,
            engine=turn.engine,
            tools_key=chat.tools_key if chat else "",
            messages=plan.new_messages,
            reply=turn.said.message if chat else None,
            raw_prompt=plan.raw_prompt,
            raw_reply=turn.said.text if plan.raw_prompt is not None else None,
            pictures=plan.pictures[len(before(plan.pictures, shared)) :],
        )

    def _keep(
        self, session: Session, turn: _Sampled, began: float, not_followed: tuple[str, ...], *, left_out: bool
    ) -> TurnRecord:
        """On disk first. The file is locked, so that no turn of another process comes between."""
        with self._store.writing(session) as file:
            record = replace(self._record(session, turn, began), not_followed=not_followed, left_out=left_out)
            branches = record.trajectory == len(session.trajectories) and bool(session.trajectories)
            file.turn(record)
            session.apply(record)
        self.counts.update(turns=1, sampled_tokens=len(record.sampled_ids), branches=int(branches))
        return record


@dataclass(frozen=True)
class _Said:
    """text: of all tokens; shown: what the agent gets of it, up to the stop text."""

    text: str
    shown: str
    message: Message
    logprobs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class _Sampled:
    api: str
    id: str
    plan: Plan
    sampled: Sample
    engine: str | None
    asked: Asked
    said: _Said


def _delivered(sample: Sample, live: Live) -> Sample:
    """What the agent has been sent of a response that was cut off, as a truncated one; nothing of it where its
    weights are not known."""
    kept = Sample(0, 0, 0, sample.prompt_ids)
    is_in = len(sample.response_ids) == len(live.token_ids)  # the last stream has ended
    rest = live.stream.completion() if live.stream is not None and not is_in else None
    ids, logprobs, spans = sample.response_ids[:], sample.response_logprobs[:], list(sample.versions)
    if rest is not None:
        shift = len(ids)
        ids += rest.token_ids
        logprobs += rest.logprobs
        spans += [VersionSpan(span.version, span.start + shift, span.end + shift) for span in rest.versions]
    if sum(span.end - span.start for span in spans) == len(ids):
        whole = Completion(tuple(ids), tuple(logprobs), "abort", tuple(spans))
        kept.append_response_tokens(replace(whole.first(live.delivered), finish_reason="length"))
    return kept


def _read(renderer: Renderer, sampled: Sample, plan: Plan, asked: Asked, turn_id: str) -> _Said:
    text = renderer.said(sampled.response_ids)
    found = [(at, stop) for stop in asked.stop if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    shown = text[:at]
    tools = asked.prompt.tools if isinstance(asked.prompt, Conversation) else ()
    message = renderer.message(shown, turn=turn_id, tools=tools, reasoning_open=plan.reasoning_open)
    logprobs: tuple[tuple[str, float], ...] = ()
    if asked.logprobs:
        logprobs = tuple(zip(renderer.texts(sampled.response_ids), sampled.response_logprobs, strict=True))
    return _Said(text, shown, replace(message, stop=stop), logprobs)
