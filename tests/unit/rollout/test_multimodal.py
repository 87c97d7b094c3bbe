"""Rows with images, video or audio: what is kept of them, and who refuses them in which words."""

from __future__ import annotations

import base64
import json
import math
import shutil
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rltool.agents.task import row_of
from rltool.algorithms.batch import Ragged, TrainBatch
from rltool.config.data import DataConfig
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.types import TEXT_ALONE, GenerateRequest, SamplingParams
from rltool.environments.protocol import task_of
from rltool.errors import TrainingStopped, UsageError
from rltool.models.pictures import Pictures, places_of
from rltool.models.registry import family_for, read_hf_config
from rltool.quickstart.tiny_model import make_tiny_model, make_tiny_vision_model
from rltool.rollout.data import Prompt, PromptSource, load_prompts
from rltool.rollout.data.own import load_own_source
from rltool.rollout.groups import new_samples
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.multimodal import multimodal_inputs
from rltool.rollout.pictures import PictureReader, for_engine
from rltool.rollout.sample import Sample
from rltool.training.checks import modalities
from rltool.training.checks.modalities import (
    check_each_sample,
    check_samples,
    generation_refusal,
    shown_pictures,
    training_refusal,
)
from rltool.training.checks.validate import check_inputs
from rltool.training.manager.inputs import load_train_prompts
from rltool.training.show_data import describe_data
from rltool.training.sources import RecordedRollouts, SupervisedData
from tests.unit.rollout.data.test_data import LetterTokenizer, jsonl
from tests.unit.rollout.test_rollout_batching import sample as scored

PNG = "data:image/png;base64,AAAA"
OPENAI = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
]
TRANSFORMERS = [
    {"type": "image", "url": "a.png"},
    {"type": "image"},
    {"type": "image", "image": "b.png"},
    {"type": "video", "path": "c.mp4"},
    {"type": "audio", "audio": "d.wav"},
    {"type": "text", "text": "Compare."},
]


class Source:
    """A data.source of one row, again and again."""

    def __init__(self, **row: Any) -> None:
        self.row = row

    def next(self, count: int) -> list[dict[str, Any]]:
        return [self.row]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def with_media(config: DataConfig, seed: int) -> Source:
    return Source(prompt="q", videos="v.mp4", audios=["a.wav"])


def with_an_object(config: DataConfig, seed: int) -> Source:
    return Source(prompt="q", images=[object()])


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def load(path: Path, **config: Any) -> list[Prompt]:
    return list(load_prompts([path], LetterTokenizer(), DataConfig(**config), max_prompt_tokens=1000).prompts)


# -- what is kept


@pytest.mark.parametrize(
    ("columns", "messages", "expected"),
    [
        ({}, chat("text"), {}),
        ({"image": None, "video": []}, "text", {}),
        ({"image": ["a.png", {"path": "b.png"}], "audio": "c.wav"}, "<image>", {
            "image": ["a.png", {"path": "b.png"}], "audio": ["c.wav"],
        }),
        ({}, chat(OPENAI), {
            "image": [{"url": PNG, "detail": "low"}], "audio": [{"data": "AAAA", "format": "wav"}],
        }),
        ({"image": ["z.png"]}, chat(TRANSFORMERS), {
            "image": ["a.png", "b.png", "z.png"], "video": ["c.mp4"], "audio": ["d.wav"],
        }),
        ({}, chat([{"image": "a.png"}, {"text": "no types, as in Qwen's own"}]), {"image": ["a.png"]}),
        ({}, chat([{"type": "text", "text": "x", "image": None}, {"type": "unknown"}, "text"]), {}),
        ({"image": [{"bytes": b"\x89PNG", "path": None}]}, "x", {"image": [{"bytes": "iVBORw==", "path": None}]}),
    ],
)  # fmt: skip
def test_what_a_row_has_is_kept_by_kind_as_it_is(columns, messages, expected):
    assert multimodal_inputs(columns, messages) == expected


