"""What the driver's endpoint tells Prometheus and `rltool top`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rltool.commands.tables import short_version
from rltool.commands.top_view import BARS, frame, sparkline
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.metrics_text import merged
from rltool.terminal import Console
from rltool.training.observe.live_metrics import KEPT_STEPS, LiveMetrics, exported_name, exposition

STATUS = {
    "step": 12, "steps": 100, "weight_version": "0123456789abcdef0123456789abcdef:1:12", "requests_in_flight": 64,
    "groups": {"running": 8, "ready": 20},
    "engines": [{"url": "http://a:1", "state": "ready", "since_seconds": 3.0}, {"url": "http://b:1", "state": "stale"}],
}  # fmt: skip


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize(
    ("name", "exported", "labels"),
    [
        ("rollout/reward_mean", "rltool_rollout_reward_mean", {}),
        ("eval/gsm8k-test/accuracy", "rltool_eval_accuracy", {"set": "gsm8k-test"}),
        ("eval/words/pass@4", "rltool_eval_pass_4", {"set": "words"}),
        ("rollout/category/a b/pass_rate", "rltool_rollout_category_pass_rate", {"category": "a b"}),
        ("rollout/zero_std_groups/0.5", "rltool_rollout_zero_std_groups", {"reward": "0.5"}),
        ("engines/dead_total", "rltool_engines_dead_total", {}),
    ],
)
def test_names_become_prometheus_names_and_names_of_users_labels(name, exported, labels):
    assert exported_name(name) == (exported, labels)


def test_prometheus_own_parser_reads_what_is_exported():
    metrics = {"train/loss": -0.25, "eval/a/accuracy": 0.5, "eval/b/accuracy": 0.75, "engines/dead_total": 2.0}
    found = families(exposition('de"mo\n', metrics, STATUS))
    assert found["rltool_train_loss"].samples[0].value == -0.25
    assert found["rltool_train_loss"].samples[0].labels == {"run": 'de"mo\n'}
    assert {s.labels["set"]: s.value for s in found["rltool_eval_accuracy"].samples} == {"a": 0.5, "b": 0.75}
    assert found["rltool_engines_dead"].type == "counter" and found["rltool_train_loss"].type == "gauge"
    assert {s.labels["state"]: s.value for s in found["rltool_prompt_groups"].samples} == {"running": 8, "ready": 20}
    states = {(s.labels["engine"], s.labels["state"]) for s in found["rltool_engine_state"].samples}
    assert states == {("http://a:1", "ready"), ("http://b:1", "stale")}
    assert found["rltool_step"].samples[0].value == 12 and found["rltool_requests_in_flight"].samples[0].value == 64


ENGINE = """\
# HELP http_seconds How long.
# TYPE http_seconds histogram
http_seconds_bucket{handler="/a}b\\"c",le="+Inf"} 3.0
http_seconds_sum 1.5 1700000000000
http_seconds_count{ } 3.0
# TYPE queue gauge
queue{instance="its own",} NaN
"""


def test_pages_of_several_engines_become_one_that_prometheus_own_parser_reads():
    one, two, down = (EngineEndpoint(url=f"http://10.0.0.{n}:8000", group=f"g{n}") for n in (1, 2, 3))
    spoilt = 'queue{a="b} 1\nqueue{a=b} 1\nqueue one\nqueue 1_0\nqueue\n# TYPE queue gauges\n# EOF\n<html>\nqueue 5\n'
    found = families(merged([(one, ENGINE), (two, ENGINE + spoilt), (down, None)], 'de"mo'))
    ups = {s.labels["instance"]: s.value for s in found["rltool_engine_up"].samples}
    assert ups == {"10.0.0.1:8000": 1, "10.0.0.2:8000": 1, "10.0.0.3:8000": 0}
    seconds = found["http_seconds"]
    assert (seconds.type, seconds.documentation, len(seconds.samples)) == ("histogram", "How long.", 6)
    assert {(s.labels["group"], s.labels["run"]) for s in seconds.samples} == {("g1", 'de"mo'), ("g2", 'de"mo')}
    assert {s.labels["handler"] for s in seconds.samples if s.name.endswith("_bucket")} == {'/a}b"c'}
    queue = found["queue"].samples
    assert [s.labels["instance"] for s in queue] == ["its own", "its own", "10.0.0.2:8000"] and queue[2].value == 5
    assert found.keys() == {"rltool_engine_up", "http_seconds", "queue"}


def test_the_newest_value_of_each_metric_is_exported_also_where_the_last_step_did_not_measure_it():
    live = LiveMetrics("demo")
    live.log(-1, {"eval/a/accuracy": 0.5})
    live.log(0, {"train/loss": 2.0})
    live.log(1, {"train/loss": 1.0})
    found = families(live.exposition({}))
    assert found["rltool_train_loss"].samples[0].value == 1.0 and found["rltool_eval_accuracy"].samples[0].value == 0.5
    assert live.history() == {
        "run": "demo", "records": [
            {"step": -1, "metrics": {"eval/a/accuracy": 0.5}}, {"step": 0, "metrics": {"train/loss": 2.0}},
            {"step": 1, "metrics": {"train/loss": 1.0}},
        ],
    }  # fmt: skip
    for step in range(2 * KEPT_STEPS):
        live.log(step, {})
    assert len(live.history()["records"]) == KEPT_STEPS


def test_an_evaluation_that_ends_late_joins_the_record_of_its_step():
    live = LiveMetrics("demo")
    live.log(0, {"train/loss": 2.0})
    before = live.history()["records"]
    live.log(1, {"train/loss": 1.0})
    live.log(0, {"eval/a/accuracy": 0.5})
    assert live.history()["records"] == [
        {"step": 0, "metrics": {"train/loss": 2.0, "eval/a/accuracy": 0.5}}, {"step": 1, "metrics": {"train/loss": 1.0}}
    ]  # fmt: skip
    assert before[0]["metrics"] == {"train/loss": 2.0}, "who has read it has a record that stays as it was"


def test_every_query_of_the_dashboard_names_an_exported_metric():
    root = Path(__file__).resolve().parents[4]
    dashboard = json.loads((root / "docs" / "grafana.json").read_text())
    page = (root / "docs" / "metrics.md").read_text()
    explained = re.findall(r"`((?:rollout|train|eval|weights|time|engines|checkpoint)/[^`\s]+)`", page)
    exported = {exported_name(name)[0] for name in explained} | set(families(exposition("r", {}, STATUS)))
    exported |= {f"{name}_total" for name in exported}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 15
    for query in queries:
        names = re.findall(r"rltool_\w+", query)
        assert names and set(names) <= exported, query


# -- rltool top


def test_a_sparkline_begins_at_zero_so_that_noise_is_flat():
    assert sparkline([0.0, 0.5, 1.0]) == BARS[0] + BARS[4] + BARS[7]
    assert set(sparkline([0.90, 0.91, 0.90, 0.92])) == {BARS[7]}
    assert sparkline([0.0, 0.0]) == BARS[0] * 2 and sparkline([-1.0, 0.0]) == BARS[0] + BARS[7]


def shown(status, records, width=80):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(frame("demo", status, {"run": "demo", "records": records}))
    return capture.get()


def test_a_frame_shows_engines_queue_numbers_and_rewards_at_80_columns():
    records = [
        {"step": s, "metrics": {"rollout/reward_mean": s / 10, "rollout/tokens_per_second": 1492.0,
                                "rollout/staleness_mean": 0.5, "eval/words/accuracy": 0.25}}
        for s in range(-1, 11)
    ]  # fmt: skip
    text = shown(STATUS, records)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("run demo, weights 01234567:1:12", "step 12 of 100", "8 running, 20 ready", "64 requests in flight",
                 "http://a:1", "stale", "step 11", "1,492", "0.250", "steps (0.000 to 1.000)"):  # fmt: skip
        assert part in text, part
    assert "▁" in text and "█" in text


def test_a_run_before_its_first_step_has_a_frame():
    assert "no step is done yet" in shown({}, [{"step": -1, "metrics": {}}])


def test_versions_are_shortened_to_eight_characters_of_the_run():
    assert short_version(STATUS["weight_version"]) == "01234567:1:12"
    assert (
        short_version("default") == "default"
        and short_version(None) == "-"
        and short_version("119f:1:12") == "119f:1:12"
    )
