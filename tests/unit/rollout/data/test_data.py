"""Prompts from files, and their order."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltool.config.data import DataConfig
from rltool.errors import UsageError
from rltool.rollout.batching import supervised_set
from rltool.rollout.data import Prompt, PromptSource, data_summary, load_prompts


class LetterTokenizer:
    """One id per character; a chat is rendered as role:content; lines."""

    pictures = None

    def encode_prompt(self, text):
        return [0, *map(ord, text)] if text else []

    def render_messages(self, messages, *, tools=(), arguments=None):
        if any(message["role"] == "robot" for message in messages):
            raise RuntimeError("roles must alternate")
        return "".join(f"{m['role']}:{m['content']};" for m in messages) + "assistant:"

    def encode_rendered(self, text):
        return list(map(ord, text))


def load(*paths, limit=None, max_prompt_tokens=1000, **config):
    return load_prompts(
        paths, LetterTokenizer(), DataConfig(**config), max_prompt_tokens=max_prompt_tokens, limit=limit
    )


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_jsonl_rows_become_prompts(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "label": "x", "response": "y", "metadata": {"k": [1]}},
        "",
        {"prompt": "c", "label": 7},
    )
    first, second = load(path).prompts
    assert first == Prompt(0, (0, 97, 98), "ab", "x", "y", {"k": [1]})
    assert (second.index, second.label, second.response, second.metadata) == (1, "7", None, {})


def test_indices_go_on_over_files_and_count_filtered_rows(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", {"prompt": "much too long"}, {"prompt": "b"})
    b = jsonl(tmp_path / "b.jsonl", {"prompt": "c"})
    found = load(a, b, max_prompt_tokens=5)
    assert [(p.index, p.text) for p in found.prompts] == [(1, "b"), (2, "c")]
    assert found.num_too_long == 1


def test_limit_counts_kept_prompts(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(9)))
    assert len(load(path, limit=4).prompts) == 4


def test_configured_keys(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})
    [prompt] = load(path, prompt_key="question", label_key="answer").prompts
    assert (prompt.text, prompt.label) == ("q", "a")


def test_messages_go_through_the_chat_template_and_prompts_do_not(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"})
    chat, plain = load(path).prompts
    assert chat.text == "user:hi;assistant:" and chat.prompt_ids[0] == ord("u")
    assert plain.text == "hi" and plain.prompt_ids[0] == 0


def test_a_prompt_can_be_asked_to_be_a_chat(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "hi"})
    assert load(path, apply_chat_template=True).prompts[0].text == "user:hi;assistant:"


BROKEN = [
    ('{"prompt": "a"', "not valid JSON"),
    ("[1]", "expected an object with 'prompt' or 'messages', found list"),
    ({"text": "a"}, "has neither 'prompt' nor 'messages'; its keys are 'text'"),
    ({"prompt": "a", "messages": []}, "has both"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": 5}, "expected text, or a list of messages"),
    ({"messages": []}, "expected text, or a list of messages"),
    ({"messages": [{"role": "user"}]}, "expected text, or a list of messages"),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "the chat template refuses these messages: roles must alternate",
    ),
    ({"prompt": "a", "label": ["x"]}, "'label' must be text or a number, found list"),
    ({"prompt": "a", "label": True}, "'label' must be text or a number, found bool"),
    ({"prompt": "a", "metadata": 3}, "'metadata' must be an object"),
    (r'{"prompt": "a\ud800b"}', r"\ud800 is half of a surrogate pair"),
    (r'{"prompt": "a", "label": "\uDC01"}', r"\udc01 is half of a surrogate pair"),
    (r'{"prompt": "a", "metadata": {"deep": ["\ud83d"]}}', r"\ud83d is half of a surrogate pair"),
    ('{"prompt": "a\0"}', "not valid JSON"),
    ("\0" * 16, "not valid JSON"),
    ('{"prompt": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ("[" * 100_000, "cannot be read as JSON"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, row, message):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "fine"}, "", row, {"prompt": "fine"})
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line 3: {message}")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_data(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in load(path).prompts] == ["a", "b"]


def test_an_escaped_surrogate_pair_is_a_character(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", r'{"prompt": "\ud83d\ude42"}')
    assert load(path).prompts[0].text == "\N{SLIGHTLY SMILING FACE}"


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\r\n"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=r"the data set is empty \(.*a\.jsonl\): no rows"):
        load(tmp_path / "a.jsonl")


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=r"line 2: not UTF-8"):
        load(path)


def test_messages_with_the_template_switched_off_are_an_error(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UsageError, match="apply_chat_template is false"):
        load(path, apply_chat_template=False)


def test_parquet_rows_read_like_jsonl(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"prompt": "ab", "label": "x", "metadata": {"k": 1}}, {"prompt": "c", "label": None, "metadata": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = load(path).prompts
    assert first == Prompt(0, (0, 97, 98), "ab", "x", None, {"k": 1})
    assert (second.label, second.metadata) == (None, {})


def test_parquet_row_with_values_beyond_json_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "metadata": {"k": b"bytes"}}]), path)
    with pytest.raises(UsageError, match=r"row 1: 'metadata' cannot be written as JSON"):
        load(path)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '[{"deep": NaN}]'])
def test_a_number_that_json_has_not_is_refused_in_metadata_with_line_and_key(tmp_path, value):
    good = '{"prompt": "a", "metadata": {"difficulty": null, "source": {"name": "x"}}}'
    bad = f'{{"prompt": "a", "metadata": {{"source": 1, "difficulty": {value}}}}}'
    with pytest.raises(UsageError, match=r"a\.jsonl, line 2: 'metadata' .*'difficulty'.*null for what is missing"):
        load(jsonl(tmp_path / "a.jsonl", good, bad))
    assert load(jsonl(tmp_path / "a.jsonl", good)).prompts[0].metadata == {"difficulty": None, "source": {"name": "x"}}


def test_a_column_that_becomes_metadata_is_held_to_the_same(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", '{"prompt": "a", "difficulty": NaN}')
    assert load(path).prompts[0].metadata == {}, "nobody asked for it"
    with pytest.raises(UsageError, match="'difficulty'"):
        load(path, metadata_keys=["difficulty"])


def test_nan_of_a_table_is_a_value_that_is_missing(tmp_path):
    path = tmp_path / "a.parquet"
    row = {"prompt": "ab", "label": math.nan, "score": math.nan, "metadata": {"k": [{"rate": math.nan}, {"rate": 0.5}]}}
    pq.write_table(pa.Table.from_pylist([row]), path)
    [prompt] = load(path, metadata_keys=["score"]).prompts
    assert prompt.label is None and prompt.metadata == {"k": [{"rate": None}, {"rate": 0.5}], "score": None}
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "metadata": {"rate": math.inf}}]), path)
    with pytest.raises(UsageError, match=r"row 1: 'metadata' cannot be written as JSON: 'rate'"):
        load(path)


def test_truncated_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"), [("a.csv", "ends in .jsonl, .json or .parquet"), ("missing.jsonl", "does not exist")]
)
def test_unusable_files(tmp_path, name, message):
    (tmp_path / "a.csv").write_text("prompt\n")
    with pytest.raises(UsageError, match=message):
        load(tmp_path / name)


def test_empty_data_set_is_an_error_that_says_why(tmp_path):
    with pytest.raises(UsageError, match="no file given: set data.train"):
        load()
    with pytest.raises(UsageError, match="no rows"):
        load(jsonl(tmp_path / "a.jsonl"))
    with pytest.raises(UsageError, match="all 1 prompts are longer than sampling.max_prompt_tokens = 2"):
        load(jsonl(tmp_path / "b.jsonl", {"prompt": "long"}), max_prompt_tokens=2)
    with pytest.raises(UsageError, match="empty"):
        PromptSource([], seed=0)


def source(count=5, **options):
    return PromptSource([Prompt(i, (i + 1,), str(i)) for i in range(count)], **{"seed": 3, **options})


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_every_epoch_has_each_prompt_once_in_another_order():
    data = source(20)
    first, second = indices(data.next(20)), indices(data.next(20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    assert data.epoch == 1


def test_without_shuffle_the_order_is_the_file():
    assert indices(source(shuffle=False).next(7)) == [0, 1, 2, 3, 4, 0, 1]


def test_order_depends_on_the_seed_alone():
    assert indices(source(20).next(50)) == indices(source(20).next(50))
    assert indices(source(20).next(20)) != indices(source(20, seed=4).next(20))


def test_more_prompts_than_the_data_set_has_wrap_around():
    assert sorted(indices(source(3).next(9))) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("taken", [0, 3, 5, 12])
def test_resume_goes_on_exactly(taken):
    data, resumed = source(), source()
    data.next(taken)
    state = json.loads(json.dumps(data.state_dict()))
    expected = indices(data.next(13))
    resumed.next(2)
    resumed.load_state_dict(state)
    assert indices(resumed.next(13)) == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [(source(6), "another data set"), (source(seed=9), "another seed"), (source(shuffle=False), "data.shuffle")],
)
def test_resume_with_other_data_is_refused(other, message):
    with pytest.raises(UsageError, match=message):
        source().load_state_dict(other.state_dict())


def test_what_was_left_out_of_each_set_is_said_in_one_line(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", {"prompt": "much too long"}, {"prompt": "b"}, {"prompt": "c"})
    easy = jsonl(tmp_path / "easy.jsonl", {"prompt": "d"})
    hard = jsonl(tmp_path / "hard.jsonl", {"prompt": "d"}, {"prompt": "very, very long"}, {"prompt": "also very long"})
    train, easy, hard = (load(path, max_prompt_tokens=5) for path in (train, easy, hard))
    assert data_summary(easy, {}) == "data: 1 prompts"
    assert data_summary(train, {"easy": easy, "hard": hard}) == (
        "data: 2 prompts (left out: 1 with a prompt longer than sampling.max_prompt_tokens); easy: 1 prompts; "
        "hard: 1 prompts (left out: 2 with a prompt longer than sampling.max_prompt_tokens)"
    )


def test_rows_that_are_left_out_for_their_response_are_counted_apart(tmp_path):
    texts = [("much too long", "x"), ("b", "far too long"), ("c", "y")]
    rows = [{"prompt": prompt, "response": response} for prompt, response in texts]
    found = load(jsonl(tmp_path / "rows.jsonl", *rows), max_prompt_tokens=5)

    class TargetTokenizer(LetterTokenizer):
        def encode_target(self, text):
            return [*map(ord, text), 0]

    rows = supervised_set(found.prompts, TargetTokenizer(), max_response_tokens=3)
    assert (len(rows.prompts), rows.num_too_long) == (1, 1)
    assert data_summary(found, {}, targets_too_long=rows.num_too_long) == (
        "data: 1 supervised rows (left out: 1 with a prompt longer than sampling.max_prompt_tokens "
        "and 1 with a response longer than sampling.max_response_tokens)"
    )
    whole = load(jsonl(tmp_path / "one.jsonl", {"prompt": "c"}))
    assert data_summary(whole, {}, targets_too_long=0) == "data: 1 supervised rows"
