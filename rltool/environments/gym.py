"""Environments with gymnasium's protocol, or OpenEnv's, whose observations are shown as text and pictures.

gymnasium 1.x: reset(seed=, options=) -> (observation, info), step(action) -> (observation, reward, terminated,
truncated, info). OpenEnv: both give an object with `observation`, `reward` and `done`. Methods may be async. Neither
package is needed here: what is named makes the object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from rltool.chat.conversation import Message
from rltool.config.import_path import load_callable
from rltool.environments.plain_calls import PlainCalls
from rltool.environments.protocol import Content, Given, Start, Step, Task
from rltool.errors import UsageError

_CALLS = PlainCalls()
"""Of methods that are not async."""
LARGEST_SEED = 2**32


class TextGym:
    """make: import path of what makes the environment, called with `arguments`: a class, or "gymnasium:make" with
    {id = "..."}. show: import path of f(observation) -> text, or parts of a message (protocol.Content); None takes an
    observation that is one of these, or its `text` attribute. act: import path of f(text of the reply) -> action; None:
    the text itself; its ValueError is shown to the model, which has used up a turn. system: the first message, if any.
    options: are handed to reset.

    The seed of an episode is metadata["seed"] of its row, else the row's number: all samples of a prompt begin in the
    same state, so that they can be compared. Rewards are those of the steps, which is credit for single turns too.
    """

    def __init__(
        self,
        make: str | Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        show: str | None = None,
        act: str | None = None,
        system: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._make = load_callable(make, setting="make") if isinstance(make, str) else make
        self._arguments, self._options = dict(arguments or {}), dict(options) if options else None
        self._show: Callable[[Any], Content] = (
            load_callable(show, setting="show", takes=("observation",)) if show else _content
        )
        self._act = load_callable(act, setting="act", takes=("text",)) if act else str
        self._system = system
        self._environment: Any = None

    async def reset(self, task: Task) -> Start:
        self._environment = await _called(partial(self._make, **self._arguments))
        seed = int(task.metadata.get("seed", task.row)) % LARGEST_SEED
        first = _first_observation(await _called(partial(self._environment.reset, seed=seed, options=self._options)))
        system = (Message("system", self._system),) if self._system else ()
        return Start((*system, self._shown(first)))

    def _shown(self, observation: Any) -> Given:
        content = self._show(observation)
        return Message("user", content) if isinstance(content, str) else {"role": "user", "content": content}

    async def step(self, reply: Message) -> Step:
        try:
            action = self._act(reply.text)
        except ValueError as error:
            return Step([Message("user", f"error: {error}")])
        found = _transition(await _called(partial(self._environment.step, action)))
        if found.done:
            return Step(done=True, reward=found.reward)
        return Step([self._shown(found.observation)], reward=found.reward)

    async def reward(self) -> float:
        """All of it was earned by steps."""
        return 0.0

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            await _called(close)


class _Transition(NamedTuple):
    observation: Any
    reward: float
    done: bool


def _first_observation(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) and len(found) == 2 else getattr(found, "observation", found)


def _transition(found: Any) -> _Transition:
    """UsageError for what is neither gymnasium's nor OpenEnv's."""
    if isinstance(found, tuple) and len(found) == 5:
        observation, reward, terminated, truncated, _ = found
        return _Transition(observation, float(reward), bool(terminated or truncated))
    if not isinstance(found, tuple) and hasattr(found, "observation") and hasattr(found, "done"):
        return _Transition(found.observation, float(found.reward or 0.0), bool(found.done))
    raise UsageError(
        f"step of the environment gave {type(found).__name__}: expected (observation, reward, terminated, truncated, "
        "info), or an object with `observation`, `reward` and `done`"
    )


def _content(observation: Any) -> Content:
    if isinstance(observation, list) and observation and all(isinstance(part, Mapping) for part in observation):
        return observation
    text = observation if isinstance(observation, str) else getattr(observation, "text", None)
    if not isinstance(text, str):
        raise UsageError(
            f"an observation is {type(observation).__name__} and no text: name a function that writes it as text, or "
            "as parts of a message, `show`"
        )
    return text


async def _called(function: Callable[[], Any]) -> Any:
    """Plain functions in a thread, which nothing ends: deadlines.call ends the wait for it."""
    if inspect.iscoroutinefunction(getattr(function, "func", function)):
        return await function()
    found = await _CALLS.run(function, getattr(getattr(function, "func", function), "__qualname__", repr(function)))
    return await found if inspect.isawaitable(found) else found
