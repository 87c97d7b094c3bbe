"""The collector over simulated work: what starts, what makes a batch, what is counted; no group is ever lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rltool.algorithms.batch import fetched
from rltool.engines.types import Completion, VersionSpan
from rltool.errors import EngineError, EngineRejected, RltoolError, TrainingStopped
from rltool.processes.tasks import TaskFailed
from rltool.rollout import collector as collector_module
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.collector import CollectionInterrupted, Collector, CollectorConfig, GroupFailed
from rltool.rollout.data import Prompt, PromptSource
from rltool.rollout.groups import GroupState
from rltool.rollout.rewards.pool import RewardFailure
from rltool.rollout.rewards.scoring import FailureLimit, Scorer
from rltool.rollout.sample import SampleStatus
from rltool.rollout.serving.data_plane import PoisonousRequest
from rltool.rollout.snapshot import books, encoded, kept_samples, restore
from tests.declared import Store, declare_surprise, table_of_its_own

RUN = "a" * 32
SETTINGS = {"samples_per_prompt": 2, "run_seed": 7, "group_deadline": 5.0, "batch_deadline": 10.0, "max_filtered": 1000}


class Versions:
    published: int | None = None


@dataclass
class Work:
    """Generates two tokens a sample in two pieces, so that a version may change in between. Knobs: `delay(group)` in
    seconds, `fail(group)`: an error to raise, `reason(group)`: why it is dropped, `reward(sample)`."""

    versions: Versions
    delay: callable = lambda group: 0.0
    fail: callable = lambda group: None
    reason: callable = lambda group: None
    reward: callable = lambda sample: float(sample.index)
    partial: bool = True
    bring: dict = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    generated: Counter = field(default_factory=Counter)
    aborting: set[int] = field(default_factory=set)

    async def generate(self, group, interrupted):
        self.generated[group.id] += 1
        self.aborting.discard(group.id)  # an abort reaches what an engine has then, not what comes later
        for piece in range(2):
            await asyncio.sleep(self.delay(group) / 2)
            if (error := self.fail(group)) is not None:
                raise error
            stop = interrupted() or group.id in self.aborting
            for sample in group.samples:
                if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
                    last = len(sample.response_ids) == 1 or (piece == 1 and not stop)
                    version = VersionSpan(f"{RUN}:0:{self.versions.published}", 0, 1)
                    reason = "stop" if last else "abort"
                    sample.append_response_tokens(Completion((5,), (-1.0,), reason, (version,), columns=self.bring))
            if stop:
                self.aborting.discard(group.id)
                return

    async def finish(self, group):
        for sample in group.samples:
            sample.reward = self.reward(sample)
        return self.reason(group)

    async def abort(self, groups):
        self.aborted += groups
        self.aborting.update(groups)

    def keeps_partial_groups(self):
        return self.partial


def make(work, policy, *, prompts=50, on_event=lambda: None, **settings):
    source = PromptSource([Prompt(i, (1, 2), f"p{i}") for i in range(prompts)], seed=1)
    return Collector(
        source, policy, work, work.versions, CollectorConfig(**{**SETTINGS, **settings}), on_event=on_event
    )


def publish(collector, step):
    collector.versions.published = step
    collector.weights_published()


async def batches(collector, steps, *, first=0):
    found = []
    for step in range(first, first + steps):
        publish(collector, step)
        found.append(await collector.next(step))
    return found


def snapshot(collector, done, *, keeps_partial):
    return encoded(*books(collector, done, keeps_partial=keeps_partial), run_seed=collector.config.run_seed)


def taken_up(collector, kept):
    """Restored from a snapshot, its files on disk as in a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in kept.files.items():
            (Path(directory) / name).write_bytes(content)
        restore(collector, kept.state, kept_samples(Path(directory)))


def numbers(collected):
    return [[group.id for group in batch.groups] for batch in collected]


def test_synchronous_batches_are_the_groups_in_order_and_none_starts_before_it_is_asked_for():
    async def run():
        collector = make(Work(Versions(), delay=lambda g: 0.01 * (5 - g.id % 5)), AdmissionPolicy(batch=5))
        publish(collector, 0)
        await asyncio.sleep(0.02)
        assert collector.ledger.issued == 0
        found = await batches(collector, 3)
        assert numbers(found) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
        assert collector.ledger.counts() == {
            "issued": 15,
            "running": 0,
            "partial": 0,
            "ready": 0,
            "in_hand": 5,
            "trained": 10,
            "dropped": 0,
        }

    asyncio.run(run())


