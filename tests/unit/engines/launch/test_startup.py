"""What an engine that starts is doing, by lines as vLLM 0.32 and SGLang 0.5.23 write them."""

from __future__ import annotations

import asyncio
import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from rltool.commands import serve_engines
from rltool.engines.launch import ready as engine_ready
from rltool.engines.launch.startup import STARTING, Phase, StartupLogs, advance, describe, in_lines, phase_of

VLLM = [
    ("(EngineCore pid=3357) INFO 11-24 03:57:16 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with", None),
    ("(APIServer pid=28) WARNING 11-24 03:56:59 [vllm.py:1703] Enforce eager set, disabling torch.compile", None),
    ("(Worker pid=36) INFO 11-24 03:57:34 [gpu_model_runner.py:5039] Starting to load model /m...", "loading weights"),
    ("(Worker pid=36) INFO 11-24 03:57:34 [base_loader.py:82] Initializing model took 0.129331 seconds", None),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]", "loading weights 0%"),
    ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01, 1.9it/s]", "loading weights 50%"),
    ("(Worker pid=36) INFO 11-24 03:57:34 [default_loader.py:501] Loading weights took 0.02 seconds", None),
    ("(Worker pid=36) INFO 11-24 03:57:36 [monitor.py:41] Starting torch.compile", "compiling"),
    ("(Worker pid=36) INFO 11-24 03:57:36 [backends.py:1173] Dynamo bytecode transform time: 5.23 s", "compiling"),
    ("(Worker pid=36) INFO 11-24 03:57:40 [monitor.py:65] torch.compile took 20.10 s in total", "measuring memory"),
    (
        "(EngineCore pid=33) INFO 11-24 03:57:35 [kv_cache_utils.py:2327] GPU KV cache size: 524,288 tokens, Maximum",
        "allocating the KV cache",
    ),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/51 [00:00<?, ?it/s]",
     "capturing graphs 0%"),
    ("Capturing CUDA graphs (decode, FULL):  43%|████▎     | 15/35 [00:01<00:01, 1.5it/s]", "capturing graphs 43%"),
    ("(EngineCore pid=33) INFO 11-24 03:57:37 [core.py:402] init engine (profile, create kv cache, warmup model) took",
     "starting the server"),
    ("(APIServer pid=28) INFO 11-24 03:57:38 [entry.py:140] Starting vLLM server on http://127.0.0.1:27275",
     "starting the server"),
    ("INFO:     Application startup complete.", "answering its first request"),
]  # fmt: skip
SGLANG = [
    ("[2026-11-24 03:57:16] server_args=ServerArgs(model_path='/m', max_total_tokens=None)", None),
    ("[2026-11-24 03:57:20] Load weight begin. avail mem=138.66 GB", "loading weights"),
    ("Multi-thread loading shards:  75% Completed | 3/4 [00:01<00:00,  2.1it/s]", "loading weights 75%"),
    ("[2026-11-24 03:57:22] Load weight end. elapsed=1.30 s, type=Qwen2ForCausalLM, avail mem=137.6 GB", None),
    ("[2026-11-24 03:57:22] Memory pool end. avail mem=20.01 GB", "allocating the KV cache"),
    ("[2026-11-24 03:57:23] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail",
     "capturing graphs"),
    ("Capturing batches (bs=8 avail_mem=19.23 GB):  43%|████▎     | 15/35 [00:01<00:01, 13.5it/s]",
     "capturing graphs 43%"),
    ("[2026-11-24 03:57:31] max_total_num_tokens=123456, chunked_prefill_size=8192, max_running_requests=2048",
     "starting the server"),
    ("[2026-11-24 03:57:33] The server is fired up and ready to roll!", "answering its first request"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "phase"), [*VLLM, *SGLANG])
def test_a_line_of_a_log_tells_the_phase_or_nothing(line, phase):
    found = phase_of(line)
    assert (None if found is None else str(found)) == phase


@pytest.mark.parametrize("lines", [VLLM, SGLANG])
def test_an_engine_goes_through_its_phases_in_order(lines):
    now, seen = STARTING, []
    for line, _ in lines:
        now = advance(now, line)
        if now.what not in seen:
            seen.append(now.what)
    assert seen[0] == "starting" and seen[-1] == "answering its first request"
    assert seen == list(dict.fromkeys(["starting", *(said.rstrip(" 0123456789%") for _, said in lines if said)]))


