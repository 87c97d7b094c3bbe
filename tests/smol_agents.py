"""An agent of smolagents, as its users write one: it knows an OpenAI model behind a URL, and nothing of rltool."""

from __future__ import annotations

import asyncio
from typing import Any

PROMPT = "Solve the task with Python between <code> and </code>. Say final_answer(...) in it when you know the answer."


def solve(task: Any) -> float:
    """1.0 if the answer is the row's label, else 0.0. Its prompts are short, and its steps few, for models with a small
    context."""
    from smolagents import CodeAgent, LogLevel, OpenAIModel
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    model = OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key)
    prompts: Any = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": PROMPT}
    steps = task.row["metadata"].get("max_steps", 2)
    agent = CodeAgent([], model, prompt_templates=prompts, max_steps=steps, verbosity_level=LogLevel.OFF)
    answer = agent.run(task.row["prompt"])
    return float(str(answer) == task.row["label"])


async def run(task: Any) -> float:
    """smolagents is not async: each episode has a thread."""
    return await asyncio.to_thread(solve, task)
