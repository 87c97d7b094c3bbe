"""The real client libraries, streaming and not, with tools, against a gateway in front of a scripted engine."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tests.contract.gateway.running import Gateway

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
FLAT_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": False}
CLAUDE_TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "It is 5 — fünf."


@pytest.fixture
def session(gateway):
    return gateway.open()


@pytest.fixture
def gpt(session):
    with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as client:
        yield client


@pytest.fixture
def claude(session):
    with anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["key"], max_retries=0) as client:
        yield client


def one_trajectory(gateway, session, engine):
    """The session's only one; it is checked against what the engine was sent and what it has answered."""
    [trajectory] = gateway.record(session)["trajectories"]
    ids, mask = trajectory["token_ids"], trajectory["loss_mask"]
    for prompt in engine.asked():
        assert (ids[: len(prompt)], mask[len(prompt)]) == (prompt, 1)
    return trajectory


def sampled(trajectory):
    return [token for token, loss in zip(trajectory["token_ids"], trajectory["loss_mask"], strict=True) if loss]


# -- OpenAI Chat Completions


def chat(gpt, messages, *, stream):
    """(text, tool calls as (id, name, arguments), finish reason) of one completion."""
    if not stream:
        choice = gpt.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL]).choices[0]
        calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        return choice.message.content, calls, choice.finish_reason
    text, calls, finish = "", {}, None
    for chunk in gpt.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL], stream=True):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            known = calls.setdefault(part.index, [None, None, ""])
            known[0], known[1] = part.id or known[0], part.function.name or known[1]
            known[2] += part.function.arguments or ""
    return text, [tuple(call) for call in calls.values()], finish


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_with_a_tool(gateway, session, gpt, engine, words, stream):
    engine.script += [words.spell(CALL), words.spell(ANSWER)]
    messages = [{"role": "user", "content": "2 + 3?"}]
    text, [(call_id, name, arguments)], finish = chat(gpt, messages, stream=stream)
    assert (text, name, json.loads(arguments), finish) == ("Let me see.", "add", {"a": 2, "b": 3}, "tool_calls")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "5"},
    ]
    assert chat(gpt, messages, stream=stream) == (ANSWER, [], "stop")
    trajectory = one_trajectory(gateway, session, engine)
    assert sampled(trajectory) == words.spell(CALL) + words.spell(ANSWER)
    assert trajectory["finish_reasons"] == ["stop", "stop"]


def test_openai_chat_counts_tokens_also_in_a_stream(gpt, engine, words):
    engine.script += [words.spell("ab")] * 2
    ask = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    usage = gpt.chat.completions.create(**ask).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(engine.asked()[0]), 3)
    *_, last = gpt.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == usage


def test_openai_chat_shows_reasoning(gpt, engine, words):
    engine.script.append(words.spell("<think>\nhm\n</think>\n\ntwo"))
    said = gpt.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1+1"}]).choices[0].message
    assert (said.content, said.reasoning_content) == ("two", "hm")


def test_openai_chat_helper_stream(gpt, engine, words):
    engine.script.append(words.spell(CALL))
    ask = {"model": "policy", "messages": [{"role": "user", "content": "2 + 3?"}], "tools": [CHAT_TOOL]}
    with gpt.chat.completions.stream(**ask) as stream:
        choice = stream.get_final_completion().choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}


# -- OpenAI Completions


@pytest.mark.parametrize("stream", [False, True])
def test_openai_completions(gateway, session, gpt, engine, words, stream):
    engine.script += [words.spell(" there was", stop=False), words.spell(" a king.")]

    def complete(prompt, **fields):
        reply = gpt.completions.create(model="policy", prompt=prompt, stream=stream, **fields)
        chunks = list(reply) if stream else [reply]
        return "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason

    first = complete("Once", max_tokens=len(" there was"))
    assert first == (" there was", "length")
    assert complete("Once there was") == (" a king.", "stop")
    trajectory = one_trajectory(gateway, session, engine)
    assert words.text(trajectory["token_ids"]) == "Once there was a king.<|im_end|>"
    assert complete("Once there was a king. And") == ("fine", "stop")
    branch = gateway.record(session)["trajectories"][1]
    # The agent's text has no stop token where the model had stopped.
    assert branch["shared"] == len(trajectory["token_ids"]) - 1
    assert words.text(engine.asked()[-1]) == "Once there was a king. And"


def test_openai_completions_of_token_ids(gateway, session, gpt, engine, words):
    prompt = words.spell("Once", stop=False)
    assert gpt.completions.create(model="policy", prompt=prompt).choices[0].text == "fine"
    assert engine.asked() == [prompt]
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        gpt.completions.create(model="policy", prompt=[words.size])


