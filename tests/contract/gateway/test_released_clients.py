"""Released clients, frameworks and a program (requirements/clients.txt), unmodified, each against a scripted engine."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltool.agents.recorded import count_turns, samples_of
from rltool.rollout.sample import Sample
from tests import npm_programs
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import Gateway
from tests.e2e.engines import clients_python, programs
from tests.gateway_models import Words

PROGRAMS = Path(__file__).parents[2] / "client_programs.py"
SECONDS = 180.0


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL, ANSWER = called("add", '{"a": 2, "b": 3}'), "It is 5."
LOOP = ([CALL, ANSWER], ANSWER, 1)
CLIENTS: dict[str, tuple[list[str], str, int]] = {
    "litellm_openai": LOOP,
    "litellm_anthropic": LOOP,
    "pydantic_ai_openai": LOOP,
    "pydantic_ai_anthropic": LOOP,
    "langgraph_openai": LOOP,
    "langgraph_anthropic": LOOP,
    "openai_agents_chat": LOOP,
    "openai_agents_responses": LOOP,
    "smolagents": ([CALL, called("final_answer", '{"answer": "It is 5."}')], ANSWER, 1),
    "dspy": (["[[ ## answer ## ]]\nIt is 5.\n\n[[ ## completed ## ]]"], ANSWER, 1),
    "mini_swe_agent": (
        # A reply without a call is thrown away: it does not count, and what it answered is asked again.
        [
            "Let me think.",
            called("bash", '{"command": "echo It is 5. > answer.txt"}'),
            called("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),
        ],
        ANSWER,
        1,
    ),
}
"""What the model says to each, its last words, and how many training rows that makes."""
LONG = {"litellm_anthropic", "langgraph_anthropic", "openai_agents_chat"}
"""Of each package one way is in every test run."""


def run(name: str, session: dict[str, Any], directory: Path) -> str:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(directory), "OPENAI_BASE_URL": session["openai_base_url"],
        "ANTHROPIC_BASE_URL": session["anthropic_base_url"], "OPENAI_API_KEY": session["key"],
        "ANTHROPIC_API_KEY": session["key"], "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false",
    }  # fmt: skip
    ended = subprocess.run(
        [str(clients_python()), str(PROGRAMS), name], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CLIENTS]
)
def test_a_released_client_plays_its_episode_in_few_rows_and_each_sampled_token_is_trained_once(
    name, gateway, engine, words, tmp_path
):
    replies, answer, rows = CLIENTS[name]
    spelled = [words.spell(reply) for reply in replies]
    engine.script.extend(spelled)
    session = gateway.open()
    assert f"SAID {answer}" in run(name, session, tmp_path)
    record = gateway.record(session)
    left_out = [i for i, turn in enumerate(record["turns"]) if turn["left_out"]]
    assert len(record["turns"]) == len(replies) and len(left_out) == (name == "mini_swe_agent")
    counted = count_turns(record, 1.0)
    samples = samples_of(record, Sample(0, 0, 0, [1]), result=1.0, max_tokens=4096, counted=counted)
    assert len(samples) == rows
    trained = [t for s in samples for t, m in zip(s.response_ids, s.response_mask, strict=True) if m]
    assert trained == [token for i, ids in enumerate(spelled) if i not in left_out for token in ids]
    # What the engine read last is what is trained as context, token by token.
    assert engine.asked()[-1] == (samples[-1].prompt_ids + samples[-1].response_ids)[: len(engine.asked()[-1])]
    assert not any(turn["not_followed"] for turn in record["turns"])


CONTEXT = 200_000
"""Bytes of a program's prompt are tokens here."""


class Talking(ScriptedVllm):
    """What it says depends on what it reads: programs ask beside their task, and by several agents at once."""

    def __init__(self, words: Words) -> None:
        super().__init__(vocab_size=words.size, default=[])
        self.max_model_len = CONTEXT
        self.words, self.name, self.work, self.said = words, "", Path(), list[list[int]]()

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        answer = npm_programs.answer(self.name, self.work, self.words.text(ids))
        self.said.append(self.words.spell(answer))
        return self.said[-1][:limit]


@pytest.fixture
def talking(words) -> Iterator[Talking]:
    with Talking(words) as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "lineages"), [("claude", [7, 2]), ("codex", [7, 2]), ("opencode", [7, 2, 1])])
def test_a_program_plays_a_task_in_one_row_of_each_of_its_agents_and_each_sampled_token_is_trained_once(
    name, lineages, talking, tokenizer_dir, tmp_path
):
    """lineages: turns of the task, of a sub-agent, of a title."""
    place = npm_programs.Place(tmp_path / "program")
    talking.name, talking.work = name, place.work
    options = {"max_session_tokens": 10 * CONTEXT}
    with Gateway(tmp_path, tokenizer_dir, [talking], options=options, max_model_len=CONTEXT) as gateway:
        session = gateway.open()
        played = npm_programs.play(programs(), name, session, place)
        record = gateway.record(session)
    assert npm_programs.LAST in played.said and (place.work / "sum.txt").read_text() == "5\n"
    assert played.elsewhere == []
    turns, trajectories = record["turns"], record["trajectories"]
    assert sorted(Counter(turn["trajectory"] for turn in turns).values()) == sorted(lineages)
    assert not any(turn["not_followed"] or turn["left_out"] for turn in turns)
    # Each prompt that the engine has read is the beginning of its trajectory, and what it has said follows.
    prompts = [trajectories[turn["trajectory"]]["token_ids"][: turn["start"]] for turn in turns]
    said = [trajectories[turn["trajectory"]]["token_ids"][turn["start"] : turn["end"]] for turn in turns]
    assert sorted(talking.asked()) == sorted(prompts) and sorted(talking.said) == sorted(said)
    counted = count_turns(record, 1.0)
    samples = samples_of(record, Sample(0, 0, 0, [1]), result=1.0, max_tokens=CONTEXT, counted=counted)
    assert len(samples) == len(lineages) and not counted.left_out
    trained = [t for s in samples for t, m in zip(s.response_ids, s.response_mask, strict=True) if m]
    assert Counter(trained) == Counter(token for ids in talking.said for token in ids)
