"""Episodes of several turns: what is tokenised, what is masked, what fails, what is closed."""

from __future__ import annotations

import asyncio
import base64
import io
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rltool.chat.parsers.registry import PARSERS
from rltool.chat.rendering import Renderer
from rltool.config.rollout import RolloutConfig
from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.environments.episodes import EpisodeLimits, Episodes
from rltool.environments.gym import TextGym
from rltool.environments.loading import load_environment
from rltool.environments.protocol import task_of
from rltool.environments.scores import exact_answer
from rltool.environments.tool_use import ToolUse
from rltool.errors import EngineError, UsageError
from rltool.models.pictures import Pictures, check_places, places_of
from rltool.rollout.data import Prompt
from rltool.rollout.generate import GenerateContext, fill_group
from rltool.rollout.pictures import PictureReader, picture_file
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.tokenizer import Tokenizer
from tests.gateway_models import PAD, Words, gateway_tokenizer, seeing_tokenizer, write_seeing_model
from tests.unit.environments.own_environments import Counting, Odd, Paying, Showing, Telling, add

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

    return player(words, renderer)


def player(words: Words, renderer: Renderer, pictures: PictureReader | str = "it has no tower"):
    def play(
        make: Callable[[], Any], *script: str | Completion, tokens: int = 400, row: Prompt | None = None, **limits: Any
    ):
        Counting.made.clear()
        plane = Plane(words, *script)
        sample = Sample(7, 0, 3, [1], prompt_text="2 + 3?", label="5", seed=11)
        given = EpisodeLimits(**{"turns": 8, "turn_tokens": None, "prompt_tokens": 400, "call_seconds": 5.0} | limits)
        sampling = SamplingParams(max_tokens=tokens)
        if row is not None:
            sample.multimodal_inputs = dict(row.multimodal_inputs)
            sample.picture_places = array("q", row.picture_places)
        context = GenerateContext(plane.generate, sampling, words.size, prompt=row)
        asyncio.run(fill_group([sample], context, Episodes(make, renderer, given, pictures=pictures)))
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
    rows = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "weight": 1})
    prompt = Prompt(3, (1,), "rendered", "x", messages=rows)
    task = task_of(Sample(0, 0, 3, [1], prompt_text="rendered", seed=4), prompt)
    assert [(message.role, message.text) for message in task.messages] == [("system", "be brief"), ("user", "hi")]
    with pytest.raises(UsageError, match="has a part 1: environments show text and images"):
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


# -- pictures


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    """A folder of pictures, beside which there is another one."""
    root = tmp_path_factory.mktemp("around") / "media"
    root.mkdir()
    for name, size in {"red": (40, 20), "blue": (70, 70), "../outside": (9, 9)}.items():
        Image.new("RGB", size, name if name in ("red", "blue") else "black").save(root / f"{name}.png")
    (root / "notes.png").write_text("no picture")
    return root


@pytest.fixture(scope="module")
def reader(tmp_path_factory, media) -> PictureReader:
    words = Words(seeing_tokenizer())
    token, [video] = words.tokenizer.convert_tokens_to_ids(PAD), words.spell("~", stop=False)
    pictures = Pictures(token, patch=8, merge=2, deep=0, video=video)
    return PictureReader(pictures, write_seeing_model(tmp_path_factory.mktemp("model")), media)


@pytest.fixture
def see(reader):
    """As `play`, of a model that sees."""
    words = Words(seeing_tokenizer())
    tokenizer = Tokenizer(words.tokenizer, stop_ids=[words.stop], vocab_size=words.size)
    return player(words, Renderer(tokenizer, PARSERS["hermes"], {}), reader)


def file_of(kind: str = "webp") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 48), "green").save(stream, kind)
    return stream.getvalue()


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def seen(sample: Sample, reader: PictureReader) -> list[tuple[str, int, int]]:
    """(what stands before its tokens, rows, columns) of each picture, by the sample's own tokens."""
    ids, words = [*sample.prompt_ids, *sample.response_ids], Words(seeing_tokenizer())
    places = places_of(sample.picture_places)
    check_places(ids, places, reader.pictures)
    assert len(sample.multimodal_inputs["image"]) == len(places)
    assert [place.size for place in places] == [len(picture_file(one)) for one in sample.multimodal_inputs["image"]]
    return [(words.text(ids[place.at - 3 : place.at]), place.rows, place.columns) for place in places]


