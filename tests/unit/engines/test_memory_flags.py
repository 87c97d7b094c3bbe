"""Flags that let engines leave the trainer's GPUs, and room on them."""

from __future__ import annotations

import pytest

from rltool.config.serve import EngineGroup
from rltool.engines.dialects.memory_flags import memory_flag, takes_turns


@pytest.mark.parametrize(
    ("group", "flags"),
    [
        ({"engine": "vllm"}, ["--enable-sleep-mode", "--gpu-memory-utilization", "0.6"]),
        ({"engine": "sglang"}, ["--enable-memory-saver", "--mem-fraction-static", "0.6"]),
        (
            {"engine": "sglang", "model": "judge"},
            ["--enable-memory-saver", "--enable-weights-cpu-backup", "--mem-fraction-static", "0.6"],
        ),
        (
            {"engine": "vllm", "flags": ["--gpu-memory-utilization=0.4", "--enforce-eager"]},
            ["--enable-sleep-mode", "--gpu-memory-utilization=0.4", "--enforce-eager"],
        ),
        ({"role": "placeholder"}, []),
        ({"device": "cpu"}, []),
    ],
)
def test_engines_can_sleep_and_leave_room_and_flags_of_their_own_win(group, flags):
    assert list(takes_turns(EngineGroup(**group), "cuda").flags) == flags


def test_engines_that_load_their_weights_again_keep_no_copy():
    judge = EngineGroup(engine="sglang", model="judge")
    assert list(takes_turns(judge, "cuda", from_disk=True).flags) == [
        "--enable-memory-saver", "--mem-fraction-static", "0.6",
    ]  # fmt: skip


def test_on_the_cpu_nothing_is_added():
    assert takes_turns(EngineGroup(), "cpu") == EngineGroup()


def test_the_plan_says_what_an_engine_takes_of_the_memory():
    assert memory_flag(takes_turns(EngineGroup(), "cuda")) == "--gpu-memory-utilization 0.6"
    given = EngineGroup(engine="sglang", flags=["--mem-fraction-static=0.7"])
    assert memory_flag(takes_turns(given, "cuda")) == "--mem-fraction-static=0.7"
