"""benchmarks.adapter_sync: which part of a first token took how long, and which GPUs a transport joins."""

from __future__ import annotations

import pytest

from benchmarks import adapter_sync
from benchmarks.adapter_sync import SUM_OR_COUNT, decode_step, first_token_parts, main, medians

PAGE = """
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="policy"} 0.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="policy"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="policy"} 1.25
vllm:request_queue_time_seconds_count{engine="0",model_name="policy"} 1.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="policy"} 4.5e-05
"""


def counted(**sums: tuple[float, int]) -> dict[str, float]:
    found = {}
    for name, (seconds, count) in sums.items():
        found |= {f"{name}_seconds_sum": seconds, f"{name}_seconds_count": float(count)}
    return found


def test_sums_and_counts_are_read_off_a_page_of_metrics():
    found = {name: float(value) for name, value in SUM_OR_COUNT.findall(PAGE)}
    assert found == counted(time_to_first_token=(1.25, 9), request_queue_time=(4.5e-05, 1))


def test_a_first_token_is_the_engines_own_time_and_http_and_a_request_of_others_is_not_taken_for_it():
    before = counted(time_to_first_token=(1.0, 8), request_queue_time=(0.5, 3), request_prefill_time=(0.2, 3))
    after = counted(time_to_first_token=(1.25, 9), request_queue_time=(0.625, 4), request_prefill_time=(0.9, 5))
    # Two requests have left their prefill times: one of them was in flight.
    assert first_token_parts(0.375, before, after) == {"engine_first_token": 0.25, "queued": 0.125, "http": 0.125}
    assert first_token_parts(0.375, after, after) == {}
    between = counted(inter_token_latency=(1.0, 100)), counted(inter_token_latency=(3.0, 108))
    assert decode_step(*between) == 0.25 and decode_step(after, after) is None
    assert medians([{"a": 1.0, "b": 1.0}, {"a": 3.0}, {"a": 2.0, "b": 9.0}]) == {"a": 2.0}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--cpu --transport nccl", "needs a GPU"), ("--transport nccl --engine-gpu 0", "no two ranks on one GPU"),
        ("--transport ipc --engine-gpu 1", "for an engine on the same"),
    ],
)
def test_gpus_that_a_transport_does_not_join_are_refused_before_an_engine_starts(monkeypatch, capsys, words, why):
    monkeypatch.setattr("sys.argv", ["adapter_sync", *words.split()])
    with pytest.raises(SystemExit):
        main()
    assert why in capsys.readouterr().err


def test_over_nccl_the_engine_is_on_another_gpu_and_has_the_flags_behind_the_dashes(monkeypatch):
    started = {}

    class Server:
        def __init__(self, *_, **options):
            started.update(options)
            raise InterruptedError

    monkeypatch.setattr(adapter_sync, "Server", Server)
    for transport, gpu in (("nccl", "1"), ("ipc", "0"), ("gloo", "0")):
        monkeypatch.setattr("sys.argv", ["adapter_sync", "--transport", transport, "--", "--no-async-scheduling"])
        with pytest.raises(InterruptedError):
            main()
        assert started["gpu"] == gpu and started["flags"] == ["--no-async-scheduling"]
