"""Data sets by name: what is written for them, published layouts, mixtures, generated tasks, stores."""

import json
import math
import sys
import tracemalloc

import datasets
import pytest

from rltool.config.data import DataConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.data import Prompt, PromptSource, data_summary
from rltool.rollout.data.gym import check_held_out, seeds
from rltool.rollout.data.own import MAX_TOO_LONG_IN_A_ROW, load_own_source
from rltool.rollout.data.prompt import PromptStore
from rltool.rollout.data.spec import DataSpec, parse_spec
from rltool.training.sources import SupervisedData
from tests.unit.rollout.data.test_data import LetterTokenizer, indices, jsonl, load


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a.jsonl", ("file", "a.jsonl", {}, 0, None)),
        ("dir/a.parquet[:1000]", ("file", "dir/a.parquet", {}, 0, 1000)),
        ("a.json[100:200]", ("file", "a.json", {}, 100, 200)),
        ("a.jsonl[5:]", ("file", "a.jsonl", {}, 5, None)),
        ("openai/gsm8k", ("hub", "openai/gsm8k", {}, 0, None)),
        (
            "openai/gsm8k?config=main&split=test[:10]",
            ("hub", "openai/gsm8k", {"config": "main", "split": "test"}, 0, 10),
        ),
        ("./openai/gsm8k", ("file", "./openai/gsm8k", {}, 0, None)),
        ("reasoning-gym:chain_sum", ("reasoning-gym", "chain_sum", {}, 0, None)),
        (
            "reasoning-gym:chain_sum?size=5000&seed=3",
            ("reasoning-gym", "chain_sum", {"size": "5000", "seed": "3"}, 0, None),
        ),
    ],
)
def test_what_is_written_for_a_data_set(text, spec):
    assert parse_spec(text) == DataSpec(text, *spec)


def test_a_directory_that_exists_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert parse_spec("openai/gsm8k").kind == "directory"
    assert parse_spec("openai/gsm9k").kind == "file", "a misspelt path is not looked for on the hub"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl[5:5]", "holds no row"),
        ("openai/gsm8k?conf=main", "has the options config, split, revision, not conf"),
        ("reasoning-gym:chain_sum?size", r"expected \?KEY=VALUE"),
        ("reasoning-gym:chain_sum?size=5&size=6", "size is given twice"),
        ("reasoning-gym:chain_sum?size=many", "size must be a whole number"),
        ("reasoning-gym:chain_some", "no task 'chain_some'; did you mean 'chain_sum'"),
        ("reasoning-gym:chain_sum?digits=2", "refuses these options"),
    ],
)
def test_a_data_set_that_is_written_wrongly_says_so(text, message):
    with pytest.raises(UsageError, match=message):
        load(text)


def test_slices_take_rows_and_not_prompts_that_are_short_enough(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "long" * 9 if i == 2 else str(i)} for i in range(9)))
    found = load(f"{path}[1:4]", max_prompt_tokens=5)
    assert [prompt.text for prompt in found.prompts] == ["1", "3"]
    assert found.num_too_long == 1
    assert [prompt.text for prompt in load(f"{path}[7:100]").prompts] == ["7", "8"]


def test_a_json_array_is_read_like_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b", "label": 3}], indent=1))
    assert [(prompt.text, prompt.label) for prompt in load(path).prompts] == [("a", None), ("b", "3")]
    path.write_text("[1]")
    with pytest.raises(UsageError, match=r"a\.json, row 1: expected an object"):
        load(path)


def test_a_directory_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    rows = datasets.Dataset.from_list([{"prompt": f"p{i}", "label": str(i), "rate": math.nan} for i in range(5)])
    rows.save_to_disk(str(tmp_path / "saved"))
    prompts = load(f"{tmp_path}/saved[1:3]", metadata_keys=["rate"]).prompts
    assert [(prompt.label, prompt.metadata) for prompt in prompts] == [("1", {"rate": None}), ("2", {"rate": None})]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UsageError, match="has the splits train, test: name one, .*splits/train"):
        load(tmp_path / "splits")
    assert len(load(tmp_path / "splits" / "test").prompts) == 5
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"cannot be read as one of `datasets`.*save_to_disk"):
        load(tmp_path / "other")


