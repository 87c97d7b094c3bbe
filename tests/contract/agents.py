"""Agents that the tests run: they know the API, and nothing of rltool."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

ATTEMPTS, PAUSE = 100, 0.2
"""A client that tries again, as real ones do, for longer than a gateway takes to start."""


def ask(base_url: str, key: str, model: str, messages: list[dict[str, Any]]) -> str:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for attempt in range(ATTEMPTS):
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError:
            raise
        except OSError:  # refused, or cut off
            if attempt + 1 == ATTEMPTS:
                raise
            time.sleep(PAUSE)
    raise AssertionError


async def talk(task: Any, *questions: str) -> list[str]:
    messages: list[dict[str, Any]] = []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = await asyncio.to_thread(ask, task.base_url, task.api_key, task.model, messages)
        messages.append({"role": "assistant", "content": answer})
        answers.append(answer)
    return answers


async def two_questions(task: Any) -> float:
    """Worth the letters of both answers."""
    return float(sum(map(len, await talk(task, task.row["prompt"], "and then?"))))


async def no_opinion(task: Any) -> None:
    await talk(task, task.row["prompt"])


async def forgets(task: Any) -> float:
    """Two conversations in one episode."""
    await talk(task, "one")
    await talk(task, "another", "more")
    return 0.5


async def with_openai(task: Any) -> float:
    import openai

    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        reply = await client.chat.completions.create(model=task.model, messages=messages)
    return float(reply.choices[0].message.content == task.row["label"])


async def misbehaves(task: Any) -> float:
    """As the row says."""
    match task.row["prompt"]:
        case "raises":
            raise KeyError("lost")
        case "dies":
            os._exit(3)
        case "hangs":
            await asyncio.Event().wait()
        case "blocks":
            time.sleep(60)  # noqa: ASYNC251  # this is what it is for
        case "not a number":
            return "many"  # pyright: ignore[reportReturnType]
        case "dies once":
            marker = task.row["metadata"]["marker"]
            if not os.path.exists(marker):  # noqa: ASYNC240  # nothing else runs in this process
                os.close(os.open(marker, os.O_CREAT))
                os._exit(3)
    return 1.0


async def asks_nothing(task: Any) -> float:
    return 1.0


def not_async(task: Any) -> float:
    return 1.0
