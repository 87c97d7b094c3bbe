"""What users' functions raise ends a run in order: an error of ours, with the setting and the place in it."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from rltool.algorithms.contracts import example_batch
from rltool.algorithms.shaping import with_advantages
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.data import DataConfig
from rltool.config.own_functions import FunctionFailed, named, named_async
from rltool.config.rollout import RolloutConfig
from rltool.engines.types import Completion, SamplingParams, VersionSpan
from rltool.engines.weight_version import Lineage
from rltool.errors import ContractViolation, EngineError, RltoolError
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.collector import CollectionInterrupted
from rltool.rollout.contracts import example_group
from rltool.rollout.data.own import load_own_source
from rltool.rollout.generate import GenerateContext, fill_group, load_generate
from rltool.rollout.groups import GroupState
from rltool.rollout.own_batch import SampleJudge, changed_batch, load_batch_hook
from rltool.rollout.own_rollout import OwnCollector
from rltool.rollout.rewards.scoring import Scorer, load_filter, load_hook
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.versions import VersionBook
from rltool.training.manager.actor import ManagerFailed, failing_in_order
from tests.unit.rollout.test_collector import (
    RUN,
    Versions,
    Work,
    batches,
    make,
    numbers,
    publish,
    snapshot,
    taken_up,
)

HERE = "tests.unit.rollout.test_own_functions:"


class OneEach:
    async def score(self, samples, texts):
        return [1.0 for _ in samples]


class Judge:
    """A callable object."""

    def __call__(self, text):
        return re.compile(text)


def reads_a_key(samples):
    return {}["difficulty"]


def leaves(group):
    raise SystemExit("give up")


async def forgets(group, context):
    await asyncio.sleep(0)
    raise TimeoutError("the sandbox")


def is_plain(group, context):
    pass


async def asks_engines(group, context):
    await context.generate(None)


async def fills_wrongly(group, context):
    for sample in group:
        sample.response_ids, sample.status = [5, 6], SampleStatus.COMPLETED


def advantage(batch, algorithm):
    return batch.metadata["difficulty"]


class Source:
    def next(self, count):
        return [][count]

    def state_dict(self):
        raise OSError("the queue has gone")

    def load_state_dict(self, state):
        pass


def source(config, seed):
    return Source()


def pending():
    return [Sample(group_id=0, index=0, prompt_index=4, prompt_ids=[1, 2], prompt_text="p", seed=1)]


def context():
    async def no_engine(request):
        raise EngineError("no engine serves")

    return GenerateContext(no_engine, SamplingParams(max_tokens=4), 10)


def changed(**fields):
    """A batch of one sample with these fields, as a batch hook may have left it."""
    made = Sample(
        3, 1, 0, [1, 2], response_ids=[5, 6, 7], response_mask=[1, 1, 0], response_logprobs=[-0.5, -0.25, 0.0],
        versions=[VersionSpan("a" * 32 + ":0:4", 0, 2)], status=SampleStatus.COMPLETED, reward=1.0,
    )  # fmt: skip
    return [replace(made, **fields)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": SampleStatus.FAILED}, "it is failed"),
        ({"reward": None}, "its reward is None"),
        ({"reward": math.nan}, "its reward is nan"),
        ({"response_mask": [1, 1, 1]}, "1 for a token of no weight version, which the policy did not sample"),
        ({"response_mask": [1, 2, 0]}, "other values than 0 and 1"),
        ({"response_mask": [1, 1]}, "2 mask entries"),
        ({"response_logprobs": [-0.5, math.nan, 0.0]}, "a log-probability is not finite"),
        ({"response_ids": [5, 6, 10]}, "outside the model's vocabulary of 10"),
        ({"prompt_ids": []}, "it has no prompt"),
        ({"versions": [VersionSpan("other:0:4", 0, 2)]}, "weights 'other:0:4' are foreign"),
        ({"versions": [VersionSpan("a" * 32 + ":0:5", 0, 2)]}, "are unpublished"),
        ({"versions": [VersionSpan("a" * 32 + ":0:2", 0, 2)]}, "weights are of step 2, and step 4 takes none older"),
        ({"train_metadata": {"a": {1}}}, "cannot be written as JSON"),
    ],
)
def test_what_a_batch_hook_returns_is_checked_as_if_the_run_had_generated_it(fields, said):
    book = VersionBook(Lineage("a" * 32, 0), published=4)
    judge = SampleJudge(10, AdmissionPolicy(batch=1, max_staleness=1), book.refusal)
    assert changed_batch(lambda samples: samples, changed(), judge, 4).samples == changed()
    with pytest.raises(ContractViolation, match=rf"returned what cannot be trained on: (sample 3/1: )?.*{said}"):
        changed_batch(lambda samples: changed(**fields), changed(), judge, 4)


@pytest.mark.parametrize(
    ("returned", "said"),
    [(None, "NoneType"), ([], "an empty list"), ((1, 2), "tuple"), ([{"tokens": [1]}], "dict is no Sample")],
)
def test_a_batch_hook_that_returns_no_samples_is_refused(returned, said):
    judge = SampleJudge(10, AdmissionPolicy(batch=1), None)
    with pytest.raises(ContractViolation, match=said):
        changed_batch(lambda samples: returned, changed(), judge, 0)


def test_a_batch_hook_that_raises_is_named_with_its_line():
    hook = load_batch_hook(RolloutConfig(batch_hook=HERE + "reads_a_key"))
    with pytest.raises(FunctionFailed, match=r"^rollout\.batch_hook = .* raised KeyError: 'difficulty' \(test_own_fun"):
        changed_batch(hook, changed(), SampleJudge(10, AdmissionPolicy(batch=1), None), 0)


@pytest.mark.parametrize(("load", "key"), [(load_hook, "group_hook"), (load_filter, "group_filter")])
@pytest.mark.parametrize(
    ("function", "reason"), [("reads_a_key", "KeyError: 'difficulty'"), ("leaves", "SystemExit: give up")]
)
def test_a_hook_or_filter_that_raises_is_named_with_its_line(load, key, function, reason):
    loaded = load(RolloutConfig.model_validate({key: HERE + function}))
    scorer = Scorer(OneEach(), str, **{key: loaded})
    expected = rf"^rollout\.{key} = '{HERE}{function}' raised {reason} \(test_own_functions\.py, line \d+\)$"
    with pytest.raises(FunctionFailed, match=expected) as found:
        asyncio.run(scorer.finish(example_group()))
    assert isinstance(found.value.__cause__, (KeyError, SystemExit))


@pytest.mark.parametrize(
    ("function", "reason"),
    [("forgets", r"TimeoutError: the sandbox \(test_own_functions"), ("is_plain", "TypeError: .*await")],
)
def test_a_generate_function_that_raises_is_named_and_no_deadline_in_its_place(function, reason):
    loaded = load_generate(RolloutConfig(generate_function=HERE + function))
    with pytest.raises(FunctionFailed, match=rf"^rollout\.generate_function = '{HERE}{function}' raised {reason}"):
        asyncio.run(fill_group(pending(), context(), loaded))


def test_what_engines_do_to_a_generate_function_is_theirs():
    loaded = load_generate(RolloutConfig(generate_function=HERE + "asks_engines"))
    with pytest.raises(EngineError, match="^no engine serves"):
        asyncio.run(fill_group(pending(), context(), loaded))


def test_samples_that_a_generate_function_left_inconsistent_are_named():
    loaded = load_generate(RolloutConfig(generate_function=HERE + "fills_wrongly"))
    with pytest.raises(ContractViolation, match=r"prompt 4 .*: the generate function left what is no sample: "):
        asyncio.run(fill_group(pending(), context(), loaded))


def test_a_function_that_returns_is_as_it_was():
    assert named(lambda a, b: (b, a), "x")(1, 2) == (2, 1)

    async def run():
        group = pending()

        async def answer(request):
            return [Completion((5,), (-1.0,), "stop", ())]

        function = load_generate(RolloutConfig(generate_function="rltool.rollout.generate:generate_group"))
        await fill_group(group, GenerateContext(answer, SamplingParams(max_tokens=4), 10, False), function)
        return group[0].response_ids

    assert asyncio.run(run()) == [5]


def test_a_data_source_that_raises_is_named():
    own = load_own_source(DataConfig(source=HERE + "source"), None, seed=0, max_prompt_tokens=9)
    with pytest.raises(FunctionFailed, match=r"^data\.source: next raised IndexError: .*test_own_functions\.py, line"):
        own.next(2)
    with pytest.raises(FunctionFailed, match=r"^data\.source: state_dict raised OSError: the queue has gone"):
        own.state_dict()


def test_an_own_advantage_that_raises_is_named():
    settings = AlgorithmConfig(advantage=HERE + "advantage")
    with pytest.raises(FunctionFailed, match=r"^algorithm\.advantage = .* raised KeyError: 'difficulty' \(test_own"):
        with_advantages(example_batch(), settings, max_response_tokens=6)


def test_whatever_a_group_fails_of_is_an_error_on_which_the_run_saves():
    """A driver that gets anything but an RltoolError ends without a checkpoint."""

    async def run():
        collector = make(Work(Versions(), fail=lambda group: KeyError("refused")), AdmissionPolicy(batch=4))
        publish(collector, 0)
        expected = r"group \d+: KeyError: 'refused' \(test_collector.py, line \d+\)"
        with pytest.raises(RltoolError, match=expected) as found:
            await collector.next(0)
        assert isinstance(found.value.__cause__, KeyError)
        assert collector.ledger.counts()["partial"] == 4, "no group is lost"

    asyncio.run(run())


def test_the_place_is_the_innermost_line_of_the_users_file():
    for parses in (Judge(), Judge().__call__, lambda text: re.compile(text)):
        with pytest.raises(FunctionFailed, match=r"x raised error: .*\(test_own_functions\.py, line "):
            named(parses, "x")("(")


def test_what_nobody_expected_of_the_manager_ends_the_run_in_order_with_a_traceback_in_its_log(capsys):
    expected = "the rollout manager failed: KeyError: 'difficulty' .*rollout_manager.log"
    with pytest.raises(ManagerFailed, match=expected), failing_in_order():
        reads_a_key([])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [EngineError("gone"), RayTaskError("send", "Traceback", RuntimeError("CUDA")), asyncio.CancelledError()]
)
def test_our_errors_those_of_ranks_and_a_cancellation_leave_the_manager_as_they_are(error):
    with pytest.raises(type(error)) as found, failing_in_order():
        raise error
    assert found.value is error


# -- rollout.function


class OwnWork(Work):
    def context(self):
        return context()


def own_collector(function, *, staleness=0, batch=2, partial=False, **settings):
    """With the work and the prompts of the collector's own tests."""
    versions = Versions()
    work, policy = OwnWork(versions, partial=partial), AdmissionPolicy(batch=batch, max_staleness=staleness)
    plain = make(work, policy, **settings)
    book = SimpleNamespace(refusal=lambda version: None if version.startswith(RUN) else "foreign")
    judge = SampleJudge(10, policy, book.refusal)
    own = named_async(function, "rollout.function = 'own:rollout'")
    return OwnCollector(own, judge, plain.source, policy, work, versions, plain.config)


