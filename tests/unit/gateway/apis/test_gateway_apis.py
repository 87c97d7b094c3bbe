"""The four APIs: what is asked, and how a reply is said. tests/contract/gateway has the real clients."""

from __future__ import annotations

import pytest

from rltool.chat.conversation import Message, Reply, SentPicture, ToolCall
from rltool.engines.types import SamplingParams
from rltool.gateway.apis.anthropic import AnthropicApi
from rltool.gateway.apis.base import Answer
from rltool.gateway.apis.chat import ChatApi
from rltool.gateway.apis.completions import CompletionsApi
from rltool.gateway.apis.responses import ResponsesApi
from rltool.gateway.errors import BadRequest, NotFound, TooMany
from rltool.gateway.sampling import PARAMETERS, not_followed

CALL = ToolCall("call_1", "add", {"a": 1})
URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


def chat(**fields):
    return ChatApi().parse({"model": "policy", "messages": [{"role": "user", "content": "hi"}], **fields})


def called_with(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def anthropic(**fields):
    sent = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return AnthropicApi().parse(sent | fields)


def responses(**fields):
    return ResponsesApi().parse({"model": "policy", "input": "hi", **fields})


def test_the_same_history_is_the_same_conversation_in_all_three_apis():
    messages = (
        Message("system", "be brief"),
        Message("user", "1 + 1?"),
        Message("assistant", "let me see", tool_calls=(CALL,)),
        Message("tool", "2", tool_call_id="call_1"),
    )
    tool_call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    from_chat = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
            {"role": "assistant", "content": "let me see", "tool_calls": [tool_call]},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ]
    )
    from_anthropic = anthropic(
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "1 + 1?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2"}]},
        ],
    )
    from_responses = responses(
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        ],
    )
    assert from_chat.prompt.messages == messages
    assert from_anthropic.prompt.messages == messages
    assert from_responses.prompt.messages == messages


def test_tools_are_the_same_in_all_three_apis():
    schema = TOOL["function"]["parameters"]
    flat = {"type": "function", "name": "add", "parameters": schema, "strict": True}
    keys = {
        chat(tools=[TOOL]).prompt.tools_key,
        anthropic(tools=[{"name": "add", "input_schema": schema}]).prompt.tools_key,
        responses(tools=[flat]).prompt.tools_key,
    }
    assert len(keys) == 1


def test_text_after_a_tool_result_is_a_message_of_the_user():
    parts = [{"type": "tool_result", "tool_use_id": "a", "content": []}, {"type": "text", "text": "go on"}]
    asked = anthropic(messages=[{"role": "user", "content": parts}])
    assert [(m.role, m.text) for m in asked.prompt.messages] == [("tool", ""), ("user", "go on")]


def test_images_are_the_same_messages_in_all_three_apis():
    said = [{"type": "text", "text": "see"}, IMAGE, IMAGE, {"type": "text", "text": "and"}]
    seen = tuple(SentPicture(3, URL) for _ in range(2))
    shown = {"role": "tool", "tool_call_id": "a", "content": [IMAGE]}
    asked = chat(messages=[{"role": "user", "content": said}, shown])
    messages = (
        Message("user", "seeand", pictures=seen),
        Message("tool", "", tool_call_id="a", pictures=(SentPicture(0, URL),)),
    )
    assert asked.prompt.messages == messages
    own = {"type": "input_image", "image_url": URL, "detail": "auto"}
    said = [{"type": "input_text", "text": "see"}, own, own, {"type": "input_text", "text": "and"}]
    output = {"type": "function_call_output", "call_id": "a", "output": [own]}
    assert responses(input=[{"role": "user", "content": said}, output]).prompt.messages == messages
    own = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    said = [{"type": "text", "text": "see"}, own, own, {"type": "text", "text": "and"}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [own]}
    [user, tool] = anthropic(messages=[{"role": "user", "content": [*said, result]}]).prompt.messages
    assert [(m.text, [(p.at, p.source.partition(",")[2]) for p in m.pictures]) for m in (user, tool)] == [
        ("seeand", [(3, "AAAA")] * 2), ("", [(0, "AAAA")])
    ]


SPACE = {
    "type": "namespace", "name": "agents", "description": "Sub-agents.",
    "tools": [{"type": "function", "name": name, "description": "Does."} for name in ("spawn", "wait")],
}  # fmt: skip
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}