def test_a_slower_worker_of_the_same_log_sets_nothing_back():
    now = Phase("compiling")
    assert advance(now, "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01, 1.9it/s]") == now
    half = Phase("loading weights", 0.5)
    assert advance(half, "INFO [gpu_model_runner.py:5039] Starting to load model /m...") == half


def test_bars_are_read_though_no_line_end_follows_them(tmp_path):
    log = tmp_path / "engine-0.log"
    logs = StartupLogs({"engine-0": log, "engine-1": tmp_path / "later"})
    assert logs.phases() == {"engine-0": STARTING, "engine-1": STARTING}
    bar = "\rCapturing CUDA graphs (decode, FULL):  {}%|██ | 15/35 [00:01<00:01, 13.5it/s]"
    log.write_bytes(b"\xff INFO Starting to load model /m...\n" + "".join(map(bar.format, (20, 40, 60))).encode())
    assert logs.phases()["engine-0"] == Phase("capturing graphs", 0.4)
    logs.serves("engine-0")
    assert describe(logs.phases()) == "engine-1: starting"


def test_lines_come_once_for_each_phase_and_name_the_engines_that_are_in_it_together():
    said, now = [], [0.0]
    show = in_lines(said.append, lambda: now[0])
    first, second = Phase("loading weights", 0.1), Phase("loading weights", 0.5)
    for at, phases in enumerate([
        {"engine-0": STARTING, "engine-1": STARTING},
        {"engine-0": first, "engine-1": first},
        {"engine-0": second, "engine-1": second},
        {"engine-0": Phase("compiling"), "engine-1": second},
        {"engine-1": Phase("compiling")},
    ]):  # fmt: skip
        now[0] = 10.0 * at
        show(phases)
    assert said == [
        "engine-0, engine-1: loading weights (10 s)", "engine-0: compiling (30 s)", "engine-1: compiling (40 s)",
    ]  # fmt: skip


def test_what_engines_do_is_shown_until_they_serve(tmp_path, monkeypatch):
    """And what shows it may fail: a closed terminal ends no start."""
    log, shown = tmp_path / "engine-0.log", []
    monkeypatch.setattr(engine_ready, "LOG_SECONDS", 0.001)

    async def until_shown(process, probe, **_):
        for line, what in ((VLLM[2][0], "loading weights"), (SGLANG[-1][0], "answering its first request")):
            with log.open("a") as file:
                file.write(line + "\n")
            while not shown or shown[-1]["engine-0"].what != what:
                await asyncio.sleep(0.001)
        return SimpleNamespace(url="http://127.0.0.1:1", weight_backend="rltool")

    def show(phases):
        shown.append(dict(phases))
        raise BrokenPipeError

    monkeypatch.setattr(engine_ready, "wait_until_ready", until_shown)
    monkeypatch.setattr(engine_ready, "_Probe", lambda *_: None)
    launch = SimpleNamespace(gpus=(), ready_timeout=1.0, world_size=1, update_weights=True)
    lines: list[str] = []
    process = SimpleNamespace(role="engine-0", log=log)
    [endpoint] = asyncio.run(engine_ready.wait_for_all([launch], [process], lines.append, show))  # type: ignore[list-item]
    assert endpoint.url == "http://127.0.0.1:1" and len(lines) == 1


def test_a_terminal_has_a_bar_for_each_engine_and_a_file_has_lines(monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(serve_engines, "console", Console(file=drawn, force_terminal=True, width=100))
    with serve_engines._startup() as show:
        show({"engine-0": Phase("loading weights", 0.5), "engine-1": STARTING})
        show({"engine-1": Phase("compiling")})
    assert re.search(r"engine-0.*━.*loading weights", drawn.getvalue()) and "compiling" in drawn.getvalue()
    written = io.StringIO()
    monkeypatch.setattr(serve_engines, "console", Console(file=written, width=100))
    with serve_engines._startup() as show:
        show({"engine-0": Phase("loading weights", 0.5)})
    assert written.getvalue() == "engine-0: loading weights (0 s)\n"
