"""`rltool models check`: a right family passes, on one rank and two; of a wrong one it names what differs."""

from __future__ import annotations

import json

import pytest

from rltool.checkpoints.family_check import check_family, small
from rltool.cli import main

pytestmark = pytest.mark.e2e

EXAMPLE = "examples.seed_oss:FAMILY"
WRONG = """
from dataclasses import replace
from examples.seed_oss import FAMILY, build
from rltool.api import Variant, decoder


def other_rope(config):
    return build({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})


def without_biases(config):
    return decoder({**config, "attention_dropout": 0.0}, Variant())


def unknown(config):
    return replace(build(config), architecture="UnknownForCausalLM")


ROPE, BIASES = replace(FAMILY, build=other_rope), replace(FAMILY, build=without_biases)
UNKNOWN = replace(FAMILY, build=unknown, architectures=("UnknownForCausalLM",))
"""


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    (tmp_path / "wrong_families.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["models", "check", *words])
    captured = capsys.readouterr()
    return end.value.code or 0, " ".join((captured.out + captured.err).split())


def test_the_example_is_the_model_of_transformers_on_one_rank_and_two(capsys):
    code, output = run(capsys, EXAMPLE)
    assert code == 0 and "FAILED" not in output and "not compared" not in output
    for at in ("TP 1", "TP 2"):
        for what in ("export: ", "packed against one by one", "log-probabilities of transformers", "gradients of"):
            assert f"ok {at}: {what}" in output.replace("names and bytes of the ", "")


def test_a_wrong_family_ends_with_1_and_says_what_differs(capsys, wrong):
    code, output = run(capsys, "wrong_families:ROPE")
    assert code == 1
    assert "FAILED TP 1: log-probabilities of transformers" in output and "FAILED TP 1: gradients" in output
    assert "ok TP 1: names and bytes" in output and "this is not the model of transformers" in output


def test_tensors_that_a_family_leaves_out_are_named(capsys, wrong):
    code, output = run(capsys, "wrong_families:BIASES")
    assert code == 2 and "unknown tensors" in output and "self_attn.k_proj.bias" in output


def test_what_transformers_does_not_have_is_compared_with_itself_alone(capsys, wrong, tmp_path):
    assert "give a checkpoint's config.json" in run(capsys, "wrong_families:UNKNOWN")[1]
    sizes = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=91)
    sizes |= dict(num_key_value_heads=2, architectures=["UnknownForCausalLM"], attention_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "work").mkdir()
    found = []
    for finding in check_family("wrong_families:UNKNOWN", tmp_path, tmp_path / "work"):
        found.append((finding.what, finding.ok))
        if "packed" in finding.what:
            break
    assert ("transformers", None) in found and found[-1] == ("TP 1: packed against one by one", True)


def test_a_path_that_is_no_family_is_wrong_usage(capsys):
    assert run(capsys, "examples.seed_oss:build")[0] == 2
    code, output = run(capsys, "examples.seed_oss:FAMLY")
    assert code == 2 and "did you mean 'FAMILY'" in output


def test_a_small_config_keeps_one_layer_of_each_kind_and_what_is_smaller_already():
    kinds = ["a"] * 5 + ["b"]
    found = small({"num_hidden_layers": 6, "hidden_size": 48, "vocab_size": 999, "layer_types": kinds})
    assert found["layer_types"] == ["a", "a", "a", "b"]
    assert (found["hidden_size"], found["vocab_size"], found["num_hidden_layers"]) == (48, 131, 4)
