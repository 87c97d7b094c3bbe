"""Where a model's name may stand: it becomes a directory before anybody looks at it."""

from pathlib import Path

import huggingface_hub
import pytest

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.models.hub import local_model, with_local_models
from tests.tiny_models import write_tiny_qwen2
from tests.unit.commands.test_cli_commands import run_main, runs  # noqa: F401  # a fixture


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(name, revision) of every download, each of which leads to tmp_path/NAME."""
    calls = []

    def download(name, *, revision, allow_patterns):
        assert "*.safetensors" in allow_patterns and not any(pattern.endswith("bin") for pattern in allow_patterns)
        calls.append((name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    return calls


def test_every_model_of_a_run_may_be_named(asked, tmp_path):
    (tmp_path / "runs").mkdir()
    sets = [
        "model.path=acme/policy@v2", "model.teacher_path=acme/teacher", "critic.path=runs/critic",
        "algorithm.advantage=gae", "algorithm.distill_coef=0.1",
        "models={judge={path='acme/judge'}, other={external=['h:1']}}",
    ]  # fmt: skip
    config = with_local_models(load_config(TrainConfig, [], sets).config)
    assert asked == [("acme/policy", "v2"), ("acme/teacher", None), ("acme/judge", None)]
    assert config.model.path == tmp_path / "acme/policy" and config.model.teacher_path == tmp_path / "acme/teacher"
    assert config.critic.path == Path("runs/critic")
    assert config.models["judge"].path == tmp_path / "acme/judge" and config.models["other"].path is None


@pytest.mark.parametrize("path", ["/abs/model", "model", "a/b/c", "../up/model", "runs/x"])
def test_a_path_is_not_looked_for_on_the_hub(asked, path, tmp_path):
    (tmp_path / "runs").mkdir()
    assert local_model(Path(path)) == Path(path) and asked == []


def test_serve_engines_takes_a_name(monkeypatch, runs, tmp_path, capsys):  # noqa: F811
    write_tiny_qwen2(tmp_path / "cache" / "policy", tied=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "cache" / "policy"))
    code, said = run_main(["serve-engines", "acme/policy", "--device", "cpu", "--dry-run"], capsys)
    assert code == 0, said
    assert f"{tmp_path}/cache/policy" in said
