"""An agent framework that nobody here wrote, unmodified, through a gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rltool.agents.pool import FunctionAgents
from rltool.agents.recorded import samples_of
from rltool.agents.task import AgentTask
from rltool.rollout.sample import Sample
from tests.contract.fakes.scripted import ScriptedVllm
from tests.contract.gateway.running import Gateway
from tests.gateway_models import Words, gateway_tokenizer, write_gateway_tokenizer

FIRST = "I compute.\n<code>\nx = 6 * 7\nprint(x)\n</code>"
SECOND = "<code>\nfinal_answer(x)\n</code>"


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(gateway_tokenizer())


def episode(gateway: Gateway) -> tuple[float, dict[str, Any]]:
    session = gateway.open()
    row = {"index": 0, "prompt": "6 * 7?", "messages": None, "label": "42", "response": None, "metadata": {}}
    task = AgentTask(
        session["openai_base_url"], session["anthropic_base_url"], session["key"], session["model"], row, 120.0, 5
    )

    async def run() -> Any:
        agents = FunctionAgents("tests.smol_agents:run", workers=1)
        try:
            return await agents.run(task)
        finally:
            await agents.close()

    return asyncio.run(run()), gateway.record(session)


def test_smolagents_runs_unmodified_and_every_sampled_token_is_recorded_once(words, tmp_path):
    directory = write_gateway_tokenizer(tmp_path / "model")
    with ScriptedVllm(vocab_size=words.size, default=words.spell("lost")) as engine:
        engine.script.extend(words.spell(text) for text in (FIRST, SECOND))
        with Gateway(tmp_path, directory, [engine]) as gateway:
            reward, record = episode(gateway)
        asked = engine.asked()
    assert reward == 1.0
    samples = samples_of(record, Sample(0, 0, 0, [1]), result=reward, max_tokens=4096)
    sampled = [[t for t, m in zip(s.response_ids, s.response_mask, strict=True) if m] for s in samples]
    assert [words.text(ids) for ids in sampled] == [FIRST, SECOND], "its stop text ends them"
    # It writes "Calling tools: ..." behind what the model has said: another history, so a branch, which says so.
    first, second = record["turns"]
    assert (first["reason"], second["trajectory"]) == ("", 1) and second["reason"]
    assert record["trajectories"][1]["token_ids"][: len(asked[1])] == asked[1]
    assert "Calling tools:" in words.text(asked[1]) and "42" in words.text(asked[1])
    assert second["not_followed"] == []
