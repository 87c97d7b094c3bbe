"""Token parity: what is recorded is what the engine was sent and what it answered, over many turns."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.contract.fakes.vllm import _logprob
from tests.contract.gateway.running import Gateway

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
SCRIPTS = ("hello there", "naïve café — 東京 🙂", "zwölf Boxkämpfer\njagen", "  spaces  ", "", '<b>&amp;\\n"quoted"')


class Agent:
    """As frameworks do it: keeps the messages, and sends all of them each time."""

    def __init__(self, gateway, session, *, tools=()):
        self.client = openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0)
        self.messages, self.tools = [], list(tools)
        self.headers = {}

    def ask(self, *messages):
        self.messages += messages
        more = {"tools": self.tools} if self.tools else {}
        reply = self.client.chat.completions.with_raw_response.create(model="policy", messages=self.messages, **more)
        self.headers = reply.headers
        message = reply.parse().choices[0].message
        said = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        self.messages.append(said)
        return message


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def session(gateway):
    return gateway.open()


def segments(trajectory):
    """[(loss, ids), ...] of equal mask."""
    pairs = zip(trajectory["loss_mask"], trajectory["token_ids"], strict=True)
    return [(loss, [token for _, token in run]) for loss, run in itertools.groupby(pairs, key=lambda pair: pair[0])]


def check(record, engine, answers):
    """Every request: its prompt is the beginning of a trajectory, and what was answered follows there, with loss; and
    nothing else has a loss. The fake's log-probabilities are known by token and position."""
    losses = 0
    for prompt, answer in zip(engine.asked(), answers, strict=True):
        [trajectory] = [
            t
            for t in record["trajectories"]
            if t["token_ids"][: len(prompt) + len(answer)] == prompt + answer
            and t["loss_mask"][len(prompt) : len(prompt) + len(answer)] == [1] * len(answer)
        ]
        recorded = trajectory["logprobs"][len(prompt) : len(prompt) + len(answer)]
        assert recorded == [_logprob(token, position) for position, token in enumerate(answer)]
        losses += len(answer)
    assert losses == sum(sum(t["loss_mask"]) for t in record["trajectories"])
    for trajectory in record["trajectories"]:
        assert all(
            logprob == 0.0
            for logprob, loss in zip(trajectory["logprobs"], trajectory["loss_mask"], strict=True)
            if not loss
        )
        assert sum(span["end"] - span["start"] for span in trajectory["versions"]) == sum(trajectory["loss_mask"])


def test_many_turns_with_unicode_and_tools_are_one_trajectory(gateway, session, engine, words):
    answers, rng = [], random.Random(7)
    agent = Agent(gateway, session, tools=[TOOL])
    agent.messages.append({"role": "system", "content": "You find things. 東京"})
    for turn in range(12):
        text = rng.choice(SCRIPTS)
        if turn % 3 == 1:  # arguments as no JSON writer would write them
            text += '\n<tool_call>{"arguments" : {"q":"' + rng.choice("äb🙂") + '"},  "name":"find"}</tool_call>'
        answers.append(words.spell(text))
        engine.script.append(answers[-1])
        last = agent.messages[-1]
        if last.get("tool_calls"):
            sent = {"role": "tool", "tool_call_id": last["tool_calls"][0]["id"], "content": rng.choice(SCRIPTS)}
        else:
            sent = user(rng.choice(SCRIPTS) + str(turn))
        agent.ask(sent)
    record = gateway.record(session)
    assert len(record["trajectories"]) == 1
    assert [ids for loss, ids in segments(record["trajectories"][0]) if loss] == answers
    check(record, engine, answers)


def test_what_was_sampled_is_not_tokenised_again(gateway, session, engine, words):
    """The test can fail: the tokenizer would write this answer with other tokens."""
    answer = words.spell("hello thin an")
    assert words.tokenizer(words.text(answer))["input_ids"] != answer
    engine.script += [answer, words.spell("x")]
    agent = Agent(gateway, session)
    agent.ask(user("a"))
    agent.ask(user("b"))
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    more = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"

    def encode(text):
        return words.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert engine.asked() == [encode(text), encode(text) + answer + encode(more)]


