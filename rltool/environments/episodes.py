"""Episodes: the policy and an environment take turns, and each episode becomes one sample.

What the model reads is tokenised once, by the chat template, and appended as ids without loss; what it has sampled is
kept as it was sampled, with its log-probabilities and weight versions, and is never tokenised again. Pictures become
tokens as those of rows do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from rltool.chat.conversation import Conversation, Message
from rltool.chat.parsers.parsed import Tools
from rltool.chat.rendering import Renderer, Suffix
from rltool.environments.protocol import Environment, Given, Start, Step, message_of, task_of
from rltool.errors import RltoolError, UsageError
from rltool.models.pictures import has_stray, places_of
from rltool.processes.tasks import all_of
from rltool.rollout.generate import GenerateContext, check_prompt, continue_response
from rltool.rollout.pictures import PictureReader
from rltool.rollout.rewards.worker import describe, finite
from rltool.rollout.sample import Sample, SampleStatus, TurnReward

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EpisodeFailed(RltoolError):
    """An environment did not keep its part; its sample is counted as failed."""


@dataclass(frozen=True)
class EpisodeLimits:
    """turns: replies of the model; turn_tokens: of each, None: as many as the sample may have; prompt_tokens: of the
    first prompt; call_seconds: for each call of the environment."""

    turns: int
    turn_tokens: int | None
    prompt_tokens: int
    call_seconds: float


@dataclass(frozen=True)
class _Shown:
    """What the model reads next: tokens; pictures and picture_places as a sample has them."""

    token_ids: list[int]
    reasoning_open: bool
    pictures: Sequence[str] = ()
    places: Sequence[int] = ()


class Episodes:
    """A generate function (rollout/generate.py): all samples of a group side by side, each with an environment of its
    own. Templates are rendered one at a time in a thread, as `Renderer` wants it. pictures: their reader, or why the
    model gets none."""

    def __init__(
        self, make: Callable[[], Environment], renderer: Renderer, limits: EpisodeLimits, *,
        pictures: PictureReader | str = "there is no reader of pictures", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._make, self._renderer, self._limits, self._clock = make, renderer, limits, clock
        self._pictures = pictures
        self._cpu = ThreadPoolExecutor(1, "chat template")

    async def __call__(self, group: list[Sample], context: GenerateContext) -> None:
        # A group that was interrupted comes again: of an episode that was cut off the environment has gone.
        begun = [sample for sample in group if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        await all_of(self._run(sample, context) for sample in begun)

    async def _run(self, sample: Sample, context: GenerateContext) -> None:
        sample.clear()
        environment: Environment | None = None
        try:
            environment = self._made()
            await self._play(sample, environment, context)
        except EpisodeFailed as error:
            sample.fail(str(error))
        finally:
            if environment is not None:
                await self._close(environment)

    def _made(self) -> Environment:
        try:
            return self._make()
        except UsageError:
            raise
        except Exception as error:
            raise EpisodeFailed(f"the environment could not be made: {describe(error)}") from error

    async def _play(self, sample: Sample, environment: Environment, context: GenerateContext) -> None:
        start: Start = await self._call("reset", environment.reset(task_of(sample, context.prompt)))
        talk = Conversation(await self._given("reset", start.messages), tuple(start.tools))
        shown = await self._shown("reset", await self._on_cpu(self._renderer.prompt, talk), talk.messages, 0)
        self._begin(sample, shown, context)
        for turn in range(self._limits.turns):
            began = len(sample.response_ids)
            reply, stop_id = await self._turn(sample, talk, turn, shown.reasoning_open, context)
            if sample.status is SampleStatus.ABORTED:
                return
            began_step = self._clock()
            step: Step = await self._call("step", environment.step(reply))
            sample.tool_seconds = (sample.tool_seconds or 0.0) + self._clock() - began_step
            earned = _finite("the reward of a step", step.reward)
            sample.turn_rewards.append(TurnReward(turn, began, len(sample.response_ids), earned))
            if step.done or sample.status is SampleStatus.TRUNCATED:
                break
            talk, shown = await self._next(talk, reply, step, stop_id, sample.num_tokens)
            no_room = len(sample.response_ids) + len(shown.token_ids) >= context.sampling.max_tokens
            if no_room or turn + 1 == self._limits.turns or self._has_stray(sample, shown):
                sample.status = SampleStatus.TRUNCATED
                break
            sample.append_environment_tokens(shown.token_ids)
            self._see(sample, shown)
        sample.episode_reward = await self._reward(environment)

    def _begin(self, sample: Sample, prompt: _Shown, context: GenerateContext) -> None:
        most = self._limits.prompt_tokens
        if len(prompt.token_ids) > most:
            raise EpisodeFailed(
                f"the environment's first prompt has more than sampling.max_prompt_tokens = {most} tokens"
            )
        sample.prompt_ids = prompt.token_ids
        check_prompt(sample, context.vocab_size)
        if isinstance(self._pictures, PictureReader):
            # What the row has of pictures the policy has seen only where the environment shows it.
            sample.multimodal_inputs = {k: own for k, own in sample.multimodal_inputs.items() if k != "image"}
            sample.picture_places = array("q")
        self._see(sample, prompt)

    def _see(self, sample: Sample, shown: _Shown) -> None:
        if shown.pictures:
            sample.multimodal_inputs.setdefault("image", []).extend(shown.pictures)
            sample.picture_places.extend(shown.places)

    def _has_stray(self, sample: Sample, shown: _Shown) -> bool:
        """Whether the model has written a placeholder itself: no picture can stand before or behind it."""
        places = places_of([*sample.picture_places, *shown.places])
        if not places or not isinstance(self._pictures, PictureReader):
            return False
        ids = [*sample.prompt_ids, *sample.response_ids, *shown.token_ids]
        return has_stray(ids, self._pictures.pictures, places)

    async def _given(self, call: str, given: Sequence[Given]) -> tuple[Message, ...]:
        if all(isinstance(one, Message) and not one.pictures for one in given):
            return cast(tuple[Message, ...], tuple(given))
        return await asyncio.to_thread(self._messages, call, given)

    def _messages(self, call: str, given: Sequence[Given]) -> tuple[Message, ...]:
        """EpisodeFailed for a picture that is none; UsageError for what is no message, and for any picture where the
        model sees none."""
        found: list[Message] = []
        for number, message in enumerate(given):
            try:
                found.append(message_of(message, self._source))
            except ValueError as error:
                raise EpisodeFailed(f"{call}: message {number}: {error}") from error
        return tuple(found)

    def _source(self, value: Any) -> str | None:
        if isinstance(self._pictures, str):
            raise UsageError(f"rollout.environment shows a picture, and {self._pictures}")
        return None if value is None else self._pictures.source(value)

    async def _shown(self, call: str, suffix: Suffix, messages: Sequence[Message], start: int) -> _Shown:
        """messages: what of the conversation is in the suffix, which begins at token `start` of the sample."""
        ids, pictures = list(suffix.token_ids), [one.source for message in messages for one in message.pictures]
        if not pictures:
            return _Shown(ids, suffix.reasoning_open)
        assert isinstance(self._pictures, PictureReader)
        try:
            ids, sources, places = await asyncio.to_thread(self._pictures.read, ids, pictures, start)
        except ValueError as error:
            raise EpisodeFailed(f"{call}: {error}") from error
        return _Shown(ids, suffix.reasoning_open, sources, places)

    async def _turn(
        self, sample: Sample, talk: Conversation, turn: int, reasoning_open: bool, context: GenerateContext
    ) -> tuple[Message, int | None]:
        """The model's reply, and the stop token that ends it, None where it was cut."""
        began = len(sample.response_ids)
        limit = context.sampling.max_tokens
        if self._limits.turn_tokens is not None:
            limit = min(limit, began + self._limits.turn_tokens)
        await continue_response(sample, replace(context, sampling=replace(context.sampling, max_tokens=limit)))
        ids = sample.response_ids[began:]
        name = f"{sample.seed or 0:x}t{turn}n"
        reply = await self._on_cpu(self._read, ids, name, talk.tools, reasoning_open)
        return reply, ids[-1] if ids and ids[-1] in self._renderer.stop_ids else None

    def _read(self, token_ids: list[int], name: str, tools: Tools, reasoning_open: bool) -> Message:
        said = self._renderer.said(token_ids)
        return self._renderer.message(said, turn=name, tools=tools, reasoning_open=reasoning_open)

    async def _next(
        self, talk: Conversation, reply: Message, step: Step, stop_id: int | None, tokens: int
    ) -> tuple[Conversation, _Shown]:
        """tokens: of the sample so far."""
        if not step.messages:
            raise EpisodeFailed("step: neither done nor a message: the model would get no input")
        recorded, new = (*talk.messages, reply), await self._given("step", step.messages)
        following = replace(talk, messages=(*recorded, *new))
        suffix = await self._on_cpu(self._renderer.observation, recorded, following, stop_id)
        return following, await self._shown("step", suffix, new, tokens)

    async def _reward(self, environment: Environment) -> float | None:
        reward = await self._call("reward", environment.reward())
        return None if reward is None else _finite("reward", reward)

    async def _close(self, environment: Environment) -> None:
        try:
            await self._call("close", environment.close())
        except EpisodeFailed as error:
            logger.warning("environment: %s", error)

    async def _call(self, name: str, work: Awaitable[T]) -> T:
        """What the environment gives. EpisodeFailed for what it raises and where it is late; UsageError as it is."""
        seconds = self._limits.call_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await work
        except UsageError:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            reason = f"took longer than deadlines.call = {seconds:g} s" if late else describe(error)
            raise EpisodeFailed(f"{name}: {reason}") from error

    async def _on_cpu(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._cpu, function, *arguments)


def _finite(what: str, value: Any) -> float:
    try:
        return finite(value)
    except ValueError as error:
        raise EpisodeFailed(f"{what}: {error}") from error