def test_a_name_of_the_hub_is_loaded_with_its_options(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_list([GSM8K] * 5)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load("openai/gsm8k?config=main&split=test&revision=v2[1:4]", "acme/rows")
    assert found.parts == (3, 5) and found.layouts == ("gsm8k",)
    assert asked == [
        (("openai/gsm8k", "main"), {"split": "test", "revision": "v2"}),
        (("acme/rows", None), {"split": "train", "revision": None}),
    ]


def test_a_data_set_that_the_hub_does_not_give_is_named(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ValueError("Config name is missing.\nPlease pick one among: ['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UsageError, match=r"data set 'openai/gsm8k' cannot be loaded.*pick one among: \['main'"):
        load("openai/gsm8k")


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'rltool\[data\]'"):
        load("openai/gsm8k")


GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
DEEPSCALER = {"problem": "Find $x$.", "answer": "5", "solution": ""}
DAPO = {
    "data_source": "math_dapo", "prompt": [{"role": "user", "content": "Solve"}], "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "9a"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "text", "label", "response", "layout"),
    [
        (GSM8K, "Two and two?", "1,004", GSM8K["answer"], "gsm8k"),
        (DEEPSCALER, "Find $x$.", "5", None, "deepscaler"),
        (DEEPSCALER | {"solution": "long"}, "Find $x$.", "5", "long", "deepscaler"),
        (DAPO, "user:Solve;assistant:", "34", None, "verl"),
        ({"prompt": DAPO["prompt"], "label": "34"}, "user:Solve;assistant:", "34", None, None),
    ],
)
def test_published_layouts_are_recognised(tmp_path, row, text, label, response, layout):
    found = load(jsonl(tmp_path / "a.jsonl", row, row))
    assert found.layouts == ((layout,) if layout else ())
    for prompt in found.prompts:
        assert (prompt.text, prompt.label, prompt.response) == (text, label, response)


def test_dapo_keeps_what_else_its_rows_say(tmp_path):
    [prompt] = load(jsonl(tmp_path / "a.jsonl", DAPO)).prompts
    assert prompt.metadata == {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a"}}
    assert data_summary(load(tmp_path / "a.jsonl"), {}) == "data: 1 prompts in the layout of verl"


def test_configured_columns_go_before_a_layout(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GSM8K)
    assert load(path, prompt_key="question", label_key="answer").prompts[0].label == GSM8K["answer"]
    with pytest.raises(UsageError, match="has neither 'prompt' nor 'messages'"):
        load(path, layout="columns")


def test_a_row_that_breaks_its_layout_is_named(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GSM8K, {"question": "q", "answer": "4"})
    with pytest.raises(UsageError, match="line 2: 'answer' has no final answer behind ####.*set data.layout"):
        load(path)
    with pytest.raises(UsageError, match="line 1: the deepscaler layout has a column 'problem'"):
        load(path, layout="deepscaler")


def test_columns_by_name_lead_into_objects_and_become_metadata(tmp_path):
    row = {"task": {"q": "ask", "a": 4}, "level": "hard", "a.b": "kept", "metadata": {"old": 1}}
    [prompt] = load(
        jsonl(tmp_path / "a.jsonl", row), prompt_key="task.q", label_key="task.a", metadata_keys=["level", "a.b"]
    ).prompts
    assert (prompt.text, prompt.label) == ("ask", "4")
    assert prompt.metadata == {"old": 1, "level": "hard", "a.b": "kept"}


def test_an_instruction_stands_around_every_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2 {x}"})
    assert load(path, prompt_template="Q: {prompt}\nA:").prompts[0].text == "Q: 2+2 {x}\nA:"
    with pytest.raises(ValueError, match=r"no \{prompt\}"):
        DataConfig(prompt_template="Q: {question}")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("written", [[TOOL], json.dumps([TOOL])])
def test_the_chat_template_is_told_of_tools(tmp_path, written, monkeypatch):
    told = []

    def render(self, messages, *, tools=(), arguments=None):
        told.append((list(tools), arguments))
        return "x"

    monkeypatch.setattr(LetterTokenizer, "render_messages", render)
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": written}
    load(jsonl(tmp_path / "a.jsonl", row), chat_template_arguments={"enable_thinking": False})
    assert told == [([TOOL], {"enable_thinking": False})]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "tools": [TOOL]}, "only a chat template passes"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "[{"}, "the tools are no valid JSON"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}, "must be a list of objects"),
    ],
)
def test_tools_that_cannot_be_told_are_an_error(tmp_path, row, message):
    with pytest.raises(UsageError, match=message):
        load(jsonl(tmp_path / "a.jsonl", row))