# -- OpenAI Responses


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_with_a_tool(gateway, session, gpt, engine, words, stream):
    engine.script += [words.spell(CALL), words.spell(ANSWER)]

    def respond(sent):
        ask = {"model": "policy", "input": sent, "instructions": "Be brief.", "tools": [FLAT_TOOL]}
        if not stream:
            return gpt.responses.create(**ask)
        with gpt.responses.stream(**ask) as events:
            numbers = [event.sequence_number for event in events]
            assert numbers == list(range(len(numbers)))
            return events.get_final_response()

    sent = [{"role": "user", "content": "2 + 3?"}]
    first = respond(sent)
    assert first.output_text == "Let me see."
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    sent += [item.model_dump(exclude_none=True) for item in first.output]
    sent.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    assert respond(sent).output_text == ANSWER
    trajectory = one_trajectory(gateway, session, engine)
    assert sampled(trajectory) == words.spell(CALL) + words.spell(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_show_reasoning_and_what_was_cut(gpt, engine, words, stream):
    engine.script.append(words.spell("<think>\nhm\n</think>\n\ntwo"))
    ask = {"model": "policy", "input": "1 + 1?", "max_output_tokens": 10}
    if stream:
        *_, last = gpt.responses.create(**ask, stream=True)
        assert last.type == "response.incomplete"
        reply = last.response
    else:
        reply = gpt.responses.create(**ask)
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "hm"
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


# -- Anthropic Messages


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_with_a_tool(gateway, session, claude, engine, words, stream):
    engine.script += [words.spell(CALL), words.spell(ANSWER)]

    def log(messages):
        ask = {
            "model": "policy",
            "max_tokens": 500,
            "system": "Be brief.",
            "messages": messages,
            "tools": [CLAUDE_TOOL],
        }
        if not stream:
            return claude.messages.create(**ask)
        with claude.messages.stream(**ask) as events:
            return events.get_final_message()

    messages = [{"role": "user", "content": "2 + 3?"}]
    first = log(messages)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("Let me see.", "add", {"a": 2, "b": 3}, "tool_use")
    assert first.usage.output_tokens == len(words.spell(CALL))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = log(messages)
    assert ([block.text for block in second.content], second.stop_reason) == ([ANSWER], "end_turn")
    trajectory = one_trajectory(gateway, session, engine)
    assert sampled(trajectory) == words.spell(CALL) + words.spell(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_thinking_comes_back_and_is_recognised(gateway, session, claude, engine, words, stream):
    thought = "<think>\nhm\n</think>\n\n"
    engine.script += [words.spell(thought + CALL), words.spell(ANSWER)]
    ask = {
        "model": "policy", "max_tokens": 5000, "tools": [CLAUDE_TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    }  # fmt: skip
    messages = [{"role": "user", "content": "2 + 3?"}]
    if stream:
        with claude.messages.stream(**ask, messages=messages) as events:
            first = events.get_final_message()
    else:
        first = claude.messages.create(**ask, messages=messages)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "hm"
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "5"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    claude.messages.create(**ask, messages=messages)
    assert sampled(one_trajectory(gateway, session, engine)) == words.spell(thought + CALL) + words.spell(ANSWER)


# -- what is refused or overridden, as the clients show it


def test_errors_are_the_clients_own(gpt, claude, session, gateway):
    hi = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="gpt-5") as wrong:
        gpt.chat.completions.create(model="gpt-5", messages=hi)
    assert wrong.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        claude.messages.create(model="claude", max_tokens=9, messages=hi)
    image = {"type": "image_url", "image_url": {"url": "http://example.invalid/a.png"}}
    with pytest.raises(openai.BadRequestError, match="http: URLs are not fetched"):
        gpt.chat.completions.create(model="policy", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
        claude.messages.create(
            model="policy",
            max_tokens=9,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "http://example.invalid/a.png"}}],
                }
            ],
        )
    with pytest.raises(openai.AuthenticationError):
        gpt.with_options(api_key=gateway.open()["key"]).chat.completions.create(model="policy", messages=hi)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model="policy", max_tokens=9, messages=hi)


def test_models_are_listed(gpt, claude):
    """With the context's length, by which agents compact."""
    [model] = gpt.models.list()
    assert (model.id, model.max_model_len) == ("policy", 4096)
    assert gpt.models.retrieve("policy") == model
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("gpt-5")
    assert [(one.id, one.max_input_tokens) for one in claude.models.list()] == [("policy", 4096)]


def test_the_runs_sampling_wins_and_says_so(engine, tokenizer_dir, tmp_path):
    with Gateway(tmp_path, tokenizer_dir, [engine], {"on_sampling": "override"}) as gateway:
        session = gateway.open()
        client = openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0)
        reply = client.chat.completions.with_raw_response.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], temperature=0.0, tool_choice="auto"
        )
    assert reply.headers["x-rltool-not-followed"] == "temperature"
    [body] = [r.body for r in engine.requests if r.path == "/rltool/generate"]
    assert body["sampling_params"]["temperature"] == 1.0
    assert reply.parse().choices[0].message.content == "fine"


