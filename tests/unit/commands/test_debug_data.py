"""`rltool debug data`, as docs/data.md has it typed."""

import re
import shlex
from pathlib import Path

import pytest

from rltool.cli import main
from rltool.quickstart.tiny_model import make_tiny_model
from tests.unit.rollout.data.test_data import jsonl

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def here(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "models" / "tiny", seed=0)
    words = [{"prompt": f"{word}=", "label": word[::-1], "metadata": {"k": 1}} for word in ("sun", "bird", "cat")]
    jsonl(tmp_path / "words.jsonl", {"prompt": "x" * 2000}, *words)
    monkeypatch.chdir(tmp_path)


def run(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


def test_the_command_of_the_docs_shows_what_a_run_would_read(here, capsys):
    [line] = re.findall(r"^    rltool (debug data .*)$", (DOCS / "data.md").read_text(), re.MULTILINE)
    code, said = run(shlex.split(line), capsys)
    assert code == 0, said
    assert "data: 1 prompts (left out: 1 with a prompt longer than sampling.max_prompt_tokens)" in said
    assert "row 1, 4 tokens, label 'nus'" in said and '  metadata {"k": 1}\n  | sun=' in said


def test_mixtures_and_own_sources_are_shown(here, capsys):
    sets = ["--set", "model.path=models/tiny"]
    mixed = [*sets, "--set", 'data.train=["words.jsonl[1:2]", "words.jsonl[2:]"]', "--set", "data.weights=[1, 3]"]
    code, said = run(["debug", "data", *mixed, "--show", "0"], capsys)
    assert code == 0 and "data: 3 prompts\n  words.jsonl[1:2]: 1 prompts, weight 1\n" in said, said
    own = [*sets, "--set", 'data.source="examples.data_source:growing_sums"']
    code, said = run(["debug", "data", *own], capsys)
    assert code == 0 and "data: prompts come from data.source\nrow 0, " in said, said


def test_what_is_wrong_with_the_data_is_said(here, capsys):
    code, said = run(["debug", "data", "--set", "model.path=models/tiny", "--set", 'data.train=["none.jsonl"]'], capsys)
    assert code == 2 and "data.train: none.jsonl does not exist" in said
