"""The report: one self-contained page from a run's files."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from rltool.cli import main
from rltool.errors import RltoolError, UsageError
from rltool.processes.run_directory import open_run
from rltool.report.charts import Series, format_number, line_chart, moving_mean, nice_ticks, stacked_bars
from rltool.report.page import phases, write_report
from rltool.report.run_files import evenly, flatten, read_metrics
from rltool.report.samples import SampleRecord, StepSamples, encoded, sample_file
from rltool.report.served import read_served


def record(step, **values):
    named = {key.replace("__", "/"): value for key, value in values.items()}
    return {"step": step, "weight_version": f"run:0:{step}", **named}


def write(run_dir, *records, config=None):
    (run_dir / "metrics.jsonl").write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    )
    if config is not None:
        (run_dir / "config.json").write_text(json.dumps(config))


def full_run(run_dir):
    write(
        run_dir,
        *(
            record(
                s, rollout__reward_mean=0.3 + s / 50, rollout__response_length_mean=5.0,
                train__logprob_abs_diff_mean=1e-6, train__logprob_abs_diff_max=0.0, time__generate_seconds=1.0,
                time__train_seconds=0.5, time__step_seconds=1.7,
                **({"eval__words__accuracy": 0.3 + s / 50} if s in (0, 30) else {}),
            )
            for s in range(31)
        ),
        config={
            "config": {"model": {"path": "<script>alert(1)</script>"}, "seed": 7}, "origins": {"seed": "--seed & co"},
        },
    )  # fmt: skip


class Checker(HTMLParser):
    """Every tag is closed in order, and nothing is fetched."""

    VOID = {"meta", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_self_contained_and_escaped(tmp_path):
    full_run(tmp_path)
    path = write_report([tmp_path])
    page = path.read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.tags.count("svg") == 6
    assert path.name == "report.html"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "--seed &amp; co" in page
    assert not re.search(r"https?://|url\(|@import|nan|None", page)
    assert "prefers-color-scheme: dark" in page


def test_tiles_tell_the_rise(tmp_path):
    full_run(tmp_path)
    page = write_report([tmp_path]).read_text()
    assert "0.32 → 0.81" in page  # means of the first three and the last ten steps
    assert "0.30 → 0.90" in page  # accuracy before and after
    assert "1.00e-06" in page


def test_adapters_have_a_tile(tmp_path):
    full_run(tmp_path)
    assert "LoRA" not in write_report([tmp_path]).read_text()
    lora = {"rank": 16, "alpha": 32.0, "targets": ["qkv", "proj"]}
    config = {"config": {"lora": lora, "weights": {"lora_sync": "adapter"}}, "origins": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = write_report([tmp_path]).read_text()
    assert "Adapters (LoRA)</b><strong>rank 16</strong><small>alpha 32.0, qkv, proj, sent alone<" in page


def test_run_with_a_single_step_and_few_metrics_has_a_report(tmp_path):
    write(tmp_path, record(0, rollout__reward_mean=0.5))
    page = write_report([tmp_path]).read_text()
    assert "not measured in this run" in page and "0.50 → 0.50" in page


def test_repeated_steps_count_once_and_torn_last_line_is_forgiven(tmp_path):
    write(
        tmp_path,
        record(0, a=1.0),
        record(1, a=2.0),
        record(1, a=3.0),
        record(2, a=None),
        record(3, a=float("nan")),
        '{"step": 4, "a"',
    )
    assert read_metrics(tmp_path / "metrics.jsonl") == {"a": [(1.0, 1.0), (2.0, 3.0)]}


def test_broken_line_in_the_middle_is_named(tmp_path):
    write(tmp_path, record(0, a=1.0), "{broken", record(2, a=1.0))
    with pytest.raises(RltoolError, match=r"metrics.jsonl, line 2"):
        write_report([tmp_path])


def test_missing_and_empty_metrics_are_errors(tmp_path):
    with pytest.raises(RltoolError, match="does not exist"):
        write_report([tmp_path])
    write(tmp_path)
    with pytest.raises(RltoolError, match="no metrics yet"):
        write_report([tmp_path])


def test_phases_add_up_to_the_step():
    metrics = {
        "time/step_seconds": [(0.0, 10.0), (1.0, 3.0)],
        "time/train_seconds": [(0.0, 4.0), (1.0, 1.0)],
        "time/generate_seconds": [(0.0, 3.0), (1.0, 1.5)],
        "time/eval_seconds": [(0.0, 2.0)],
    }
    parts = phases(metrics, [0.0, 1.0])
    assert parts == {"generate": [3.0, 1.5], "train": [4.0, 1.0], "eval": [2.0, 0.0], "other": [1.0, 0.5]}
    assert list(parts)[:2] == ["generate", "train"]


def test_generation_beside_training_is_no_time_of_the_step():
    metrics = {
        "time/step_seconds": [(1.0, 5.0)], "time/train_seconds": [(1.0, 4.0)], "time/generate_seconds": [(1.0, 30.0)],
        "time/wait_seconds": [(1.0, 1.0)], "time/reward_seconds": [(1.0, 3.0)],
    }  # fmt: skip
    assert phases(metrics, [1.0]) == {"generate": [1.0], "train": [4.0]}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (5.084, 5.32), (-3, 12_345), (1e-9, 2e-9), (7, 7), (0, 0)])
def test_ticks_are_even_and_cover_the_range(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 12
    gaps = [b - a for a, b in pairwise(ticks)]
    assert max(gaps) == pytest.approx(min(gaps))


def numbers(svg, attribute):
    return [float(value) for value in re.findall(rf'{attribute}="([-\d.]+)"', svg)]


def test_log_chart_puts_zero_on_the_lower_edge_and_decades_evenly():
    svg = line_chart([Series("x", [(0, 1e-6), (1, 1e-5), (2, 1e-4), (3, 0.0)])], label="y", log=True)
    ys = [float(pair.split(",")[1]) for pair in re.search(r'polyline[^>]*points="([^"]+)"', svg)[1].split()]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[3] == ys[0] == max(ys)


def test_stacked_bars_lie_on_each_other():
    svg = stacked_bars([0, 1], {"a": [1.0, 2.0], "b": [3.0, 1.0]}, label="s")
    rects = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="var\(--c(\d)\)"', svg)
    first = [tuple(map(float, rect)) for rect in rects[:2]]
    assert first[1][1] + first[1][2] == pytest.approx(first[0][1], abs=0.2)
    assert first[1][2] == pytest.approx(3 * first[0][2], abs=0.5)


def test_one_slow_step_does_not_flatten_the_others():
    svg = stacked_bars(list(range(20)), {"a": [100.0, *[1.0] * 19]}, label="s")
    heights = numbers(svg, "height")
    assert min(heights) > 50
    assert ">100.0</text>" in svg


def test_moving_mean_uses_what_is_there():
    assert moving_mean([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_numbers_are_readable():
    assert [format_number(v) for v in (0.0, 0.12345, 12345.6, 1.5e-7, 2e9)] == [
        "0",
        "0.1235",
        "12,346",
        "1.50e-07",
        "2.00e+09",
    ]


def dots(svg):
    return len(re.findall(r"<circle cx", svg))


def test_two_evaluations_are_not_joined_by_a_line_and_have_error_bars():
    two = [(0, 0.2), (9, 0.6)]
    svg = line_chart([Series("x", two, "dots", 0, {0: (0.1, 0.3), 9: (0.5, 0.7)})], label="y", y_range=(0, 1))
    assert "polyline" not in svg and dots(svg) == 2 and svg.count('class="error"') == 2
    assert "step 9: 0.6 (0.5 to 0.7)" in svg
    assert "polyline" in line_chart([Series("x", [*two, (12, 0.7)], "dots")], label="y")


@pytest.mark.parametrize(("values", "end"), [((5.08, 5.32), 0.0), ((-5.3, -5.1), 0.0)])
def test_an_axis_shows_zero_so_that_noise_looks_small(values, end):
    svg = line_chart([Series("x", list(enumerate(values)))], label="y")
    ticks = [float(text) for text in re.findall(r'text-anchor="end" x="50" y="[-\d.]+">([-\d.]+)</text>', svg)]
    assert end in ticks


def test_steps_are_counted_as_on_the_console(tmp_path):
    write(tmp_path, record(-1, eval__words__accuracy=0.25), record(0, a=1.0, eval__words__accuracy=0.5))
    assert read_metrics(tmp_path / "metrics.jsonl")["eval/words/accuracy"] == [(0.0, 0.25), (1.0, 0.5)]


def test_several_runs_share_the_charts_and_their_settings_are_compared(tmp_path):
    for name, lr, reward in (("slow", 1e-6, 0.25), ("fast<", 1e-3, 0.75)):
        directory = tmp_path / name
        directory.mkdir()
        write(
            directory, *(record(s, rollout__reward_mean=reward, rollout__samples=8.0) for s in range(3)),
            config={
                "config": {"optimizer": {"lr": lr}, "seed": 7},
                "facts": {"host": f"box-{name}", "parameters": 5_000_000},
            },
        )  # fmt: skip
    page = write_report([tmp_path / "slow", tmp_path / "fast<"], note="a & b").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "<title>slow and fast&lt;</title>" in page and "a &amp; b" in page
    differences = page.split("Differences in configuration")[1].split("</details>")[0]
    assert "optimizer.lr" in differences and "0.001" in differences and "seed" not in differences
    assert "host box-slow" in page and "5.00 M" in page
    [reward] = re.findall(r"<tr><th>rollout/reward_mean</th><td>([^<]+)</td><td>([^<]+)</td></tr>", page)
    assert reward == ("0.25", "0.75")


def test_what_never_changes_stands_apart_and_folded(tmp_path):
    write(tmp_path, *(record(s, rollout__samples=64.0, rollout__reward_mean=s / 10) for s in range(4)))
    shown, constant = write_report([tmp_path]).read_text().split("constant in all steps")
    assert "<th>rollout/reward_mean</th>" in shown and "<th>rollout/samples</th>" not in shown
    assert "<th>rollout/samples</th><td>64</td>" in constant


def answer(reward, text):
    return SampleRecord(
        group=0, index=0, prompt="1<2?", text=text, reward=reward, status="completed", prompt_tokens=3,
        tokens=(text,), token_ids=(5,), mask=(1,), engine_logprobs=(-0.5,), label="yes",
    )  # fmt: skip


def test_the_page_has_best_median_and_worst_answers_over_time(tmp_path):
    write(tmp_path, record(0, rollout__reward_mean=0.5))
    (tmp_path / "samples").mkdir()
    for step in range(9):
        records = tuple(answer(reward, f"answer <{step}> {reward}") for reward in (0.5, 1.0, 0.0))
        sample_file(tmp_path / "samples", step).write_bytes(encoded(StepSamples(step, 64, records)))
    page = write_report([tmp_path]).read_text()
    assert [int(step) for step in re.findall(r"<h3>step (\d+) \(3 of 64", page)] == [1, 4, 6, 9]
    first = page.split("step 1 (3 of 64")[1].split("<h3>")[0]
    texts = re.findall(r"<b>(\w+), reward ([\d.]+)</b>.*?<pre>(answer[^<]*)</pre>", first)
    assert texts == [
        (n, r, f"answer &lt;0&gt; {float(r)}") for n, r in (("best", "1"), ("median", "0.5"), ("worst", "0"))
    ]
    checker = Checker()
    checker.feed(page)
    assert checker.open == []


def test_evenly_takes_the_ends():
    assert evenly([1, 2, 3], 4) == [1, 2, 3] and evenly(list(range(10)), 4) == [0, 3, 6, 9]


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_stages_are_shown_where_they_were_measured(tmp_path):
    full_run(tmp_path)
    assert "Stages" not in write_report([tmp_path]).read_text()
    page = write_report([tmp_path], stages={"a task & a model": 1.25}).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "Stages" in page and "a task &amp; a model" in page and "1.2 s" in page


def test_the_verb_reports_on_the_newest_run_or_the_named_one_and_writes_where_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    for name, reward in (("old", 0.25), ("new", 0.75)):
        write(open_run(name, create=True).path, record(0, rollout__reward_mean=reward))

    def report(*words):
        with pytest.raises(SystemExit) as ended:
            main(["report", *words])
        out = capsys.readouterr()
        return ended.value.code, (out.out + out.err).replace("\n", "")

    assert report() == (0, f"report of run new: {tmp_path}/runs/new/report.html")
    code, said = report("old", "new", "--out", str(tmp_path / "both.html"))
    assert (code, said) == (0, f"report of runs old, new: {tmp_path}/both.html")
    assert report("old", "--run", "new")[0] == 2 and report("old", "old")[0] == 2
    page = str(tmp_path / "page.html")
    assert report("--run", "old", "--out", page) == (0, f"report of run old: {page}")
    assert "0.75 → 0.75" in (tmp_path / "runs" / "new" / "report.html").read_text()
    assert "0.25 → 0.25" in (tmp_path / "page.html").read_text()
    code, said = report("--out", str(tmp_path / "no" / "such" / "page.html"))
    assert code == 1 and "--out" in said


def test_the_report_of_a_served_trainer_has_models_losses_by_step_and_clients_over_all_starts(tmp_path):
    run_dir = tmp_path / "lab"
    (run_dir / "served").mkdir(parents=True)
    call = {"time": 1e9, "client": "<b>a", "model": "m:train:0", "seconds": 0.5, "tokens": 0}
    forward = {**call, "kind": "forward_backward", "tokens": 7, "backward": True}
    lines = [
        {"time": 1e9, "boot": "1", "clients": {}},
        {**call, "kind": "create_model"},
        {**forward, "loss": 2.0}, {**forward, "loss": 1.0}, {**forward, "loss": 9.0, "backward": False},
        {**call, "kind": "optim_step", "grad_norm": 0.25, "skipped": 0.0},
        {"time": 1e9, "boot": "1", "clients": {"<b>a": {"samples": 2, "sampled_tokens": 9, "refused": 1,
                                                          "last_refusal": "no <i>room</i>"}}},
        {"time": 1e9, "boot": "2", "clients": {"<b>a": {"samples": 3}}},
        {**forward, "loss": 0.5},
        {**call, "kind": "save_weights", "error": "disk"},
        {**call, "kind": "optim_step", "grad_norm": 0.125},
    ]  # fmt: skip
    history = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "served" / "history.jsonl").write_text(history + '{"time": 1, "cli')
    found = read_served(run_dir)
    [model] = found.models.values()
    assert model.losses == [(1, 3.0), (2, 0.5)] and model.norms == [(1, 0.25), (2, 0.125)]
    assert (model.calls, model.failed, model.tokens, model.seconds) == (8, 1, 28, 4.0) and found.starts == 2
    counts = {"samples": 5, "sampled_tokens": 9, "refused": 1, "last_refusal": "no <i>room</i>"}
    assert found.clients == {"<b>a": counts}
    page = write_report([run_dir]).read_text()
    Checker().feed(page)
    assert "no &lt;i&gt;room" in page and "&lt;b&gt;a" in page and "<td>3</td><td>0.5</td><td>1: disk</td>" in page
    other = tmp_path / "other"
    other.mkdir()
    full_run(other)
    with pytest.raises(UsageError, match="lab: of serve-trainer"):
        write_report([run_dir, other])
    (run_dir / "served" / "history.jsonl").write_text("{}\n" + history)
    with pytest.raises(RltoolError, match="line 1: no record"):
        write_report([run_dir])