def test_a_generated_task_has_what_its_score_needs():
    found = load("reasoning-gym:spell_backward?size=20&seed=5&min_word_len=3[2:4]")
    assert len(found.prompts) == 2
    prompt = found.prompts[0]
    assert prompt.metadata["source_dataset"] == "spell_backward" and prompt.metadata["source_index"] == 2
    assert prompt.label == prompt.metadata["word"][::-1]


@pytest.mark.parametrize(
    ("held_out", "overlaps"),
    [
        ("reasoning-gym:chain_sum?size=100", True),
        ("reasoning-gym:chain_sum?size=100&seed=99", True),
        ("reasoning-gym:chain_sum?size=100&seed=100", False),
        ("reasoning-gym:chain_sum?size=500[100:]", False),
        ("reasoning-gym:basic_arithmetic?size=100", False),
    ],
)
def test_a_held_out_set_made_from_seeds_of_training_is_refused(held_out, overlaps):
    train, spec = [parse_spec("a.jsonl"), parse_spec("reasoning-gym:chain_sum?size=100")], parse_spec(held_out)
    assert seeds(train[1]) == range(100)
    if not overlaps:
        check_held_out(train, {"sums": spec})
        return
    with pytest.raises(UsageError, match="eval.sets.sums: .*hold the same items.*give the evaluation seed=100 or"):
        check_held_out(train, {"sums": spec})


def test_reasoning_gym_makes_item_i_from_seed_plus_i():
    """What the check above stands on."""
    first = load("reasoning-gym:chain_sum?size=9&seed=5").prompts
    second = load("reasoning-gym:chain_sum?size=9&seed=8").prompts
    assert [prompt.text for prompt in first[3:]] == [prompt.text for prompt in second[:6]]


def mixed(sizes=(3, 10), weights=(3, 1), **options):
    prompts = [Prompt(i, (i + 1,), str(i)) for i in range(sum(sizes))]
    return PromptSource(prompts, seed=3, parts=sizes, weights=weights, **options)


def test_a_mixture_keeps_to_its_shares_after_every_prompt():
    drawn = indices(mixed().next(400))
    for end in range(1, 400):
        share = sum(index < 3 for index in drawn[:end])
        assert abs(share - 0.75 * end) <= 1
    assert drawn[:40].count(0) + drawn[:40].count(1) + drawn[:40].count(2) == 30


