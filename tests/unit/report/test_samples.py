"""Samples that are kept of each step: which, with whose log-probabilities, and how they are shown."""

from __future__ import annotations

import base64
import io
import json
import re
from array import array
from dataclasses import replace

import pytest
import torch
from PIL import Image

from rltool.algorithms.batch import TrainBatch
from rltool.cli import main
from rltool.config.train import TrainConfig
from rltool.engines.types import VersionSpan
from rltool.errors import RltoolError
from rltool.processes.run_directory import open_run
from rltool.report.sample_text import sample_view
from rltool.report.samples import SampleRecord, Span, mean_difference, median, ordered, read_samples, spread
from rltool.report.sections import _answer
from rltool.rollout.measure.dump import about_model, write_dump
from rltool.rollout.measure.sample_records import records_to_keep, sample_record
from rltool.rollout.pictures import _shown, picture_file
from rltool.rollout.sample import Sample, SampleStatus
from rltool.terminal import Console
from rltool.training.observe.sample_log import SampleLog, Scored, with_trainer_logprobs
from tests.hostile import HOSTILE, SHOWN


def record(reward=1.0, *, group=0, index=0, mask=(1, 1), tokens=None, **changes):
    n = len(mask)
    values = {
        "group": group, "index": index, "prompt": "cat=", "text": "ta", "reward": reward, "status": "completed",
        "prompt_tokens": 4, "tokens": tuple(tokens or "ta"[:n].ljust(n, "x")), "token_ids": tuple(range(n)),
        "mask": tuple(mask), "engine_logprobs": (-0.5,) * n, **changes,
    }  # fmt: skip
    return SampleRecord(**values)


@pytest.mark.parametrize(
    ("count", "rewards"),
    [(0, []), (1, [0.5]), (2, [0.0, 1.0]), (3, [0.0, 0.5, 1.0]), (5, [0.0, 0.25, 0.5, 0.75, 1.0]), (99, 5)],
)
def test_worst_median_and_best_are_among_those_that_are_kept(count, rewards):
    all_rewards = [0.75, 0.0, 1.0, 0.25, 0.5]
    found = [all_rewards[i] for i in spread(all_rewards, count)]
    assert found == (sorted(all_rewards) if rewards == 5 else rewards)
    assert spread([], count) == []


def test_of_equal_rewards_samples_from_the_whole_batch_are_kept():
    assert spread([0.0] * 100, 3) == [0, 50, 99]


def test_spans_and_differences_follow_the_mask():
    found = record(mask=(1, 1, 0, 0, 1), trainer_logprobs=(-0.25, None, -9.0, None, -0.75))
    assert found.spans == [Span(1, 0, 2), Span(0, 2, 4), Span(1, 4, 5)]
    assert found.differences == (0.25, None, None, None, -0.25)
    assert mean_difference(found) == 0.25
    assert mean_difference(record()) is None and record().differences == (None, None)


def test_orders():
    small, large, none = (
        record(0.0, index=0, trainer_logprobs=(-0.5, -0.4)),
        record(0.5, index=1, trainer_logprobs=(-0.5, -0.9), mask=(1, 1)),
        record(None, index=2, mask=(1, 1, 1)),
    )
    all_three = [none, small, large]
    by = {key: [r.index for r in ordered(all_three, key)] for key in ("reward", "length", "difference", "index")}
    assert by == {"reward": [1, 0, 2], "length": [2, 0, 1], "difference": [1, 0, 2], "index": [2, 0, 1]}
    assert median(all_three).index == 0
    with pytest.raises(ValueError, match="unknown order"):
        ordered(all_three, "beauty")


class Letters:
    """A tokenizer whose ids are code points; 0 is a special token."""

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)

    def decode_everything(self, ids):
        return "".join(chr(i) if i else "<eos>" for i in ids)