def test_with_staleness_the_next_batch_is_generated_while_the_trainer_is_busy():
    async def run():
        collector = make(Work(Versions(), delay=lambda g: 0.01), AdmissionPolicy(batch=4, max_staleness=1))
        publish(collector, 0)
        await collector.next(0)
        await asyncio.sleep(0.05)  # the trainer trains, and nobody asks for anything
        assert [g.id for g in collector.ledger.groups(GroupState.READY)] == [4, 5, 6, 7]
        assert collector.ledger.issued == 8, "no more than the bound allows"
        await collector.interrupt()

    asyncio.run(run())


def test_a_filtered_group_is_counted_and_another_prompt_takes_its_place():
    async def run():
        work = Work(Versions(), reason=lambda g: "equal_rewards" if g.id in (1, 2) else None)
        [batch] = await batches(collector := make(work, AdmissionPolicy(batch=4)), 1)
        assert [g.id for g in batch.groups] == [0, 3, 4, 5]
        assert batch.dropped == {"equal_rewards": 2} and collector.ledger.counts()["dropped"] == 2
        assert batch.filtered_reward == sum(range(len(batch.groups[0].samples))) / len(batch.groups[0].samples)

    asyncio.run(run())


def test_filtering_without_end_stops_the_run():
    async def run():
        work = Work(Versions(), reason=lambda g: "equal_rewards")
        with pytest.raises(TrainingStopped, match=r"equal_rewards.*max_filtered_batches\); the mean reward .* is 0.5:"):
            await batches(make(work, AdmissionPolicy(batch=4), max_filtered=12), 1)

    asyncio.run(run())


def test_a_run_that_is_stopped_says_how_many_groups_were_always_right_and_how_many_always_wrong():
    async def run():
        def reward(sample):  # 8 groups of 12 that are scored are right, 1 is mixed
            if sample.group_id >= 12:
                return None
            return float(sample.group_id < 8 or (sample.group_id == 8 and sample.index > 0))

        def reason(group):
            return "equal_rewards" if group.id < 12 else "reward_failed"

        work = Work(Versions(), reason=reason, reward=reward)
        said = r"is 0\.708; 67% of them got 1 for every sample; 25% of them got 0 for every sample: are"
        with pytest.raises(TrainingStopped, match=said):
            await batches(make(work, AdmissionPolicy(batch=4), max_filtered=16), 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EngineRejected("too long", 400), "rejected"), (PoisonousRequest("three engines"), "poisonous")],
    ids=["rejected", "poisonous"],
)
def test_a_group_that_engines_cannot_generate_is_dropped_and_another_prompt_takes_its_place(error, reason):
    async def run():
        work = Work(Versions(), fail=lambda g: error if g.id in (1, 6) else None)
        collector = make(work, AdmissionPolicy(batch=4), max_failed=1)
        first, second = await batches(collector, 2)
        assert numbers([first, second]) == [[0, 2, 3, 4], [5, 7, 8, 9]]
        assert first.dropped == second.dropped == {reason: 1}, "the limit holds for each batch"
        collector.ledger.check()

    asyncio.run(run())


def test_too_many_groups_that_engines_cannot_generate_stop_the_run():
    async def run():
        work = Work(Versions(), fail=lambda g: EngineRejected("too long", 400) if g.id in (1, 2) else None)
        collector = make(work, AdmissionPolicy(batch=4), max_failed=1)
        with pytest.raises(TrainingStopped, match=r"failed on 2 groups.*max_failed_fraction.*too long"):
            await batches(collector, 1)
        counts = collector.ledger.counts()
        assert counts["dropped"] == 1 and counts["running"] == 0, "the one that ended the run is kept"
        collector.ledger.check()

    asyncio.run(run())


