"""OpenAI Completions: POST /v1/completions. A text or token ids, without a chat template.

Source: https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rltool.chat.conversation import RawPrompt
from rltool.gateway.apis import base
from rltool.gateway.apis.base import Answer, Asked, Event
from rltool.gateway.apis.chat import usage
from rltool.gateway.errors import BadRequest, RequestError
from rltool.gateway.sampling import ApiName


class CompletionsApi:
    """See rltool.gateway.apis.base.Api."""

    name: ApiName = "completions"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        options = base.record(body.get("stream_options") or {}, "stream_options")
        return Asked(
            model=base.model_name(body),
            prompt=RawPrompt(_prompt(body.get("prompt"))),
            stream=base.flag(body, "stream"),
            max_tokens=base.count(body, "max_tokens"),
            include_usage=base.flag(options, "include_usage"),
            stop=base.stop_texts(body, "stop"),
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        whole = _envelope(answer, answer.reply.raw, answer.reply.finish_reason)
        return whole | {"usage": usage(answer.reply)}

    def stream(self) -> CompletionsStream:
        return CompletionsStream()

    def ping(self) -> bytes:
        return base.PING_COMMENT

    def error(self, error: RequestError) -> dict[str, Any]:
        return base.openai_error(error)

    def error_event(self, error: RequestError) -> Event:
        return None, base.openai_error(error)


class CompletionsStream:
    """See rltool.gateway.apis.base.EventStream."""

    def __init__(self) -> None:
        self._sent = ""

    def begin(self, answer: Answer) -> Iterator[Event]:
        yield from ()

    def more(self, answer: Answer) -> Iterator[Event]:
        text, self._sent = base.new_text(answer.reply.raw, self._sent), answer.reply.raw
        if text:
            yield None, _envelope(answer, text, None)

    def end(self, answer: Answer) -> Iterator[Event]:
        yield from self.more(answer)
        yield None, _envelope(answer, "", answer.reply.finish_reason)
        if answer.asked.include_usage:
            yield None, _envelope(answer, "", None) | {"choices": [], "usage": usage(answer.reply)}
        yield None, "[DONE]"


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return base.text(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise BadRequest(
        "prompt must be one text, or one list of token ids (several prompts: several requests)", field="prompt"
    )


def _envelope(answer: Answer, text: str, finish: str | None) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
    }