def test_a_row_s_columns_and_parts_reach_every_sample_of_its_prompt(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "q", "images": ["a.png"]},
        {"messages": chat(OPENAI)},
        {"prompt": "q", "picture": "p.png", "images": None},
    )
    column, parts, none = load(path)
    assert column.multimodal_inputs == {"image": ["a.png"]} and column.text == "q"
    assert set(parts.multimodal_inputs) == {"image", "audio"} and parts.messages[0]["content"] == OPENAI
    assert none.multimodal_inputs == {}
    one, two = new_samples(0, column, count=2, run_seed=0)
    one.multimodal_inputs["image"].append("changed")
    assert two.multimodal_inputs == {"image": ["a.png"]}


def test_other_columns_are_named_and_none_is_a_choice_too(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "q", "images": ["a.png"], "task": {"picture": "p.png"}})
    [prompt] = load(path, multimodal_keys={"image": "task.picture"})
    assert prompt.multimodal_inputs == {"image": ["p.png"]}
    assert load(path, multimodal_keys={})[0].multimodal_inputs == {}
    with pytest.raises(UsageError, match="multimodal_keys"):
        load_config(TrainConfig, [], ["model.path=m", "data.multimodal_keys={smell='smells'}"])


def test_parquet_s_structs_lose_the_keys_that_other_parts_have(tmp_path):
    """A chat template that asks `'image' in part` would take the text for an image."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat([{"type": "image", "image": b"\0"}, {"text": "x"}])}]), path)
    [prompt] = load(path)
    assert prompt.messages[0]["content"] == [{"type": "image", "image": "AA=="}, {"text": "x"}]
    assert prompt.multimodal_inputs == {"image": ["AA=="]}


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}], [3, *chat(OPENAI)]])
def test_what_are_no_messages_is_said_as_without_images(tmp_path, messages):
    path = jsonl(tmp_path / "a.jsonl", {"messages": messages, "images": ["a.png"]})
    with pytest.raises(UsageError, match="line 1: expected text, or a list of messages"):
        load(path)


def test_a_decoded_image_is_refused_with_what_to_give():
    config = DataConfig(source=f"{__name__}:with_an_object")
    source = load_own_source(config, LetterTokenizer(), seed=0, max_prompt_tokens=99)
    with pytest.raises(UsageError, match=r"data\.source, row 0: image: .*builtins\.object.*Image\(decode=False\)"):
        source.next(1)


def test_prompts_and_dumps_keep_them_and_those_of_an_earlier_release_have_none(tmp_path):
    inputs = {"image": ["a.png"], "video": [{"url": "http://example.invalid/v.mp4"}]}
    prompt = Prompt(3, (1, 2), "t", "l", None, {"m": 1}, tuple(chat("t")), inputs)
    assert Prompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt
    assert Prompt.from_json([3, [1, 2], "t", "l", None, {"m": 1}, None]).multimodal_inputs == {}
    samples = [scored(0, [1], [2])]
    samples[0].multimodal_inputs = inputs
    write_dump(tmp_path, step=0, seed=0, samples=samples)
    assert read_dump(tmp_path, 0).samples == samples


def test_another_image_is_another_data_set():
    def fingerprint(**inputs: Any) -> str:
        return PromptSource([Prompt(0, (1,), "t", multimodal_inputs=inputs)], seed=0).state_dict()["fingerprint"]

    assert fingerprint(image=["a"]) != fingerprint(image=["b"])
    assert fingerprint() != fingerprint(image=["a"])


def test_environments_and_agents_are_given_them():
    sample = Sample(0, 0, 7, [1], prompt_text="q", multimodal_inputs={"image": ["a.png"]})
    assert task_of(sample, None).multimodal_inputs == {"image": ["a.png"]}
    assert row_of(sample, None)["multimodal_inputs"] == {"image": ["a.png"]}


# -- who refuses them


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def configured(model, tmp_path):
    rows = [{"prompt": "cat=", "label": "tac"}, {"prompt": "dog=", "label": "god", "images": ["dog.png"]}]
    path = jsonl(tmp_path / "rows.jsonl", *rows)

    def make(*sets: str) -> TrainConfig:
        return load_config(TrainConfig, [], [f"model.path={model}", f'data.train=["{path}"]', *sets]).config

    return make


FUNCTION = "rollout.generate_function=tests.contract.rollout_functions:two_turns"


@pytest.mark.parametrize("how", [[], [FUNCTION], ['algorithm.loss="sft"']])
def test_train_refuses_them_before_anything_starts_whoever_generates(configured, how):
    said = r"rows\.jsonl, line 2: has images, and the trainer.s \w+ takes text alone \(no .*multimodal_keys = \{\}"
    with pytest.raises(UsageError, match=said):
        check_inputs(configured(*how))
    assert "2 prompts" in check_inputs(configured(*how, "data.multimodal_keys={}"))


def test_train_refuses_them_in_evaluation_sets_and_in_supervised_rows(configured, tmp_path):
    plain = jsonl(tmp_path / "plain.jsonl", {"prompt": "cat=", "label": "tac"})
    with pytest.raises(UsageError, match="rows.jsonl, line 2: has images"):
        check_inputs(configured(f'data.train=["{plain}"]', f'eval.sets={{held="{tmp_path}/rows.jsonl"}}'))
    with pytest.raises(UsageError, match="rows.jsonl, line 2: has images"):
        SupervisedData(configured('algorithm.loss="sft"'))


def test_without_a_trainer_the_built_in_generation_refuses_them_and_others_do_not(configured):
    def read(*sets: str):
        config = configured(*sets)
        train, _ = load_train_prompts(config, LetterTokenizer(), partial(generation_refusal, config))
        assert train is not None
        return train.prompts[1].multimodal_inputs

    with pytest.raises(UsageError, match="line 2: has images, and the built-in generation takes text alone"):
        read()
    for own in (FUNCTION, "rollout.environment=tests.unit.environments.own_environments:Counting", "rollout.agent=a:b"):
        assert read(own) == {"image": ["dog.png"]}


def test_a_row_of_an_own_source_is_refused_as_it_comes(configured):
    config = configured(f'data.source="{__name__}:with_media"', "data.train=[]")
    prompts = load_train_prompts(config, LetterTokenizer(), partial(training_refusal, config))[1]
    with pytest.raises(UsageError, match="data.source, row 0: has video and audio, and the trainer's"):
        prompts.next(1)


def test_a_family_that_reads_them_is_not_refused_but_for_what_it_does_not_read(configured, monkeypatch, model):
    sees = replace(family_for(read_hf_config(model)), pictures=Pictures(token=1, patch=8, merge=2, deep=0))
    monkeypatch.setattr(modalities, "family_for", lambda config, own=None: sees)
    config = configured(FUNCTION)
    assert "has no image processor" in str(training_refusal(config, {"image"}))
    monkeypatch.setattr(modalities, "PROCESSORS", ("config.json",))
    for config in (configured(FUNCTION), configured()):
        assert training_refusal(config, {"image"}) is None and generation_refusal(config, {"image"}) is None
        assert str(training_refusal(config, {"image", "audio"})).startswith("audio, and the trainer's")
    assert "built-in generation" in str(generation_refusal(configured(), {"image", "video"}))
    for settings in (["trainer.world_size=2", "trainer.context_parallel=2"], ["trainer.shared_prefixes=true"]):
        assert "not implemented with pictures" in str(training_refusal(configured(*settings), {"image"}))
        assert str(shown_pictures(configured(*settings))).startswith(settings[-1].split("=")[0])
    assert shown_pictures(configured()) == sees.pictures
    monkeypatch.setattr(modalities, "PROCESSORS", ("preprocessor_config.json",))
    assert "has no image processor" in str(shown_pictures(configured()))


def test_rollouts_of_a_model_that_the_trainer_does_not_have_read_text_alone(configured, model, tmp_path):
    """Image processor or not: engines serve more models than the trainer has."""
    other = shutil.copytree(model, tmp_path / "other")
    named = json.loads((model / "config.json").read_text()) | {"architectures": ["NobodyForCausalLM"]}
    (other / "config.json").write_text(json.dumps(named))
    for _ in range(2):
        config = configured(f"model.path={other}")
        assert modalities.run_tokenizer(config).pictures is None
        assert TEXT_ALONE in str(generation_refusal(config, {"image"}))
        (other / "preprocessor_config.json").write_text("{}")


PICTURES = Pictures(token=7, patch=8, merge=2, deep=0)


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """Directories of a model, and of pictures."""
    root = tmp_path_factory.mktemp("media")
    Image.new("RGB", (40, 20), "red").save(root / "red.png")
    (root / "notes.png").write_text("no picture")
    return make_tiny_vision_model(tmp_path_factory.mktemp("sees"), seed=0), root


@pytest.fixture(scope="module")
def reader(sees):
    return PictureReader(PICTURES, *sees)


def test_a_prompt_gets_a_placeholder_for_each_token_of_its_pictures(reader):
    ids, sources, places = reader.read([1, 7, 2, 7, 3], ["red.png", {"path": "red.png", "bytes": None}])
    [first, second] = places_of(places)
    assert ids == [1, *[7] * first.tokens, 2, *[7] * second.tokens, 3] and first.tokens == second.tokens == 2
    assert (first.rows, first.columns) == (1, 2) and ids[second.at] == 7 and ids[second.at - 1] == 2
    assert len(set(sources)) == 1 and Path(sources[0]).name == "red.png" and Path(sources[0]).is_absolute()
    own = Path(sources[0]).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(own).decode()
    assert reader.read([7], [url])[0] == reader.read([7], [base64.b64encode(own).decode()])[0] == [7, 7]
    request = GenerateRequest(tuple(ids), SamplingParams(1), "id", pictures=for_engine({"image": sources}, places))
    assert request.unexpanded == [1, 7, 2, 7, 3] and [part.url for part in request.pictures] == [url, url]


def test_pictures_without_a_place_are_kept_for_who_shows_them_later(configured, monkeypatch, sees, reader):
    """Environments and agents do; a run without one refuses such a row."""
    made = []
    monkeypatch.setattr(modalities, "_pictures", lambda config: PICTURES)
    monkeypatch.setattr(modalities, "PictureReader", lambda *_, shown_later: made.append(shown_later))
    of_environment = "rollout.environment=tests.unit.environments.own_environments:Counting"
    for sets in ([], [of_environment], ["rollout.agent=a:b"], [FUNCTION], [of_environment, 'algorithm.loss="sft"']):
        modalities.picture_reader(configured(*sets))
    assert made == [False, True, True, False, False]
    later = PictureReader(PICTURES, *sees, shown_later=True)
    ids, sources, places = later.read([1, 2], ["red.png"])
    assert (ids, len(places)) == ([1, 2], 0) and Path(sources[0]).is_absolute()
    assert later.read([1, 7], ["red.png"]) == reader.read([1, 7], ["red.png"])
    with pytest.raises(ValueError, match="has 1 pictures, and its prompt has 2 places"):
        later.read([7, 7], ["red.png"])


@pytest.mark.parametrize(
    ("ids", "value", "said"),
    [
        ([1, 2], "red.png", "has 1 pictures, and its prompt has 0 places"),
        ([7, 7], "red.png", "has 1 pictures, and its prompt has 2 places"),
        ([7], "https://example.invalid/a.png", "pictures are not fetched"),
        ([7], "../red.png", "not in data.media_root"),
        ([7], "file:///etc/hostname", "not in data.media_root"),
        ([7], "missing.png", "cannot be read"),
        ([7], "notes.png", "cannot be read"),
        ([7], "data:image/png;base64,AAAA", "cannot be read"),
        ([7], 3, "not int"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused_with_its_reason(reader, ids, value, said):
    with pytest.raises(ValueError, match=said):
        reader.read(ids, [value])


def test_a_sample_whose_pictures_are_not_of_its_tokens_is_refused_by_name(configured, monkeypatch, model, reader):
    sees = replace(family_for(read_hf_config(model)), pictures=PICTURES)
    monkeypatch.setattr(modalities, "family_for", lambda config, own=None: sees)
    monkeypatch.setattr(modalities, "PROCESSORS", ("config.json",))
    ids, sources, places = reader.read([1, 7, 3], ["red.png"])
    prompt = Prompt(0, tuple(ids), "q", multimodal_inputs={"image": sources}, picture_places=tuple(places))
    assert Prompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt
    [sample] = new_samples(4, prompt, count=1, run_seed=0)
    sample.clear()
    check_samples(configured(), [sample])
    [later] = new_samples(4, Prompt(0, (1,), "q", multimodal_inputs={"image": sources}), count=1, run_seed=0)
    later.append_environment_tokens(ids[1:])  # an agent's second picture
    later.picture_places = places
    check_samples(configured(), [later])
    twice = {"image": [*sources] * 2}
    for change in ({"picture_places": array("q")}, {"prompt_ids": [1, 7, 3]}, {"multimodal_inputs": twice}):
        [wrong] = new_samples(4, prompt, count=1, run_seed=0)
        for name, value in change.items():
            setattr(wrong, name, value)
        with pytest.raises(TrainingStopped, match=r"sample 4/0 \(row 0\) has"):
            check_samples(configured(), [wrong])


def test_recorded_samples_with_them_are_not_trained_on(configured, tmp_path):
    samples = [scored(4, [1], [2])]
    samples[0].multimodal_inputs = {"image": ["a.png"]}
    write_dump(tmp_path / "out", step=0, seed=0, samples=samples)
    with pytest.raises(TrainingStopped, match=r"sample 4/0 \(row 0\) has images, and the trainer's"):
        RecordedRollouts(configured(), tmp_path / "out").next_batch(0)
    check_samples(configured(), [scored(0, [1], [2])])


def test_the_data_are_shown_with_what_nobody_reads(configured):
    assert "  multimodal inputs 1 x image: kept in the sample, not read by the policy" in [
        *describe_data(configured("data.shuffle=false"), show=2)
    ]


def test_one_sample_that_differs_stops_training_with_its_number():
    lengths, tokens = torch.tensor([3, 50, 2]), torch.arange(55)
    places = Ragged(torch.tensor([0, 1, 1, 9]), torch.tensor([0, 4, 0]))
    engine = torch.full((55,), -2.0)
    batch = TrainBatch(
        tokens=tokens, lengths=lengths, loss_mask=torch.ones(55), rewards=torch.zeros(3), loss_weights=torch.ones(55),
        group_ids=torch.zeros(3, dtype=torch.int64), rollout_logprobs=engine, picture_places=places,
    )  # fmt: skip
    selection = torch.ones(55)
    selection[0] = 0
    ours = engine.clone()
    ours[0] = 5.0  # not selected
    check_each_sample(batch, ours, selection, 1e-3)
    for at, value in ((10, 0.3), (20, math.nan)):
        with pytest.raises(TrainingStopped, match="sample 1 of this batch, which has 1 pictures"):
            check_each_sample(batch, ours.index_fill(0, torch.tensor(at), value), selection, 1e-3)
    check_each_sample(batch, ours.index_fill(0, torch.tensor(10), -1.9), selection, 1e-3)  # 2e-3 of 50 tokens
