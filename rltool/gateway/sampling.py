"""What becomes of each parameter of a request: it is followed, or refused with its reason; nothing is dropped. Pure.

Tokens are trained as samples of the policy at the run's temperature. What only cuts a reply (stop texts, fewer tokens)
leaves the distribution before the cut as it is. What would change it is refused; --on-sampling override serves some of
that with the run's own sampling, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rltool.engines.types import SamplingParams
from rltool.gateway.errors import BadRequest

OnSampling = Literal["override", "refuse"]
ApiName = Literal["chat", "completions", "responses", "anthropic"]
OPENAI: tuple[ApiName, ...] = ("chat", "completions", "responses")
ALL: tuple[ApiName, ...] = (*OPENAI, "anthropic")

SHAPES = "it would change the distribution that the model is trained on"
CONSTRAINED = "structured output changes the distribution that the model is trained on: ask in the prompt, and check"


@dataclass(frozen=True)
class Parameter:
    """becomes: "followed"; "hint", which asks for no particular answer; "sampling", refused, or with --on-sampling
    override served without; "refused". plain: values that ask for nothing, taken everywhere."""

    names: tuple[str, ...]
    apis: tuple[ApiName, ...]
    becomes: Literal["followed", "hint", "sampling", "refused"]
    why: str = ""
    plain: tuple[Any, ...] = ()


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(("model", "stream"), ALL, "followed", "the events come with the tokens"),
    Parameter(("messages", "tools"), ("chat", "anthropic"), "followed", "text, images; functions"),
    Parameter(("system",), ("anthropic",), "followed", "text"),
    Parameter(("input", "instructions"), ("responses",), "followed", "text, images"),
    Parameter(
        ("tools",), ("responses",), "followed",
        "functions, in namespaces too; custom tools as functions of one text, their grammar: as temperature",
    ),
    Parameter(("prompt",), ("completions",), "followed", "one text, or one list of token ids"),
    Parameter(("max_tokens",), ("chat", "completions", "anthropic"), "followed", "only cuts"),
    Parameter(("max_completion_tokens",), ("chat",), "followed", "only cuts"),
    Parameter(("max_output_tokens",), ("responses",), "followed", "only cuts"),
    Parameter(("stop",), ("chat", "completions"), "followed", "only cuts; the text that ended a reply is trained"),
    Parameter(("stop_sequences",), ("anthropic",), "followed", "as stop"),
    Parameter(("stream_options",), OPENAI, "followed", "include_usage"),
    Parameter(("logprobs",), ("chat",), "followed", "those recorded, of all sampled tokens"),
    Parameter(("thinking",), ("anthropic",), "followed", "shows or hides the model's thinking; budget_tokens: a hint"),
    Parameter(("tool_choice",), ("chat", "responses", "anthropic"), "followed", "a forced call: as temperature"),
    Parameter(("user", "metadata", "service_tier", "seed", "store"), ALL, "hint", "agents are not seeded"),
    Parameter(("safety_identifier", "prompt_cache_key", "prompt_cache_retention"), ALL, "hint"),
    Parameter(("client_metadata",), ("responses",), "hint", "the agent's own"),
    Parameter(("include",), ("responses",), "hint", "but log-probabilities: refused"),
    Parameter(("temperature", "top_p", "top_k"), ALL, "sampling", "only the run's own, or those of the session"),
    Parameter(("frequency_penalty", "presence_penalty", "min_p"), ALL, "sampling", SHAPES, plain=(0,)),
    Parameter(("repetition_penalty",), ALL, "sampling", SHAPES, plain=(1,)),
    Parameter(("logit_bias",), ALL, "sampling", SHAPES, plain=({},)),
    Parameter(("parallel_tool_calls",), ("chat", "responses"), "sampling", "calls are not bounded", plain=(True,)),
    Parameter(("reasoning_effort", "verbosity"), ALL, "sampling", "the model knows none"),
    Parameter(
        ("reasoning",), ALL, "sampling", "an effort: the model knows none; a summary is the thinking itself",
        plain=({}, {"summary": "auto"}),
    ),
    Parameter(
        ("output_config",), ("anthropic",), "sampling", 'the model knows no effort; "high" is the API\'s default',
        plain=({}, {"effort": "high"}),
    ),
    Parameter(
        ("context_management",), ALL, "refused", "a prompt is served whole; edits that keep all: followed",
        plain=({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    Parameter(("n", "best_of"), OPENAI, "refused", "send the request that many times", plain=(1,)),
    Parameter(("logprobs",), ("completions",), "refused", "chat has them", plain=(False, 0)),
    Parameter(("top_logprobs",), OPENAI, "refused", "only those of sampled tokens are known", plain=(0,)),
    Parameter(("response_format",), ("chat",), "refused", CONSTRAINED, plain=({"type": "text"},)),
    Parameter(("text",), ("responses",), "refused", CONSTRAINED, plain=({"format": {"type": "text"}}, {})),
    Parameter(("output_format",), ("anthropic",), "refused", CONSTRAINED),
    Parameter(("guided_json", "guided_regex", "structured_outputs"), OPENAI, "refused", CONSTRAINED),
    Parameter(("functions", "function_call"), ("chat",), "refused", "send tools and tool_choice"),
    Parameter(("echo", "background"), OPENAI, "refused", "not served", plain=(False,)),
    Parameter(("suffix",), ("completions",), "refused", "not served", plain=("",)),
    Parameter(("truncation",), ("responses",), "refused", "a prompt is served whole", plain=("disabled",)),
    Parameter(
        ("previous_response_id", "conversation", "prompt"), ("responses",), "refused",
        "send the whole input with each request",
    ),
)  # fmt: skip
"""A parameter that is not here is treated as `sampling`."""

_BY_NAME = {(api, name): parameter for parameter in PARAMETERS for api in parameter.apis for name in parameter.names}


def not_followed(
    api: ApiName, body: Mapping[str, Any], *, sampling: SamplingParams, on_sampling: OnSampling
) -> tuple[str, ...]:
    """Fields of a request that are served with the run's own sampling in their place, sorted. BadRequest for the first
    that is refused."""
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    overridden: list[str] = []
    for name in sorted(body):
        value, found = body[name], _BY_NAME.get((api, name))
        becomes = found.becomes if found else "sampling"
        why = found.why if found else "this gateway does not know it"
        if name == "tool_choice" and _kind(value) not in ("auto", "none"):
            becomes, why = "sampling", "a forced call changes the distribution that the model is trained on"
        if name == "tools" and api == "responses" and has_grammar(value):
            becomes, why = "sampling", "a custom tool's grammar changes the distribution that the model is trained on"
        asks_nothing = value is None or bool(found and _given(value) in found.plain) or value == own.get(name, ...)
        if becomes in ("followed", "hint") or asks_nothing:
            continue
        if becomes == "refused":
            raise BadRequest(f"{name} is not served: {found.why if found else SHAPES}", field=name, code="unsupported")
        if on_sampling == "refuse":
            raise BadRequest(
                f"{name} is refused: {why} (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k "
                f"{sampling.top_k}). Leave it out, or override it: --on-sampling override, rollout.on_sampling",
                field=name,
                code="sampling_is_the_runs",
            )
        overridden.append(name)
    return tuple(overridden)


def with_tools(choice: Any) -> bool:
    """Whether the model is shown its tools, by tool_choice of any API."""
    return _kind(choice) != "none"


def has_grammar(tools: Any) -> bool:
    """Whether what a custom tool of OpenAI Responses is called with is bound to a grammar."""
    return isinstance(tools, list) and any(
        isinstance(tool, Mapping) and tool.get("type") == "custom" and _kind(tool.get("format")) not in (None, "text")
        for tool in tools
    )


def _given(value: Any) -> Any:
    """Without the fields of an object that say nothing."""
    if isinstance(value, Mapping):
        return {key: one for key, one in value.items() if one is not None}
    return value


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, Mapping) else choice


def parameter_table() -> str:
    """For docs/agents.md: Markdown."""
    said = {"sampling": "refused, or overridden", "hint": "taken as a hint"}
    rows = [
        f"| {', '.join(f'`{name}`' for name in p.names)} | {'all' if p.apis == ALL else ', '.join(p.apis)} | "
        f"{said.get(p.becomes, p.becomes)} | {p.why} |"
        for p in PARAMETERS
    ]
    return "\n".join(["| parameter | API | | why |", "|---|---|---|---|", *rows]) + "\n"
