"""How an engine gives its memory to the trainer and takes it back: the requests, by what the engine can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rltool.engines.types import EngineInfo
from rltool.errors import UsageError
from rltool.weights.sleep import check_can_sleep, sleep_of


def info(dialect: str, *levels: int) -> EngineInfo:
    return EngineInfo(
        dialect=dialect, engine_version="1", model_id="policy", world_size=1, max_model_len=None, vocab_size=None,
        dtype=None, weight_backend="rltool", weight_version=None, boot_id=None, plugin=dialect == "vllm",
        sleep_levels=levels,
    )  # fmt: skip


def told(requests) -> list[str]:
    return [f"{r.path} {r.query or r.body or ''}".strip() for r in requests]


def test_a_policy_that_a_sync_brings_anyway_is_dropped_and_a_judge_is_kept():
    assert told(sleep_of(info("vllm", 1, 2), "cuda", updated=True).sleep()) == [
        "/sleep {'level': '2', 'mode': 'abort'}"
    ]
    assert told(sleep_of(info("vllm", 1, 2), "cuda", updated=False).sleep()) == [
        "/sleep {'level': '1', 'mode': 'abort'}"
    ]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_weights_come_back_before_the_cache(dialect):
    sleep = sleep_of(info(dialect, 2), "cuda", updated=True)
    weights, caches = told(sleep.wake_weights()), told(sleep.wake_caches())
    assert len(weights) == 1 and "weights" in weights[0] and "kv_cache" not in weights[0]
    assert "kv_cache" in caches[0] and not any("weights" in request for request in caches)


def test_weights_that_sleep_to_disk_are_loaded_again_between_their_memory_and_the_cache():
    vllm = sleep_of(info("vllm", 1, 2), "cuda", updated=False, from_disk=True)
    assert told(vllm.sleep()) == ["/sleep {'level': '2', 'mode': 'abort'}"]
    assert told(vllm.wake_weights()) == ["/wake_up {'tags': 'weights'}", "/rltool/reload_weights"]
    assert told(vllm.wake_caches()) == ["/wake_up {'tags': 'kv_cache'}"]
    stock = sleep_of(replace(info("vllm", 1, 2), plugin=False), "cuda", updated=False, from_disk=True)
    assert told(stock.wake_weights())[1:] == ["/collective_rpc {'method': 'reload_weights'}"]
    sglang = sleep_of(replace(info("sglang", 2), model_path="/m/judge"), "cuda", updated=False, from_disk=True)
    assert told(sglang.wake_weights()) == [
        "/resume_memory_occupation {'tags': ['weights']}",
        "/update_weights_from_disk {'model_path': '/m/judge', 'load_format': 'auto', 'flush_cache': False}",
    ]
    with pytest.raises(UsageError, match="does not report where it read its model"):
        sleep_of(info("sglang", 2), "cuda", updated=False, from_disk=True).wake_weights()
    with pytest.raises(UsageError, match="http://a:1 keeps its weights in the host's memory .* leave the flag out"):
        check_can_sleep({"http://a:1": info("sglang", 1)}, "cuda", updated=False, from_disk=True)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_on_the_cpu_a_pause_stands_for_it(dialect):
    sleep = sleep_of(info(dialect), "cpu", updated=True)
    assert "pause" in told(sleep.sleep())[0] and "abort" in told(sleep.sleep())[0]
    assert sleep.wake_weights() == sleep.wake_caches() == []


@pytest.mark.parametrize(
    ("engine", "updated", "flags"),
    [
        (info("vllm"), True, "--enable-sleep-mode"),
        (info("sglang"), True, "--enable-memory-saver"),
        (info("sglang", 2), False, "--enable-memory-saver --enable-weights-cpu-backup"),
    ],
)
def test_an_engine_that_cannot_sleep_is_refused_with_the_flags_that_it_lacks(engine, updated, flags):
    with pytest.raises(UsageError, match=f"the engine http://a:1 cannot free .* was started without {flags}"):
        check_can_sleep({"http://a:1": engine}, "cuda", updated=updated)
