"""Two real vLLM engines, started by the run: one fills KV caches, the other fetches them over NIXL and samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import openai
import pytest

from rltool.config.serve import EngineGroup
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.fleet import disaggregation
from rltool.engines.fleet.disaggregation import CacheOutdated
from rltool.engines.launch.plan import Model
from rltool.engines.launch.start import Order, launch_engines
from rltool.engines.sync_client import send
from rltool.engines.types import Completion, GenerateRequest, HttpRequest, SamplingParams, TokenStream
from rltool.errors import RltoolError
from rltool.processes.run_directory import open_run
from rltool.processes.supervise import ProcessGroup
from tests.contract.gateway.running import Gateway
from tests.e2e.job import write_job
from tests.e2e.test_managed import alive_with, engines_of
from tests.e2e.weights import PROMPT, first_model, mean_difference, new_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SETS = (
    'engines.mode="managed"', "eval.sets={}",
    'weights.pause_mode="abort"',
    'engines.groups=[{name="p",role="prefill",max_model_len=64},{name="d",role="decode",max_model_len=64}]',
)  # fmt: skip
SYNCHRONOUS = ("steps=2",)
AHEAD = ("steps=4", "rollout.max_staleness=1", 'algorithm.is_weights="token"')
"""Each sync meets requests on their way."""
AGREEMENT = 5e-6
TOKENS = 480
"""With the prompt about what the model can take: a test sees the middle of them."""
SECONDS = 120.0


@pytest.mark.parametrize(
    "more", [SYNCHRONOUS, pytest.param(AHEAD, marks=pytest.mark.long)], ids=["synchronous", "ahead"]
)
def test_a_run_whose_engines_prefill_and_decode_apart_agrees_with_its_trainer(
    tmp_path: Path, tiny_tied_dir: Path, more: tuple[str, ...]
):
    job = write_job(tmp_path / "job", tiny_tied_dir, None)
    process = job.start("train", "apart", sets=[*SETS, *more])
    fetched = 0.0
    try:
        while process.poll() is None:
            with suppress(RltoolError):  # an engine is being ended
                fetched = max(fetched, _fetched(job.runs / "apart" / "endpoints.json"))
            time.sleep(0.5)
    finally:
        process.kill()
    assert process.returncode == 0, job.output("apart")[-4000:]
    steps = job.steps("apart")
    out = job.output("apart")
    assert "placement: 3 Ray bundles (1 trainer, 2 engine)" in out and "engine-0: vllm prefill, group p, cpu" in out
    assert len(steps) == (2 if more == SYNCHRONOUS else 4)
    compared = [s["train/logprob_abs_diff_mean"] for s in steps if "train/logprob_abs_diff_mean" in s]
    assert compared and max(compared) < AGREEMENT
    assert fetched > 0, "without a connector each engine would have computed everything itself"
    assert engines_of(job, "apart") == {} and alive_with(job, "apart") == []
    assert Endpoints.load(job.runs / "apart" / "endpoints.json").models == {}
    assert (job.runs / "apart" / "logs" / "latest" / "engine-0.log").stat().st_size > 0


@pytest.mark.long
def test_a_pair_streams_what_it_answers_in_one_piece_also_to_agents(tmp_path: Path, tiny_tied_dir: Path, monkeypatch):
    groups = [EngineGroup(name=role, role=role, device="cpu", max_model_len=512) for role in ("prefill", "decode")]
    run = open_run("engines", create=True, root=tmp_path / "runs")
    with ProcessGroup(run) as group:
        pair = launch_engines(Order(tuple(groups), {"policy": Model(tiny_tied_dir)}), group)["policy"]
        streams_as_it_answers(pair, new_request(max_tokens=TOKENS), tiny_tied_dir, AGREEMENT)
        before = _fetched(run.endpoints_file)
        streams_to_agents(pair, TOKENS, tiny_tied_dir, tmp_path, monkeypatch, AGREEMENT)
        assert _fetched(run.endpoints_file) > before > 0


def streams_as_it_answers(
    pair: Sequence[EngineEndpoint], request: GenerateRequest, model: Path, agreement: float
) -> None:
    """request: one whose answer is the same each time."""
    prefill, decode = sorted(pair, key=lambda engine: engine.role == "decode")
    pieces: list[Completion] = []

    async def scenario() -> None:
        async with EngineClient() as client:
            sample = partial(disaggregation.generate, client, prefill, decode, timeout=SECONDS)
            [whole] = await sample(request)
            task = asyncio.create_task(sample(request.again(), stream=TokenStream(pieces.append)))
            while len(pieces) < 3 or not await held(client, [decode]):
                await asyncio.sleep(0.001)
                assert not task.done()
            [streamed] = await task
            assert streamed.token_ids == whole.token_ids and len(whole.token_ids) == request.sampling.max_tokens
            assert streamed.logprobs == pytest.approx(whole.logprobs, abs=agreement)
            assert streamed.versions == whole.versions != ()
            assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
            assert mean_difference(first_model(model), streamed, temperature=request.sampling.temperature or 1.0) < (
                agreement
            )
            pieces.clear()
            with pytest.raises(CacheOutdated):
                await sample(request.again(), stream=TokenStream(pieces.append), version="of a sync that came between")
            assert pieces == []
            await idle(client, pair)

    asyncio.run(scenario())


def streams_to_agents(
    engines: Sequence[EngineEndpoint], tokens: int, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch,
    agreement: float, *, router: EngineEndpoint | None = None,
) -> None:  # fmt: skip
    """Through a gateway: a stream that is heard to its end, and one that the agent cancels."""
    without_end = partial(SamplingParams, ignore_eos=True)
    monkeypatch.setattr("rltool.gateway.turns.SamplingParams", lambda stop_token_ids, **rest: without_end(**rest))
    sampling = [engine for engine in engines if engine.role != "prefill"]
    weights = first_model(model)

    async def listen(client: EngineClient, gateway: Gateway, most: int) -> tuple[int, bool, Completion]:
        """Events, whether the engine was at work when there were some, and what the gateway has recorded."""
        session, events, early = gateway.open(), 0, False
        async with openai.AsyncOpenAI(
            base_url=session["openai_base_url"], api_key=session["key"], max_retries=0
        ) as gpt:
            said = await gpt.completions.create(model="policy", prompt=[*PROMPT], max_tokens=tokens, stream=True)
            async for _ in said:
                events += 1
                early = early or (events > 2 and await held(client, sampling) == 1)
                if events == most:
                    break
            await said.close()
        while not gateway.record(session)["turns"]:
            await asyncio.sleep(0.05)
        [found] = gateway.record(session)["trajectories"]
        assert [(span["start"], span["end"]) for span in found["versions"]] == [(len(PROMPT), len(found["token_ids"]))]
        ids, logprobs = (tuple(found[name][len(PROMPT) :]) for name in ("token_ids", "logprobs"))
        return events, early, Completion(ids, logprobs, "stop")

    async def scenario(gateway: Gateway) -> None:
        async with EngineClient() as client:
            events, early, whole = await listen(client, gateway, 2 * tokens)
            assert early and events > tokens / 10 and len(whole.token_ids) == tokens
            assert mean_difference(weights, whole) < agreement
            *_, cancelled = await listen(client, gateway, 10)
            assert 5 < len(cancelled.token_ids) < tokens
            assert mean_difference(weights, cancelled) < agreement
            await idle(client, engines)

    parts = {} if router is None else {"through_router": True}
    asked = engines if router is None else [router]
    with Gateway(directory, model, asked, max_model_len=tokens + 32, parts=parts) as gateway:
        asyncio.run(scenario(gateway))


async def held(client: EngineClient, engines: Sequence[EngineEndpoint]) -> int:
    """Requests that they have, by counts that SGLang renews now and then."""
    loads = [await client.load(engine) for engine in engines]
    return sum(load.running + load.waiting for load in loads)


async def idle(client: EngineClient, engines: Sequence[EngineEndpoint]) -> None:
    """None of them works on for nobody."""
    async with asyncio.timeout(SECONDS):
        while await held(client, engines):
            await asyncio.sleep(0.05)


def _fetched(file: Path) -> float:
    """KV caches that the decode engine has fetched so far, by its own count."""
    models = Endpoints.load(file).models if file.exists() else {}
    for engine in models["policy"].engines if "policy" in models else ():
        if engine.role == "decode":
            text = send(engine.url, HttpRequest("GET", "/metrics"), key=engine.read_key(), timeout=5.0)
            lines = [line for line in text.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return 0.0