def test_an_error_from_elsewhere_ends_the_wait_for_a_batch():
    async def run():
        collector = make(Work(Versions(), delay=lambda g: 3.0), AdmissionPolicy(batch=4))
        publish(collector, 0)
        waiting = asyncio.create_task(collector.next(0))
        await asyncio.sleep(0)
        collector.fail(RltoolError("no engines"))
        with pytest.raises(RltoolError, match="no engines"):
            await waiting
        assert collector.ledger.counts()["partial"] == 4

    asyncio.run(run())


def test_a_failure_is_raised_once_all_tasks_have_ended_and_no_group_is_lost():
    async def run():
        work = Work(Versions(), delay=lambda g: 0.01, fail=lambda g: EngineError("gone") if g.id == 2 else None)
        collector = make(work, AdmissionPolicy(batch=4))
        with pytest.raises(EngineError, match="gone"):
            await batches(collector, 1)
        collector.ledger.check()
        assert collector.ledger.counts()["partial"] + collector.ledger.counts()["ready"] == 4

    asyncio.run(run())


def test_a_group_that_takes_too_long_names_its_deadline():
    async def run():
        work = Work(Versions(), delay=lambda g: 60.0 if g.id == 1 else 0.0)
        with pytest.raises(RltoolError, match=r"group 1 was not generated within deadlines.group = 0.05 s"):
            await batches(make(work, AdmissionPolicy(batch=2), group_deadline=0.05), 1)

    asyncio.run(run())


def test_a_batch_that_does_not_come_names_its_deadline_and_what_there_is():
    async def run():
        work = Work(Versions(), delay=lambda g: 60.0)
        with pytest.raises(RltoolError, match=r"deadlines.step = 0.05 s.*'running': 2"):
            await batches(make(work, AdmissionPolicy(batch=2), batch_deadline=0.05), 1)

    asyncio.run(run())


def test_an_interrupt_ends_the_wait_at_once_and_keeps_every_group():
    async def run():
        collector = make(Work(Versions(), delay=lambda g: 60.0), AdmissionPolicy(batch=3))
        publish(collector, 0)
        waiting = asyncio.create_task(collector.next(0))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(collector.interrupt(), 30.0)
        with pytest.raises(CollectionInterrupted):
            await waiting
        assert collector.ledger.counts()["partial"] == 3

    asyncio.run(run())


def test_oversampling_takes_the_first_that_are_ready_and_drops_the_rest():
    async def run():
        work = Work(Versions(), delay=lambda g: 60.0 if g.id in (0, 2) else 0.0)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=2))
        [batch] = await batches(collector, 1)
        await asyncio.sleep(0.01)
        assert [g.id for g in batch.groups] == [1, 3] and batch.dropped == {"surplus": 2}
        assert sorted(work.aborted) == [0, 2], "their requests are not left running"
        collector.ledger.check()

    asyncio.run(run())


def test_partial_groups_keep_their_tokens_and_go_on_under_the_next_weights():
    async def run():
        work = Work(Versions(), delay=lambda g: 0.2 if g.id == 0 and not g.samples[0].response_ids else 0.0)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=1.5, max_staleness=1, partial_rollout=True))
        [first] = await batches(collector, 1)
        while not collector.ledger.groups(GroupState.PARTIAL):
            await asyncio.sleep(0.01)
        [second] = await batches(collector, 1, first=1)
        assert [g.id for g in first.groups] == [1, 2] and first.interrupted == 1
        found = {g.id: g for g in second.groups}[0]
        versions = [[span.version[-1] for span in sample.versions] for sample in found.samples]
        assert versions == [["0", "1"], ["0", "1"]], "one token of each version"
        await collector.interrupt()

    asyncio.run(run())


@dataclass
class Judged(Work):
    """Scoring group 0 takes long. until_put_aside: so does generating it, which then comes to its end nevertheless."""

    until_put_aside: bool = False
    begun: Counter = field(default_factory=Counter)

    async def generate(self, group, interrupted):
        while self.until_put_aside and group.id == 0 and not interrupted():
            await asyncio.sleep(0.001)
        await super().generate(group, lambda: False)

    async def abort(self, groups):
        self.aborted += groups

    async def finish(self, group):
        self.begun[group.id] += 1
        await asyncio.sleep(0.3 if group.id == 0 else 0.0)
        return await super().finish(group)


