"""SGLang's /generate as vLLM servers with rltool's plugin answer it, which is how sglang-router reaches them.

All samples of a prompt go in one request: the plugin hands n and the seed to vLLM, which gives sample i the seed + i.
Eight samples in eight requests cost the server's front end, one Python process, three times as much.
"""

from __future__ import annotations

from typing import Any

from rltool.engines.dialects.sglang import SglangDialect, parse_reply
from rltool.engines.dialects.vllm import sample_chunks
from rltool.engines.types import Completion, GenerateRequest, HttpRequest, json_list
from rltool.errors import EngineError


class RoutedVllmDialect(SglangDialect):
    """A data plane only: control requests go to the engines themselves, in their own dialect."""

    name = "vllm behind sglang-router"

    def generate(self, request: GenerateRequest) -> list[HttpRequest]:
        sent = super().generate(request)
        chunks = list(sample_chunks(request))
        for start, count in chunks:
            if count > 1:
                sent[start].body["sampling_params"]["n"] = count
        return [sent[start] for start, _ in chunks]

    def request_ids(self, request: GenerateRequest) -> list[str]:
        ids = super().request_ids(request)
        return [ids[start] for start, _ in sample_chunks(request)]

    def parse_generate(self, request: GenerateRequest, replies: list[Any]) -> list[Completion]:
        completions: list[Completion] = []
        for (_, count), reply in zip(sample_chunks(request), replies, strict=True):
            samples = json_list(reply) or [reply]
            if len(samples) != count:
                raise EngineError(f"/generate returned {len(samples)} samples where {count} were asked for")
            completions.extend(parse_reply(sample) for sample in samples)
        return completions
