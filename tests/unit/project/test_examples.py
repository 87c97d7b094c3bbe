"""Every file of examples/ keeps its contract; and every contract sees what breaks it."""

import re
from pathlib import Path

import pytest

from rltool.algorithms.contracts import check_advantage_function, check_loss_function
from rltool.config.import_path import load_callable
from rltool.config.methods import EXAMPLES as METHODS
from rltool.engines.types import GenerateRequest
from rltool.errors import ContractViolation
from rltool.models.registry import load_family
from rltool.rollout.contracts import (
    check_batch_hook,
    check_data_source,
    check_eval_function,
    check_generate_function,
    check_group_filter,
    check_group_hook,
    check_group_reward,
    check_metrics_function,
    check_reward_function,
    check_rollout_function,
    example_group,
)
from rltool.training.contracts import check_logger
from tests.unit.rollout.data.test_data import LetterTokenizer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HERE = "tests.unit.project.test_examples:"


def data_source(path):
    check_data_source(path, tokenizer=LetterTokenizer())


CHECKS = {
    "data.source": data_source,
    "reward.function": check_reward_function,
    "reward.group": check_group_reward,
    "rollout.generate_function": check_generate_function,
    "rollout.group_filter": check_group_filter,
    "rollout.function": check_rollout_function,
    "rollout.group_hook": check_group_hook,
    "rollout.batch_hook": check_batch_hook,
    "algorithm.advantage": check_advantage_function,
    "algorithm.objective": check_loss_function,
    "monitor.metrics": check_metrics_function,
    "monitor.logger": check_logger,
    "eval.function": check_eval_function,
    "model.family": load_family,  # tests/e2e/test_models_check.py compares it with transformers
}


TABLE = re.findall(r'`([\w.]+) = "([\w.:]+)"`', (EXAMPLES / "README.md").read_text())
"""(setting, import path), as the examples' page has them."""


@pytest.mark.parametrize(("setting", "path"), TABLE)
def test_an_example_keeps_the_contract_of_its_setting(setting, path):
    CHECKS[setting](path)


def test_the_table_has_every_example_and_each_names_its_own_setting():
    assert {setting for setting, _ in TABLE} == CHECKS.keys()
    # tests/e2e/test_serve_trainer.py runs own_loop.
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "own_loop"}
    assert {path.split(":")[0].split(".")[1] for _, path in TABLE} == files
    assert {f"algorithm.{of} = examples.algorithms:{kind}" for kind, of in METHODS.items()} == {
        f"{setting} = {path}" for setting, path in TABLE if "algorithms:" in path
    }
    for setting, path in TABLE:
        # A family is a value: its file names the setting behind it.
        module = EXAMPLES / f"{path.split(':')[0].split('.')[1]}.py"
        said = module.read_text() if setting == "model.family" else load_callable(path, setting=setting).__doc__
        assert f'{setting} = "{path}"' in said


def says_five(group):
    return 5


def forgets(group):
    group.pop()


def changes_tokens(group):
    group[0].response_ids[0] = 7


def takes_rewards(group):
    group[0].reward = None


def filters_and_changes(group):
    group[0].reward = 9.0


def one_for_all(group, texts):
    return [1.0]


def raises(*arguments):
    raise KeyError("x")


def list_of_numbers(samples):
    return [1.0]


def infinite(samples):
    return {"a": float("inf")}


async def no_numbers(eval_set, context):
    await context.samples()
    return {"majority": "all"}


async def a_name_of_two_parts(eval_set, context):
    await context.samples()
    return {"a/b": 1.0}


async def no_accuracy(eval_set, context):
    return {"votes": 1.0}


def not_async(eval_set, context):
    return {"accuracy": 1.0}


async def rolls_dice(eval_set, context):
    MADE.append(context)
    return {"accuracy": float(len(MADE))}


async def asks_without_a_seed(eval_set, context):
    request = GenerateRequest((1, 2), context.generation.sampling, "a")
    return {"accuracy": float(len(await context.generation.generate(request)))}


class Deaf:
    """Cannot be closed."""

    def __init__(self, run):
        pass

    def log(self, step, metrics):
        pass


class Greedy(Deaf):
    """Takes the numbers away."""

    def log(self, step, metrics):
        metrics.clear()

    def close(self):
        pass


class OnlyForward(Greedy):
    """Takes no step below the one before."""

    last = -2

    def log(self, step, metrics):
        if step < self.last:
            raise ValueError(f"step {step} after {self.last}")
        self.last = step


class Forgetful:
    """Saves nothing of where it is."""

    def __init__(self, config, seed):
        self.at = 0

    def next(self, count):
        self.at += count
        return [{"prompt": str(self.at + i)} for i in range(count)]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


MADE = []


class Different(Forgetful):
    """Saves where it is, and begins elsewhere each time."""

    def __init__(self, config, seed):
        MADE.append(self)
        self.at = 1000 * len(MADE)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


BROKEN = [
    (check_group_filter, "says_five", "returned int, expected a reason or None"),
    (check_group_filter, "filters_and_changes", "the filter changed its samples"),
    (check_group_filter, "raises", "raised KeyError"),
    (check_group_hook, "says_five", "returned something"),
    (check_group_hook, "forgets", "added or removed samples"),
    (check_group_hook, "changes_tokens", "sample 0: tokens or log-probabilities were changed"),
    (check_group_hook, "takes_rewards", "sample 0: its reward is None"),
    (check_group_reward, "one_for_all", "a group of 4: ValueError: reward.group returned 1 values"),
    (check_group_reward, "raises", "KeyError"),
    (check_metrics_function, "list_of_numbers", "returned list, expected a dict"),
    (check_metrics_function, "infinite", "expected a finite number"),
    (check_eval_function, "raises", "eval.function failed on set 'contract': KeyError"),
    (check_eval_function, "no_numbers", "eval.function failed on set 'contract'.*expected a number"),
    (check_eval_function, "a_name_of_two_parts", "expected a dict of names"),
    (check_eval_function, "no_accuracy", "returned no accuracy and took no samples"),
    (check_eval_function, "not_async", "it is no async function"),
    (check_eval_function, "rolls_dice", "another result the second time"),
    (check_eval_function, "asks_without_a_seed", "a request without a seed"),
    (check_logger, "raises", "did not start: KeyError"),
    (check_logger, "Deaf", r"the Deaf that it returned has no close\(\)"),
    (check_logger, "Greedy", r"log\(\) changed the metrics"),
    (check_logger, "OnlyForward", "raised ValueError: step 0 after 1"),
    (data_source, "Forgetful", "a source that resumed gives other rows"),
    (data_source, "Different", "two sources of one seed give different rows"),
]


@pytest.mark.parametrize(("check", "function", "said"), BROKEN)
def test_a_function_that_breaks_its_contract_is_told_how(check, function, said):
    with pytest.raises(ContractViolation, match=said):
        check(HERE + function)


def test_own_groups_are_checked_in_place_of_the_examples():
    group = example_group(3)
    for sample in group:
        sample.reward = 1.0
    check_group_filter("examples.group_filter:too_easy", groups=[group])
