"""What of a dead process' log is quoted: the exception above what it leaked."""

from __future__ import annotations

import pytest

from rltool.processes.excerpt import excerpt

LEAKED = [
    "nanobind: leaked 4 instances!",
    ' - leaked instance 0x7fa9b6539228 of type "triton._C.libtriton.ir.attribute"',
    "nanobind: leaked 514 functions!",
    *(f' - leaked function "create_{i}"' for i in range(30)),
    " - ... skipped remainder",
    "nanobind: this is likely caused by a reference counting issue in the binding code.",
    "See https://nanobind.readthedocs.io/en/latest/refleaks.html/usr/lib/resource_tracker.py:254: UserWarning: "
    "resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
    "  warnings.warn('resource_tracker: There appear to be %d '",
    "/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory x",
    "  warnings.warn('resource_tracker: There appear to be %d '",
]
WORKER = "(EngineCore pid=7) ERROR 11-21 20:09:13 [core.py:1254] "
CAUSE = f"{WORKER}RuntimeError: CPU Generator does not use offset"
TRACEBACK = [
    f"{WORKER}Traceback (most recent call last):",
    f'{WORKER}  File "core.py", line 1, in step',
    f"{WORKER}    sample()",
    CAUSE,
]
WAITED = [
    "(APIServer pid=6) ERROR 11-21 20:09:13 [async_llm.py:704] Traceback (most recent call last):",
    *(f'(APIServer pid=6) ERROR 11-21 20:09:13 [async_llm.py:704]   File "a.py", line {i}' for i in range(12)),
    "(APIServer pid=6) ERROR 11-21 20:09:13 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.",
    *(f"INFO:     Shutting down {i}" for i in range(12)),
]
CALM = [f"INFO: request {i}" for i in range(300)]


@pytest.fixture
def quoted(tmp_path):
    def quote(*lines: str, count: int = 20) -> list[str]:
        (tmp_path / "log").write_text("\n".join(lines) + "\n")
        return excerpt(tmp_path / "log", count)

    return quote


def test_what_a_process_leaked_is_not_quoted(quoted):
    assert quoted(*CALM, *TRACEBACK, *LEAKED) == [*CALM[-16:], *TRACEBACK]


def test_the_cause_is_quoted_where_it_stands_above_those_who_waited_for_the_dead(quoted):
    found = quoted(*CALM, *TRACEBACK, *WAITED, *LEAKED)
    assert len(found) <= 20 and found[:4] == TRACEBACK and found[4] == "..." and found[-1] == WAITED[-1]
    assert not any("leaked" in line for line in found)


def test_a_worker_that_was_killed_could_say_nothing_so_the_line_about_its_death_is_the_cause(quoted):
    death = (
        "(EngineCore pid=7) ERROR 11-21 23:29:21 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly"
    )
    waited = [TRACEBACK[0], *(f"{WORKER}  line {i}" for i in range(9)), f"{WORKER}RuntimeError: Executor failed."]
    assert death in quoted(*CALM, death, *waited, *WAITED, *LEAKED)


def test_of_a_traceback_too_long_the_end_is_quoted(quoted):
    long = [TRACEBACK[0], *(f"{WORKER}  line {i}" for i in range(50)), CAUSE]
    found = quoted(*long, *WAITED)
    assert CAUSE in found and found.index(CAUSE) == 8 and len(found) <= 20


def test_the_last_lines_are_enough_where_the_cause_is_among_them_or_there_is_none(quoted):
    assert quoted(*CALM) == CALM[-20:]
    assert quoted(*CALM, "api_server.py: error: unrecognized arguments: --x")[-1].endswith("--x")
    assert quoted(*CALM, *TRACEBACK, *WAITED[-5:])[-5:] == WAITED[-5:]
    assert quoted(*WAITED, *CALM) == CALM[-20:]


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad", "torch.OutOfMemoryError: CUDA out of memory.", "(Worker pid=3) AssertionError",
        "sglang.srt.CustomException: no", f"{WORKER}KeyError: 'x'",
    ],
)  # fmt: skip
def test_exceptions_are_known_in_every_form_in_which_engines_print_them(quoted, line):
    assert line in quoted("Traceback (most recent call last):", line, *WAITED)


def test_a_log_of_nothing_but_leaks_or_of_nothing_quotes_nothing(quoted, tmp_path):
    assert quoted(*LEAKED) == []
    assert excerpt(tmp_path / "none", 20) == []
