"""Evaluations while training goes on (eval.blocking = false), and those of one's own (eval.function), in the rollout
service against fake engines."""

from __future__ import annotations

import asyncio

import pytest

from rltool.errors import RltoolError
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.test_rollout_service import (  # noqa: F401  # fixtures
    data_file,
    generated,
    model_dir,
    serve,
    settings,
    spellers,
    stack,
    there,
    tokenizer,
    train,
    until,
)


def test_it_names_the_versions_that_its_tokens_came_from_and_is_in_no_checkpoint(serve, settings, stack):  # noqa: F811
    engine = stack.enter_context(FakeVllm())
    engine.vocab_size = 64

    async def run():
        async with serve(settings(), [engine]) as service:
            await train(service, 1)
            before = await service.evaluate()
            engine.seconds = 1.0
            evaluation = asyncio.create_task(service.evaluate())
            await until(lambda: engine.batch.running > 0, "it has its first tokens")
            there(engine, engine.batch.freeze)
            engine.seconds = 0.0
            state = await service.state_dict(1)
            [rollout] = await train(service, 2, first=1)
            return before.metrics, (await evaluation).metrics, state, rollout

    before, beside, state, rollout = asyncio.run(run())
    assert (before["eval/version_min"], before["eval/version_max"]) == (0, 0)
    assert (beside["eval/version_min"], beside["eval/version_max"]) == (0, 1)
    assert state.state["groups"] == [] and state.state["issued"] == 4
    assert rollout.metrics["rollout/samples"] == 16 and beside["eval/words/samples"] == 18


def test_rollouts_and_an_evaluation_that_wait_for_slots_take_turns(serve, settings, stack):  # noqa: F811
    engine = stack.enter_context(FakeVllm())
    engine.vocab_size = 64
    config = settings(rollout={"requests_per_engine": 1}, eval={"sampling": {"max_response_tokens": 7}})

    async def run():
        async with serve(config, [engine]) as service:
            await service.sync_weights(0)
            there(engine, engine.batch.freeze)
            engine.requests.clear()
            evaluation = asyncio.create_task(service.evaluate())
            await until(lambda: len(generated(engine)) == 1, "its first request is there")
            batch = asyncio.create_task(service.next_batch(0))
            await until(lambda: service.collector.ledger.counts()["running"] == 4, "groups have started")
            await until(lambda: len(service._plane._waiting) == 12, "all others wait")
            there(engine, engine.batch.resume)
            await asyncio.gather(evaluation, batch)

    asyncio.run(run())
    kinds = "".join("e" if body["sampling_params"]["max_tokens"] == 7 else "r" for body in generated(engine))
    assert kinds == "ee" + "re" * 4 + "eee"


def test_an_evaluation_of_ones_own_is_recorded_beside_the_built_in_numbers(serve, settings, spellers):  # noqa: F811
    config = settings(
        eval={"function": "examples.evaluation:majority", "samples_per_prompt": 3},
        reward={"function": "rltool.rollout.rewards.shipped:exact_match"},
    )

    async def run():
        async with serve(config, spellers) as service:
            await service.sync_weights(0)
            return await service.evaluate()

    found = asyncio.run(run())
    right = [sum(sample.reward for sample in found.samples["words"][i : i + 3]) for i in range(0, 27, 3)]
    assert found.metrics["eval/words/majority"] == sum(number >= 2 for number in right) / 9
    assert found.metrics["eval/words/accuracy"] == pytest.approx(sum(right) / 27)
    assert found.metrics["eval/version_max"] == 0


def test_an_evaluation_of_ones_own_that_fails_says_whose_it_is(serve, settings, spellers):  # noqa: F811
    async def run():
        async with serve(settings(eval={"function": "tests.unit.project.test_examples:raises"}), spellers) as service:
            await service.sync_weights(0)
            with pytest.raises(RltoolError, match="eval.function failed on set 'words': KeyError"):
                await service.evaluate()

    asyncio.run(run())