@pytest.mark.parametrize("until_put_aside", [False, True])
def test_a_group_that_is_only_being_scored_is_left_to_finish(monkeypatch, until_put_aside):
    monkeypatch.setattr(collector_module, "INTERRUPT_SECONDS", 0.05)

    async def run():
        work = Judged(Versions(), delay=lambda g: 0.02 if g.id else 0.0, until_put_aside=until_put_aside)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=1.5, max_staleness=4, partial_rollout=True))
        found = []
        for step in range(5):
            found += await batches(collector, 1, first=step)
            await asyncio.sleep(0.1)  # the trainer
        trained = [group.id for batch in found for group in batch.groups]
        assert 0 not in trained[:2] and 0 in trained
        assert work.begun[0] == work.generated[0] == 1, "neither is done again"
        assert work.aborted.count(0) == int(until_put_aside)
        await collector.interrupt()

    asyncio.run(run())


def test_episodes_that_are_cut_off_between_two_turns_start_over(monkeypatch):
    """Their samples are COMPLETED, as the engine's last reply was, and wait for an environment."""
    monkeypatch.setattr(collector_module, "INTERRUPT_SECONDS", 0.02)

    class TwoTurns(Work):
        async def generate(self, group, interrupted):
            if all(sample.status is SampleStatus.COMPLETED for sample in group.samples):
                return  # as environments.Episodes: nothing is left to do
            await super().generate(group, lambda: False)
            if group.id == 0 and self.generated[0] == 1:
                await asyncio.sleep(60.0)  # a step of the environment
            for sample in group.samples:
                sample.append_response_tokens(Completion((6,), (-1.0,), "stop", (VersionSpan(f"{RUN}:0:1", 0, 1),)))

    async def run():
        work = TwoTurns(Versions(), partial=False)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=1.5, max_staleness=2, partial_rollout=True))
        found = []
        for step in range(3):
            found += await batches(collector, 1, first=step)
            await asyncio.sleep(0.05)
        samples = [sample for batch in found for group in batch.groups if group.id == 0 for sample in group.samples]
        assert [sample.response_ids for sample in samples] == [[5, 5, 6], [5, 5, 6]]
        await collector.interrupt()

    asyncio.run(run())


def test_a_group_that_goes_on_is_not_cut_off_by_an_abort_that_an_engine_answers_late(monkeypatch):
    monkeypatch.setattr(collector_module, "INTERRUPT_SECONDS", 0.05)
    cancelled = []

    class Slow(Work):
        async def generate(self, group, interrupted):
            try:
                await super().generate(group, interrupted)
            except asyncio.CancelledError:
                cancelled.append(group.id)
                raise

        async def abort(self, groups):
            await super().abort(groups)
            await asyncio.sleep(0.1)

    async def run():
        work = Slow(Versions(), delay=lambda g: (0.04 if work.generated[0] == 1 else 0.4) if g.id == 0 else 0.0)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=1.5, max_staleness=1, partial_rollout=True))
        [first] = await batches(collector, 1)
        while not collector.ledger.groups(GroupState.PARTIAL):
            await asyncio.sleep(0.005)
        [second] = await batches(collector, 1, first=1)
        assert [[g.id for g in batch.groups] for batch in (first, second)] == [[1, 2], [0, 3]]
        assert work.generated[0] == 2 and not cancelled
        await collector.interrupt()

    asyncio.run(run())


def test_a_ready_group_that_has_become_too_old_is_sampled_again_and_counted():
    async def run():
        work = Work(Versions(), delay=lambda g: 0.02 if g.id == 0 else 0.0)
        collector = make(work, AdmissionPolicy(batch=2, max_staleness=1, on_stale="resample"))
        for step in range(4):
            publish(collector, step)
            batch = await collector.next(step)
            for group in batch.groups:
                assert step - group.oldest_version <= 1
        await collector.interrupt()
        collector.ledger.check()

    asyncio.run(run())