def test_pictures_before_and_behind_replies_are_the_samples_and_the_engines(see, reader, media):
    """Paths, bytes and a data URL, over three turns; what the engine is sent is what the sample has."""
    url = "data:image/png;base64," + base64.b64encode((media / "blue.png").read_bytes()).decode()
    openai = {"type": "image_url", "image_url": {"url": url}}
    first = user("a", image("red.png"), "b", image(file_of()))
    environment = Showing(first, user("c", openai), user(image("red.png"), "d"))
    sample, plane = see(lambda: environment, "hello", "he", "hello he", tokens=2000)
    assert (sample.status, sample.turns) == (SampleStatus.COMPLETED, 3)
    start, end = "<|vision_start|>", "<|vision_end|>"
    assert seen(sample, reader) == [
        (f"\na{start}", 1, 2), (f"{end}b{start}", 3, 1), (f"\nc{start}", 4, 4), (f"r\n{start}", 1, 2),
    ]  # fmt: skip
    names = [Path(one).name if not one.startswith("data:") else "data" for one in sample.multimodal_inputs["image"]]
    assert names == ["red.png", "data", "data", "red.png"]
    in_prompt = [place.at < len(sample.prompt_ids) for place in places_of(sample.picture_places)]
    assert in_prompt == [True, True, False, False]
    mask = [0] * len(sample.prompt_ids) + list(sample.response_mask)
    assert not any(any(mask[place.at : place.at + place.tokens]) for place in places_of(sample.picture_places))
    ids = [*sample.prompt_ids, *sample.response_ids]
    for request, count in zip(plane.requests, (2, 3, 4), strict=True):
        assert list(request.prompt_ids) == ids[: len(request.prompt_ids)]
        assert [(one.at, one.tokens) for one in request.pictures] == [
            (place.at, place.tokens) for place in places_of(sample.picture_places)[:count]
        ]
        assert request.unexpanded.count(reader.pictures.token) == count
    assert plane.requests[2].pictures[2].url == url


def test_what_a_row_has_of_pictures_is_in_its_task_and_seen_where_it_is_shown(see, reader):
    ids, sources, places = reader.read([5, reader.pictures.token, 6], ["red.png"])
    row = Prompt(
        3, tuple(ids), "rendered", messages=(user("see ", {"type": "image"}, "?"),),
        multimodal_inputs={"image": sources}, picture_places=tuple(places),
    )  # fmt: skip
    sample, _ = see(lambda: Counting(0), "hello", row=row)
    [environment] = Counting.made
    assert environment.task.multimodal_inputs == {"image": sources}
    assert environment.task.messages[0].pieces == ["see ", "?"]
    assert seen(sample, reader) == [("e <|vision_start|>", 1, 2)]
    silent, plane = see(lambda: Showing({"role": "user", "content": "hi"}), "hello", row=row)
    assert silent.multimodal_inputs == {} and not silent.picture_places and not plane.requests[0].pictures
    two = user({"type": "image"}, {"type": "image"})
    more = Prompt(3, (5,), "x", messages=(two,), multimodal_inputs={"image": sources})
    with pytest.raises(UsageError, match="has a part of type image without its picture"):
        see(lambda: Counting(0), "hello", row=more)


def test_an_episode_that_starts_over_has_its_own_pictures_alone(see, reader):
    sample, _ = see(lambda: Showing(user(image("red.png")), user(image("blue.png"))), "hello", "he", tokens=2000)
    sample.status = SampleStatus.ABORTED
    words = Words(seeing_tokenizer())
    tokenizer = Tokenizer(words.tokenizer, stop_ids=[words.stop], vocab_size=words.size)
    limits = EpisodeLimits(turns=8, turn_tokens=None, prompt_tokens=400, call_seconds=5.0)
    renderer = Renderer(tokenizer, PARSERS["hermes"], {})
    episodes = Episodes(lambda: Showing(user(image("blue.png"))), renderer, limits, pictures=reader)
    context = GenerateContext(Plane(words, "hello").generate, SamplingParams(max_tokens=400), words.size)
    asyncio.run(fill_group([sample], context, episodes))
    assert [(rows, columns) for _, rows, columns in seen(sample, reader)] == [(4, 4)]


def draw(name: str) -> Any:
    """Shows a picture."""
    shown = [{"type": "text", "text": "here"}, {"type": "image", "path": f"{name}.png"}]
    return ["a", "list"] if name == "none" else shown


