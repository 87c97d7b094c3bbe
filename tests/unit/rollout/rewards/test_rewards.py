"""The reward functions that are shipped, and the contract of everybody's."""

import pytest

from rltool.config.import_path import load_callable
from rltool.config.rollout import RolloutConfig
from rltool.errors import UsageError
from rltool.rollout.contracts import ContractViolation, check_generate_function, check_reward_function
from rltool.rollout.generate import load_generate
from rltool.rollout.rewards.pool import load_reward
from rltool.rollout.rewards.scoring import load_filter, load_hook
from rltool.rollout.rewards.shipped import exact_match, final_answer, math_answer, reasoning_gym_score
from rltool.rollout.sample import Sample, SampleStatus


def sample(index=0, label="nus", **fields):
    return Sample(
        group_id=0,
        index=index,
        prompt_index=4,
        prompt_ids=[1],
        label=label,
        response_ids=[index],
        response_mask=[1],
        response_logprobs=[-1.0],
        status=SampleStatus.COMPLETED,
        **fields,
    )


@pytest.mark.parametrize(("text", "value"), [("nus", 1.0), (" nus\n", 1.0), ("nuss", 0.0), ("Nus", 0.0), ("", 0.0)])
def test_exact_match(text, value):
    assert exact_match(sample(), text) == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 42", "42"),
        ("#### 1\n#### 2 ", "2"),
        (r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{open", None),
        ("42", None),
        ("####", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("#### 1,000", "steps\n#### 1000", 1.0),
        ("#### $1000.00", "1000", 1.0),
        (r"\boxed{-0}", "0", 1.0),
        (r"\boxed{007}", "7", 1.0),
        ("#### 5 apples", "5", 0.0),
        ("#### 10", "1", 0.0),
        ("42", "42", 0.0),
        (r"\boxed{x+1}", "x+1", 1.0),
    ],
)
def test_math_answer(text, label, value):
    assert math_answer(sample(label=label), text) == value


def test_reasoning_gym_score_pays_for_near_misses():
    spell = sample(prompt_text="sun=", metadata={"source_dataset": "spell_backward"})
    assert reasoning_gym_score(spell, "nus") == 1.0
    assert 0 < reasoning_gym_score(spell, "nux") < 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "expected `package.module:function`"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        ("rltool.rollout.rewards.shipped:exact_mach", "did you mean 'exact_match'"),
        ("rltool.rollout.generate:MAX_CONTINUATIONS", "expected a function, found int"),
    ],
)
def test_import_path_errors_name_setting_and_fix(path, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_callable(path, setting="reward.function")
    assert "reward.function" in str(caught.value)


def test_a_module_that_fails_while_imported_is_a_usage_error(tmp_path, monkeypatch):
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load_callable("broken_reward_module:f", setting="reward.function")


@pytest.mark.parametrize("path", ["os:getcwd", "rltool.rollout.rewards.shipped:final_answer", "json:dumps"])
def test_a_function_that_cannot_be_called_as_a_reward_is_refused_with_its_signature(path):
    with pytest.raises(UsageError, match=r"reward\.function = .*called as f\(sample, text\), which \(.* does not take"):
        load_reward(path)


@pytest.mark.parametrize(
    "path", ["rltool.rollout.rewards.shipped:exact_match", "tests.unit.rollout.rewards.reward_functions:judge"]
)
def test_a_plain_function_and_a_callable_object_are_rewards(path):
    assert callable(load_reward(path))


@pytest.mark.parametrize(
    ("load", "key"),
    [(load_filter, "group_filter"), (load_hook, "group_hook"), (load_generate, "generate_function")],
)
def test_the_other_functions_of_a_rollout_are_refused_by_their_signature_as_well(load, key):
    with pytest.raises(UsageError, match=rf"rollout\.{key} = 'os:getcwd': it is called as f\(group"):
        load(RolloutConfig.model_validate({key: "os:getcwd"}))


def test_shipped_rewards_and_generation_keep_their_contracts():
    check_reward_function("rltool.rollout.rewards.shipped:exact_match")
    check_reward_function("rltool.rollout.rewards.shipped:math_answer")
    check_generate_function("rltool.rollout.generate:generate_group")


def test_contract_check_lists_every_violation(tmp_path, monkeypatch):
    (tmp_path / "bad_functions_module.py").write_text(
        "def reward(sample, text):\n"
        "    sample.metadata['seen'] = True\n"
        "    return float(text)\n"
        "async def generate(group, context):\n"
        "    for sample in group:\n"
        "        sample.prompt_ids.append(1)\n"
        "        sample.append_environment_tokens([2])\n"
        "        sample.status = 'completed'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ContractViolation) as caught:
        check_reward_function("bad_functions_module:reward")
    assert "changed the sample" in str(caught.value) and "ValueError" in str(caught.value)
    with pytest.raises(ContractViolation) as caught:
        check_generate_function("bad_functions_module:generate")
    assert "the prompt was changed" in str(caught.value) and "no token of the response was sampled" in str(caught.value)
