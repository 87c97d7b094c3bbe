"""Running reward functions over samples: in worker processes, or on the event loop."""

import asyncio
import os
import signal

import psutil
import pytest

from rltool.errors import RltoolError, UsageError
from rltool.rollout.rewards.pool import RewardFailure, RewardPool
from rltool.rollout.sample import Sample, SampleStatus

HERE = "tests.unit.rollout.rewards.reward_functions:"


def sample(index=0, **metadata):
    return Sample(
        group_id=0, index=index, prompt_index=4, prompt_ids=[1], label="nus", metadata=metadata, response_ids=[index],
        response_mask=[1], response_logprobs=[-1.0], status=SampleStatus.COMPLETED,
    )  # fmt: skip


def with_pool(scenario, function="plain", workers=1, timeout=30.0, **options):
    """The result of `await scenario(pool)`."""

    async def run():
        pool = RewardPool(HERE + function, workers=workers, timeout=timeout, **options)
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def score(samples, **options):
    return with_pool(lambda pool: pool.score(samples, [str(s.index) for s in samples]), **options)


def reasons(outcomes):
    """Rewards as they are, failures as their reasons."""
    return [outcome.reason if isinstance(outcome, RewardFailure) else outcome for outcome in outcomes]


@pytest.mark.parametrize("function", ["plain", "awaits"])
def test_rewards_come_in_the_order_of_the_samples(function):
    assert score([sample(i) for i in range(5)], function=function) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert score([], function=function) == []


def test_an_object_with_an_async_call_is_an_async_function():
    assert score([sample()], function="judge") == [3.0]


FAILURES = [
    ({"do": "raise"}, "KeyError: 'answer'"),
    ({"do": "stop_iteration"}, "StopIteration"),
    ({"do": "exit"}, "SystemExit: 3"),
    ({"do": "awaitable"}, "declare it `async def`"),
    ({"do": "return", "value": "float('nan')"}, "returned nan, expected a finite number"),
    ({"do": "return", "value": "float('-inf')"}, "returned -inf"),
    ({"do": "return", "value": "None"}, "returned NoneType, expected a number"),
    ({"do": "return", "value": "'0.5'"}, "returned text ('0.5'), expected a number"),
    ({"do": "return", "value": "b'1'"}, "returned text (b'1'), expected a number"),
    ({"do": "return", "value": "10**400"}, "returned int, expected a number"),
    ({"do": "return", "value": "True"}, None),
    ({"do": "return", "value": "__import__('numpy').float32(1)"}, None),
    ({"do": "return", "value": "__import__('torch').tensor(1.0)"}, None),
    ({"do": "die"}, "ended its process (killed by SIGKILL)"),
    ({"do": "leave"}, "ended its process (exit code 3)"),
    ({"do": "hang"}, "no answer within deadlines.call = 1 s"),
    ({"lock": (lambda: None)}, "cannot be sent to a reward worker"),
]


@pytest.mark.parametrize(("metadata", "reason"), FAILURES)
def test_a_failing_sample_fails_alone_and_the_others_of_its_group_are_scored(metadata, reason):
    timeout = 1.0 if metadata.get("do") == "hang" else 30.0
    first, failed, *others = reasons(score([sample(0), sample(1, **metadata), sample(2), sample(3)], timeout=timeout))
    assert (first, others) == (0.0, [2.0, 3.0])
    assert failed == 1.0 if reason is None else reason in failed


def test_several_samples_at_fault_in_one_group_fail_each_for_itself():
    samples = [sample(0, do="die"), sample(1, do="raise"), sample(2, do="die"), sample(3, do="leave"), sample(4)]
    found = reasons(score(samples))
    assert [type(value) for value in found] == [str, str, str, str, float]
    assert "SIGKILL" in found[0] and "KeyError" in found[1] and "SIGKILL" in found[2] and "exit code 3" in found[3]


def test_a_hanging_sample_holds_up_no_other_group():
    async def scenario(pool):
        stuck = asyncio.create_task(pool.score([sample(0, do="hang")], ["0"]))
        rest = await asyncio.gather(*(pool.score([sample(i)], [str(i)]) for i in range(5)))
        assert not stuck.done()
        return rest

    assert with_pool(scenario, workers=2) == [[float(i)] for i in range(5)]


def test_groups_are_scored_by_all_workers_at_once_and_each_by_one(tmp_path):
    async def scenario(pool):
        return await asyncio.gather(
            *(pool.score([sample(do="meet", dir=str(tmp_path), parties=3)], ["0"]) for _ in range(3))
        )

    assert with_pool(scenario, workers=3) == [[3.0]] * 3
    assert len(set(score([sample(i, do="pid") for i in range(4)], workers=3))) == 1