async def in_turn(given, *groups):
    for group in groups:
        await given.generate(group)
        await given.score(group)
    return list(groups)


async def plain_rollout(given):
    return await in_turn(given, *given.groups(given.count))


def collected(function, steps=2, **options):
    """(the collector, the numbers of each batch's groups) of a run."""

    async def run():
        collector = own_collector(function, **options)
        found = await batches(collector, steps)
        collector.ledger.check()
        await collector.interrupt()
        return collector, numbers(found), found

    return asyncio.run(run())


def test_a_rollout_function_is_asked_for_each_batch_and_what_it_leaves_out_is_counted():
    asked = []

    async def every_other(given):
        asked.append((given.step, given.count))
        return (await in_turn(given, *given.groups(2 * given.count)))[::2]

    collector, found, rollouts = collected(every_other, steps=3)
    assert asked == [(0, 2), (1, 2), (2, 2)] and found == [[0, 2], [4, 6], [8, 10]]
    assert [one.dropped for one in rollouts] == [{"unused": 2}] * 3 and rollouts[0].tokens == 16
    assert collector.ledger.counts()["dropped"] == 6


def test_the_filters_reason_is_counted_unless_the_function_returns_the_group_all_the_same():
    async def run():
        async def all_but_one(given):
            return (await in_turn(given, *given.groups(given.count + 1)))[1:]

        collector = own_collector(all_but_one)
        collector.work.reason = lambda group: "easy" if group.id < 2 else None
        [found] = await batches(collector, 1)
        assert numbers([found]) == [[1, 2]] and found.dropped == {"easy": 1}

    asyncio.run(run())