def test_tools_of_a_namespace_and_tools_of_a_text_are_functions_to_the_model_and_themselves_to_the_agent():
    asked = responses(tools=[SPACE, PATCH, {"type": "function", "name": "add"}])
    shown = [tool["function"] for tool in asked.prompt.tools]
    assert [one["name"] for one in shown] == ["agents__spawn", "agents__wait", "patch", "add"]
    assert [one.get("description") for one in shown] == ["Sub-agents.\n\nDoes.", "Does.", "Patches.", None]
    assert shown[2]["parameters"]["properties"] == {"input": {"type": "string"}}
    calls = (
        ToolCall("call_0", "agents__wait", {"a": 1}), ToolCall("call_1", "patch", {"input": "+1"}),
        ToolCall("call_2", "patch", {"text": "+1"}), ToolCall("call_3", "add", {}),
    )  # fmt: skip
    items = ResponsesApi().body(answer(asked, calls=calls))["output"]
    assert [(i["type"], i["name"], i.get("namespace"), i.get("arguments"), i.get("input")) for i in items] == [
        ("function_call", "wait", "agents", '{"a": 1}', None),
        ("custom_tool_call", "patch", None, None, "+1"),
        ("custom_tool_call", "patch", None, None, '{"text": "+1"}'),
        ("function_call", "add", None, "{}", None),
    ]
    outputs = [{"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}]
    [said, tool] = responses(input=[items[0], items[1], items[3], *outputs]).prompt.messages
    assert said.tool_calls == (calls[0], calls[1], calls[3])
    assert tool == Message("tool", "done", tool_call_id="call_1")
    events = [event for _, event in ResponsesApi().stream().end(answer(asked, calls=calls[1:2]))]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert (events[1]["delta"], events[2]["input"], events[0]["item"]["input"]) == ("+1", "+1", "")


FOUND = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "late"}]}
LATE = {"name": "late", "input_schema": {}, "defer_loading": True}


def test_a_deferred_tool_is_shown_where_a_search_has_found_it_and_not_before_the_conversation():
    own = {"name": "find", "input_schema": {}}
    before, after = (
        anthropic(tools=[own, *more], messages=[{"role": "user", "content": [FOUND] if more[1:] else "hi"}]).prompt
        for more in ([LATE | {"name": "other"}], [LATE, LATE | {"name": "other"}])
    )
    assert before.tools_key == after.tools_key and [t["function"]["name"] for t in after.tools] == ["find"]
    assert '"name": "late"' in after.messages[0].text and "other" not in after.messages[0].text
    with pytest.raises(BadRequest, match="tool_reference"):
        anthropic(tools=[own], messages=[{"role": "user", "content": [FOUND]}])