@pytest.mark.parametrize("policy", [AdmissionPolicy(batch=3), AdmissionPolicy(batch=3, max_staleness=1)])
def test_a_batch_in_hand_is_kept_until_its_step_is_done_and_not_after_it(policy):
    async def run():
        collector = make(Work(Versions()), policy)
        publish(collector, 0)
        batch = await collector.next(0)
        await collector.interrupt()  # the books hold still
        for done, expected in ((0, [0, 1, 2]), (1, [])):
            resumed = make(Work(Versions()), policy)
            taken_up(resumed, snapshot(collector, done, keeps_partial=True))
            ready = resumed.ledger.groups(GroupState.READY)
            assert [g.id for g in ready if g.id < 3] == expected
            assert resumed.ledger.trained == 3 - len(expected)
        assert numbers([batch]) == [[0, 1, 2]]

    asyncio.run(run())


@pytest.mark.parametrize("wide", [False, True])
def test_a_checkpointed_buffer_keeps_a_declared_field_of_samples_that_go_on_growing(wide):
    async def run():
        collector = make(Work(Versions(), bring={"surprise": array("f", [0.5])}), policy := AdmissionPolicy(batch=3))
        publish(collector, 0)
        [one, *_] = (await collector.next(0)).groups[0].samples
        kept = snapshot(collector, 0, keeps_partial=True)
        resumed = make(Work(Versions()), policy)
        taken_up(resumed, kept)
        samples = [s for group in resumed.ledger.groups(GroupState.READY) for s in group.samples]
        assert samples and all(s.surprise == array("f", [0.5, 0.5]) for s in samples)
        store = Store()
        [batch] = fetched([samples_to_batch([replace(s, reward=1.0) for s in samples], put=store.put)], store.get)
        assert bool(store.asked) == wide and set(batch.surprise.tolist()) == {0.0, 0.5}
        _, copies = books(collector, 0, keeps_partial=True)
        one.append_environment_tokens([1])
        assert len(one.surprise) == 3 and all(len(copy.surprise) == 2 for copy in copies)

    with table_of_its_own():
        declare_surprise(wide=wide)
        asyncio.run(run())


class Rewards:
    def __init__(self, broken):
        self.broken = broken

    async def score(self, samples, texts):
        return [RewardFailure("HTTP 503") if self.broken else 1.0 for _ in samples]


@dataclass
class ScoredWork(Work):
    broken: bool = False

    def __post_init__(self):
        self.scorer = Scorer(Rewards(self.broken), lambda ids: "", may_fail=FailureLimit(0.1, 8))

    async def finish(self, group):
        return await self.scorer.finish(group.samples)


def test_a_run_that_failing_rewards_have_stopped_goes_on_where_it_was_once_they_work():
    async def run():
        stopped = make(ScoredWork(Versions(), broken=True), policy := AdmissionPolicy(batch=4))
        with pytest.raises(TrainingStopped, match="HTTP 503"):
            await batches(stopped, 1)
        resumed = make(work := ScoredWork(Versions()), policy)
        taken_up(resumed, snapshot(stopped, 0, keeps_partial=True))
        kept = {g.id: [s.response_ids for s in g.samples] for g in resumed.ledger.groups() if g.samples[0].response_ids}
        [batch] = await batches(resumed, 1)
        assert kept and kept.items() <= {g.id: [s.response_ids for s in g.samples] for g in batch.groups}.items()
        assert [g.id for g in batch.groups] == [0, 1, 2, 3] and work.scorer.take_stats().failed == 0

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "policy",
    [
        AdmissionPolicy(batch=4),
        AdmissionPolicy(batch=4, max_staleness=1),
        AdmissionPolicy(batch=4, max_staleness=3),
        AdmissionPolicy(batch=4, oversampling=1.5),
        AdmissionPolicy(batch=4, oversampling=1.5, max_staleness=2, partial_rollout=True),
        AdmissionPolicy(batch=4, max_staleness=2, on_stale="resample"),
    ],
    ids=lambda p: f"staleness {p.max_staleness}, oversampling {p.oversampling:g}, {p.on_stale}",
)
def test_over_hundreds_of_random_steps_no_group_is_lost_or_trained_twice_and_no_token_is_too_old(policy, seed):
    """With injected filters, failures that a resume follows, and generation of random length.

    The books are checked after every event.
    """
    rng = random.Random(seed)
    trained: Counter[int] = Counter()

    async def attempt(kept, first, steps, *, fails_at):
        versions = Versions()
        pieces = itertools.count()
        work = Work(
            versions, delay=lambda g: rng.choice([0.0, 0.0, 0.001, 0.004]),
            reason=lambda g: "bad" if rng.random() < 0.1 else None,
            fail=lambda g: EngineError("lost") if next(pieces) == fails_at else None,
        )  # fmt: skip
        collector = make(work, policy, on_event=lambda: collector.ledger.check())
        if kept is not None:
            taken_up(collector, kept)
        kept = snapshot(collector, first, keeps_partial=True)
        step = first
        try:
            for step in range(first, steps):
                publish(collector, step)
                batch = await collector.next(step)
                assert len(batch.groups) == policy.batch
                for group in batch.groups:
                    assert step - group.oldest_version <= policy.max_staleness
                    assert all(len(sample.response_ids) == 2 for sample in group.samples)
                await asyncio.sleep(rng.choice([0.0, 0.002]))
                trained.update(group.id for group in batch.groups)
                kept = snapshot(collector, step + 1, keeps_partial=True)
        except EngineError:
            return kept, step, collector
        finally:
            await collector.interrupt()
            collector.ledger.check()
        return kept, steps, collector

    kept, step = None, 0
    for fails_at in (60, 150, None):  # pieces of work, in whatever order groups come to them
        assert step < 60, "the failure before was injected"
        kept, step, collector = asyncio.run(attempt(kept, step, 60, fails_at=fails_at))
    assert step == 60
    counts = collector.ledger.counts()
    assert set(trained.values()) == {1}, "no group is trained twice"
    assert len(trained) == 60 * policy.batch
    lost = set(range(collector.ledger.issued)) - set(trained) - {g.id for g in collector.ledger.groups()}
    assert len(lost) == counts["dropped"], "and none is lost but those that were dropped, and counted"