def test_a_rollout_function_runs_ahead_as_far_as_staleness_lets_it_and_no_further():
    asked = []

    async def noted(given):
        asked.append((given.step, given._collector.versions.published))
        return await plain_rollout(given)

    async def run():
        collector = own_collector(noted, staleness=1)
        publish(collector, 0)
        await settled(collector)
        assert asked == [(0, 0), (1, 0)]
        first = await collector.next(0)
        await settled(collector)
        assert len(asked) == 2, "the batch of step 2 may not hold tokens of the weights before step 1"
        publish(collector, 1)
        await settled(collector)
        assert asked[2:] == [(2, 1)]
        assert numbers([first, await collector.next(1), await collector.next(2)]) == [[0, 1], [2, 3], [4, 5]]
        await collector.interrupt()

    asyncio.run(run())


async def settled(collector):
    """Until no call runs."""
    while collector._tasks:
        await asyncio.sleep(0.001)


def test_a_group_that_is_put_back_comes_again_with_what_it_has():
    async def run():
        seen = []

        async def keeps_one(given):
            groups = given.groups(given.count + 1)
            seen.append([(group.id, [s.status.value for s in group.samples]) for group in groups])
            *returned, last = groups
            await given.generate(last)
            given.put_back(last)
            return await in_turn(given, *returned)

        collector = own_collector(keeps_one, staleness=1)
        found = numbers(await batches(collector, 3))
        assert found[0] == [0, 1] and found[1] == [2, 3] and found[2] == [4, 5]
        assert seen[1][0] == (2, ["completed"] * 2) and seen[1][1] == (3, ["pending"] * 2)
        assert collector.ledger.counts()["partial"] + collector.ledger.counts()["running"] >= 1
        await collector.interrupt()
        collector.ledger.check()

    asyncio.run(run())


