"""Flags that let engines leave the trainer's GPUs, and room on them."""

from __future__ import annotations

import pytest

from rltool.config.serve import EngineGroup
from rltool.engines.dialects.memory_flags import CacheSize, may_set_cache, memory_flag, shares_memory, with_sleep_flags


@pytest.mark.parametrize(
    ("group", "flags"),
    [
        ({"engine": "vllm"}, ["--gpu-memory-utilization", "0.600", "--enable-sleep-mode"]),
        ({"engine": "sglang"}, ["--mem-fraction-static", "0.600", "--enable-memory-saver"]),
        (
            {"engine": "sglang", "model": "judge"},
            ["--mem-fraction-static", "0.600", "--enable-memory-saver", "--enable-weights-cpu-backup"],
        ),
        (
            {"engine": "vllm", "flags": ["--gpu-memory-utilization=0.4", "--enforce-eager"]},
            ["--enable-sleep-mode", "--gpu-memory-utilization=0.4", "--enforce-eager"],
        ),
    ],
)
def test_engines_can_sleep_and_leave_room_and_flags_of_their_own_win(group, flags):
    assert list(shares_memory(with_sleep_flags(EngineGroup(**group), "cuda"), 0, colocated=True).flags) == flags


def test_engines_that_share_a_gpu_divide_what_the_trainer_leaves():
    two = with_sleep_flags(EngineGroup(count=2, engines_per_gpu=2), "cuda")
    parts = [shares_memory(two, number, colocated=True).flags[:2] for number in (0, 1)]
    assert parts == [("--gpu-memory-utilization", "0.300")] * 2
    three = with_sleep_flags(EngineGroup(engine="sglang", count=3, engines_per_gpu=3), "cuda")
    free, taken = 1.0, []
    for number in range(3):  # of what is free when it starts
        part = float(shares_memory(three, number, colocated=True).flags[1]) * free
        free, taken = free - part, [*taken, part]
    assert taken == pytest.approx([0.2] * 3, abs=2e-3)


def test_a_cache_of_a_set_size_takes_the_place_of_all_that_the_fraction_leaves():
    group = with_sleep_flags(EngineGroup(count=2, engines_per_gpu=2), "cuda", cache=CacheSize(1000, 0.0712))
    assert shares_memory(group, 1, colocated=True).flags == (
        "--enable-sleep-mode", "--kv-cache-memory-bytes", "1000", "--gpu-memory-utilization", "0.071",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group", "may"),
    [
        ({}, True),
        ({"flags": ["--max-num-seqs", "64"]}, True),
        ({"flags": ["--gpu-memory-utilization=0.4"]}, False),
        ({"flags": ["--kv_cache_memory_bytes", "1"]}, False),
        ({"flags": ["--kv-cache-dtype", "fp8"]}, False),
        ({"engine": "sglang"}, False),
    ],
)
def test_a_cache_is_set_where_no_flag_says_anything_of_it(group, may):
    assert may_set_cache(EngineGroup(**group)) == may


def test_engines_that_load_their_weights_again_keep_no_copy():
    judge = EngineGroup(engine="sglang", model="judge")
    assert with_sleep_flags(judge, "cuda", from_disk=True).flags == ("--enable-memory-saver",)


def test_on_the_cpu_nothing_is_added():
    assert with_sleep_flags(EngineGroup(), "cpu") == EngineGroup()
    assert with_sleep_flags(EngineGroup(device="cpu"), "cuda").flags == ()
    assert with_sleep_flags(EngineGroup(role="placeholder"), "cuda").flags == ()
    assert with_sleep_flags(EngineGroup(count=2, engines_per_gpu=2), "cpu") == EngineGroup(count=2)


def test_the_plan_says_what_an_engine_takes_of_the_memory():
    group = shares_memory(with_sleep_flags(EngineGroup(), "cuda"), 0, colocated=True)
    assert memory_flag(group) == "--gpu-memory-utilization 0.600"
    given = EngineGroup(engine="sglang", flags=["--mem-fraction-static=0.7"])
    assert memory_flag(with_sleep_flags(given, "cuda")) == "--mem-fraction-static=0.7"
