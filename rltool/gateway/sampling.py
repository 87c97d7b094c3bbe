"""The run's sampling wins: which fields of a request would change the distribution, and what becomes of them. Pure.

Tokens are trained as samples of the policy at the run's temperature. A request for another distribution is served with
the run's own (and logged), or refused. An unknown field is treated as one of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from rltool.engines.types import SamplingParams
from rltool.gateway.errors import BadRequest

OnSampling = Literal["override", "refuse"]

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "stop_sequences": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "background": (False,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", {"type": "auto"}),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
}
"""Values that ask for nothing beyond plain sampling."""


def not_followed(
    body: Mapping[str, Any], *, followed: Collection[str], sampling: SamplingParams, on_sampling: OnSampling
) -> tuple[str, ...]:
    """Fields of a request that are not followed, sorted; BadRequest for the first of them where such are refused.

    followed: fields that the translator reads, or that do not change what the model generates.
    """
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

    def plain(name: str, value: Any) -> bool:
        return name in followed or value is None or value in NEUTRAL.get(name, ()) or value == own.get(name, ...)

    fields = tuple(sorted(name for name, value in body.items() if not plain(name, value)))
    if fields and on_sampling == "refuse":
        raise BadRequest(
            f"{fields[0]} would change what the model is trained on (temperature {sampling.temperature:g}, top_p "
            f"{sampling.top_p:g}, top_k {sampling.top_k}, no constraint): leave it out, or start the gateway with "
            "--on-sampling override",
            field=fields[0],
            code="sampling_is_the_runs",
        )
    return fields
