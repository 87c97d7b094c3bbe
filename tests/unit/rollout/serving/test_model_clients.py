"""How long functions that ask models beside the policy are waited for."""

from __future__ import annotations

import asyncio

from rltool.rollout.serving import model_clients
from rltool.rollout.serving.model_clients import ModelClient, Models, ended_in_time


class Judge:
    """A model without engines until `back` is set; the functions wait for it."""

    def __init__(self, monkeypatch, *, patience: float) -> None:
        monkeypatch.setattr(model_clients, "LOOK_SECONDS", 0.01)
        self.back = asyncio.Event()
        self.models = Models(patience=patience)
        self.models.add(ModelClient("judge", None, None, None, None, serves=self.back.is_set))

    async def asked(self) -> float:
        await self.back.wait()
        return 1.0


def test_while_a_model_has_no_engine_that_serves_the_deadline_of_rewards_stands_still(monkeypatch):
    async def run():
        judge = Judge(monkeypatch, patience=60.0)
        task = asyncio.ensure_future(judge.asked())
        waiting = asyncio.ensure_future(ended_in_time([task], 0.1, judge.models))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        judge.back.set()
        assert await waiting is None and task.result() == 1.0

    asyncio.run(run())


def test_when_it_is_back_the_deadline_counts(monkeypatch):
    async def run():
        judge = Judge(monkeypatch, patience=60.0)
        judge.back.set()
        hangs = asyncio.ensure_future(asyncio.Event().wait())
        said = await ended_in_time([hangs], 0.05, judge.models)
        assert said == "no answer within deadlines.call = 0.05 s"
        hangs.cancel()

    asyncio.run(run())


def test_nobody_waits_for_a_model_for_longer_than_for_engines(monkeypatch):
    async def run():
        judge = Judge(monkeypatch, patience=0.05)
        task = asyncio.ensure_future(judge.asked())
        said = await ended_in_time([task], 60.0, judge.models)
        assert said == "no engine of model judge has served for deadlines.engines = 0.05 s"
        task.cancel()

    asyncio.run(run())


def test_without_models_it_is_a_plain_deadline():
    models = Models()

    async def run():
        async def quick():
            return 2.0

        hangs, done = asyncio.ensure_future(asyncio.Event().wait()), asyncio.ensure_future(quick())
        assert await ended_in_time([done], 60.0, models) is None
        assert await ended_in_time([hangs, done], 0.05, models) == "no answer within deadlines.call = 0.05 s"
        assert done.done() and not hangs.done()
        hangs.cancel()

    asyncio.run(run())
