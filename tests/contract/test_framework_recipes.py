"""The agents of openai-agents in `recipes/`, unmodified, in the environment of released clients, through a real gateway
against an engine that knows the task. What the warm start of `shop` reads is what its agent makes of the same turns."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.shop import task as shop
from recipes.tool_use import task as tool_use
from rltool.agents.recorded import count_turns, samples_of
from rltool.rollout.sample import Sample
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.gateway.running import Gateway
from tests.e2e.engines import clients_python
from tests.gateway_models import write_gateway_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
import asyncio, importlib, json, sys, types
run = importlib.import_module(sys.argv[1]).run
async def main():
    tasks = [types.SimpleNamespace(**task) for task in json.load(sys.stdin)]
    return await asyncio.gather(*map(run, tasks), return_exceptions=True)
def text(error):
    return f"{type(error).__name__}: {getattr(error, 'code', error)}"
print("REWARDS", json.dumps(asyncio.run(main()), default=text))
"""


class Knowing(FakeVllm):
    """says(prompt's text) is its reply."""

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str]) -> None:
        super().__init__()
        self.vocab_size, self.tokenizer, self.says = tokenizer.vocab_size, tokenizer, says
        self.max_model_len, self.read = 4096, list[str]()

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        self.read.append(self.tokenizer.decode_everything(ids))
        return self.tokenizer.encode_target(self.says(self.read[-1]))[:limit]


def played(
    agent: str, rows: list[dict[str, Any]], model: Path, says: Callable[[str], str], directory: Path,
    max_model_len: int = 1024, **options: Any,
) -> tuple[list[Any], list[dict[str, Any]], list[str]]:  # fmt: skip
    """(rewards, or errors as text; records of the sessions; what the engine has read)."""
    with (
        Knowing(load_tokenizer(model), says) as engine,
        Gateway(directory, model, [engine], options, max_model_len=max_model_len) as gateway,
    ):
        sessions = [gateway.open() for _ in rows]
        tasks = [
            {"base_url": session["openai_base_url"], "api_key": session["key"], "model": "policy", "row": row}
            for session, row in zip(sessions, rows, strict=True)
        ]
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [str(clients_python()), "-c", PLAY, agent], input=json.dumps(tasks), cwd=directory, env=environment,
            capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        rewards = json.loads(ended.stdout.partition("REWARDS ")[2])
        return rewards, [gateway.record(session) for session in sessions], engine.read


def test_the_clerk_of_the_shop(tmp_path):
    model = write_gateway_tokenizer(tmp_path / "model")
    rng = random.Random(0)
    asked = [shop.question_of(rng) for _ in range(12)]
    rows = [{"prompt": q, "label": calls[-1][2], "metadata": {"prices": prices}} for q, prices, calls in asked]
    right = dict(turn for question, _, calls in asked for turn in shop.turns_of(question, calls))
    assert len(right) == sum(len(calls) + 1 for _, _, calls in asked)
    wrong = {
        "a guess": lambda said: "12",
        "no such tool": lambda said: said.replace("price", "prize"),
        "no object": lambda said: said.replace('{"item"', '["item"'),
        "not what the tool takes": lambda said: said.replace("item", "thing"),
        "for ever": lambda said: shop.call_text("add", {"a": 1, "b": 1}),
    }
    spoilt = {question: way for (question, _, _), way in zip(asked, wrong.values(), strict=False)}

    def says(text: str) -> str:
        found = right.get(text, "I give up.")
        question = text.partition("user\n")[2].partition("<|im_end|>")[0]
        return spoilt[question](found) if question in spoilt else found

    (model / "chat_template.jinja").write_text(shop.TEMPLATE)
    rewards, records, read = played("recipes.shop.agent", rows, model, says, tmp_path)
    assert rewards == [0.0] * len(wrong) + [1.0] * (len(rows) - len(wrong))
    # Token by token what the warm start has taught: nothing else is read or said in an episode that goes well.
    taught = [turn for question, _, calls in asked[len(wrong) :] for turn in shop.turns_of(question, calls)]
    assert {prompt for prompt, _ in taught} <= set(read)
    tokenizer = load_tokenizer(model)
    for record, (question, _, calls) in zip(records[len(wrong) :], asked[len(wrong) :], strict=True):
        turns = list(shop.turns_of(question, calls))
        pending, counted = Sample(0, 0, 0, [1]), count_turns(record, 1.0)
        (sample,) = samples_of(record, pending, result=1.0, max_tokens=1024, counted=counted)
        text = tokenizer.decode_everything([*sample.prompt_ids, *sample.response_ids])
        assert text == "".join(turns[-1]) + "<|im_end|>"
        trained = [token for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
        assert trained == [token for _, said in turns for token in tokenizer.encode_target(said)]
        assert not any(turn["left_out"] or turn["not_followed"] for turn in record["turns"])


def test_the_careless_clerk_is_mostly_wrong_and_the_sets_are_apart(tmp_path):
    shop.make_data(tmp_path, num_train=2000, num_held_out=100)
    sets = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }
    assert (len(sets["train"]), len(sets["held_out"])) == (2000, 100)
    known = {(row["prompt"], str(row["metadata"])) for row in sets["train"]}
    assert not known & {(row["prompt"], str(row["metadata"])) for row in sets["held_out"]}
    rng = random.Random(1)
    well = 0
    for _ in range(2000):
        question, _, calls = shop.question_of(rng)
        right = [said for _, said in shop.turns_of(question, calls)]
        well += [row["response"] for row in shop.careless_turns(question, calls, rng)] == right
    assert 0.3 < well / 2000 < 0.42


def test_the_calculator_by_the_framework(tmp_path):
    model = tool_use.make_model(tmp_path / "model", seed=0)
    right = [{"prompt": "12*34", "label": "408"}, {"prompt": "50-61", "label": "-11"}]
    wrong = [{"prompt": "2*", "label": "4"}, {"prompt": "2*2*2*2*2*2*", "label": "64"}]

    def says(text: str) -> str:
        *_, result = text.rpartition(tool_use.TOOL)
        if tool_use.TOOL in text:
            return result.partition(tool_use.STOP)[0][:12]
        return tool_use.call_of(text.removeprefix(tool_use.USER).partition(tool_use.STOP)[0])

    rewards, records, read = played("recipes.tool_use.framework", right + wrong, model, says, tmp_path, 72)
    assert rewards == [1.0, 1.0, 0.0, 0.0] and any("error" in text for text in read)
    # With the last one's error the conversation is longer than the recipe's 72 tokens: its second turn is refused.
    assert [len(record["turns"]) for record in records] == [2, 2, 2, 1]
    assert all(len(record["trajectories"]) == 1 for record in records)


@pytest.mark.parametrize("agent", ["recipes.shop.agent", "recipes.tool_use.framework"])
def test_a_request_that_is_refused_for_another_reason_is_no_reward(agent, tmp_path):
    if agent.startswith("recipes.shop"):
        model, said = write_gateway_tokenizer(tmp_path / "model"), shop.call_text("add", {"a": 1, "b": 1})
        (model / "chat_template.jinja").write_text(shop.TEMPLATE)
    else:
        model, said = tool_use.make_model(tmp_path / "model", seed=0), tool_use.call_of("2*3")
    row = {"prompt": "2*3", "label": "6", "metadata": {"prices": {}}}
    rewards, [record], _ = played(agent, [row], model, lambda _: said, tmp_path, max_turns=1)
    assert rewards == ["BadRequestError: session_limit"] and len(record["turns"]) == 1
