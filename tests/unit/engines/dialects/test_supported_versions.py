"""Which engine versions are taken, and what is known to differ between them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rltool.engines.dialects.protocol import Feature
from rltool.engines.dialects.supported import exact_refusal, has, newest, parse, pause_mode, refusal, training_refusal
from rltool.engines.dialects.table import dialect


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.23.post1", (0, 5, 23)),
        ("v0.32.0+cpu", (0, 32, 0)),
        ("0.32.1rc2.dev7+g1a2b3c", (0, 32, 1)),
        ("0.32", (0, 32)),
        ("dev", None),
        ("", None),
    ],
)
def test_the_numbers_of_a_version_are_read(text, version):
    assert parse(text) == version


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_bounds_are_supported_and_what_follows_the_newest_belongs_to_it(kind):
    versions = dialect(kind).versions
    for bound in (versions.oldest, versions.newest):
        assert refusal(kind, ".".join(map(str, bound))) is None
    assert refusal(kind, ".".join(map(str, versions.newest)) + ".post1") is None


@pytest.mark.parametrize(("kind", "version"), [("vllm", "0.28.0"), ("sglang", "0.5.16.post2"), ("sglang", "0.4.9")])
def test_an_older_version_is_refused_whatever_is_allowed(kind, version):
    for newer in (False, True):
        why = refusal(kind, version, newer=newer)
        assert why is not None and version in why and "too old" in why


@pytest.mark.parametrize(
    ("kind", "version"), [("vllm", "0.34.0"), ("sglang", "0.5.24"), ("sglang", "0.6.0"), ("vllm", "dev")]
)
def test_a_newer_version_is_refused_by_name_unless_allowed(kind, version):
    why = refusal(kind, version)
    assert why is not None and version in why and "engines.newer_versions" in why
    assert refusal(kind, version, newer=True) is None


@pytest.mark.parametrize(
    ("kind", "version", "mode", "message"),
    [
        ("vllm", "0.32.0", "keep", None),
        ("vllm", "0.33.0+cpu", "keep", None),
        ("vllm", "0.31.0", "abort", "does not report the weight version"),
        ("vllm", "0.29.0", "keep", "install vLLM 0.32"),
        ("sglang", "0.5.17", "keep", 'weights.pause_mode to "abort"'),
        ("sglang", "0.5.18", "keep", "one weight version for a response"),
        ("sglang", "0.5.17", "abort", None),
        ("sglang", "0.5.17", "auto", None),
        ("sglang", "0.5.19", "keep", None),
        ("sglang", "0.5.23", "keep", None),
    ],
)
def test_an_engine_whose_tokens_cannot_be_attributed_is_not_trained_against(kind, version, mode, message):
    why = training_refusal(kind, version, mode)
    assert why is None if message is None else message in (why or "")


@pytest.mark.parametrize(
    ("kind", "version", "role", "mode"),
    [
        ("vllm", "0.32.0", "regular", "keep"),
        ("sglang", "0.5.18", "regular", "abort"),
        ("sglang", "0.5.19", "regular", "keep"),
        ("vllm", "0.32.0", "decode", "abort"),
        ("sglang", "0.5.23", "prefill", "abort"),
    ],
)
def test_an_engine_is_paused_as_it_can_be_unless_the_user_has_chosen(kind, version, role, mode):
    assert pause_mode("auto", kind, version, role) == mode
    assert pause_mode("keep", kind, version, role) == "keep"


def test_a_version_that_cannot_be_read_has_what_new_ones_have():
    assert has("sglang", "dev", Feature.STARTING_VERSION)
    assert not has("vllm", "dev", Feature.STARTING_VERSION), "which vLLM has in no version"


@pytest.mark.parametrize(
    ("version", "newer", "refused"),
    [("0.32.1", False, False), ("0.33.0", False, True), ("dev", False, True), ("0.33.0", True, False)],
)
def test_algorithm_exact_is_for_versions_that_it_was_compared_with(version, newer, refused):
    why = exact_refusal("vllm", version, newer=newer)
    assert f"vLLM {version}" in why and "compared with vLLM 0.32" in why if refused else why is None


@pytest.mark.parametrize(("kind", "tested"), [("vllm", "0.32"), ("sglang", "0.5.23")])
def test_the_extra_installs_the_version_that_is_tested(kind, tested):
    """`uv pip install '.[vllm]'` of the README. Unbounded it brings a release that rltool does not know."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    (bound,) = project["optional-dependencies"][kind]
    *before, last = tested.split(".")
    assert bound == f"{kind}>={tested},<{'.'.join([*before, str(int(last) + 1)])}"
    assert parse(tested) <= parse(newest(kind)) and refusal(kind, tested) is None
