"""What other packages say that is no user's business, and nothing else, is not shown."""

import logging
import warnings

import pytest

import rltool.megatron

assert rltool.megatron.__doc__, "it sets the filters"
COMPARES = 'x = "a" is 1'
"""Compiling it warns of a syntax that is allowed."""


@pytest.fixture
def shown(monkeypatch):
    """The warnings that pass rltool's filters, which stand in front of pytest's own."""
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.resetwarnings()
        rltool.megatron.quieten()
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: seen.append(str(message)))
        yield seen


def test_syntax_warnings_of_megatron_alone_are_left_out(shown):
    compile(COMPARES, "/site-packages/megatron/core/inference/contexts/kv_block_allocator.py", "exec")
    assert shown == []
    compile(COMPARES, "/site-packages/my_rewards.py", "exec")
    assert len(shown) == 1 and "is" in shown[0]


def test_arguments_that_a_compiler_does_not_take_are_left_out(shown):
    warnings.warn("Argument aux_data of type <class 'tuple'>\ncannot be converted to a JitArgument", stacklevel=1)
    warnings.warn("Argument aux_data is wrong", stacklevel=1)
    assert shown == ["Argument aux_data is wrong"]


def test_the_announcement_of_another_model_class_is_left_out(caplog):
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("a layer spec is missing")
    assert caplog.messages == ["a layer spec is missing"]
