"""An agent that was written for OpenAI's API: it asks, calculates what it is asked to, and answers. It knows nothing of
training."""

from __future__ import annotations

import json
from typing import Any

import openai

from rltool.environments.calculator import calculate

CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 3

_client: openai.AsyncOpenAI | None = None
"""One connection pool for all episodes of this process: making one takes longer than a turn."""


def client_for(task: Any) -> openai.AsyncOpenAI:
    global _client
    _client = _client or openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    return _client.with_options(base_url=task.base_url, api_key=task.api_key)


async def run(task: Any) -> float:
    """1.0 if the answer is the label, else 0.0."""
    client = client_for(task)
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[CALCULATE])
        said = reply.choices[0].message
        if not said.tool_calls:
            return float((said.content or "").strip() == task.row["label"])
        messages.append(said.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": result_of(call)} for call in said.tool_calls
        ]
    return 0.0


def result_of(call: Any) -> str:
    try:
        return calculate(json.loads(call.function.arguments)["expression"])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {error}"
