"""Episodes of several turns: what is tokenised, what is masked, what fails, what is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rltool.chat.parsers.registry import PARSERS
from rltool.chat.rendering import Renderer
from rltool.config.rollout import RolloutConfig
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.environments.episodes import EpisodeLimits, Episodes
from rltool.environments.loading import load_environment
from rltool.environments.protocol import task_of
from rltool.environments.scores import exact_answer
from rltool.environments.tool_use import ToolUse
from rltool.errors import EngineError, UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.generate import GenerateContext, fill_group
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.tokenizer import Tokenizer
from tests.gateway_models import Words, gateway_tokenizer
from tests.unit.environments.own_environments import Counting, Odd, Paying, Telling, add

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PLACE = "tests.unit.environments.own_environments"


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(gateway_tokenizer())


@pytest.fixture(scope="module")
def renderer(words) -> Renderer:
    tokenizer = Tokenizer(words.tokenizer, stop_ids=[words.stop], vocab_size=words.size)
    return Renderer(tokenizer, PARSERS["hermes"], {})


class Plane:
    """Engines that say the script, one text a request; versions count requests."""

    def __init__(self, words: Words, *script: str | Completion) -> None:
        self.words, self.script = words, list(script)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        said = self.script[len(self.requests)]
        self.requests.append(request)
        if isinstance(said, Completion):
            return [said]
        ids = self.words.spell(said)
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        version = f"run:0:{len(self.requests)}"
        return [Completion(tuple(ids), (-0.5,) * len(ids), reason, (VersionSpan(version, 0, len(ids)),))]


@pytest.fixture
def play(words, renderer):
    """(make, script) -> the sample of one episode, and the plane."""

    def play(make: Callable[[], Any], *script: str | Completion, tokens: int = 400, **limits: Any):
        Counting.made.clear()
        plane = Plane(words, *script)
        sample = Sample(7, 0, 3, [1], prompt_text="2 + 3?", label="5", seed=11)
        given = EpisodeLimits(**{"turns": 8, "turn_tokens": None, "prompt_tokens": 400, "call_seconds": 5.0} | limits)
        sampling = SamplingParams(max_tokens=tokens)
        context = GenerateContext(plane.generate, sampling, words.size, prompt=None)
        asyncio.run(fill_group([sample], context, Episodes(make, renderer, given)))
        return sample, plane

    return play


def by_mask(sample: Sample, words: Words) -> list[tuple[int, str]]:
    """The response in stretches of equal mask."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(sample.response_ids, sample.response_mask, strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, words.text(ids)) for mask, ids in found]