def test_a_system_message_of_anthropics_may_stand_behind_others():
    sent = [{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    assert anthropic(messages=sent).prompt.messages == (Message("user", "hi"), Message("system", "be brief"))


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.mark.parametrize(
    ("ask", "said", "field"),
    [
        (lambda: chat(messages=[{"role": "user", "content": [image("https://example.invalid/a.png")]}]),
         "https: URLs are not fetched", "messages[0].content[0].image_url.url"),
        (lambda: chat(messages=[{"role": "user", "content": [image("file:///etc/passwd")]}]),
         "file: URLs are not fetched", "messages[0].content[0].image_url.url"),
        (lambda: chat(messages=[{"role": "user", "content": [image("/etc/passwd")]}]),
         "this is none", "messages[0].content[0].image_url.url"),
        (lambda: chat(messages=[{"role": "user", "content": [image(URL, detail="low")]}]),
         "detail 'low' is not served", "messages[0].content[0].image_url.url"),
        (lambda: chat(messages=[{"role": "system", "content": [IMAGE]}]), "'image_url'", "messages[0].content[0]"),
        (lambda: chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
         "no video, audio or files", "messages[0].content[0]"),
        (lambda: anthropic(messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]),
         "nothing is fetched", "messages[0].content[0].source"),
        (lambda: responses(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
         "this is none", "input[0].content[0].image_url"),
        (lambda: responses(input=[{"role": "assistant", "content": [{"type": "input_image", "image_url": URL}]}]),
         "'input_image'", "input[0].content[0]"),
    ],
)  # fmt: skip
def test_what_is_no_picture_of_an_agent_s_own_is_refused_by_name(ask, said, field):
    with pytest.raises(BadRequest, match=said) as refused:
        ask()
    assert refused.value.field == field
    assert refused.value.code == "unsupported_content"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: chat(messages=[]),
        lambda: chat(messages="hi"),
        lambda: chat(messages=[{"role": "robot", "content": "hi"}]),
        lambda: chat(messages=[{"role": "user"}]),
        lambda: chat(messages=[{"role": "user", "content": 1}]),
        lambda: chat(messages=[{"role": "user", "content": "hi", "tool_calls": [{}]}]),
        lambda: chat(messages=[called_with("{")]),
        lambda: chat(messages=[called_with("[]")]),
        lambda: chat(tools=[{"type": "web_search"}]),
        lambda: chat(tools=[{"type": "function", "function": {"name": ""}}]),
        lambda: chat(tools=[{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]),
        lambda: chat(tools=[{"type": "function", "function": {"name": "x", "parameters": {"properties": [1]}}}]),
        lambda: chat(tools=[{"type": "function", "function": {"name": "x", "parameters": "none"}}]),
        lambda: chat(model=None),
        lambda: chat(stream="yes"),
        lambda: chat(max_tokens=0),
        lambda: chat(max_tokens=True),
        lambda: anthropic(max_tokens=None),
        lambda: anthropic(messages=[{"role": "system", "content": "x"}]),
        lambda: anthropic(tools=[{"name": "x"}]),
        lambda: anthropic(tools=[{"type": "bash_20250124", "name": "bash"}]),
        lambda: responses(input=[]),
        lambda: responses(input=None),
        lambda: chat(stop=["x"] * 17),
        lambda: chat(stop=[7]),
        lambda: responses(include=["message.output_text.logprobs"]),
        lambda: responses(input=[{"type": "computer_call"}]),
        lambda: responses(tools=[{"type": "web_search"}]),
        lambda: responses(tools=[{"type": "function", "name": "x", "defer_loading": True}]),
        lambda: responses(tools=[{"type": "namespace", "name": "x", "tools": [{"type": "local_shell"}]}]),
        lambda: CompletionsApi().parse({"model": "policy", "prompt": ["a", "b"]}),
        lambda: CompletionsApi().parse({"model": "policy", "prompt": []}),
        lambda: CompletionsApi().parse({"model": "policy", "prompt": [True]}),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(ask):
    with pytest.raises(BadRequest):
        ask()


def answer(asked, *, text="", reasoning="", calls=(), finish="stop"):
    message = Message("assistant", text, reasoning, calls)
    return Answer("0" * 32, "policy", 7, asked, Reply(message, finish, 5, 3, text))


def test_finish_reasons():
    cases = [("stop", ()), ("length", ()), ("stop", (CALL,)), ("length", (CALL,))]
    said = [answer(chat(), text="x", calls=calls, finish=finish) for finish, calls in cases]
    choices = [ChatApi().body(one)["choices"][0]["finish_reason"] for one in said]
    assert choices == ["stop", "length", "tool_calls", "length"]
    assert [AnthropicApi().body(one)["stop_reason"] for one in said] == [
        "end_turn", "max_tokens", "tool_use", "max_tokens",
    ]  # fmt: skip
    assert [ResponsesApi().body(one)["status"] for one in said] == [
        "completed", "incomplete", "completed", "incomplete",
    ]  # fmt: skip


def test_thinking_is_shown_to_an_anthropic_agent_that_asked_for_it_alone():
    shown = answer(anthropic(thinking={"type": "enabled", "budget_tokens": 2000}), text="two", reasoning="hm")
    hidden = answer(anthropic(), text="two", reasoning="hm")
    omitted = answer(anthropic(thinking={"type": "adaptive", "display": "omitted"}), text="two", reasoning="hm")
    assert [block["type"] for block in AnthropicApi().body(omitted)["content"]] == ["text"]
    assert [block["type"] for block in AnthropicApi().body(shown)["content"]] == ["thinking", "text"]
    assert [block["type"] for block in AnthropicApi().body(hidden)["content"]] == ["text"]


def test_errors_have_each_apis_own_form():
    error = TooMany("later")
    assert ChatApi().error(error)["error"]["code"] == "rate_limit_exceeded"
    assert AnthropicApi().error(error) == {"type": "error", "error": {"type": "rate_limit_error", "message": "later"}}
    assert AnthropicApi().error(NotFound("x"))["error"]["type"] == "not_found_error"


SAMPLING = SamplingParams(max_tokens=8, temperature=0.7)


def followed(body, on_sampling="override"):
    return not_followed("chat", body, sampling=SAMPLING, on_sampling=on_sampling)


def test_a_request_for_the_runs_own_sampling_is_followed():
    plain = {"model": "m", "temperature": 0.7, "top_p": 1, "n": 1, "presence_penalty": 0.0, "tool_choice": "auto"}
    assert followed(plain | {"logit_bias": {}, "stop": None, "response_format": {"type": "text"}}) == ()


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("anthropic", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        ("anthropic", {"output_config": {"effort": "high"}, "metadata": {"user_id": "x"}}),
        ("responses", {"reasoning": {"summary": "auto", "effort": None}, "client_metadata": {"turn": "x"}}),
        ("responses", {"tools": [PATCH, SPACE]}),
    ],
)
def test_what_programs_send_with_every_request_and_asks_for_nothing_is_followed(api, body):
    assert not_followed(api, body, sampling=SAMPLING, on_sampling="refuse") == ()


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("anthropic", {"output_config": {"effort": "low"}}),
        ("responses", {"reasoning": {"summary": "auto", "effort": "low"}}),
        ("responses", {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]}),
    ],
)
def test_what_they_may_ask_for_is_named_or_refused(api, body):
    [field] = body
    assert not_followed(api, body, sampling=SAMPLING, on_sampling="override") == (field,)
    with pytest.raises(BadRequest, match=field):
        not_followed(api, body, sampling=SAMPLING, on_sampling="refuse")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 0.9),
        ("frequency_penalty", 0.1),
        ("logit_bias", {"5": 100}),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "high"),
        ("grammar_of_tomorrow", "x"),
    ],
)
def test_what_would_change_the_distribution_is_named_or_refused(field, value):
    assert followed({"model": "m", field: value}) == (field,)
    with pytest.raises(BadRequest, match=field) as refused:
        followed({"model": "m", field: value}, "refuse")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("api", "field", "value", "why"),
    [
        ("chat", "n", 2, "send the request that many times"),
        ("chat", "response_format", {"type": "json_schema"}, "structured output changes the distribution"),
        ("chat", "functions", [], "send tools"),
        ("chat", "top_logprobs", 2, "only those of sampled tokens"),
        ("completions", "logprobs", 1, "chat has them"),
        ("responses", "text", {"format": {"type": "json_schema"}}, "structured output changes the distribution"),
        ("responses", "previous_response_id", "resp_1", "send the whole input"),
        ("anthropic", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "served whole"),
        ("anthropic", "output_format", {"type": "json_schema"}, "structured output changes the distribution"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason_also_where_sampling_is_overridden(api, field, value, why):
    with pytest.raises(BadRequest, match=why) as refused:
        not_followed(api, {"model": "m", field: value}, sampling=SAMPLING, on_sampling="override")
    assert refused.value.field == field


@pytest.mark.parametrize("ask", [chat, anthropic, responses])
def test_no_tools_are_shown_where_none_may_be_called_and_a_forced_call_is_refused(ask):
    own = {chat: TOOL, responses: {"type": "function", "name": "add"}, anthropic: {"name": "add", "input_schema": {}}}
    choice = {"type": "none"} if ask is anthropic else "none"
    assert ask(tools=[own[ask]]).prompt.tools and not ask(tools=[own[ask]], tool_choice=choice).prompt.tools
    forced = {"type": "any"} if ask is anthropic else "required"
    api = {chat: "chat", responses: "responses", anthropic: "anthropic"}[ask]
    body = {"tool_choice": forced}
    assert not_followed(api, {"tool_choice": choice}, sampling=SAMPLING, on_sampling="refuse") == ()
    assert not_followed(api, body, sampling=SAMPLING, on_sampling="override") == ("tool_choice",)
    with pytest.raises(BadRequest, match="a forced call changes the distribution"):
        not_followed(api, body, sampling=SAMPLING, on_sampling="refuse")


def test_every_parameter_has_one_treatment_in_each_api():
    seen = [(api, name) for parameter in PARAMETERS for api in parameter.apis for name in parameter.names]
    assert len(seen) == len({*seen})
