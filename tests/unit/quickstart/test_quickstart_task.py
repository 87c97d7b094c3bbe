"""The quickstart's data and model."""

import json

import pytest

from rltool.quickstart.task import MAX_LETTERS, MIN_LETTERS, MISTAKE_RATE, make_task
from rltool.quickstart.tiny_model import CHARACTERS, HEAD_DIM, make_tiny_model, make_tokenizer
from rltool.rollout.tokenizer import load_tokenizer


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), seed=0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


def test_no_word_is_in_the_data_twice_and_none_in_both_splits(task):
    train, heldout = ([row["metadata"]["word"].lower() for row in rows(path)] for path in (task.train, task.heldout))
    assert (len(train), len(heldout)) == (6000, 256)
    assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
    assert not set(train) & set(heldout)


def test_labels_are_reasoning_gyms_and_right(task):
    for row in rows(task.train) + rows(task.heldout):
        word = row["metadata"]["word"]
        assert MIN_LETTERS <= len(word) <= MAX_LETTERS
        assert (row["prompt"], row["label"], row["metadata"]["source_dataset"]) == (
            f"{word}=",
            word[::-1],
            "spell_backward",
        )


def test_warm_start_has_the_training_words_with_mistakes_in_the_stated_share(task):
    train, warm = rows(task.train), rows(task.warm_start)
    assert [{k: v for k, v in row.items() if k != "response"} for row in warm] == train
    wrong = sum(row["response"] != row["label"] for row in warm) / len(warm)
    assert wrong == pytest.approx(MISTAKE_RATE, abs=0.03)
    assert all(sorted(row["response"]) == sorted(row["label"]) for row in warm if len(set(row["label"])) > 1)


def test_the_same_seed_gives_the_same_files_and_another_one_does_not(task, tmp_path):
    again, other = make_task(tmp_path / "a", seed=0), make_task(tmp_path / "b", seed=1)
    assert again.train.read_bytes() == task.train.read_bytes()
    assert again.warm_start.read_bytes() == task.warm_start.read_bytes()
    assert other.heldout.read_bytes() != task.heldout.read_bytes()


def test_every_character_of_the_task_has_its_own_token(task, model_dir):
    tokenizer = load_tokenizer(model_dir)
    for row in rows(task.train)[:500] + rows(task.heldout):
        assert len(tokenizer.encode_prompt(row["prompt"])) == len(row["prompt"])
        assert tokenizer.decode(tokenizer.encode_target(row["label"])) == row["label"]


def test_auto_tokenizer_loads_what_was_saved(model_dir):
    made, loaded = make_tokenizer(), load_tokenizer(model_dir)
    assert loaded.vocab_size == len(made) == 64
    assert loaded.decode(loaded.encode_target(CHARACTERS)) == CHARACTERS  # the space is what a Qwen2 loader could lose
    assert loaded.encode_target(CHARACTERS)[:-1] == made(CHARACTERS)["input_ids"] == list(range(3, 64))
    assert loaded.stop_ids == (made.eos_token_id,)


def test_model_is_tiny_seeded_and_runs_on_vllms_cpu_attention(model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert model.config.hidden_size // model.config.num_attention_heads == HEAD_DIM
    assert model.config.tie_word_embeddings
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == 1
    weights = (model_dir / "model.safetensors").read_bytes()
    assert (make_tiny_model(tmp_path / "same", seed=0) / "model.safetensors").read_bytes() == weights
    assert (make_tiny_model(tmp_path / "other", seed=1) / "model.safetensors").read_bytes() != weights
