"""Environments with gymnasium's and OpenEnv's protocols, and several attempts at one answer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from rltool.chat.conversation import Message
from rltool.environments.attempts import Attempts
from rltool.environments.gym import TextGym
from rltool.environments.protocol import Step, Task
from rltool.environments.scores import exact_answer
from rltool.errors import UsageError
from tests.e2e.engines import harbor_python

PLACE = "tests.unit.environments.test_gym"


class Guess:
    """gymnasium's protocol without the package."""

    made: list[Guess] = []

    def __init__(self, limit: int = 10, number: bool = False) -> None:
        self.limit, self.number, self.closed = limit, number, False
        Guess.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.secret, self.options, self.steps = seed % self.limit, options, 0
        return (self.limit if self.number else f"below {self.limit}"), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        right = int(action) == self.secret
        return ("lower" if action > self.secret else "higher"), float(right) - 0.25, right, self.steps == 3, {}

    def close(self) -> None:
        self.closed = True


@dataclass
class Result:
    observation: Any
    reward: float | None
    done: bool


@dataclass
class Observation:
    text: str


class Remote:
    """OpenEnv's, async."""

    async def reset(self, **kwargs: Any) -> Result:
        return Result(Observation("say it"), None, False)

    async def step(self, action: str) -> Result:
        return Result(Observation("again"), None if action == "no" else 1.0, action == "yes")


class Wrong(Guess):
    def step(self, action: int) -> Any:
        return "lower", 1.0, True


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def shown(observation: int) -> str:
    return f"limit {observation}"


def task(row: int = 7, **metadata: Any) -> Task:
    return Task(row, (Message("user", "go"),), "5", metadata, seed=123)


async def replies(environment: Any, given: Task, *said: str) -> tuple[list[Message], list[Step]]:
    start = await environment.reset(given)
    steps = [await environment.step(Message("assistant", text)) for text in said]
    assert await environment.reward() == 0.0
    await environment.close()
    return list(start.messages), steps


def play(environment: Any, given: Task, *said: str) -> tuple[list[Message], list[Step]]:
    return asyncio.run(replies(environment, given, *said))


def test_gymnasium_s_protocol_is_a_conversation_with_a_reward_for_each_step():
    environment = TextGym(f"{PLACE}:Guess", act=f"{PLACE}:whole_number", system="Guess.", options={"a": 1})
    start, steps = play(environment, task(), "3", "many", "7")
    assert [(m.role, m.text) for m in start] == [("system", "Guess."), ("user", "below 10")]
    assert [(s.done, s.reward, [m.text for m in s.messages]) for s in steps] == [
        (False, -0.25, ["higher"]),
        (False, 0.0, ["error: 'many' is no whole number"]),
        (True, 0.75, []),
    ]
    assert Guess.made[-1].closed and Guess.made[-1].options == {"a": 1}


def test_a_truncated_episode_ends():
    _, steps = play(TextGym(Guess, act=f"{PLACE}:whole_number"), task(), "1", "2", "3")
    assert [step.done for step in steps] == [False, False, True]


@pytest.mark.parametrize(("given", "secret"), [(task(row=4), 4), (task(row=4, seed=18), 8)])
def test_samples_of_a_row_begin_in_the_same_state(given, secret):
    play(TextGym(Guess), given)
    assert Guess.made[-1].secret == secret


def test_openenv_s_protocol():
    start, steps = play(TextGym(Remote), task(), "no", "yes")
    assert start[0].text == "say it"
    assert [(step.done, step.reward) for step in steps] == [(False, 0.0), (True, 1.0)]