def sample(group, index, text, reward, mask=None):
    ids = [*map(ord, text), 0]
    return Sample(
        group, index, 0, [1, 2], prompt_text="p", label="l", response_ids=ids, response_mask=mask or [1] * len(ids),
        response_logprobs=[-1 / 3] * len(ids), versions=[VersionSpan("run:0:4", 0, len(ids))],
        status=SampleStatus.COMPLETED, reward=reward,
    )  # fmt: skip


def test_a_record_has_the_text_of_every_token():
    found = sample_record(sample(3, 1, "ab", 0.5), Letters())
    assert (found.text, found.tokens, found.token_ids) == ("ab", ("a", "b", "<eos>"), (97, 98, 0))
    assert (found.group, found.index, found.reward, found.status) == (3, 1, 0.5, "completed")
    assert found.versions == (("run:0:4", 0, 3),) and found.engine_logprobs[0] == -0.3333333
    assert sample_record(sample(0, 0, "a", 1.0), None).tokens == ("<97>", "<0>")


def test_the_prompt_of_a_record_is_what_the_model_has_read():
    """An agent's is not its row's."""
    one = sample(0, 0, "a", 1.0)
    one.prompt_ids, one.prompt_text = [104, 105], "hi"
    assert sample_record(one, Letters()).prompt == "hi"
    one.prompt_text = "the row's"
    assert sample_record(one, Letters()).prompt == "hi" and sample_record(one, None).prompt == "the row's"


def test_pictures_of_a_prompt_are_named_and_shown_small(tmp_path):
    drawn, file = Image.effect_noise((600, 300), 90).convert("RGB"), tmp_path / "noise.png"
    drawn.save(file)
    one = sample(0, 0, "a", 1.0)
    one.multimodal_inputs, one.picture_places = {"image": [str(file)]}, array("q", [1, 2, 4, file.stat().st_size])
    found = sample_record(one, Letters())
    [(name, url)] = found.pictures
    assert name == str(file) and found.prompt == "p", "its placeholders are not shown"
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as small:
        assert small.size == (256, 128)
    assert str(file) in shown(found) and f'src="{url}"' in _answer("first", found)
    file.unlink()
    _shown.cache_clear()
    picture_file.cache_clear()
    assert sample_record(one, Letters()).pictures == ((name, ""),)


def kept_of(samples, count):
    return records_to_keep(samples, count, Letters())


def batch_of(samples):
    lengths = torch.tensor([2 + len(s.response_ids) for s in samples])
    mask = torch.tensor([float(m) for s in samples for m in [0, 0, *s.response_mask]])
    n = len(samples)
    return TrainBatch(
        tokens=torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths=lengths, loss_mask=mask,
        rewards=torch.zeros(n), group_ids=torch.arange(n), loss_weights=mask,
    )  # fmt: skip


def test_each_kept_sample_gets_the_trainers_log_probabilities_of_its_own_tokens():
    samples = [sample(0, 0, "abc", 0.0), sample(0, 1, "d", 0.5, mask=[0, 1]), sample(1, 0, "ef", 1.0)]
    batch = batch_of(samples)
    logprobs = -torch.arange(len(batch.tokens)).float()
    found = with_trainer_logprobs(kept_of(samples, 3), Scored(logprobs, batch, range(3)))
    assert found[0].trainer_logprobs == (-2.0, -3.0, -4.0, -5.0)
    assert found[1].trainer_logprobs == (None, -9.0)
    assert found[2].trainer_logprobs == (-12.0, -13.0, -14.0)


def test_samples_outside_of_the_optimizer_step_that_was_compared_have_none():
    samples = [sample(0, 0, "abc", 0.0), sample(1, 0, "de", 1.0)]
    part = batch_of(samples).select([1])
    found = with_trainer_logprobs(kept_of(samples, 2), Scored(torch.zeros(5), part, [1]))
    assert found[0].trainer_logprobs is None and found[1].trainer_logprobs == (0.0, 0.0, 0.0)
    assert all(r.trainer_logprobs is None for r in with_trainer_logprobs(kept_of(samples, 2), None))