def test_tokens_of_a_group_that_was_put_back_are_counted_once_and_no_group_is_given_after_the_call():
    async def run():
        contexts = []

        async def keeps_one(given):
            contexts.append(given)
            groups = given.groups(3 if given.step == 0 else 2)
            if given.step == 0:
                await given.generate(groups[2])
                given.put_back(groups[2])
            return await in_turn(given, *groups[:2])

        collector = own_collector(keeps_one, staleness=1)
        publish(collector, 0)
        await settled(collector)
        assert (await collector.next(0)).tokens == 4 * 4, "of four groups in two calls"
        with pytest.raises(RltoolError, match=r"after rollout\.function had ended its call for step 0"):
            contexts[0].groups(1)
        await collector.interrupt()

    asyncio.run(run())


def foreign_group(groups):
    return [replace(groups[0], samples=list(groups[0].samples)), *groups[1:]]


def of_another_group(groups):
    groups[1].samples = groups[0].samples
    return groups


def unscored(groups):
    groups[0].samples[1].reward = None
    return groups


def from_old_weights(groups):
    groups[0].samples[0].versions = [VersionSpan(f"{RUN}:0:0", 0, 2)]
    return groups


def from_other_weights(groups):
    groups[0].samples[0].versions = [VersionSpan("other:0:1", 0, 2)]
    return groups