def test_a_reply_that_was_cut_is_closed_by_the_template(gateway, session, engine, words):
    engine.script += [words.spell("hello" * 300, stop=False), words.spell("x")]
    agent = Agent(gateway, session)
    agent.ask(user("a"))
    agent.ask(user("b"))
    [trajectory] = gateway.record(session)["trajectories"]
    assert trajectory["finish_reasons"] == ["length", "stop"]
    _, (_, cut), (_, between), _ = segments(trajectory)
    assert len(cut) == 1024
    assert words.text(between).startswith("<|im_end|>\n<|im_start|>user\nb")


def test_another_stop_token_than_the_templates_stays_and_the_turn_is_closed(
    gateway, session, engine, words, tokenizer_dir
):
    other = words.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = tokenizer_dir / "generation_config.json"
    before = config.read_text()
    config.write_text(json.dumps({"eos_token_id": [words.stop, other]}))
    try:
        (directory := gateway.directory / "second").mkdir()
        with Gateway(directory, tokenizer_dir, [engine]) as second:
            mine = second.open()
            engine.script += [[*words.spell("x", stop=False), other], words.spell("y")]
            agent = Agent(second, mine)
            agent.ask(user("a"))
            agent.ask(user("b"))
            [trajectory] = second.record(mine)["trajectories"]
    finally:
        config.write_text(before)
    assert "x<|endoftext|><|im_end|>\n<|im_start|>user\nb" in words.text(trajectory["token_ids"])


def test_reasoning_is_kept_within_a_tool_loop_and_dropped_for_the_next_user(gateway, session, engine, words):
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    answers = [
        words.spell(text)
        for text in (
            f"<think>\nhm\n</think>\n\n{call}",
            "<think>\naha\n</think>\n\nfound",
            "<think>\nso\n</think>\n\nbye",
        )
    ]
    engine.script += answers
    agent = Agent(gateway, session, tools=[TOOL])
    said = agent.ask(user("find it"))
    agent.ask({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "it is here"})
    assert "x-rltool-branch" not in agent.headers
    agent.ask(user("thanks"))
    assert "drop reasoning" in agent.headers["x-rltool-branch"]
    record = gateway.record(session)
    kept, dropped = record["trajectories"]
    assert [ids for loss, ids in segments(kept) if loss] == answers[:2]
    text = words.text(dropped["token_ids"])
    assert "hm" not in text and "aha" not in text and "found" in text
    assert (dropped["parent"], dropped["shared"] > 0) == (0, True)
    check(record, engine, answers)


@pytest.mark.parametrize(
    ("edit", "branches"),
    [
        (lambda m: [*m[:1], user("summary of all that")], True),
        (lambda m: m[2:], True),
        (lambda m: [{"role": "system", "content": "sub-agent"}, *m], True),
        (lambda m: m[:2], False),  # back to an earlier turn: another continuation of it
        (lambda m: [*m[:1], {"role": "assistant", "content": "I never said that"}, *m[2:]], True),
    ],
)
def test_an_edited_history_is_a_branch_that_says_so(gateway, session, engine, words, edit, branches):
    answers = [words.spell("one"), words.spell("two"), words.spell("three")]
    engine.script += answers
    agent = Agent(gateway, session)
    agent.ask(user("a"))
    agent.ask(user("b"))
    agent.messages = edit(agent.messages)
    agent.ask(user("c"))
    assert agent.headers["x-rltool-trajectory"] == "1"
    reason = agent.headers["x-rltool-branch"]
    assert ("edited its history" in reason) is branches
    record = gateway.record(session)
    assert record["trajectories"][1]["reason"] in reason
    check(record, engine, answers)
    # None of this has touched what was recorded before.
    assert [ids for loss, ids in segments(record["trajectories"][0]) if loss] == answers[:2]


def test_the_same_question_once_more_is_told_so(gateway, session):
    for _ in range(2):
        agent = Agent(gateway, session)
        agent.ask(user("a"))
    assert "once more" in agent.headers["x-rltool-branch"]


def test_turns_side_by_side_are_trajectories_of_their_own(gateway, session, engine, words):
    engine.seconds = 0.2
    agent = Agent(gateway, session)
    agent.ask(user("a"))

    def go_on(text):
        other = Agent(gateway, session)
        other.messages = list(agent.messages)
        other.ask(user(text))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go_on, "bcde"))
    record = gateway.record(session)
    assert len(record["trajectories"]) == 4
    assert sorted(t["shared"] > 0 for t in record["trajectories"]) == [False, True, True, True]
    check(record, engine, [words.spell("fine")] * 5)