def test_a_worker_is_used_again_and_one_that_died_in_between_is_replaced_without_blame():
    async def scenario(pool):
        first, again = [(await pool.score([sample(do="pid")], ["0"]))[0] for _ in range(2)]
        assert first == again
        os.kill(int(first), signal.SIGKILL)
        while psutil.pid_exists(int(first)) and psutil.Process(int(first)).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.001)
        (other,) = await pool.score([sample(do="pid")], ["0"])
        return first, other

    first, other = with_pool(scenario)
    assert first != other and isinstance(other, float)


def test_a_killed_worker_takes_along_what_its_function_started(tmp_path):
    (outcome,) = score([sample(do="spawn_and_hang", file=str(tmp_path / "pid"))], timeout=4.0)
    assert outcome == RewardFailure("no answer within deadlines.call = 4 s")
    child = int((tmp_path / "pid").read_text())
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=60)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_cancelled_score_frees_its_worker_for_the_next():
    async def scenario(pool):
        stuck = asyncio.create_task(pool.score([sample(do="hang")], ["0"]))
        await pool.ready()
        await asyncio.sleep(0.05)
        stuck.cancel()
        return await pool.score([sample(7)], ["7"])

    assert with_pool(scenario) == [7.0]


def test_what_a_function_prints_comes_out_where_the_parents_output_goes(capfd):
    assert score([sample(i, do="print") for i in range(3)]) == [0.0, 1.0, 2.0]
    printed = capfd.readouterr().out
    assert "printed by the reward 2\n" in printed and printed.count("printed by its child\n") == 3


def test_changes_to_a_sample_are_a_failure_where_they_are_looked_for():
    for function in ("plain", "awaits"):
        assert reasons(score([sample(do="change")], function=function, refuse_changes=True)) == [
            "ValueError: the function changed the sample"
        ]
        assert reasons(score([sample(do="change")], function=function)) == [0.0]


def test_async_samples_run_all_side_by_side_whatever_the_number_of_workers():
    here = []
    assert score([sample(i, do="together", here=here, parties=40) for i in range(40)], function="awaits") == [
        float(i) for i in range(40)
    ]


def test_an_async_function_that_fails_or_hangs_fails_its_sample_alone():
    samples = [sample(0), sample(1, do="raise"), sample(2, do="hang"), sample(3), sample(4, do="exit")]
    assert reasons(score(samples, function="awaits", timeout=1.0)) == [
        0.0,
        "KeyError: 'answer'",
        "no answer within deadlines.call = 1 s",
        3.0,
        "RuntimeError: SystemExit: 3",
    ]


def test_an_async_function_that_ignores_its_cancellation_is_not_waited_for():
    end = asyncio.Event()

    async def scenario(pool):
        outcomes = await pool.score([sample(0, do="ignore_cancellation", end=end)], ["0"])
        end.set()
        return outcomes

    assert reasons(with_pool(scenario, function="awaits", timeout=0.1)) == ["no answer within deadlines.call = 0.1 s"]


def test_the_workers_are_gone_after_close_and_a_score_in_progress_says_so():
    async def scenario(pool):
        (pid,) = await pool.score([sample(do="pid")], ["0"])
        stuck = asyncio.create_task(pool.score([sample(do="hang")], ["0"]))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(RltoolError, match="was closed|is closed"):
            await stuck
        with pytest.raises(RltoolError, match="is closed"):
            await pool.score([sample()], ["0"])
        return int(pid)

    assert not psutil.pid_exists(with_pool(scenario))


def test_the_workers_end_with_their_parent():
    import subprocess
    import sys

    code = (
        "import asyncio, os; from rltool.rollout.rewards.pool import RewardPool\n"
        f"pool = RewardPool({HERE + 'plain'!r}, workers=2, timeout=9)\n"
        "asyncio.run(pool.ready())\n"
        "print(*[worker.process.pid for worker in pool._workers.workers], flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.split() if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert len(parent.stdout.split()) == 2 and not alive


def test_a_function_that_cannot_be_imported_is_a_usage_error_before_anything_starts():
    with pytest.raises(UsageError, match="reward.function"):
        RewardPool(HERE + "absent", workers=1, timeout=1.0)


def test_a_module_that_fails_in_a_worker_alone_is_an_error_with_its_text(tmp_path, monkeypatch):
    (tmp_path / "once_module.py").write_text(
        "import pathlib\n"
        "flag = pathlib.Path(__file__).with_suffix('.seen')\n"
        "if flag.exists(): raise OSError('no more')\n"
        "flag.touch()\n"
        "def f(sample, text): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario():
        pool = RewardPool("once_module:f", workers=1, timeout=5.0)
        try:
            with pytest.raises(RltoolError, match="OSError: no more"):
                await pool.score([sample()], ["0"])
        finally:
            await pool.close()

    asyncio.run(scenario())
