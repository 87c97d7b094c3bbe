"""An environment and an agent of the same conversation: a tool call, its answer, and a question in many scripts."""

from __future__ import annotations

import base64
from typing import Any

from rltool.chat.conversation import Message
from rltool.environments.protocol import Start, Step, Task
from tests.e2e.taught import TOOL

FURTHER = "と 漢字 🙂 fünf?"


class Sums:
    """Worth the number of its turns and the parity of their letters, so that groups differ."""

    async def reset(self, task: Task) -> Start:
        self.said: list[str] = []
        return Start([Message("user", task.messages[0].text)], [TOOL])

    async def step(self, reply: Message) -> Step:
        self.said.append(reply.text)
        if reply.tool_calls and len(self.said) == 1:
            return Step([Message("tool", "5", tool_call_id=reply.tool_calls[0].id)])
        return Step([Message("user", FURTHER)]) if len(self.said) == 2 else Step(done=True)

    async def reward(self) -> float:
        return worth(self.said)

    async def close(self) -> None: ...


def worth(said: list[str]) -> float:
    return len(said) + 0.5 * (sum(map(len, said)) % 2)


class Seeing:
    """Three turns with the row's pictures before and behind replies: two that its message shows, one by its path, and
    one as bytes."""

    async def reset(self, task: Task) -> Start:
        self.said: list[str] = []
        self.left = [
            [{"type": "text", "text": "and"}, {"type": "image", "image": task.metadata["path"]}],
            [{"type": "image", "image": base64.b64decode(task.metadata["base64"])}, {"type": "text", "text": "see"}],
        ]
        return Start(task.messages)

    async def step(self, reply: Message) -> Step:
        self.said.append(reply.text)
        return Step([{"role": "user", "content": self.left.pop(0)}]) if self.left else Step(done=True)

    async def reward(self) -> float:
        return worth(self.said)

    async def close(self) -> None: ...


async def with_openai(task: Any) -> float:
    """The same conversation, by OpenAI's client, streaming."""
    import openai

    said: list[str] = []
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    tools: list[Any] = [TOOL]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            try:
                async with client.chat.completions.stream(model=task.model, messages=messages, tools=tools) as stream:
                    reply = (await stream.get_final_completion()).choices[0].message
            except openai.LengthFinishReasonError as cut:  # the turn's last token: no error to rltool
                return worth([*said, cut.completion.choices[0].message.content or ""])
            said.append(reply.content or "")
            calls = [
                {"id": call.id, "type": "function"}
                | {"function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in reply.tool_calls or []
            ]
            messages.append({"role": "assistant", "content": reply.content, **({"tool_calls": calls} if calls else {})})
            if calls and len(said) == 1:
                messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"})
            elif len(said) == 2:
                messages.append({"role": "user", "content": FURTHER})
            else:
                return worth(said)


async def with_pictures(task: Any) -> float:
    """A turn for each of the row's pictures, a data URL, the first one streamed. A model without training writes a
    placeholder now and then, behind which no picture may come."""
    import openai

    said: list[str] = []
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for url in task.row["metadata"]["pictures"]:
            picture = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "see"}, picture]})
            try:
                if said:
                    reply = await client.chat.completions.create(model=task.model, messages=messages)
                    text = reply.choices[0].message.content or ""
                else:
                    events = await client.chat.completions.create(model=task.model, messages=messages, stream=True)
                    text = "".join([event.choices[0].delta.content or "" async for event in events])
            except openai.BadRequestError as error:
                if error.code != "sampled_placeholder":
                    raise
                break
            said.append(text)
            messages.append({"role": "assistant", "content": said[-1]})
    return worth(said)
