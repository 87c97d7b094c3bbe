"""Functions as tools: schemas from signatures, calls, the calculator."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Annotated, Literal

import pytest
import reasoning_gym

from rltool.chat.conversation import Message
from rltool.environments import tools
from rltool.environments.calculator import calculate
from rltool.environments.protocol import Task
from rltool.environments.scores import exact_answer, reasoning_gym_answer
from rltool.environments.tools import make_tool
from rltool.errors import UsageError
from tests.unit.environments.own_environments import add


def test_the_schema_is_made_from_the_signature():
    assert make_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "default": 1, "description": "what is added"},
                    "how": {"type": "string", "enum": ["plain", "loud"], "default": "plain"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_a_parameter_may_be_called_title():
    def publish(title: str, tags: list[str]) -> None: ...

    properties = make_tool(publish).schema["function"]["parameters"]["properties"]
    assert properties == {"title": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}}


def untyped(a): ...


def spread(*numbers: int) -> None: ...


def of_objects(a: asyncio.Event) -> None: ...


@pytest.mark.parametrize("function", [untyped, spread, of_objects])
def test_a_signature_that_is_no_schema_is_refused(function):
    with pytest.raises(UsageError, match=f"tool {function.__name__}"):
        make_tool(function)


def called(function, **arguments) -> str:
    return asyncio.run(make_tool(function).call(arguments, seconds=5.0))


def test_results_are_text():
    def some(kind: Literal["dict", "none"]) -> object:
        return {"ü": 1} if kind == "dict" else None

    async def later(a: float) -> float:
        return a / 2

    assert called(add, a=2, how="loud") == "3!"
    assert (called(some, kind="dict"), called(some, kind="none"), called(later, a=3)) == ('{"ü": 1}', "null", "1.5")


def test_what_the_model_did_wrong_is_told_to_it():
    def breaks(a: Annotated[int, "x"]) -> None:
        raise KeyError(a)

    assert called(add, a=1, c=2) == "error: c: Extra inputs are not permitted"
    assert called(add) == "error: a: Field required"
    assert called(breaks, a=3) == "error: KeyError: 3"


def test_a_late_tool_is_told_to_the_model():
    async def hangs() -> None:
        await asyncio.Event().wait()

    assert asyncio.run(make_tool(hangs).call({}, seconds=0.01)) == "error: no result within 0.01 s"


def test_calls_that_hang_stand_in_no_other_s_way_until_they_are_too_many_and_are_named(monkeypatch):
    monkeypatch.setattr(tools, "_CALLS", tools.PlainCalls(at_once=2, most_hung=4))
    ended = threading.Event()

    def hangs() -> None:
        ended.wait(60.0)

    def works() -> int:
        return 1

    async def calls() -> None:
        for others in ("1", None):
            given_up = [make_tool(hangs).call({}, seconds=0.05) for _ in range(2)]
            assert await asyncio.gather(*given_up) == ["error: no result within 0.05 s"] * 2
            assert await _or_refused(make_tool(works)) == others
        with pytest.raises(UsageError, match=r"4 calls .*hangs: 4"):
            await make_tool(works).call({}, seconds=60.0)
        ended.set()
        while (said := await _or_refused(make_tool(works))) is None:
            await asyncio.sleep(0.01)
        assert said == "1"

    try:
        asyncio.run(asyncio.wait_for(calls(), 60.0))
    finally:
        ended.set()


async def _or_refused(tool: tools.Tool) -> str | None:
    try:
        return await tool.call({}, seconds=60.0)
    except UsageError:
        return None


def test_more_calls_than_threads_wait_for_them(monkeypatch):
    monkeypatch.setattr(tools, "_CALLS", tools.PlainCalls(at_once=2))
    side_by_side, most = [0], [0]

    def counted() -> int:
        side_by_side[0] += 1
        most[0] = max(most[0], side_by_side[0])
        time.sleep(0.01)
        side_by_side[0] -= 1
        return 1

    async def calls() -> list[str]:
        return await asyncio.gather(*(make_tool(counted).call({}, seconds=60.0) for _ in range(8)))

    assert asyncio.run(calls()) == ["1"] * 8 and most == [2]


def test_a_tool_that_exits_does_not_end_the_run():
    def leaves() -> None:
        sys.exit(3)

    assert called(leaves) == "error: RuntimeError: leaves raised SystemExit"


def test_what_only_the_user_can_mend_is_raised():
    def unusable() -> None:
        raise UsageError("no namespaces here")

    with pytest.raises(UsageError):
        called(unusable)


def test_long_results_are_cut(monkeypatch):
    monkeypatch.setattr(tools, "MAX_RESULT_CHARACTERS", 5)

    def long() -> str:
        return "x" * 7

    assert called(long) == "xxxxx ... (2 characters were cut)"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("-(2 - 5)", "3"), ("7//2 + 7%4", "6"), ("2**10", "1024"), ("1/4", "0.25"), (" 012.5 ", "12.5")],
)
def test_the_calculator_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
     "", "2+", "x", "__import__('os')", "True", "'a'*3", "[1]", "9**9**9", "2**-1**99999", "(-8)**0.5", "1/0",
     "1" * 201, "(" * 150, "10**300*10**300*10**300", "1e308*10 or 2", "1 if 1 else 2"],
)  # fmt: skip
def test_the_calculator_refuses_the_rest(expression):
    if expression == "2**-1**99999":
        assert calculate(expression) == "0.5"
        return
    with pytest.raises((ValueError, ArithmeticError)):
        calculate(expression)


def test_scores():
    task = Task(0, (Message("user", "2 + 3?"),), " 5\n", {}, 0)
    assert (exact_answer("5", task), exact_answer("6", task)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="no label"):
        exact_answer("5", Task(0, (), None, {}, 0))


def test_reasoning_gym_scores_its_own_entries():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    task = Task(0, (Message("user", entry["question"]),), entry["answer"], entry["metadata"], 0)
    assert reasoning_gym_answer(entry["answer"], task) == 1.0
    assert reasoning_gym_answer("no", task) < 0.1