def test_a_tool_episode_is_one_sample_whose_tool_tokens_have_no_loss(play, words):
    sample, plane = play(lambda: ToolUse([add], score=exact_answer), CALL, "5")
    assert by_mask(sample, words) == [
        (1, CALL + "<|im_end|>"),
        (0, "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (1, "5<|im_end|>"),
    ]
    assert (sample.status, sample.episode_reward, sample.turns) == (SampleStatus.COMPLETED, 1.0, 2)
    first, second = plane.requests
    assert list(first.prompt_ids) == sample.prompt_ids
    # What was sampled is sent back token by token: the tokenizer itself would merge "he", "ll" and "in".
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert list(second.prompt_ids) == [*sample.prompt_ids, *sample.response_ids[: -len(words.spell("5"))]]


def test_each_token_keeps_the_version_and_log_probability_that_it_was_sampled_with(play, words):
    sample, _ = play(lambda: ToolUse([add]), CALL, "5")
    sampled = [i for i, mask in enumerate(sample.response_mask) if mask]
    covered = [i for span in sample.versions for i in range(span.start, span.end)]
    assert covered == sampled
    assert [span.version for span in sample.versions] == ["run:0:1", "run:0:2"]
    assert {sample.response_logprobs[i] for i in sampled} == {-0.5}
    not_sampled = set(range(len(sample.response_ids))) - set(sampled)
    assert {sample.response_logprobs[i] for i in not_sampled} == {0.0}


def test_what_was_sampled_is_never_tokenised_again(play, words):
    sample, plane = play(lambda: Counting(1), "hello thin", "än hell")
    spelled = words.spell("hello thin")
    assert len(spelled) > len(words.tokenizer("hello thin<|im_end|>")["input_ids"])
    assert sample.response_ids[: len(spelled)] == spelled
    assert list(plane.requests[1].prompt_ids[len(sample.prompt_ids) :][: len(spelled)]) == spelled


def test_reasoning_that_the_template_drops_stays_in_the_tokens(play, words):
    """This template writes earlier turns without their reasoning once a user speaks again."""
    sample, _ = play(lambda: Counting(1), "<think>\nhm\n</think>\n\nyes", "no")
    [(_, first), (_, between), (_, second)] = by_mask(sample, words)
    assert first == "<think>\nhm\n</think>\n\nyes<|im_end|>" and second == "no<|im_end|>"
    assert between == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert Counting.made[0].said[0].reasoning == "hm"


def test_what_an_environment_tells_training_is_its_samples_and_not_an_earlier_attempts(play, words, renderer):
    sample, _ = play(lambda: Telling(2), *["hello"] * 3)
    assert sample.train_metadata == {"replies": 3}
    sample.status, sample.train_metadata["stale"] = SampleStatus.ABORTED, 1
    plane = Plane(words, "hello", "hello")
    limits = EpisodeLimits(turns=8, turn_tokens=None, prompt_tokens=400, call_seconds=5.0)
    context = GenerateContext(plane.generate, SamplingParams(max_tokens=400), words.size, prompt=None)
    asyncio.run(fill_group([sample], context, Episodes(lambda: Telling(1), renderer, limits)))
    assert sample.train_metadata == {"replies": 2}


def test_what_a_step_earns_belongs_to_the_tokens_of_its_reply(play):
    sample, _ = play(lambda: Paying(2), "hello", "he", "hello hello")
    starts = [i for i, m in enumerate(sample.response_mask) if m and (i == 0 or not sample.response_mask[i - 1])]
    assert [(turn.turn, turn.start, turn.reward) for turn in sample.turn_rewards] == [
        (number, start, number + 1.0) for number, start in enumerate(starts)
    ]
    assert all(all(sample.response_mask[turn.start : turn.end]) for turn in sample.turn_rewards)
    assert sample.episode_reward == 0.1 and sample.earned == 6.0


def test_a_step_that_earns_no_number_fails_its_sample(play):
    sample, _ = play(lambda: Odd(1), "hello")
    assert sample.status is SampleStatus.FAILED and "the reward of a step: " in sample.failure


def test_tokens_of_all_turns_together_are_bounded(play):
    sample, plane = play(lambda: Counting(9), *["hello"] * 9, tokens=60)
    assert sample.status is SampleStatus.TRUNCATED and len(sample.response_ids) <= 60
    assert sample.response_mask[-1] == 1  # no observation that nobody answers
    assert sample.episode_reward == float(len(plane.requests))


def test_a_reply_that_was_cut_is_the_last(play):
    sample, plane = play(lambda: Counting(9), "hello hello", turn_tokens=5)
    assert sample.status is SampleStatus.TRUNCATED and len(sample.response_ids) == 5 and len(plane.requests) == 1
    assert Counting.made[0].said[0].text == "hello"


def test_turns_are_bounded(play):
    sample, plane = play(lambda: Counting(9), *["hello"] * 9, turns=2)
    assert (sample.status, sample.turns, len(plane.requests)) == (SampleStatus.TRUNCATED, 2, 2)


def test_an_answer_that_an_abort_cut_is_gone_on_with_in_the_same_turn(play, words):
    ids = words.spell("hel", stop=False)
    cut = Completion(tuple(ids), (-1.0,) * 3, "abort", (VersionSpan("run:0:0", 0, 3),))
    sample, plane = play(lambda: Counting(0), cut, "lo")
    assert by_mask(sample, words) == [(1, "hello<|im_end|>")]
    assert len(Counting.made[0].said) == 1 and plane.requests[1].seed != plane.requests[0].seed


@pytest.mark.parametrize("where", ["reset", "step", "reward"])
def test_an_environment_that_raises_fails_its_sample_and_is_closed(play, where):
    sample, _ = play(lambda: Counting(0, fails_in=where), "yes")
    assert sample.status is SampleStatus.FAILED and sample.failure == f"{where}: KeyError: '{where}'"
    assert [environment.closed for environment in Counting.made] == [1]


def test_an_environment_that_hangs_fails_its_sample(play):
    sample, _ = play(lambda: Counting(0, hangs_in="step"), "yes", call_seconds=0.01)
    assert sample.status is SampleStatus.FAILED and "deadlines.call = 0.01 s" in sample.failure
    assert Counting.made[0].closed == 1


def test_an_environment_that_cannot_be_closed_costs_nothing(play):
    sample, _ = play(lambda: Counting(0, fails_in="close"), "yes")
    assert sample.status is SampleStatus.COMPLETED


def test_environments_are_closed_where_the_engines_fail(play):
    def fails() -> Counting:
        return Counting(0)

    class Broken(Plane):
        async def generate(self, request):
            raise EngineError("gone")

    plane_error = pytest.raises(EngineError, match="gone")
    with plane_error:
        sample = Sample(7, 0, 3, [1], prompt_text="x", seed=1)
        words = Words(gateway_tokenizer())
        tokenizer = Tokenizer(words.tokenizer, stop_ids=[words.stop], vocab_size=words.size)
        episodes = Episodes(fails, Renderer(tokenizer, PARSERS["hermes"], {}), EpisodeLimits(8, None, 400, 5.0))
        Counting.made.clear()
        context = GenerateContext(Broken(words).generate, SamplingParams(max_tokens=9), words.size)
        asyncio.run(fill_group([sample], context, episodes))
    assert Counting.made[0].closed == 1


def test_an_interrupted_episode_starts_over(words, renderer):
    plane = Plane(words, "hello", "hello", "hello", "hello")
    sample = Sample(7, 0, 3, [1], prompt_text="x", seed=1)
    limits = EpisodeLimits(8, None, 400, 5.0)
    episodes = Episodes(lambda: Counting(1), renderer, limits)
    stop = [False, True]
    first = GenerateContext(
        plane.generate, SamplingParams(max_tokens=99), words.size, interrupted=lambda: stop[min(len(plane.requests), 1)]
    )
    Counting.made.clear()
    asyncio.run(fill_group([sample], first, episodes))
    assert sample.status is SampleStatus.ABORTED and sample.turns == 1
    again = GenerateContext(plane.generate, SamplingParams(max_tokens=99), words.size)
    asyncio.run(fill_group([sample], again, episodes))
    assert (sample.status, sample.turns, len(plane.requests)) == (SampleStatus.COMPLETED, 2, 3)
    assert [environment.closed for environment in Counting.made] == [1, 1]


def test_tool_use_tells_the_model_what_was_wrong(play, words):
    sample, _ = play(
        lambda: ToolUse([add]),
        CALL.replace("add", "subtract"),
        CALL.replace("2", '"two"'),
        "I give up",
    )
    tool_texts = [text for mask, text in by_mask(sample, words) if not mask]
    assert "there is no tool 'subtract'; there are: add" in tool_texts[0]
    assert "a: Input should be a valid integer" in tool_texts[1]
    assert sample.episode_reward is None  # left to [reward]


def test_an_episode_without_an_answer_is_worth_nothing(play):
    sample, _ = play(lambda: ToolUse([add], score=exact_answer), CALL, CALL, turns=2)
    assert (sample.status, sample.episode_reward) == (SampleStatus.TRUNCATED, 0.0)


def test_the_messages_of_a_row_are_the_beginning():
    rows = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    prompt = Prompt(3, (1,), "rendered", "x", messages=rows)
    task = task_of(Sample(0, 0, 3, [1], prompt_text="rendered", seed=4), prompt)
    assert [(message.role, message.text) for message in task.messages] == [("system", "be brief"), ("user", "hi")]
    with pytest.raises(UsageError, match="content is text"):
        task_of(Sample(0, 0, 3, [1]), Prompt(3, (1,), "x", messages=({"role": "user", "content": [1]},)))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (f"{PLACE}:not_an_environment", {}, "it lacks reset, step, reward, close"),
        (f"{PLACE}:Counting", {"times": 1, "color": 2}, "unexpected keyword argument 'color'"),
        ("rltool.environments.tool_use:ToolUse", {"tools": [f"{PLACE}:nothing"]}, "has no 'nothing'"),
        ("rltool.environments.tool_use:ToolUse", {"tools": [f"{PLACE}:add"] * 2}, "two tools have one name"),
    ],
)
def test_what_is_no_environment_is_found_before_anything_starts(name, arguments, said):
    with pytest.raises(UsageError, match=said):
        load_environment(RolloutConfig(environment=name, environment_arguments=arguments))


def test_the_seconds_of_an_episodes_steps_are_its_samples_and_those_of_a_reply_are_not(words, renderer):
    """By a clock that the environment and the engine turn."""
    clock = [0.0]

    class Slow(Counting):
        async def step(self, reply):
            clock[0] += 1.5
            return await super().step(reply)

    class Thinking(Plane):
        async def generate(self, request):
            clock[0] += 100.0
            return await super().generate(request)

    limits = EpisodeLimits(turns=8, turn_tokens=None, prompt_tokens=400, call_seconds=5.0)
    sample = Sample(7, 0, 3, [1], prompt_text="2 + 3?", seed=11)
    context = GenerateContext(Thinking(words, *"123").generate, SamplingParams(max_tokens=400), words.size)
    episodes = Episodes(lambda: Slow(times=2), renderer, limits, clock=lambda: clock[0])
    asyncio.run(fill_group([sample], context, episodes))
    assert (sample.turns, sample.tool_seconds) == (3, 4.5)


def test_environments_are_made_with_their_arguments():
    make = load_environment(RolloutConfig(environment=f"{PLACE}:Counting", environment_arguments={"times": 4}))
    assert make is not None and isinstance(make(), Counting) and make() is not make()
    assert load_environment(RolloutConfig()) is None