def test_a_tool_s_result_and_an_observation_may_have_pictures(see, reader):
    call = '<tool_call>\n{"name": "draw", "arguments": {"name": "NAME"}}\n</tool_call>'
    calls = [call.replace("NAME", name) for name in ("blue", "none")]
    sample, _ = see(lambda: ToolUse([draw]), *calls, "5", tokens=2000)
    assert [(rows, columns) for _, rows, columns in seen(sample, reader)] == [(4, 4)]
    assert '["a", "list"]' in Words(seeing_tokenizer()).text(sample.response_ids)

    class Game:
        def reset(self, *, seed: int, options: Any) -> Any:
            return [{"type": "text", "text": "look"}, image("red.png")], {}

        def step(self, action: str) -> Any:
            return [image("blue.png")], 0.0, action == "he", False, {}

    for show, sizes in ((None, [(1, 2), (4, 4)]), (f"{__name__}:as_parts", [(3, 1), (3, 1)])):
        sample, _ = see(lambda show=show: TextGym(Game, show=show), "hello", "he", tokens=2000)
        assert [(rows, columns) for _, rows, columns in seen(sample, reader)] == sizes


def as_parts(observation: Any) -> Any:
    assert observation[-1]["type"] == "image"
    return (image(file_of()),)


def test_a_picture_counts_with_all_of_its_tokens(see):
    shows = lambda: Showing(user("a"), user(image("blue.png")))  # noqa: E731
    whole, _ = see(shows, "hello", "he", tokens=2000)
    assert [place.tokens for place in places_of(whole.picture_places)] == [16]
    sample, plane = see(shows, "hello", "he", tokens=len(whole.response_ids) - len("he.") - 10)
    assert sample.status is SampleStatus.TRUNCATED and len(plane.requests) == 1 and not sample.picture_places
    sample, _ = see(lambda: Showing(user(image("blue.png"))), "hello", prompt_tokens=30)
    assert sample.status is SampleStatus.FAILED and "sampling.max_prompt_tokens = 30" in sample.failure


def test_a_model_that_writes_the_placeholder_itself_gets_no_further_picture(see, reader):
    """An engine could not tell it from those of pictures."""
    words = Words(seeing_tokenizer())
    version = (VersionSpan("run:0:1", 0, 2),)
    for token in (reader.pictures.token, reader.pictures.video):
        stray = Completion((token, words.stop), (-0.5, -0.5), "stop", version)
        for first, second in (("a", image("red.png")), (image("red.png"), "a")):
            sample, plane = see(lambda one=first, two=second: Showing(user(one), user(two)), stray, "he", tokens=2000)
            assert sample.status is SampleStatus.TRUNCATED and len(plane.requests) == 1
            assert sample.episode_reward == 1.0
        sample, plane = see(lambda: Showing(user("a"), user("b")), stray, "he", tokens=2000)
        assert sample.status is SampleStatus.COMPLETED and len(plane.requests) == 2


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (user("a", {"type": "video", "video": "a.mp4"}), "of role 'user' has video: environments show text and images"),
        (user({"type": "input_audio", "input_audio": {"data": "AAAA"}}), "has audio: environments show"),
        (user({"type": "document", "text": "x"}), "has a part 'document': environments show"),
        (user({"type": "image"}), "has a part of type image without its picture"),
        (user(image(object())), "cannot be written as JSON"),
        ({"role": "system", "content": [image("red.png")]}, "of role 'system' has images"),
        ({"role": "robot", "content": "x"}, "'robot', .* is no message of an environment: one has role, content"),
        ({"role": "user", "content": "x", "tool_calls": []}, "'tool_calls': .* is no message of an environment"),
        ("hello", "'hello' is no message of an environment"),
        ({"role": "user", "content": 3}, "content of type int"),
    ],
)  # fmt: skip
def test_what_is_no_message_of_text_and_pictures_is_refused_by_name(see, shown, said):
    with pytest.raises(UsageError, match=said):
        see(lambda: Showing(shown), "hello")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("../outside.png", "reset: message 0: ../outside.png: not in data.media_root"),
        ("https://example.invalid/a.png", "pictures are not fetched"),
        ("missing.png", "cannot be read"),
        ("notes.png", "cannot be read"),
        (b"GIF89a", "cannot be read"),
    ],
)
def test_a_picture_that_cannot_be_read_fails_its_sample_with_its_reason(see, value, said):
    sample, plane = see(lambda: Showing(user(image(value))), "hello")
    assert sample.status is SampleStatus.FAILED and said in sample.failure and not plane.requests


def test_a_model_without_a_tower_is_shown_no_picture(play):
    with pytest.raises(UsageError, match=r"rollout.environment shows a picture, and it has no tower"):
        play(lambda: Showing(user(image("red.png"))), "hello")
    sample, _ = play(lambda: Showing(user("a", "b")), "hello")
    assert sample.status is SampleStatus.COMPLETED