def test_what_was_written_is_read_back(tmp_path):
    log = SampleLog(tmp_path / "samples")
    samples = [sample(0, 0, "abc", 0.0), sample(1, 0, "de", 1.0)]
    samples[0].metadata = {"path": tmp_path, "n": 1}
    kept = kept_of(samples, 2)
    log.write(4, kept, of=64, scored=None)
    log.write(5, {}, of=64, scored=None)
    found = read_samples(tmp_path / "samples", 4)
    assert (found.step, found.of) == (4, 64)
    assert found.samples[1] == kept[1] and found.samples[0].metadata == {"path": str(tmp_path), "n": 1}
    with pytest.raises(RltoolError, match="no samples of step 5 .* steps 4 to 4"):
        read_samples(tmp_path / "samples", 5)
    (tmp_path / "samples" / "step_000006.json").write_text('{"format_version": 1}')
    with pytest.raises(RltoolError, match="step_000006.json holds no samples"):
        read_samples(tmp_path / "samples", 6)


def shown(found, *, terminal=False, all_tokens=False, width=220):
    console = Console(width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    with console.capture() as capture:
        console.print(sample_view(found, "1 of 1", all_tokens=all_tokens, terminal=terminal))
    return capture.get()


def test_turns_of_an_agent_are_shown_span_by_span():
    turns = record(
        0.25, mask=(1, 0, 0, 1), tokens=("call", "re", "sult", "done"), trainer_logprobs=(-0.5, None, None, -0.8)
    )
    text = shown(turns)
    assert "2 sampled (mask 1), 2 inserted (mask 0)" in text
    assert "span 1: sampled, mask 1, tokens 0 to 0:\ncall\n" in text
    assert "span 2: inserted, mask 0, tokens 1 to 2:\nresult\n" in text
    assert "span 3: sampled, mask 1, tokens 3 to 3:\ndone\n" in text
    assert "|trainer - engine| mean 1.5e-01, max 3.0e-01" in text
    [largest, _] = re.findall(r"^(\d+) +'(\w+)' +1 +-0.5000 +(\S+) +(\S+)", text, re.MULTILINE)
    assert largest == ("3", "done", "-0.8000", "-3.0e-01")


def test_neither_prompt_nor_label_nor_answer_can_send_an_escape_sequence():
    for field in ("prompt", "label", "answer"):
        given = {"tokens": (HOSTILE, "ok")} if field == "answer" else {field: HOSTILE}
        for terminal in (False, True):
            text = shown(record(**given), terminal=terminal, width=400).replace("\x1b[1m", "").replace("\x1b[0m", "")
            assert "\x07" not in text and "\x1b]" not in text and (terminal or "\x1b" not in text)
            assert all(part in text for part in SHOWN)


def test_on_a_terminal_large_differences_are_red_and_inserted_tokens_dim():
    text = shown(record(mask=(1, 1, 0), tokens=("A", "B", "C"), trainer_logprobs=(-0.5, -0.9, None)), terminal=True)
    assert "\x1b[31mB" in text and "\x1b[2mC" in text and "\x1b[31mA" not in text


def test_all_tokens_are_listed_on_request():
    found = record(mask=(1,) * 9, tokens=tuple("abcdefghi"))
    assert "not compared" in shown(found)
    assert len(re.findall(r"^\d+ +'\w'", shown(found, all_tokens=True), re.MULTILINE)) == 9


# -- the verb


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    return open_run("demo", create=True)


def call(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["samples", *words])
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


def test_the_verb_shows_a_steps_samples_by_reward(run, capsys):
    samples = [
        sample(0, i, text, reward) for i, (text, reward) in enumerate((("low", 0.0), ("high", 1.0), ("mid", 0.5)))
    ]
    SampleLog(run.samples_dir).write(11, kept_of(samples, 3), of=64, scored=None)
    code, text = call(capsys, "demo", "--step", "12", "--sort", "reward", "--limit", "2")
    assert code == 0 and text.startswith("run demo, step 12; 3 of its 64 samples are kept; by reward")
    assert text.index("high") < text.index("mid") and "low" not in text
    assert "low" in call(capsys, "demo", "--reverse", "--limit", "1")[1]
    code, text = call(capsys, "demo", "--step", "3")
    assert code == 2 and "has samples of steps 12 to 12" in text


def test_a_run_without_samples_says_why(run, capsys):
    code, text = call(capsys)
    assert code == 1 and "monitor.samples_per_step" in text


def test_recorded_rollouts_show_every_sample_and_what_the_trainer_made_of_the_kept_ones(run, capsys, monkeypatch):
    samples = [sample(0, i, text, float(i)) for i, text in enumerate(("zero", "one", "two"))]
    write_dump(run.rollouts_dir, step=0, seed=1, samples=samples)
    kept = {row: replace(r, trainer_logprobs=(-0.5,) * len(r.tokens)) for row, r in kept_of(samples, 1).items()}
    SampleLog(run.samples_dir).write(0, kept, of=3, scored=None)
    run.config_file.write_text(json.dumps({"config": {"model": {"path": str(run.path)}}}))
    monkeypatch.setattr("rltool.rollout.tokenizer.load_tokenizer", lambda path, **_: Letters())
    code, text = call(capsys, "--sort", "index", "--limit", "9")
    assert code == 0 and text.startswith("run demo, step 1; by index")
    assert text.count("|trainer - engine|") == 1 and all(word in text for word in ("zero", "one", "two"))


def recorded(directory, *, model=None, step=0):
    samples = [sample(0, i, text, float(i)) for i, text in enumerate(("zero", "one"))]
    info = {} if model is None else about_model(TrainConfig(model={"path": model}))
    write_dump(directory, step=step, seed=1, samples=samples, info=info)


def test_a_recording_that_names_its_model_is_shown_as_text_without_a_configuration(run, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("rltool.rollout.tokenizer.load_tokenizer", lambda path, **_: asked.append(path) or Letters())
    recorded(run.rollouts_dir, model=run.path)
    assert "answer:\nzero" in call(capsys, "--sort", "index")[1]
    assert asked == [run.path]
    recorded(run.rollouts_dir, model=run.path / "gone")
    code, text = call(capsys, "--sort", "index")
    assert code == 0 and "zero" not in text, "the model is gone: token ids"


def test_directories_are_taken_as_runs_are(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rltool.rollout.tokenizer.load_tokenizer", lambda path, **_: Letters())
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "out", model=tmp_path)
    recorded(tmp_path / "dump" / "heldout", model=tmp_path)
    recorded(run.rollouts_dir, model=tmp_path, step=3)
    for word, name in (
        ("out", "out, step 1"), ("dump", "dump/heldout, step 1"), ("dump/heldout", "dump/heldout, step 1"),
        ("runs/demo", "run demo, step 4"), ("runs/demo/rollouts", "runs/demo/rollouts, step 4"),
    ):  # fmt: skip
        code, text = call(capsys, word)
        assert code == 0 and text.startswith(name) and "zero" in text, word
    recorded(tmp_path / "dump" / "second")
    code, text = call(capsys, "dump")
    assert code == 2 and "give one of dump/heldout, dump/second" in text
    (tmp_path / "empty").mkdir()
    assert "holds no recorded rollouts" in call(capsys, "empty")[1]


def test_the_run_is_named_as_an_argument_or_as_other_verbs_have_it(run, capsys):
    SampleLog(run.samples_dir).write(0, kept_of([sample(0, 0, "low", 0.0)], 1), of=1, scored=None)
    assert call(capsys, "--run", "demo") == call(capsys, "demo")
    assert call(capsys, "demo", "--run", "demo")[0] == 2
    code, text = call(capsys, "nope")
    assert code == 2 and "no run nope in" in text and "--run" not in text
