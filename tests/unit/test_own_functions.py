"""What users' functions raise ends a run in order: an error of ours, with the setting and the place in it."""

from __future__ import annotations

import asyncio
import re

import pytest
from ray.exceptions import RayTaskError

from rltool.algorithms.contracts import example_batch
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.data import DataConfig
from rltool.config.own_functions import FunctionFailed, named
from rltool.config.rollout import RolloutConfig
from rltool.engines.types import Completion, SamplingParams
from rltool.errors import ContractViolation, EngineError, RltoolError
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.contracts import example_group
from rltool.rollout.data.own import load_own_source
from rltool.rollout.generate import GenerateContext, fill_group, load_generate
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.scoring import Scorer, load_filter, load_hook
from rltool.training.advantages import with_advantages
from rltool.training.rollout_actor import ManagerFailed, failing_in_order
from tests.unit.test_collector import Versions, Work, make, publish

HERE = "tests.unit.test_own_functions:"


class OneEach:
    async def score(self, samples, texts):
        return [1.0 for _ in samples]


class Judge:
    """A callable object."""

    def __call__(self, text):
        return re.compile(text)


def reads_a_key(group):
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