def without_samples(groups):
    groups[0].samples.clear()
    return groups


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda groups: None, "NoneType, expected a list of groups"),
        (lambda groups: [group.samples for group in groups], "expected a list of groups from context.groups"),
        (lambda groups: groups[:1], "1 groups, expected context.count = 2 different ones"),
        (lambda groups: [groups[0]] * 2, "2 groups, expected context.count = 2 different"),
        (foreign_group, "group 2, which context.groups did not give it"),
        (of_another_group, "group 3 with a sample that is not of it"),
        (without_samples, "group 2 without samples"),
        (unscored, "sample 2/1: its reward is None"),
        (from_old_weights, "its oldest weights are of step 0, and step 1 takes none older than"),
        (from_other_weights, "weights 'other:0:1' are foreign"),
    ],
)
def test_what_a_rollout_function_returns_is_checked_and_nothing_moves(change, said):
    async def spoils_the_second(given):
        groups = await plain_rollout(given)
        return groups if given.step == 0 else change(groups)

    async def run():
        collector = own_collector(spoils_the_second)
        await batches(collector, 1)
        publish(collector, 1)
        with pytest.raises(ContractViolation, match=f"^rollout.function returned .*{said}"):
            await collector.next(1)
        collector.ledger.check()
        assert collector.ledger.counts()["partial"] == 2, "for the run that resumes, from their prompts"
        assert not any(sample.response_ids for group in collector.ledger.groups() for sample in group.samples
                       if group.state is GroupState.PARTIAL)  # fmt: skip

    asyncio.run(run())


def test_a_group_cannot_be_both_returned_and_put_back():
    async def both(given):
        groups = await plain_rollout(given)
        given.put_back(groups[0])
        return groups

    with pytest.raises(ContractViolation, match="returned group 0 and put it back"):
        collected(both)


def test_a_rollout_function_that_raises_is_named_and_engines_errors_are_theirs():
    async def divides(given):
        given.groups(1)
        return 1 / 0

    with pytest.raises(FunctionFailed, match=r"^rollout.function = 'own:rollout' raised ZeroDivisionError: division"):
        collected(divides)

    async def asks(given):
        await given.generation.generate(None)

    with pytest.raises(EngineError, match="no engine serves"):
        collected(asks)


def test_a_checkpoint_in_the_middle_of_a_rollout_function_keeps_its_prompts_and_nothing_of_what_it_sampled():
    async def run():
        reached = asyncio.Event()

        async def stays(given):
            groups = given.groups(3)
            await in_turn(given, groups[0])
            if given.step == 1:
                reached.set()
                await asyncio.Event().wait()
            return await in_turn(given, *groups[:2])

        collector = own_collector(stays)
        await batches(collector, 1)
        publish(collector, 1)
        waiting = asyncio.ensure_future(collector.next(1))
        await reached.wait()
        kept = snapshot(collector, 1, keeps_partial=collector.work.keeps_partial_groups())
        await collector.interrupt()
        with pytest.raises(CollectionInterrupted):
            await waiting
        collector.ledger.check()
        open_groups = [(group.id, group.state) for group in collector.ledger.groups() if group.id > 2]
        assert open_groups == [(number, GroupState.PARTIAL) for number in (3, 4, 5)]

        given_again = []

        async def resumed(given):
            groups = given.groups(given.count)
            given_again.extend((group.id, len(group.samples[0].response_ids)) for group in groups)
            return await in_turn(given, *groups)

        other = own_collector(resumed)
        taken_up(other, kept)
        await batches(other, 2, first=1)
        assert given_again == [(number, 0) for number in (3, 4, 5, 6)]
        other.ledger.check()

    asyncio.run(run())
