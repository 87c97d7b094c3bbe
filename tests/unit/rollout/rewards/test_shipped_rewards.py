"""Rewards by name: what each pays, several together, and groups."""

import asyncio
import inspect
import sys

import pytest

from benchmarks.rewards import collapsed, shipped, slowest
from rltool.config.loader import load_config
from rltool.config.reward import SHIPPED, SHIPPED_FOR_GROUPS, RewardConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.rollout.contracts import ContractViolation, check_reward_function
from rltool.rollout.measure.metrics import rollout_metrics
from rltool.rollout.rewards.group import GroupReward, load_group_reward, rank
from rltool.rollout.rewards.instructions import CHECKS, instructions_followed
from rltool.rollout.rewards.parts import RewardParts, check_rewards, start_rewards
from rltool.rollout.rewards.pool import RewardFailure, load_reward
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.rewards.shipped import chosen_letter, f1, math_verified, multiple_choice, numeric, regex
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.serving.model_clients import Models, Reply
from tests.unit.rollout.rewards.test_rewards import sample

HERE = "tests.unit.rollout.rewards.test_shipped_rewards:"


@pytest.mark.parametrize("name", [*SHIPPED, *SHIPPED_FOR_GROUPS])
def test_every_name_leads_to_a_function(name):
    if name in SHIPPED_FOR_GROUPS:
        function = load_group_reward(RewardConfig(group=name))
    else:
        required = {"regex": {"pattern": "x"}, "remote": {"url": "http://h"}, "slime": {"function": "a:b"}}
        function = load_reward(name, required.get(name, {}))
    assert inspect.getdoc(function)


@pytest.mark.parametrize(
    ("text", "label", "tolerance", "value"),
    [
        ("the answer is 1,000.", "1000", 0.0, 1.0),
        ("$1000.00 in all", "so\n#### 1,000", 0.0, 1.0),
        ("1e3", "1000", 0.0, 1.0),
        ("-.5", "-0.5", 0.0, 1.0),
        ("x=-3", "-3", 0.0, 1.0),
        ("5-3", "3", 0.0, 1.0),
        ("first 7, then 8", "7", 0.0, 0.0),
        ("3.14", "3.14159", 0.0, 0.0),
        ("3.14", "3.14159", 0.01, 1.0),
        ("none", "7", 0.0, 0.0),
        ("10", "1", 0.0, 0.0),
    ],
)
def test_numeric(text, label, tolerance, value):
    assert numeric(sample(label=label), text, tolerance=tolerance) == value