def test_each_set_of_a_mixture_has_epochs_of_its_own():
    source = mixed()
    of_first = [index for index in indices(source.next(16)) if index < 3]
    assert [sorted(of_first[start : start + 3]) for start in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert source.epoch == 0, "the second set is not through yet"
    source.next(40)
    assert source.epoch == 1


@pytest.mark.parametrize("taken", [0, 1, 7, 50])
def test_a_mixture_resumes_exactly(taken):
    source, resumed = mixed(), mixed()
    source.next(taken)
    state = json.loads(json.dumps(source.state_dict()))
    expected = indices(source.next(60))
    resumed.load_state_dict(state)
    assert indices(resumed.next(60)) == expected
    with pytest.raises(UsageError, match="another data.weights"):
        mixed(weights=(1, 1)).load_state_dict(state)


def test_a_share_of_an_empty_set_is_refused():
    with pytest.raises(UsageError, match="set 1 of data.train has no prompt left"):
        mixed(sizes=(0, 4))


def test_weights_and_own_sources_are_checked_where_they_are_written():
    with pytest.raises(ValueError, match="2 numbers for 1 sets"):
        DataConfig(train=("a.jsonl",), weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="takes the place of train"):
        DataConfig(train=("a.jsonl",), source="a:b")


def test_a_store_gives_back_what_was_put_in():
    store = PromptStore()
    prompts = [Prompt(i, tuple(range(i)), "\u00fc\U0001f642" * i, str(i), None, {"k": [i]}) for i in range(50)]
    for prompt in prompts:
        store.append(prompt)
    store.flush()
    assert list(store) == prompts and store[7] == prompts[7] and store[3:9:2] == prompts[3:9:2] and len(store) == 50
    with pytest.raises(IndexError):
        store[50]


def test_a_data_set_may_be_larger_than_what_is_held_of_it(tmp_path):
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(600):
            file.write(json.dumps({"prompt": str(number), "label": "x" * 4000}) + "\n")
    tracemalloc.start()
    found = load(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 2_400_000
    assert held < 200_000 and peak < 600_000
    assert found.prompts[599].text == "599"


class Counter:
    """Rows 0, 1, 2, ...; every third is too long."""

    def __init__(self, config, seed):
        self.at = seed

    def next(self, count):
        rows = []
        for _ in range(min(count, 2)):
            rows.append({"prompt": "long" * 9 if self.at % 3 == 2 else str(self.at), "label": self.at})
            self.at += 1
        return rows

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Silent(Counter):
    def next(self, count):
        return []


class Endless(Counter):
    def next(self, count):
        return [{"prompt": "long" * 9}] * count


class Unwritable(Counter):
    def state_dict(self):
        return {"at": {1, 2}}


def no_source(config, seed):
    return object()


def own(name="Counter"):
    config = DataConfig(source=f"tests.unit.rollout.data.test_data_sets:{name}")
    return load_own_source(config, LetterTokenizer(), seed=0, max_prompt_tokens=5)


def test_a_source_of_ones_own_is_filtered_counted_and_resumed():
    source = own()
    assert [prompt.label for prompt in source.next(3)] == ["0", "1", "3"]
    assert source.num_too_long == 1
    state = json.loads(json.dumps(source.state_dict()))
    following = source.next(4)
    resumed = own()
    resumed.load_state_dict(state)
    assert resumed.next(4) == following
    assert [prompt.index for prompt in following] == [4, 6, 7, 9], "numbers go on over what was left out"
    assert resumed.restored(json.loads(json.dumps(resumed.saved(following[0])))) == following[0]


@pytest.mark.parametrize(
    ("name", "act", "message"),
    [
        ("Silent", lambda source: source.next(2), r"next\(2\) gave 0 rows"),
        ("Endless", lambda source: source.next(2), f"{MAX_TOO_LONG_IN_A_ROW} rows one after the other"),
        ("Unwritable", lambda source: source.state_dict(), "cannot be written as JSON"),
        ("Counter", lambda source: source.load_state_dict({"streams": []}), "made with data.train"),
        ("no_source", None, "which has no next and no state_dict"),
    ],
)
def test_a_source_that_breaks_its_contract_is_an_error(name, act, message):
    with pytest.raises(UsageError, match=message):
        act(own(name))


def test_a_checkpoint_of_an_own_source_is_no_checkpoint_of_files():
    with pytest.raises(UsageError, match="made with data.source"):
        mixed().load_state_dict(own().state_dict())


def test_supervised_rows_are_mixed_by_weight_too(tmp_path):
    model = make_tiny_model(tmp_path / "model", seed=0)
    right = jsonl(tmp_path / "a.jsonl", *({"prompt": f"{w}=", "response": w} for w in ("sun", "a" * 99, "cat")))
    other = jsonl(tmp_path / "b.jsonl", *({"prompt": f"{w}=", "response": w} for w in ("owl", "bird", "neon")))
    config = TrainConfig.model_validate({
        "model": {"path": model}, "data": {"train": [right, other], "weights": [1, 3]},
        "sampling": {"max_response_tokens": 20}, "rollout": {"prompts_per_step": 8},
    })  # fmt: skip
    data = SupervisedData(config)
    assert len(data.rows.prompts) == 5 and data.rows.num_too_long == 1
    drawn = [prompt.index for prompt in data._source.next(24)]
    assert {index for index in drawn if index < 3} == {0, 2}, "the row that is too long is out"
    assert sum(index < 3 for index in drawn) == 6
    assert data.next_batch(0).batch.num_samples == 8