def test_stop_texts_cut_and_are_trained_and_the_conversation_goes_on_with_or_without_them(
    gateway, session, gpt, claude, engine, words
):
    """ReAct's way, and smolagents': it puts the stop text behind the reply itself."""
    for text in ("Thought: add\nObservation: 7", "<code>1 + 1</code> and on", "fine"):
        engine.script.append(words.spell(text))
    messages = [{"role": "user", "content": "2 + 3?"}]
    for stop, behind in ("Observation:", ""), (["</nothing>", "</code>"], "</code>"), (None, ""):
        options = {"stop": stop} if stop else {}
        said = gpt.chat.completions.create(model="policy", messages=messages, **options).choices[0]
        assert said.finish_reason == "stop"
        messages += [
            {"role": "assistant", "content": said.message.content + behind}, {"role": "user", "content": "Go on."},
        ]  # fmt: skip
    assert [m["content"] for m in messages[1::2]] == ["Thought: add\n", "<code>1 + 1</code>", "fine"]
    trajectory = one_trajectory(gateway, session, engine)
    text = words.text(sampled(trajectory))
    assert text == "Thought: add\nObservation:<code>1 + 1</code>fine<|im_end|>"
    engine.script.append(words.spell("one, two, three"))
    said = claude.messages.create(
        model="policy", max_tokens=99, stop_sequences=["two"], messages=[{"role": "user", "content": "count"}]
    )
    assert (said.stop_reason, said.stop_sequence, said.content[0].text) == ("stop_sequence", "two", "one, ")


def test_tokens_are_counted_as_a_turn_would_have_them(gateway, session, claude, engine):
    asked = {"model": "policy", "system": "be brief", "messages": [{"role": "user", "content": "hello"}]}
    counted = claude.messages.count_tokens(**asked, tools=[CLAUDE_TOOL]).input_tokens
    claude.messages.create(**asked, tools=[CLAUDE_TOOL], max_tokens=9)
    assert counted == len(engine.asked()[0])
    assert len(gateway.record(session)["turns"]) == 1
    wrong = gateway.http("POST", f"/sessions/{session['id']}/v1/messages/batches", key=session["key"], json={})
    assert wrong.json()["type"] == "error" and wrong.json()["error"]["type"] == "not_found_error"


def test_log_probabilities_of_a_chat_are_those_recorded(gateway, session, gpt, engine):
    asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    said = gpt.chat.completions.create(**asked).choices[0].logprobs.content
    with gpt.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].logprobs.content
    assert "".join(token.token for token in said) == "fine<|im_end|>"
    [first, second] = gateway.record(session)["trajectories"]
    for tokens, trajectory in (said, first), (streamed, second):
        recorded = [p for p, m in zip(trajectory["logprobs"], trajectory["loss_mask"], strict=True) if m]
        assert [token.logprob for token in tokens] == pytest.approx(recorded, abs=0)


def test_what_is_refused_is_an_error_of_the_client_that_names_the_parameter(gpt):
    asked = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    refused = {"n": 2, "temperature": 0.0, "response_format": schema, "top_logprobs": 2, "tool_choice": "required"}
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as error:
            gpt.chat.completions.create(**asked, **{name: value})
        assert error.value.param == name


# -- tokens reach the client as they are made


def heard_early(stream, gateway, session, engine, shown):
    """Everything that `shown` makes of a stream's events; the first text comes while the engine is at work."""
    found = []
    for event in stream:
        text = shown(event)
        if text and not any(found):
            assert gateway.record(session)["turns"] == []
            engine.hurry()
        found.append(text or "")
    return "".join(found)


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "anthropic"])
def test_a_stream_shows_text_before_the_engine_has_ended(gateway, session, gpt, claude, engine, words, api):
    engine.default = words.spell("hello there, this is the answer")
    engine.seconds = 1e6  # no token after the first, until it is told to hurry
    hi = [{"role": "user", "content": "hi"}]
    match api:
        case "chat":
            stream = gpt.chat.completions.create(model="policy", messages=hi, stream=True)
            said = heard_early(stream, gateway, session, engine, lambda chunk: chunk.choices[0].delta.content)
        case "completions":
            stream = gpt.completions.create(model="policy", prompt="hi", stream=True)
            said = heard_early(stream, gateway, session, engine, lambda chunk: chunk.choices[0].text)
        case "responses":
            stream = gpt.responses.create(model="policy", input="hi", stream=True)
            said = heard_early(
                stream, gateway, session, engine,
                lambda event: event.delta if event.type == "response.output_text.delta" else None,
            )  # fmt: skip
        case _:
            with claude.messages.stream(model="policy", max_tokens=500, messages=hi) as stream:
                said = heard_early(
                    stream, gateway, session, engine, lambda event: event.text if event.type == "text" else None
                )
    assert said == "hello there, this is the answer"
    assert sampled(one_trajectory(gateway, session, engine)) == engine.default
