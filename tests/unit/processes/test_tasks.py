"""Tasks beside others: their ends are heard, and they end with their owners."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from rltool.errors import EngineError
from rltool.processes.tasks import Background, all_of, beside


async def until(holds):
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0)


async def raises(error):
    raise error


async def for_ever():
    await asyncio.Event().wait()


def of(scenario):
    """scenario(background, failures) to its end."""
    failures = []

    async def run():
        background = Background(failures.append)
        await scenario(background, failures)
        await background.close()

    asyncio.run(run())
    return [str(failure) for failure in failures]


@pytest.mark.parametrize(
    ("error", "text"), [(KeyError("x"), "watch: KeyError: 'x'"), (EngineError("it is gone"), "watch: it is gone")]
)
def test_what_a_task_raises_is_heard_with_its_cause(error, text):
    async def scenario(background, failures):
        background.start(raises(error), "watch")
        await until(lambda: failures)
        assert failures[0].__cause__ is error

    assert of(scenario) == [text]


def test_a_task_that_ends_or_is_cancelled_by_its_owner_is_no_failure():
    async def scenario(background, failures):
        assert await background.start(asyncio.sleep(0, "done"), "short") == "done"
        task = background.start(for_ever(), "long")
        task.cancel()
        await asyncio.wait([task])
        background.start(for_ever(), "until close")

    assert of(scenario) == []


def test_what_an_awaited_task_raises_is_for_whoever_waits_for_it():
    async def scenario(background, failures):
        with pytest.raises(KeyError):
            await background.start(raises(KeyError("x")), "asked", awaited=True)

    assert of(scenario) == []


def test_a_task_that_was_to_run_until_close_is_missed_however_it_ends():
    async def scenario(background, failures):
        background.keep(asyncio.sleep(0), "ends")
        background.keep(raises(OSError("full")), "raises")
        background.keep(for_ever(), "is cancelled")
        await asyncio.sleep(0)
        next(task for task in asyncio.all_tasks() if task.get_name() == "is cancelled").cancel()
        await until(lambda: len(failures) == 3)
        background.keep(for_ever(), "until close")

    assert sorted(of(scenario)) == ["ends: ended", "is cancelled: was cancelled", "raises: OSError: full"]


def test_a_step_that_raises_is_heard_and_repeated():
    steps = []

    async def step():
        steps.append(None)
        if len(steps) < 3:
            raise KeyError(len(steps))

    async def scenario(background, failures):
        background.repeat(step, "look", seconds=0.0)
        await until(lambda: len(steps) > 4)

    assert of(scenario) == ["look: KeyError: 1", "look: KeyError: 2"]


def test_close_returns_when_every_task_has_ended():
    ended = []

    async def slow():
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.05)
            ended.append(None)

    async def scenario(background, failures):
        for _ in range(3):
            background.start(slow(), "slow")
        await asyncio.sleep(0)
        await background.close()
        assert len(ended) == 3

    assert of(scenario) == []


def test_without_an_owner_to_call_failures_are_logged(caplog):
    async def run():
        background = Background()
        background.start(raises(OSError("full")), "watch")
        await until(lambda: caplog.records)

    asyncio.run(run())
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "watch: OSError: full")
    ]


def test_tasks_beside_a_block_have_ended_when_it_has():
    async def run():
        with pytest.raises(KeyError):  # noqa: PT012  # its own last line
            async with beside(for_ever(), asyncio.sleep(0, "done")) as (endless, short):
                assert await short == "done"
                raise KeyError
        assert endless.cancelled()
        async with beside() as none:
            assert none == ()

    asyncio.run(run())


def test_one_that_ignores_its_cancellation_is_waited_for_no_longer_than_the_grace():
    async def run():
        free = asyncio.Event()

        async def stubborn():
            while not free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await free.wait()

        async with beside(stubborn(), grace=0.01) as (task,):
            await asyncio.sleep(0)
        assert not task.done()
        free.set()
        await task

    asyncio.run(run())


def test_of_all_the_first_failure_is_raised_when_the_others_have_ended():
    cleaned = []

    async def other():
        try:
            await for_ever()
        finally:
            cleaned.append(None)

    async def run():
        assert await all_of(asyncio.sleep(0, n) for n in range(3)) == [0, 1, 2]
        assert await all_of([]) == []
        with pytest.raises(KeyError):
            await all_of([other(), raises(KeyError("x")), other()])
        assert len(cleaned) == 2

    asyncio.run(run())


def test_a_task_that_cleans_up_after_its_cancellation_is_not_cancelled_again():
    cleaned = []

    async def careful():
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(None)

    async def run():
        waiting = asyncio.ensure_future(all_of([careful(), careful()]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(run())
    assert len(cleaned) == 2