OPENENV = """
import asyncio, json, random, threading, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.generic_client import GenericEnvClient
from rltool.chat.conversation import Message
from rltool.environments.gym import TextGym
from rltool.environments.protocol import Task

class Guess(Action):
    number: int

class Answer(Observation):
    said: str

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.steps = random.Random(seed).randrange(100), 0
        return Answer(said="below 100", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == self.secret:
            return Answer(said="right", done=True, reward=1.0)
        return Answer(said="lower" if action.number > self.secret else "higher", done=self.steps == 3, reward=-0.25)

    @property
    def state(self):
        return State(step_count=self.steps)

def said(observation):
    return observation["said"]

def guess(text):
    return {"number": int(text)}

async def by_textgym(url, seed, guesses):
    client = "openenv.core.generic_client:GenericEnvClient"
    gym = TextGym(client, arguments={"base_url": url}, show="guessing:said", act="guessing:guess")
    start = await gym.reset(Task(0, (Message("user", "go"),), None, {"seed": seed}, seed=1))
    steps = [await gym.step(Message("assistant", str(number))) for number in guesses]
    await gym.close()
    texts = [step.messages[-1].text if step.messages else "" for step in steps]
    seen = [[text, step.reward, step.done] for text, step in zip(texts, steps)]
    return [[start.messages[-1].text, None, False], *seen]

async def alone(url, seed, guesses):
    async with GenericEnvClient(base_url=url) as client:
        results = [await client.reset(seed=seed)] + [await client.step(guess(number)) for number in guesses]
    return [["" if r.done else r.observation["said"], r.reward, r.done] for r in results]

if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    secret = random.Random(7).randrange(100)
    episodes = [(7, [secret - 1, secret + 1, secret]), (7, [secret]), (7, [0, 0, 0])]
    async def side_by_side(player):
        return await asyncio.gather(*(player(url, *episode) for episode in episodes))
    print(json.dumps([asyncio.run(side_by_side(player)) for player in (by_textgym, alone)]))
"""


@pytest.mark.long
def test_a_server_of_openenv_core_through_its_own_client(tmp_path):
    """The package's WebSocket server and GenericEnvClient, in its environment; rewards as by the client alone."""
    (tmp_path / "guessing.py").write_text(OPENENV)
    root = Path(__file__).resolve().parents[3]
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    command = [harbor_python(), "guessing.py"]
    printed = subprocess.run(command, cwd=tmp_path, env=variables, check=True, stdout=subprocess.PIPE)
    ours, theirs = json.loads(printed.stdout)
    assert ours == theirs
    assert [[step[1:] for step in episode] for episode in ours] == [
        [[None, False], [-0.25, False], [-0.25, False], [1.0, True]],
        [[None, False], [1.0, True]],
        [[None, False], [-0.25, False], [-0.25, False], [-0.25, True]],
    ]
    assert ours[0][1][0] == "higher" and ours[0][2][0] == "lower"


def test_observations_that_are_no_text_need_a_function():
    with pytest.raises(UsageError, match="an observation is int and no text: .*`show`"):
        play(TextGym(Guess, arguments={"number": True}), task())
    start, _ = play(TextGym(Guess, arguments={"number": True}, show=f"{PLACE}:shown"), task())
    assert start[0].text == "limit 10"


def test_another_protocol_is_refused():
    with pytest.raises(UsageError, match="gave tuple: expected \\(observation, reward, terminated"):
        play(TextGym(Wrong), task(), "3")


def test_gymnasium_itself():
    lake = TextGym(
        "gymnasium:make", arguments={"id": "FrozenLake-v1", "is_slippery": False}, act=f"{PLACE}:whole_number",
        show=f"{PLACE}:shown",
    )  # fmt: skip
    start, steps = play(lake, task(), *"221112")
    assert start[0].text == "limit 0" and steps[0].messages[0].text == "limit 1"
    assert [(step.done, step.reward) for step in steps] == [(False, 0.0)] * 5 + [(True, 1.0)]


def test_attempts_are_worth_the_best_of_them():
    environment = Attempts(exact_answer, attempts=3, again="no, {left} left")
    start, steps = play(environment, task(), "4", "5")
    assert start[-1].text == "go"
    assert [(s.done, s.reward, [m.text for m in s.messages]) for s in steps] == [
        (False, 0.0, ["no, 2 left"]),
        (True, 1.0, []),
    ]
    _, steps = play(Attempts(exact_answer, attempts=2), task(), "4", "3")
    assert [step.done for step in steps] == [False, True]


def test_a_better_attempt_earns_the_difference_and_a_worse_one_nothing():
    scores = iter([0.25, 0.75, 0.5])
    _, steps = play(Attempts(lambda answer, task: next(scores)), task(), "a", "b", "c")
    assert [step.reward for step in steps] == [0.25, 0.5, 0.0] and steps[-1].done


def test_reasoning_gym_s_tasks():
    [entry] = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)
    given = Task(0, (Message("user", entry["question"]),), entry["answer"], entry["metadata"], seed=1)
    environment = Attempts("rltool.environments.scores:reasoning_gym_answer", attempts=2)
    _, steps = play(environment, given, "nonsense", entry["answer"])
    assert steps[-1].done and sum(step.reward for step in steps) == 1.0
    with pytest.raises(UsageError, match="attempts = 0"):
        Attempts(exact_answer, attempts=0)
