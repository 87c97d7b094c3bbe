"""The same agent in openai-agents: its loop, its schema of the tool, and nothing of training."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from recipes.tool_use.agent import MAX_TURNS, client_for
from rltool.environments import calculator

set_tracing_disabled(True)


@function_tool(failure_error_function=lambda context, error: f"error: {error}")
async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return calculator.calculate(expression)


AGENT = Agent("calculator", tools=[calculate])


async def run(task: Any) -> float:
    """1.0 if the answer is the label, else 0.0: also for a tool that does not exist, for too many turns, and for a
    conversation that has become longer than the model takes."""
    model = OpenAIChatCompletionsModel(task.model, client_for(task))
    try:
        ended = await Runner.run(AGENT, task.row["prompt"], max_turns=MAX_TURNS, run_config=RunConfig(model=model))
    except AgentsException:
        return 0.0
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return 0.0
    return float(str(ended.final_output).strip() == task.row["label"])
