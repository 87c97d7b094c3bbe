"""`rltool eval --checkpoint`: what is refused before engines start, and what is left of them. No engine is started."""

import signal
from types import SimpleNamespace

import pytest

from rltool.cli import main
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.errors import EngineUnreachable, UsageError
from rltool.processes.run_directory import list_runs, open_run


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The command lines of serve-engines that eval runs; each ends at once with this return code."""
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    found = SimpleNamespace(commands=[], returncode=0)

    def run(command, *, stdout, **_):
        stdout.write("what serve-engines said\nCtrl-C ends them\n")
        found.commands.append(command)
        endpoints = open_run(command[command.index("--run") + 1], create=False).endpoints_file
        entry = ModelEndpoints(engines=(EngineEndpoint(url="http://127.0.0.1:9"),))
        endpoints.write_text(Endpoints(models={"policy": entry}).model_dump_json())
        return SimpleNamespace(returncode=found.returncode)

    monkeypatch.setattr("rltool.commands.evaluate.subprocess", SimpleNamespace(run=run, STDOUT=-2))
    return found


@pytest.fixture
def arguments(tiny_tied_dir, tmp_path):
    (tmp_path / "words.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return ["eval", "--checkpoint", str(tiny_tied_dir), "--set", "eval.sets.words=words.jsonl"]


def evaluate(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--config", "missing.toml"], "missing.toml: no such file"),
        (["--set", "eval.sets.more=gone.jsonl"], "eval.sets.more: gone.jsonl does not exist"),
        (["--serve-flags", "--device 'cpu"], "No closing quotation"),
        (["--out", "nowhere/results.json"], "--out nowhere/results.json"),
        (["--rollout-external", "127.0.0.1:9"], "give one of them"),
    ],
)
def test_what_is_wrong_is_found_before_engines_start(started, arguments, capsys, change, message):
    code, output = evaluate([*arguments, *change], capsys)
    assert code == 2 and message in output and "Traceback" not in output
    assert not started.commands and not list_runs()


def test_an_evaluation_without_sets_is_refused_before_engines_start(started, arguments, capsys):
    code, output = evaluate(arguments[:3], capsys)
    assert code == 2 and "eval.sets names no set" in output and not started.commands


@pytest.mark.parametrize(("returncode", "code"), [(1, 1), (2, 2)])
def test_engines_that_do_not_start_are_explained_with_their_output(started, arguments, capsys, returncode, code):
    started.returncode = returncode
    found, output = evaluate([*arguments, "--serve-flags", "--device cpu"], capsys)
    assert found == code and "what serve-engines said" in output and "did not start" in output
    assert started.commands[0][-2:] == ["--device", "cpu"]
    runs = list_runs()
    assert [run.name in output for run in runs] == [True] * (code == 1), "a failure keeps its logs, and names them"


@pytest.mark.parametrize(("error", "kept"), [(EngineUnreachable("gone"), 1), (UsageError("wrong"), 0)])
def test_the_run_of_the_engines_stays_where_an_engine_failed(started, arguments, capsys, monkeypatch, error, kept):
    def probe(*_, **__):
        raise error

    monkeypatch.setattr("rltool.training.checks.preflight.probe_fleet", probe)
    code, output = evaluate(arguments, capsys)
    assert code == error.exit_code and str(error) in output
    assert len(list_runs()) == kept and ("rltool logs --run" in output) == bool(kept)


def test_sigterm_leaves_no_engine_and_no_run_either(started, arguments, capsys, monkeypatch):
    stopped = []
    monkeypatch.setattr("rltool.processes.stop_run.stop_run", stopped.append)
    monkeypatch.setattr("rltool.training.checks.preflight.probe_fleet", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, _ = evaluate(arguments, capsys)
    assert code == 130 and len(stopped) == 1 and not list_runs()


def test_a_good_end_leaves_no_run_and_says_nothing_of_engines_that_are_gone(started, arguments, capsys, monkeypatch):
    during = []

    def alone(config, engines, *, log):
        during.extend(list_runs())
        return SimpleNamespace(metrics={})

    endpoints = SimpleNamespace(engines=(), data_endpoint=lambda: None)
    fleet = SimpleNamespace(endpoints=endpoints, infos={})
    monkeypatch.setattr("rltool.training.checks.preflight.probe_fleet", lambda *_: fleet)
    for name in ("check_fleet", "check_router"):
        monkeypatch.setattr(f"rltool.training.checks.preflight.{name}", lambda *_, **__: None)
    monkeypatch.setattr("rltool.training.checks.preflight.describe_fleet", lambda _: "the fleet")
    monkeypatch.setattr("rltool.training.evaluate.evaluate_alone", alone)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr().out
    assert ended.value.code == 0, output
    assert len(during) == 1 and not list_runs()
    assert "Ctrl-C ends them" not in output and "the fleet" in output




@pytest.fixture
def hub(monkeypatch, tiny_tied_dir):
    """The names that are fetched from the hub, each of which leads to the tiny model."""
    fetched = []

    def download(name, *, revision, allow_patterns):
        fetched.append((name, revision))
        return str(tiny_tied_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return fetched


@pytest.fixture
def evaluated(monkeypatch):
    """The configurations that engines were to be asked with; none is."""
    found = []

    def probe(*_, **__):
        raise EngineUnreachable("nobody is there")

    monkeypatch.setattr("rltool.training.checks.preflight.resolve_endpoints", found.append)
    monkeypatch.setattr("rltool.training.checks.preflight.probe_fleet", probe)
    return found


def test_a_checkpoint_may_be_a_name_of_the_hub(started, arguments, hub, evaluated, tiny_tied_dir, capsys):
    arguments[2] = "acme/policy@v2"
    code, output = evaluate(arguments, capsys)
    assert (code, hub) == (1, [("acme/policy", "v2")]), output
    assert str(tiny_tied_dir) in started.commands[0], "engines load what was fetched"
    assert evaluated[0].model.path == tiny_tied_dir, "and the tokenizer is its own"


def test_the_model_of_engines_that_run_may_be_a_name_and_what_only_a_trainer_reads_is_not_fetched(
    started, arguments, hub, evaluated, tiny_tied_dir, capsys
):
    named = ["model.path=acme/policy", "models.judge.path=acme/judge", "model.teacher_path=acme/teacher"]
    sets = [word for one in [*named, "critic.path=acme/critic"] for word in ("--set", one)]
    code, output = evaluate(["eval", "--rollout-external", "127.0.0.1:9", *arguments[3:], *sets], capsys)
    assert (code, hub) == (1, [("acme/policy", None), ("acme/judge", None)]), output
    assert evaluated[0].model.path == evaluated[0].models["judge"].path == tiny_tied_dir


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--checkpoint", "acme/absent"], "--checkpoint"),
        (["--rollout-external", "127.0.0.1:9", "--set", "model.path=acme/absent"], "model.path"),
    ],
)
def test_a_name_that_cannot_be_fetched_is_refused_in_the_words_of_train(
    started, arguments, monkeypatch, tmp_path, capsys, words, setting
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    code, output = evaluate(["eval", *words, *arguments[3:]], capsys)
    said = " ".join(output.split())
    assert code == 2 and not started.commands
    assert f"{setting}: acme/absent is not (or not completely) in the cache of the Hugging Face hub" in said
    assert "`hf download acme/absent`" in said
