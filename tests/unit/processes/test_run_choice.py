"""Which run `train` means: the pure rule, the facts that go into it, and what the command line prints."""

import shlex
import sys

import pytest

from rltool.cli import main
from rltool.errors import UsageError
from rltool.processes.run_choice import choose_run, is_trained, run_to_train, runs_of, train_command
from rltool.processes.run_directory import list_runs, open_run
from rltool.processes.state import state_of_this_process, write_state


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """make(name, trained=, checkpoint=) in the root of runs."""
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def make(name, *, trained=False, checkpoint=False):
        run = open_run(name, create=True)
        run.endpoints_file.write_text(
            '{"version": 1, "models": {"policy": {"engines": [{"url": "http://127.0.0.1:9"}]}}}'
        )
        if trained or checkpoint:
            run.metrics_file.write_text('{"step": 0}\n')
        if checkpoint:
            (run.checkpoints_dir / "step_1").mkdir(parents=True)
        return run

    return make


def has_checkpoint(run):
    return (run.checkpoints_dir / "step_1").exists()


def choose(*of_engines, resume=False):
    return choose_run(
        resume=resume, trained=is_trained, resumable=has_checkpoint, of_engines=of_engines, runs=list_runs()
    )


def test_the_run_of_the_engines_is_taken_when_it_was_never_trained(runs):
    mine = runs("mine")
    runs("newer")
    assert choose(mine).run == mine


def test_a_second_training_on_the_same_engines_gets_a_run_of_its_own(runs):
    choice = choose(runs("mine", trained=True))
    assert choice.run is None
    assert "mine" in choice.why and "trained already" in choice.why


def test_engines_without_a_run_or_of_several_runs_get_a_fresh_one(runs):
    assert choose().run is None
    assert choose(runs("a"), runs("b")).run is None


def test_resume_takes_the_newest_run_that_has_a_checkpoint_whatever_the_engines(runs):
    runs("oldest", checkpoint=True)
    wanted = runs("wanted", checkpoint=True)
    runs("without", trained=True)
    assert choose(runs("engines"), resume=True).run == wanted


def test_resume_without_any_checkpoint_is_refused(runs):
    runs("a", trained=True)
    with pytest.raises(UsageError, match="no run has a complete checkpoint"):
        choose(resume=True)


def test_a_run_in_which_a_trainer_is_at_its_first_step_counts_as_trained(runs):
    mine = runs("mine")
    state = state_of_this_process("train", argv=["rltool", "train"])
    write_state(mine, state)
    assert is_trained(mine)
    write_state(mine, state.model_copy(update={"start_time": state.start_time - 3600}))  # another process by now
    assert not is_trained(mine)


def test_files_belong_to_the_run_that_they_lie_in(runs, tmp_path):
    mine = runs("mine")
    (tmp_path / "endpoints.json").write_text("{}")
    (mine.path / "other.json").write_text("{}")
    assert runs_of([mine.endpoints_file, tmp_path / "endpoints.json", mine.path / "other.json"]) == [mine]
    assert runs_of([mine.path / "other.json"]) == []
    assert runs_of([mine.path / ".." / "mine" / "endpoints.json", mine.endpoints_file]) == [mine]


def test_a_name_wins_and_nothing_is_made(runs):
    mine = runs("mine")
    run, why = run_to_train("new", resume=False, endpoints_files=[mine.endpoints_file], resumable=has_checkpoint)
    assert (run.name, why) == ("new", "named by --run")
    run, _ = run_to_train(None, resume=False, endpoints_files=[], resumable=has_checkpoint)
    assert not run.path.exists() and list_runs() == [mine]


def test_train_says_which_run_it_means(runs, tmp_path, capsys, monkeypatch):
    mine = runs("mine")
    (tmp_path / "model").mkdir()
    seen = []

    def prepare(loaded, directory, *, resume, steal, restarted):
        seen.append(directory)
        raise UsageError("enough")

    monkeypatch.setattr("rltool.training.prepare.prepare", prepare)
    sets = ["--set", f'model.path="{tmp_path / "model"}"', "--rollout-external", "@runs/mine/endpoints.json"]
    with pytest.raises(SystemExit):
        main(["train", *sets])
    assert seen == [mine]
    assert f"run mine (the run of the given engines): {mine.path}" in capsys.readouterr().out.replace("\n", "")
    mine.metrics_file.write_text("{}\n")
    with pytest.raises(SystemExit):
        main(["train", *sets])
    assert seen[1] != mine and not seen[1].path.exists()


@pytest.mark.parametrize("words", [["status"], ["stop"]])
def test_status_and_stop_name_the_run_that_they_mean(runs, capsys, words):
    runs("old")
    newest = runs("newest")
    newest.endpoints_file.unlink()
    with pytest.raises(SystemExit):
        main(words)
    output = capsys.readouterr().out.replace("\n", "")
    assert f"run newest: {newest.path}" in output


def test_the_line_to_paste_leads_to_the_run_of_its_own_fleet_from_any_shell(runs, tmp_path):
    for fleet in (runs("first"), runs("second")):
        env, root, *words = shlex.split(train_command(fleet.endpoints_file))
        assert (env, root) == ("env", f"RLTOOL_RUNS={tmp_path / 'runs'}")
        assert words[-2:] == ["--run", fleet.name] and f"@{fleet.endpoints_file}" in words
        found, _ = run_to_train(words[-1], resume=False, endpoints_files=[], resumable=has_checkpoint)
        assert found == fleet


def test_the_line_to_paste_names_no_run_where_another_training_would_be_refused(runs, tmp_path):
    trained, file = runs("mine", trained=True), tmp_path / "endpoints.json"
    file.write_text(trained.endpoints_file.read_text())
    for endpoints in (trained.endpoints_file, file):
        assert "--run" not in train_command(endpoints).split()


def test_the_line_to_paste_says_no_more_than_is_needed(runs, monkeypatch):
    run = runs("mine")
    monkeypatch.delenv("RLTOOL_RUNS")
    assert train_command(run.endpoints_file) == (
        f"rltool train --config run.toml --rollout-external @{run.endpoints_file} --run mine"
    )


def test_a_run_that_cannot_be_written_is_refused_before_torch_and_ray_are_imported(runs, tmp_path, monkeypatch, capsys):
    runs("mine")
    (tmp_path / "runs" / "blocked").write_text("")
    monkeypatch.setitem(sys.modules, "rltool.training.prepare", None)  # its import would fail
    for verb in (["train"], ["debug", "train-only", "--fake-data"]):
        with pytest.raises(SystemExit) as ended:
            main([*verb, "--set", "model.path=m", "--run", "blocked"])
        assert ended.value.code == 2
        assert "run blocked cannot be written" in capsys.readouterr().err
