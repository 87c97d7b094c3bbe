"""An agent of openai-agents, as its users write one: it knows an OpenAI model behind a URL, and nothing of training."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from recipes.tool_use.agent import client_for

set_tracing_disabled(True)
MAX_TURNS = 6


def tool(function: Any) -> Any:
    """What goes wrong in it is one word for the model."""
    return function_tool(function, failure_error_function=lambda context, error: "error")


@tool
async def price(prices: RunContextWrapper[dict[str, int]], item: str) -> str:
    """Price of one item."""
    return str(prices.context.get(item, "unknown"))


@tool
async def add(a: int, b: int) -> str:
    """a + b"""
    return str(a + b)


@tool
async def subtract(a: int, b: int) -> str:
    """a - b"""
    return str(a - b)


@tool
async def multiply(a: int, b: int) -> str:
    """a * b"""
    return str(a * b)


CLERK = Agent[dict[str, int]]("clerk", tools=[price, add, subtract, multiply])


async def run(task: Any) -> float:
    """1.0 if the answer is the label, else 0.0: also for a tool that does not exist, for too many turns, and for a
    conversation that has become longer than the model takes."""
    model = OpenAIChatCompletionsModel(task.model, client_for(task))
    try:
        ended = await Runner.run(
            CLERK, task.row["prompt"], context=task.row["metadata"]["prices"], max_turns=MAX_TURNS,
            run_config=RunConfig(model=model),
        )  # fmt: skip
    except AgentsException:
        return 0.0
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return 0.0
    return float(str(ended.final_output).strip() == task.row["label"])