def test_groups_that_are_put_aside_end_though_aborting_them_raises_and_the_run_names_it():
    class Breaks(Work):
        async def abort(self, groups):
            raise KeyError("http://e:1")

    async def run():
        work = Breaks(Versions(), delay=lambda g: 60.0 if g.id == 0 else 0.0)
        collector = make(work, AdmissionPolicy(batch=2, oversampling=1.5, max_staleness=1, partial_rollout=True))
        publish(collector, 0)
        await collector.next(0)
        async with asyncio.timeout(30.0):
            while collector._tasks:
                await asyncio.sleep(0)
        publish(collector, 1)
        with pytest.raises(TaskFailed, match="interrupting groups: KeyError: 'http://e:1'"):
            await collector.next(1)

    asyncio.run(run())


def test_a_time_out_of_a_hooks_own_is_not_taken_for_the_deadline_of_groups():
    async def run():
        work = Work(Versions())

        async def finish(group):
            raise TimeoutError("the reward's own socket")

        work.finish = finish
        collector = make(work, AdmissionPolicy(batch=2))
        publish(collector, 0)
        with pytest.raises(GroupFailed, match="TimeoutError: the reward's own socket"):
            await collector.next(0)

    asyncio.run(run())


def test_a_group_that_is_dropped_before_its_task_has_begun_leaves_nothing_behind():
    async def run():
        collector = make(Work(Versions()), AdmissionPolicy(batch=2))
        group = collector.ledger.issue(Prompt(0, (1, 2), "p0"), samples_per_prompt=2, run_seed=7)
        collector._run_task(group)
        collector._drop_surplus([group])
        async with asyncio.timeout(30.0):
            while collector._tasks:
                await asyncio.sleep(0)
        assert collector.ledger.dropped == {"surplus": 1}

    asyncio.run(run())


def test_prompts_that_could_not_be_read_end_the_wait_for_a_batch():
    class Breaks:
        def __init__(self):
            self.calls = 0

        def next(self, count):
            self.calls += 1
            if self.calls == 2:
                raise OSError("the disk has gone")
            return [Prompt(i, (1, 2), f"p{i}") for i in range(count)]

    async def run():
        work = Work(Versions(), reason=lambda g: "boring")
        collector = make(work, AdmissionPolicy(batch=2))
        collector.source = Breaks()
        publish(collector, 0)
        async with asyncio.timeout(30.0):
            with pytest.raises(GroupFailed, match="the disk has gone"):
                await collector.next(0)

    asyncio.run(run())
