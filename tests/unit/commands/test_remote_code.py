"""Code that comes with a model runs only where the user says so: no file that a verb reads can say it for him."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

import rltool
from rltool.checkpoints.logits import transformers_logits
from rltool.checkpoints.manifest import FILE, Manifest, to_text
from rltool.cli import main
from rltool.engines.types import VersionSpan
from rltool.models.registry import family_for, read_hf_config
from rltool.processes.run_directory import open_run
from rltool.rollout.measure.dump import about_model, write_dump
from rltool.rollout.sample import Sample, SampleStatus
from tests.tiny_models import write_tiny_qwen2

CODE = """
import pathlib
from transformers import PretrainedConfig, PreTrainedTokenizer, Qwen2ForCausalLM
pathlib.Path({marker!r}).write_text("ran")
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnModel(Qwen2ForCausalLM):
    pass
class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{}}
    vocab_size = 120
    def get_vocab(self):
        return {{chr(i): i for i in range(120)}}
    def _tokenize(self, text):
        return list(text)
    def _convert_token_to_id(self, token):
        return ord(token) % 120
    def _convert_id_to_token(self, index):
        return chr(index)
"""


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """(model directory whose tokenizer is code that leaves a marker, the marker)"""
    model, marker = write_tiny_qwen2(tmp_path / "model", tied=True), tmp_path / "marker"
    (model / "own.py").write_text(CODE.format(marker=str(marker)))
    (model / "tokenizer.json").unlink()
    own = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": own}))
    config = json.loads((model / "config.json").read_text())
    more = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {**own, **more}}))
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return model, marker


@pytest.fixture
def recorded(trap, tmp_path):
    """A recording, and a run with a checkpoint: each names the model, and says that its code may run."""
    model, _ = trap
    claim = {"path": str(model), "trust_remote_code": True}
    sample = Sample(
        0, 0, 0, [1, 2], prompt_text="p", label="l", response_ids=[65], response_mask=[1], response_logprobs=[-1.0],
        versions=[VersionSpan("run:0:0", 0, 1)], status=SampleStatus.COMPLETED, reward=1.0,
    )  # fmt: skip
    run = open_run("demo", create=True)
    run.config_file.write_text(json.dumps({"config": {"model": claim}, "origins": {}}))
    write_dump(run.rollouts_dir, step=0, seed=0, samples=[sample])
    for name in ("a", "b"):
        write_dump(tmp_path / name, step=0, seed=0, samples=[sample], info={"model": claim})
    run.metrics_file.write_text('{"step": 0, "weight_version": "v", "train/loss": 1.0}\n')
    checkpoint = run.checkpoints_dir / "step_1"
    checkpoint.mkdir(parents=True)
    manifest = Manifest("training", "Qwen2ForCausalLM", "float32", step=1, config={"model": claim})
    (checkpoint / FILE).write_text(to_text(manifest))


def call(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out = capsys.readouterr()
    return ended.value.code, " ".join((out.out + out.err).split())


USER = ("--set", "model.path=model", "--set", 'data.train=["words.jsonl"]')
"""What the user gives beside the files: everything but the switch."""
REFUSED = "is code that comes with it (own.OwnTokenizer)"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("samples", "a"), 0, REFUSED),
        (("samples", "demo"), 0, REFUSED),
        (("report", "demo"), 0, "report of run demo"),
        (("diff-dumps", "a", "b"), 0, "equal"),
        (("debug", "data", *USER), 2, REFUSED),
        (("debug", "rollout-only", *USER, "--out", "c"), 2, ""),
        (("train", *USER, "--set", "algorithm.loss=sft", "--dry-run"), 2, REFUSED),
        (("train", *USER, "--set", "algorithm.loss=sft", "--run", "demo", "--resume", "--dry-run"), 2, REFUSED),
        (("convert-ckpt", "runs/demo/checkpoints/step_1", "out", "--to", "hf"), 2, ""),
        (("serve-engines", "model", "--device", "cpu", "--dry-run"), 0, ""),
    ],
    ids=lambda part: " ".join(part[:2]) if isinstance(part, tuple) else "",
)
def test_no_recording_run_or_checkpoint_runs_code(recorded, trap, capsys, words, code, said):
    found, text = call(capsys, *words)
    assert said in text and found == code, text
    assert not trap[1].exists() and "y/N" not in text


def test_whether_code_may_run_comes_from_what_the_user_gave_wherever_a_tokenizer_is_loaded():
    """The verbs above, and those that would need engines: config is the user's own file and options, parts comes of it,
    and samples and serve-engines have an option."""
    given = {
        ast.unparse(keyword.value)
        for file in Path(rltool.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
    }
    assert given == {
        "False", "trust_remote_code", "config.model.trust_remote_code", "self._config.model.trust_remote_code",
        "model.trust_remote_code", "parts.trust_remote_code", "group.trust_remote_code", "self.trust_remote_code",
    }  # fmt: skip


def test_neither_do_the_logits_that_a_conversion_is_compared_with(trap):
    model, marker = trap
    tokens = torch.tensor([3, 4, 5])
    logits = transformers_logits(family_for(read_hf_config(model)), model, torch.float32, tokens, torch.tensor([3]))
    assert logits.shape == (3, 120) and not marker.exists()


def test_tokens_of_such_a_recording_are_ids_until_the_option_is_given(recorded, trap, capsys):
    code, text = call(capsys, "samples", "a")
    assert code == 0 and "allow it with --trust-remote-code" in text and "<65>" in text
    code, text = call(capsys, "samples", "a", "--trust-remote-code")
    assert code == 0 and "<65>" not in text and trap[1].exists(), "the option is the user's, and the trap is one"


def test_a_recording_does_not_hand_the_switch_on():
    from rltool.config.train import TrainConfig

    assert about_model(TrainConfig(model={"path": "/m", "trust_remote_code": True})) == {"model": {"path": "/m"}}
