"""The quickstart's bar: read from a run's metrics as they grow, with a real child process that writes them."""

import io
import sys

import pytest

from rltool.cli import main
from rltool.commands.quickstart import _print
from rltool.processes.run_directory import open_run
from rltool.processes.spawn import ProcessFailed, ProcessSpec
from rltool.processes.supervise import ProcessGroup
from rltool.quickstart.compose import Result
from rltool.quickstart.metrics_tail import MetricsTail, finished_step, headline, numbers
from rltool.quickstart.stages import Stages
from rltool.terminal import Console


def test_a_record_is_given_once_and_only_when_its_line_is_finished(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 98}\n')
    tail = MetricsTail(file)
    assert tail.new_records() == []
    with file.open("a") as out:
        out.write('{"step": 0}\nno json\n[1]\n{"step": ')
        out.flush()
        assert tail.new_records() == [{"step": 0}]
        assert tail.new_records() == []
        out.write("1}\n")
    assert tail.new_records() == [{"step": 1}]


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path):
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.new_records() == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert tail.new_records() == [{"step": 0}]


@pytest.mark.parametrize(
    ("record", "done"),
    [
        ({"step": 4, "time/step_seconds": 1.0}, 5),
        ({"step": -1, "eval/a/accuracy": 0.5}, None),
        ({"step": 4, "eval/a/accuracy": 0.5}, None),
    ],
)
def test_the_evaluation_before_the_first_step_or_after_a_resume_is_no_step(record, done):
    assert finished_step(record) == done


def test_figures_that_are_not_finite_are_left_out():
    measured = numbers(
        {
            "step": 3,
            "weight_version": "r:1:3",
            "train/loss": None,
            "rollout/reward_mean": 0.5,
            "eval/held/accuracy": 0.25,
        }
    )
    assert measured == {"rollout/reward_mean": 0.5, "eval/held/accuracy": 0.25}
    assert headline(measured) == "reward 0.500  held accuracy 0.250"
    assert headline({}) == "training"


class Child(Stages):
    """Starts Python code in place of a verb of rltool."""

    def begin(self, role, *arguments, root=None):
        return self.group.start(ProcessSpec(role=role, argv=(sys.executable, "-c", *arguments)))


def train(tmp_path, code):
    """What is left on the screen after a training of four steps."""
    run = open_run("r", create=True, root=tmp_path)
    screen = io.StringIO()
    with ProcessGroup(run) as group:
        Child(run, group, Console(file=screen, width=200), 1).train(
            "grpo", 4, code, metrics=run.metrics_file, shown_every=2
        )
    return screen.getvalue().splitlines()


WRITES = """
import json
print("data: 4 prompts", flush=True)
with open({file!r}, "a") as out:
    for step in range(-1, 4):
        timed = {{"time/step_seconds": 0.5}} if step >= 0 else {{}}
        out.write(json.dumps({{"step": step, "rollout/reward_mean": step / 10, "train/loss": None, **timed}}) + "\\n")
        out.flush()
        print("step", step + 1, "in words of its own", flush=True)
print("done after step 4", flush=True)
"""


def test_steps_are_shown_from_the_metrics_and_other_lines_as_they_come(tmp_path):
    lines = train(tmp_path, WRITES.format(file=str(tmp_path / "r" / "metrics.jsonl")))
    shown = [line.strip() for line in lines if line.strip()]
    assert shown[0] == "data: 4 prompts" and "done after step 4" in shown
    steps = [line for line in shown if line.startswith("step ")]
    assert [line.split("  ")[:2] for line in steps] == [
        ["step 1/4", "reward 0.000"],
        ["step 2/4", "reward 0.100"],
        ["step 4/4", "reward 0.300"],
    ]


def test_a_training_that_fails_is_an_error_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ProcessFailed, match=r"(?s)exit code 3.*no such model"):
        train(tmp_path, "print('no such model'); raise SystemExit(3)")


@pytest.mark.parametrize("used", ["metrics.jsonl", "warmup/metrics.jsonl", "model-torch_dist/manifest.json"])
def test_a_run_that_was_trained_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys, used):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path))
    file = open_run("mine", create=True).path / used
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "--run", "mine"])
    assert ended.value.code == 2 and "run mine was trained already" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_last_lines_name_the_checkpoint_that_verbs_take(tmp_path, capsys):
    run = open_run("mine", create=True, root=tmp_path)
    checkpoint = run.checkpoints_dir / "step_100"
    _print(Console(), Result(0.1, 0.9, 0.1, 0.9, run.report_file, checkpoint, run, {"a": 61.0}))
    said = capsys.readouterr().out
    assert f"checkpoint:   {checkpoint}\n" in said and "latest" not in said