def test_a_label_that_cannot_be_compared_is_an_error_and_no_zero():
    for function, text in ((numeric, "7"), (math_verified, "7")):
        with pytest.raises(ValueError, match="the label"):
            function(sample(label="" if function is math_verified else "seven"), text)
    with pytest.raises(ValueError, match="holds no letter"):
        multiple_choice(sample(label="1"), "B")


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{(1,2)}", "(2,1)", 0.0),
        (r"\boxed{34}", "#### 34", 1.0),
        ("no idea", "34", 0.0),
    ],
)
def test_math_verified(text, label, value):
    assert math_verified(sample(label=label), text) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("**Answer: C**", "C"),
        ("I first thought the answer is A, but the answer is D.", "D"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{C}", "C"),
        ("B", "B"),
        ("B) because", "B"),
        ("A good question. Banana.", None),
        ("", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert chosen_letter(text) == letter


def test_multiple_choice_takes_labels_of_either_case():
    assert multiple_choice(sample(label="(b)"), "Answer: B") == 1.0
    assert multiple_choice(sample(label="C"), "Answer: B") == 0.0


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "cat dog", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("bird", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1(text, label, value):
    assert f1(sample(label=label), text) == pytest.approx(value)


def test_regex():
    assert regex(sample(), "<think>x</think>42", pattern=r"^<think>.*</think>") == 1.0
    assert regex(sample(), "42", pattern=r"^<think>") == 0.0
    answer = r"<answer>(?P<answer>.*?)</answer>"
    assert regex(sample(label="42"), "<answer>1</answer><answer> 42 </answer>", pattern=answer) == 1.0
    assert regex(sample(label="1"), "<answer>1</answer><answer>42</answer>", pattern=answer) == 0.0


FOLLOWED = [
    ("keywords:existence", {"keywords": ["sun", "Moon"]}, "Sun and moon", "sunny moon"),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "sunny", "the sun!"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a a", "a"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "one two", "one two three"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "One. Two!", "One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("change_case:english_lowercase", {}, "abc", "aBc"),
    ("change_case:english_capital", {}, "ABC", "ABc"),
    ("startend:end_checker", {"end_phrase": "The end."}, "x the end. ", "the end. x"),
    ("startend:quotation", {}, '"x"', '"x'),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a}"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
    ("detectable_format:title", {}, "<<My title>>\nx", "<< >>"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np.s. y", "x"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), FOLLOWED)
def test_instructions(name, arguments, right, wrong):
    told = sample(metadata={"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None}]})
    assert instructions_followed(told, right) == 1.0
    assert instructions_followed(told, wrong) == 0.0
    assert instructions_followed(told, "") == 0.0, "an empty answer follows nothing"


def test_every_instruction_has_an_example_and_an_unknown_one_is_an_error():
    assert {name for name, *_ in FOLLOWED} == set(CHECKS)
    both = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"]}
    assert instructions_followed(sample(metadata=both), "a, b") == 0.5
    assert instructions_followed(sample(metadata=both), "a, b", all_or_nothing=True) == 0.0
    with pytest.raises(ValueError, match="is none of those that are checked"):
        instructions_followed(sample(metadata={"instruction_id_list": ["language:response_language"]}), "x")
    with pytest.raises(ValueError, match="no instruction_id_list"):
        instructions_followed(sample(), "x")


COLLAPSED = 100_000
LIMIT = 1.0
"""CPU seconds. Nothing takes a tenth of that where time grows with the text; what grows with its square took ten."""


@pytest.mark.parametrize("name", shipped())
def test_text_of_a_policy_that_has_collapsed_is_scored_0_and_at_once(name):
    reward = shipped()[name]
    assert reward("x") == 0.0  # and what is imported at the first call is there
    seconds, text, highest = slowest(reward, collapsed(COLLAPSED, plain=name == "math"))
    assert highest == 0.0
    assert seconds < LIMIT, f"{text[:20]!r}..."


def test_every_shipped_reward_of_a_text_alone_is_held_to_that():
    """The others call something: a model, a server, a function of the user's, a task of reasoning-gym."""
    others = {"remote", "judge", "judge-probability", "reward-model", "slime", "reasoning-gym"}
    assert set(SHIPPED) == shipped().keys() | others


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("answer is: **(C", "C"), ("Answer \n = \n C", "C"), ("answer isC", "C"), ("answer IS", None),
        ("answer := C", None),
        ("\n\n (C) \n--\n", "C"), ("A\nB\n", "B"), ("A\n(B) x", "B"), ("--\n(C\nwords", "C"), ("A b\nC. \n", "C"),
    ],
)  # fmt: skip
def test_the_chosen_letter_over_white_space_and_lines(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    ("name", "argument", "text", "count"),
    [
        ("number_placeholders", "num_placeholders", "[a [b] [] [[c] [d\n] [e]", 3),
        ("number_bullet_lists", "num_bullets", "\n\n * a\n\t- b\n** c\n*d\n-\n\ne\n", 3),
    ],
)
def test_what_counts_in_odd_layouts(name, argument, text, count):
    check = next(check for key, check in CHECKS.items() if key.endswith(name))
    assert check(text, **{argument: count}) and not check(text, **{argument: count + 1})


class Judge:
    """Says what it is given; notes what it was asked."""

    def __init__(self, *replies, logprob=-0.25):
        self.replies, self.logprob, self.asked = list(replies), logprob, []

    async def generate(self, prompt, **options):
        self.asked.append((prompt[0]["content"], options))
        text = self.replies[(len(self.asked) - 1) % len(self.replies)]
        return [Reply((1,), (self.logprob,), text, "stop")]


def judged(name, judge, label="42", **options):
    async def run():
        rewards = start_rewards(
            RewardConfig(function=name, options=options), timeout=30.0, models=Models({"judge": judge})
        )
        try:
            [value] = await rewards.score([sample(label=label, prompt_text="6 x {response}")], ["{label}!"])
        finally:
            await rewards.close()
        return value.reason if isinstance(value, RewardFailure) else value

    return asyncio.run(run())


def test_a_judge_grades_with_its_own_template_or_ours(tmp_path):
    judge = Judge("fine [[3]] no, better: [[8.5]]")
    assert judged("judge", judge) == 0.85
    prompt, options = judge.asked[0]
    assert "6 x {response}" in prompt and "{label}!" in prompt and "42" in prompt, "filled once, braces stay"
    assert options["temperature"] == 0.0
    (tmp_path / "own.txt").write_text("Q {prompt} A {response}: good?")
    assert judged("judge", judge, template=str(tmp_path / "own.txt"), pattern=r"\[\[(\d)", scale=8) == 1.0
    assert judge.asked[1][0] == "Q 6 x {response} A {label}!: good?"


@pytest.mark.parametrize(
    ("reply", "reason"), [("well", "no grade in the judge's reply"), ("[[11]]", "the judge's grade 11 lies outside")]
)
def test_a_judge_without_a_grade_fails_the_sample(reply, reason):
    assert reason in judged("judge", Judge(reply))


@pytest.mark.parametrize(
    ("reply", "value"), [("Yes", 0.7788), (" no", 0.2212), ("Maybe", "expected Yes or No"), ("", "expected Yes or No")]
)
def test_the_probability_of_yes(reply, value):
    found = judged("judge-probability", Judge(reply))
    assert value in found if isinstance(value, str) else found == pytest.approx(value, abs=1e-4)


def group(*rewards):
    made = [sample(index=i) for i in range(len(rewards))]
    for one, reward in zip(made, rewards, strict=True):
        one.reward = reward
    return made


@pytest.mark.parametrize(
    ("rewards", "ranks"),
    [
        ([0.1, 0.9, 0.5], [0.0, 1.0, 0.5]),
        ([1.0, 1.0, 0.0], [0.75, 0.75, 0.0]),
        ([2.0, 2.0], [0.5, 0.5]),
        ([3.0], [0.5]),
    ],
)
def test_ranks_within_the_group(rewards, ranks):
    assert rank(group(*rewards), [""] * len(rewards)) == ranks


def compare(judge, size, **options):
    config = RewardConfig(group="pairwise-judge", group_options=options)
    together = GroupReward(config, timeout=30.0, models=Models({"judge": judge}))
    samples = group(*[0.25] * size)
    asyncio.run(together.apply(samples, [f"text {i}" for i in range(size)]))
    return samples


@pytest.mark.parametrize("place", ["A", "B"])
def test_each_response_is_compared_in_both_places(place):
    judge = Judge(f"I like this place [[{place}]]")
    samples = compare(judge, 4)
    assert [one.reward for one in samples] == [0.5] * 4, "a judge that prefers a place favours nobody"
    assert len(judge.asked) == 8
    assert {one.raw_reward for one in samples} == {0.25}


def test_the_better_response_wins_its_comparisons():
    class Fair(Judge):
        async def generate(self, prompt, **options):
            text = prompt[0]["content"]
            first, second = (text.index(f"text {i}") if f"text {i}" in text else -1 for i in (0, 1))
            winner = "C" if first < 0 or second < 0 else "A" if first < second else "B"
            return [Reply((1,), (-1.0,), f"[[{winner}]]", "stop")]

    assert [one.reward for one in compare(Fair(), 2)] == [1.0, 0.0]
    assert [one.reward for one in compare(Judge("[[C]]"), 1)] == [0.5]


def doubled(group, texts, *, by):
    return [one.reward * by for one in group]


async def by_length(group, texts, context):
    return [float(len(text)) for text in texts]


def one_too_few(group, texts):
    return [0.0] * (len(group) - 1)


def not_a_number(group, texts):
    return [float("nan")] * len(group)


def leaves(group, texts):
    sys.exit(3)


async def leaves_async(group, texts):
    sys.exit(3)


async def for_ever(group, texts):
    await asyncio.Event().wait()


class Fixed:
    async def score(self, samples, texts):
        return [float(one.index) for one in samples]


def finished(name, timeout=30.0, **options):
    config = RewardConfig(group=HERE + name, group_options=options)
    scorer = Scorer(
        Fixed(), lambda ids: "x" * ids[0], group_reward=GroupReward(config, timeout=timeout, models=Models())
    )
    samples = group(0.0, 0.0, 0.0)
    return asyncio.run(scorer.finish(samples)), samples, scorer.stats


@pytest.mark.parametrize(
    ("name", "options", "rewards"), [("doubled", {"by": 3}, [0, 3, 6]), ("by_length", {}, [0, 1, 2])]
)
def test_an_own_function_takes_the_place_of_a_groups_rewards(name, options, rewards):
    reason, samples, stats = finished(name, **options)
    assert reason is None and stats.failed == 0
    assert [one.reward for one in samples] == rewards and [one.raw_reward for one in samples] == [0, 1, 2]
    assert rollout_metrics(samples, seconds=None, dropped={})["rollout/raw_reward_mean"] == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_too_few", "returned 2 values for a group of 3 samples"),
        ("not_a_number", "returned nan"),
        ("for_ever", "reward.group: no answer within deadlines.call = 0.05 s"),
        ("leaves", "SystemExit: 3"),
        ("leaves_async", "SystemExit: 3"),
    ],
)
def test_a_group_whose_function_fails_is_dropped_and_counted(name, said):
    reason, samples, stats = finished(name, timeout=0.05 if name == "for_ever" else 30.0)
    assert (reason, samples, stats.failed, stats.scored) == ("reward_failed", [], 3, 3)
    assert said in stats.describe()


def parts(**more):
    return {
        "parts": [
            {"name": "right", "function": "exact", "weight": 2.0},
            {"name": "short", "function": HERE + "shortness", "weight": -0.5, "options": {"per": 2}},
        ],
        **more,
    }


def shortness(sample, text, *, per):
    if text == "fail":
        raise KeyError("no")
    return len(text) / per


async def shortness_async(sample, text, *, per):
    return len(text) / per


def scored(config, samples, texts):
    async def run():
        rewards = start_rewards(RewardConfig.model_validate(config), timeout=30.0, models=Models())
        assert isinstance(rewards, RewardParts)
        try:
            return await rewards.score(samples, texts)
        finally:
            await rewards.close()

    return [one.reason if isinstance(one, RewardFailure) else one for one in asyncio.run(run())]


def test_several_rewards_are_added_up_and_each_is_a_metric():
    samples = [sample(index=i) for i in range(3)]
    found = scored(parts(), samples, ["nus", "mond", "fail"])
    assert found == [2.0 - 0.75, 0.0 - 1.0, "short: KeyError: 'no'"]
    assert samples[0].reward_parts == {"right": 1.0, "short": 1.5}
    for one, value in zip(samples[:2], found, strict=False):
        one.reward = value
    metrics = rollout_metrics(samples[:2], seconds=None, dropped={})
    assert (metrics["rollout/reward_part_right"], metrics["rollout/reward_part_short"]) == (0.5, 1.75)


def test_a_field_of_the_sample_chooses_its_reward():
    types = ["right", "short", "else", None]
    samples = [sample(index=i, metadata={} if t is None else {"rm_type": t}) for i, t in enumerate(types)]
    found = scored(parts(select_by="rm_type"), samples, ["nus"] * 4)
    assert found[:2] == [2.0, -0.75]
    assert found[2] == "metadata['rm_type'] is 'else', which is none of reward.parts: right, short"
    assert "is None" in found[3]
    assert samples[0].reward_parts == {"right": 1.0}


def test_parts_are_written_in_toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "m"\n[reward]\nselect_by = "rm_type"\n[[reward.parts]]\nname = "a"\nfunction = "f1"\n'
        '[[reward.parts]]\nname = "b"\nfunction = "regex"\noptions = { pattern = "x" }\n'
    )
    config = load_config(TrainConfig, [file]).config.reward
    assert [part.function for part in config.parts] == ["f1", "regex"] and config.described() == "f1, regex"
    check_rewards(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"function": "numerik"}, "did you mean 'numeric'"),
        ({"function": "zzz"}, "neither `package.module:function` nor a reward that ships"),
        (parts(function="f1"), "parts take the place of function"),
        ({"select_by": "rm_type"}, "there are none"),
        ({"group_options": {"a": 1}}, "has no effect without group"),
        ({"parts": [{"name": "a"}, {"name": "a"}]}, "several parts are called a"),
    ],
)
def test_rewards_that_contradict_themselves(values, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"function": "regex"}, "missing a required"),
        ({"function": "exact", "options": {"patern": "x"}}, "called as f.sample, text, patern=....*does not take"),
        ({"parts": [{"name": "a", "function": "os:getcwd"}]}, r"reward.parts \(a\) = 'os:getcwd'"),
    ],
)
def test_options_are_those_of_the_function(values, message):
    with pytest.raises(UsageError, match=message):
        check_rewards(RewardConfig.model_validate(values))
    with pytest.raises(UsageError, match="does not take"):
        load_group_reward(RewardConfig(group=HERE + "doubled"))


def test_a_reward_whose_package_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'rltool\[math\]'"):
        load_reward("math")


async def slimes(args, sample, **kwargs):
    assert sample.tokens == [1, 0] and sample.response_length == 1 and sample.status.value == "completed"
    return {"score": float(sample.response == sample.label) * args.scale}


def test_a_reward_of_slime_runs_as_it_is():
    options = {"function": HERE + "slimes", "arguments": {"scale": 3}, "key": "score"}

    async def run():
        rewards = start_rewards(RewardConfig(function="slime", options=options), timeout=30.0, models=Models())
        return await rewards.score([sample()], ["nus"])

    assert asyncio.run(run()) == [3.0]


def test_the_contract_takes_names_and_options():
    check_reward_function("f1")
    check_reward_function("regex", options={"pattern": "4"})
    check_reward_function("numeric")
    with pytest.raises(ContractViolation, match="no instruction_id_list"):
        check_reward_function("instructions")


def test_samples_remember_where_their_reward_came_from():
    one = Sample(group_id=0, index=0, prompt_index=0, prompt_ids=[1], status=SampleStatus.COMPLETED)
    assert one.raw_reward is None and one.reward_parts == {}
