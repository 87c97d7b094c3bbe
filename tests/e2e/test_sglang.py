"""The real SGLang on a CPU, in its own environment, driven by rltool's client, dialect, fleet and weight sync.

Values are the proof: HF's forward pass scores what SGLang sampled, in fp32 on both sides. Seeds cannot be tested here:
SGLang honours them only with --enable-deterministic-inference, which refuses every attention backend that a CPU has.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import openai
import psutil
import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.fleet.resume import TRANSFER_GROUP as GROUP
from rltool.engines.fleet.resume import resume_engines
from rltool.engines.transfer.wire import host_store
from rltool.engines.types import Completion, EngineInfo, Holder, HttpRequest, SamplingParams
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineRejected
from rltool.training.checks.preflight import with_model_config
from rltool.weights import connections
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.sync_report import SyncReport
from rltool.weights.transport import Backend, Rendezvous, transport
from rltool.weights.verify.values import ValueCheck
from tests.contract.gateway.running import Gateway
from tests.e2e.engines import RunningEngine
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import PROMPT, hf_logprobs, mean_difference, new_request, perturbed_model

pytestmark = pytest.mark.e2e

SPEAKS = dialect("sglang")
CONTROL = transport("sglang", "gloo").control
EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities; measured 1e-5."""
DIFFERENT = 0.05
SECONDS = 60.0
LONG = 480
"""Tokens that take a second or so, long enough to be interrupted."""
SAMPLED = 64
"""Tokens of a request that is well under way. SGLang's scheduler hands tokens on every 50
(SGLANG_FORCE_STREAM_INTERVAL), and a request that is aborted while the engine is paused comes back with those alone."""
BUCKET_BYTES = 200_000
"""Some ten buckets for the tiny model."""


@pytest.fixture
def engine(sglang_engine: RunningEngine) -> RunningEngine:
    return sglang_engine


class Trainer:
    """rltool's own weight sync, with one plain rank in place of Megatron, against one engine."""

    def __init__(self, client: EngineClient, engine: RunningEngine, directory: Path, backend: Backend) -> None:
        self.client, self.engine, self.where = client, engine, engine.endpoint
        self.version = WeightVersion(uuid.uuid4().hex, 0, 0)
        self.fleet = Fleet()
        self.reports: list[SyncReport] = []
        config = WeightsConfig(bucket_bytes=BUCKET_BYTES, transport=backend)
        self.ranks = HfRanks(config, engine.launch.model, deadline=SECONDS)
        vocabulary = vocab_size(engine.launch.model)
        self.sync = WeightSync(
            EngineSet(self.fleet, client), connections.Trainer(self.ranks, "cpu", directory, vocabulary), config,
            ValueCheck(vocabulary, temperature=1.0, tolerance=EQUAL, max_model_len=512),
            SyncDeadlines(SECONDS, SECONDS),
        )  # fmt: skip

    async def connected(self) -> Trainer:
        """Free the engine of what the test before may have left, and take it into the fleet."""
        await self.bring_back()
        self.fleet.add_probed(self.where, await self.probe())
        return self

    async def bring_back(self) -> None:
        """As `rltool engines resume` does."""
        [resumed] = await resume_engines(
            self.client, [self.where], timeout=SECONDS, holder=Holder("a" * 32, "r", "h", 1)
        )
        assert resumed.error is None

    async def run(self, requests: list[HttpRequest]) -> list[Any]:
        return await self.client.run(self.where, requests, timeout=SECONDS)

    async def push(self, model: torch.nn.Module) -> str:
        """One full sync of the model's weights; the version that the engine then has."""
        self.ranks.model = model
        self.version = replace(self.version, number=self.version.number + 1)
        report = await self.sync.sync(self.version)
        assert (report.version, report.updated, report.failed) == (str(self.version), (self.where.url,), {})
        assert report.bytes == sum(t.numel() * t.element_size() for t in self.ranks.weights(0).values())
        assert self.fleet.serving() == (self.where.url,)
        assert (report.difference is None) == bool(self.reports)
        self.reports.append(report)
        return str(self.version)

    async def sample(self, **request: Any) -> Completion:
        return (await self.client.generate(self.where, new_request(seed=None, **request), timeout=SECONDS))[0]

    async def probe(self) -> EngineInfo:
        return await self.client.probe(self.where)


def vocab_size(directory: Path) -> int:
    return json.loads((directory / "config.json").read_text())["vocab_size"]


class Play(Protocol):
    def __call__(self, scenario: Callable[[Trainer], Awaitable[None]], backend: Backend = "gloo") -> None: ...


@pytest.fixture
def play(engine: RunningEngine, tmp_path: Path) -> Play:
    def run(scenario: Callable[[Trainer], Awaitable[None]], backend: Backend = "gloo") -> None:
        async def session() -> None:
            async with EngineClient() as client:
                trainer = Trainer(client, engine, tmp_path / "weights", backend)
                try:
                    await scenario(await trainer.connected())
                finally:
                    trainer.ranks.close()

        asyncio.run(asyncio.wait_for(session(), 240))

    return run


# -- values


@pytest.mark.parametrize("backend", ["gloo", "disk"])
def test_after_a_sync_the_engine_computes_with_the_trainers_weights(engine, play, backend):
    async def scenario(trainer: Trainer):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (1, 2))
        await trainer.push(old)
        sample = await trainer.sample()
        assert mean_difference(old, sample) < EQUAL
        assert mean_difference(new, sample) > DIFFERENT

        version = await trainer.push(new)
        sample = await trainer.sample()
        assert mean_difference(new, sample) < EQUAL
        assert mean_difference(old, sample) > DIFFERENT
        assert [(span.version, span.start, span.end) for span in sample.versions] == [(version, 0, 24)]
        info = await trainer.probe()
        assert (info.weight_version, info.model_id) == (version, "policy")
        assert await trainer.sync.leave() == {}
        assert (await trainer.probe()).paused is False

    play(scenario, backend)


def test_logprobs_are_those_of_the_tempered_distribution(engine, play):
    async def scenario(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=3)
        await trainer.push(model)
        sample = await trainer.sample(temperature=0.6)
        assert mean_difference(model, sample, temperature=0.6) < EQUAL
        assert mean_difference(model, sample) > 10 * EQUAL

    play(scenario)


def test_a_prompt_cached_before_a_sync_is_computed_anew_after_it(engine, play):
    prompt = PROMPT * 16

    async def scenario(trainer: Trainer):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (4, 5))
        await trainer.push(old)
        first, again = [await trainer.sample(prompt=prompt) for _ in range(2)]
        assert all(mean_difference(old, sample, prompt=prompt) < EQUAL for sample in (first, again))
        assert (first.cached_tokens, again.cached_tokens) == (0, len(prompt) - 1)
        await trainer.push(new)
        anew = await trainer.sample(prompt=prompt)
        assert mean_difference(new, anew, prompt=prompt) < EQUAL and anew.cached_tokens == 0

    play(scenario)


def test_a_request_in_flight_over_a_sync_has_the_logprobs_of_the_weights_that_sampled_each_token(engine, play):
    async def scenario(trainer: Trainer):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (6, 7))
        first_version = await trainer.push(old)
        running = asyncio.create_task(trainer.sample(max_tokens=LONG))
        await is_decoding(trainer)
        await trainer.run(SPEAKS.pause("keep"))  # before the sync does it again, so that it holds in the middle
        assert not running.done()
        second_version = await trainer.push(new)
        sample = await running
        assert [span.version for span in sample.versions] == [first_version, second_version]
        first, second = sample.versions
        assert (first.start, first.end, second.end) == (0, second.start, LONG)
        for model, span in ((old, first), (new, second)):
            part = replace(
                sample,
                token_ids=sample.token_ids[span.start : span.end],
                logprobs=sample.logprobs[span.start : span.end],
                versions=(),
            )
            assert mean_difference(model, part, prompt=PROMPT + sample.token_ids[: span.start]) < EQUAL

    play(scenario)


@pytest.mark.long
def test_a_gateway_s_stream_over_a_sync_is_recorded_with_both_versions_and_one_that_is_cancelled_with_its_own(
    engine, play, tmp_path, monkeypatch
):
    without_end = partial(SamplingParams, ignore_eos=True)
    monkeypatch.setattr("rltool.gateway.turns.SamplingParams", lambda stop_token_ids, **rest: without_end(**rest))
    begun, events = threading.Event(), []

    def listen(session: dict[str, Any], most: float) -> None:
        with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as gpt:
            said = gpt.completions.create(model="policy", prompt=[*PROMPT], max_tokens=LONG, stream=True)
            events.clear()
            for event in said:
                events.append(event.choices[0].text)
                if len(events) == 4:
                    begun.set()
                if len(events) >= most:
                    said.close()
                    break

    def parts(gateway: Gateway, session: dict[str, Any]) -> list[tuple[str, Completion, tuple[int, ...]]]:
        """(version, its tokens, all before them) of the session's only turn."""
        [found] = gateway.record(session)["trajectories"]
        ids, logprobs = tuple(found["token_ids"]), tuple(found["logprobs"])
        spans = [(s["version"], s["start"], s["end"]) for s in found["versions"]]
        assert [end for *_, end in spans[:-1]] == [start for _, start, _ in spans[1:]]
        assert (spans[0][1], spans[-1][2], found["loss_mask"][spans[0][1] :]) == (
            len(PROMPT), len(ids), [1] * (len(ids) - len(PROMPT)),
        )  # fmt: skip
        return [(v, Completion(ids[a:b], logprobs[a:b], "stop"), ids[:a]) for v, a, b in spans]

    async def scenario(trainer: Trainer):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (21, 22))
        first_version = await trainer.push(old)
        options = dict(dialect="sglang", plugin=False, engine_key=trainer.where.key_file)
        with Gateway(tmp_path, engine.launch.model, [engine], **options) as gateway:
            session, cancelled = gateway.open(), gateway.open()
            listening = asyncio.create_task(asyncio.to_thread(listen, session, LONG + 1))
            assert await asyncio.to_thread(begun.wait, SECONDS)
            await trainer.run(SPEAKS.pause("keep"))  # before the sync does it again, so that it holds in the middle
            assert not listening.done()
            second_version = await trainer.push(new)
            await listening
            assert len(events) > LONG / 2
            (before, one, prompt), (after, other, longer) = parts(gateway, session)
            assert (before, after, len(one.token_ids) + len(other.token_ids)) == (first_version, second_version, LONG)
            assert mean_difference(old, one, prompt=prompt) < EQUAL
            assert mean_difference(new, other, prompt=longer) < EQUAL
            assert mean_difference(old, other, prompt=longer) > DIFFERENT

            await asyncio.to_thread(listen, cancelled, 20)
            while not gateway.record(cancelled)["turns"]:
                await asyncio.sleep(0.05)
            [(version, kept, prompt)] = parts(gateway, cancelled)
            assert version == second_version and 10 < len(kept.token_ids) < LONG
            assert mean_difference(new, kept, prompt=prompt) < EQUAL
            while (await trainer.client.load(trainer.where)).running:
                await asyncio.sleep(0.05)

    play(scenario)


def test_samples_of_one_prompt_are_distinct(play):
    async def scenario(trainer: Trainer):
        samples = await trainer.client.generate(trainer.where, new_request(n=8), timeout=SECONDS)
        assert len({sample.token_ids for sample in samples}) == 8

    play(scenario)


@pytest.mark.long
def test_a_greedy_sample_is_hfs_most_probable_one(engine, play):
    async def scenario(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=8)
        await trainer.push(model)
        sample = await trainer.sample(temperature=0.0, max_tokens=8)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *sample.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == sample.token_ids

    play(scenario)


def test_the_stop_token_is_part_of_the_response(engine, play):
    async def scenario(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=9)
        await trainer.push(model)
        whole = await trainer.sample(temperature=0.0)
        stop = whole.token_ids[2]
        sample = await trainer.sample(temperature=0.0, ignore_eos=False, stop_token_ids=(stop,))
        assert sample.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert sample.finish_reason == "stop" and sample.token_ids[-1] == stop
        assert torch.isfinite(hf_logprobs(model, PROMPT, sample)).all()

    play(scenario)


# -- pausing and failing


def test_a_paused_engine_says_so_and_holds_requests_until_it_is_resumed(play):
    async def scenario(trainer: Trainer):
        await trainer.run(SPEAKS.pause("keep"))
        assert (await trainer.probe()).paused is True
        waiting = asyncio.create_task(trainer.sample())
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        await trainer.run(SPEAKS.resume())
        assert len((await waiting).token_ids) == 24
        assert (await trainer.probe()).paused is False
        await trainer.client.health(trainer.where)

    play(scenario)


def test_an_aborting_pause_returns_partial_samples_and_lets_a_sync_follow(engine, play):
    async def scenario(trainer: Trainer):
        running = asyncio.create_task(trainer.sample(max_tokens=LONG))
        await is_decoding(trainer)
        await trainer.run(SPEAKS.pause("abort"))
        partial = await running
        assert partial.finish_reason == "abort" and len(partial.token_ids) == len(partial.logprobs) < LONG
        model = perturbed_model(engine.launch.model, seed=10)
        await trainer.push(model)
        assert mean_difference(model, await trainer.sample()) < EQUAL

    play(scenario)


def test_an_abort_ends_our_own_requests_alone_with_the_tokens_that_they_have(play):
    async def scenario(trainer: Trainer):
        client, where = trainer.client, trainer.where
        ours, theirs = (new_request(seed=None, n=2, max_tokens=LONG) for _ in range(2))
        tasks = [asyncio.create_task(client.generate(where, asked, timeout=SECONDS)) for asked in (ours, theirs)]
        await is_decoding(trainer, 4)
        assert 0 < (await client.load(where)).kv_cache_usage < 1
        await client.abort(where, [*client.request_ids(where, ours), uuid.uuid4().hex], timeout=SECONDS)
        cut, whole = [await task for task in tasks]
        assert all(
            sample.finish_reason == "abort" and 0 < len(sample.token_ids) == len(sample.logprobs) < LONG
            for sample in cut
        )
        assert [(sample.finish_reason, len(sample.token_ids)) for sample in whole] == [("length", LONG)] * 2

    play(scenario)


@pytest.mark.long
def test_a_paused_engine_ends_what_it_was_generating_but_does_not_know_yet_what_came_since(play):
    async def scenario(trainer: Trainer):
        client, where = trainer.client, trainer.where
        before, since = (new_request(seed=None, max_tokens=LONG) for _ in range(2))
        running = asyncio.create_task(client.generate(where, before, timeout=SECONDS))
        await is_decoding(trainer)
        await trainer.run(SPEAKS.pause("keep"))
        held_back = asyncio.create_task(client.generate(where, since, timeout=SECONDS))
        await asyncio.sleep(0.5)  # until it has arrived, which nothing shows
        await client.abort(where, [before.request_id, since.request_id], timeout=SECONDS)
        (sample,) = await running
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) == len(sample.logprobs) < LONG
        await trainer.run(SPEAKS.resume())
        (sample,) = await held_back
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", LONG)

    play(scenario)


def test_an_update_that_a_dead_trainer_left_open_is_cleared_by_the_next_one(engine, play):
    async def die_midway(trainer: Trainer):
        await trainer.run([*SPEAKS.pause("keep"), *CONTROL.begin()])
        with pytest.raises(EngineRejected, match="already open"):
            await trainer.run(CONTROL.begin())

    async def come_back(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=11)
        await trainer.push(model)
        assert mean_difference(model, await trainer.sample()) < EQUAL

    play(die_midway)
    play(come_back)


def test_an_engine_that_joins_a_trainer_that_dies_is_free_at_once(engine, play):
    """SGLang waits 30 minutes for its trainer, deaf to everything else.

    Only the end of the trainer's store releases it.
    """

    async def scenario(trainer: Trainer):
        store = host_store("127.0.0.1", 0, SECONDS)
        meeting = Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port)
        init = CONTROL.init(meeting, rank_offset=1, timeout_seconds=SECONDS)
        joining = asyncio.create_task(trainer.run(init))
        while store.num_keys() < 2:  # torch's count of clients and rank 1's address: now it waits for ours
            assert not joining.done()
            await asyncio.sleep(0.01)
        del store
        with pytest.raises(EngineRejected, match="Failed to initialize"):
            await joining
        model = perturbed_model(engine.launch.model, seed=14)
        await trainer.push(model)
        assert mean_difference(model, await trainer.sample()) < EQUAL

    play(scenario)


def test_a_directory_that_is_not_there_is_refused_and_the_old_weights_stay(engine, play, tmp_path):
    async def scenario(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=12)
        version = await trainer.push(model)
        absent = Rendezvous("disk", 2, GROUP, directory=str(tmp_path))
        [(load, _)] = transport("sglang", "disk").control.announce([()], absent, version="absent")
        with pytest.raises(EngineRejected, match="update_weights_from_disk"):
            await trainer.run([*CONTROL.begin(), load])
        await trainer.bring_back()
        sample = await trainer.sample()
        assert mean_difference(model, sample) < EQUAL
        assert sample.versions[0].version == version

    play(scenario)


# -- identity and secrecy


def test_the_engine_reports_the_boot_id_of_its_launch_even_after_syncs(engine, play):
    async def scenario(trainer: Trainer):
        await trainer.push(perturbed_model(engine.launch.model, seed=13))
        info = await trainer.probe()
        assert info.boot_id == engine.launch.boot_id
        assert (info.world_size, info.max_model_len, info.dtype, info.engine_version) == (1, 512, "float32", "0.5.23")

    play(scenario)


def test_what_sglang_does_not_tell_of_its_model_is_read_where_it_read_it_even_after_a_load_from_disk(engine, play):
    async def scenario(trainer: Trainer):
        await trainer.push(perturbed_model(engine.launch.model, seed=15))
        info = with_model_config(await trainer.probe())
        assert (info.vocab_size, info.model_config["hidden_size"]) == (vocab_size(engine.launch.model), 128)

    play(scenario, "disk")


def test_given_tokens_are_scored_and_parameters_have_checksums(engine, play):
    async def scenario(trainer: Trainer):
        model = perturbed_model(engine.launch.model, seed=16)
        await trainer.push(model)
        first = await trainer.client.checksums(trainer.where, timeout=SECONDS)
        sample = await trainer.sample()
        scores = await trainer.client.score(trainer.where, (*PROMPT, *sample.token_ids), timeout=SECONDS)
        assert scores[len(PROMPT) - 1 :] == pytest.approx(hf_logprobs(model, PROMPT, sample).tolist(), abs=1e-3)
        found = await trainer.client.score_topk(trainer.where, (*PROMPT, *sample.token_ids), 3, timeout=SECONDS)
        assert found.logprobs == pytest.approx(scores, abs=1e-3) and len(found.topk_ids) == 3 * len(scores)
        for place, (token, own) in enumerate(zip((*PROMPT, *sample.token_ids)[1:], scores, strict=True)):
            ids, values = (list(kept[3 * place : 3 * place + 3]) for kept in (found.topk_ids, found.topk_logprobs))
            assert len(set(ids)) == 3 and values == sorted(values, reverse=True)
            if token in ids:
                assert values[ids.index(token)] == pytest.approx(own, abs=1e-3)
            else:
                assert own <= values[-1] + 1e-3
        await trainer.push(perturbed_model(engine.launch.model, seed=17))
        second = await trainer.client.checksums(trainer.where, timeout=SECONDS)
        assert first is not None and second is not None and first.keys() == second.keys()
        assert first["dp0:pp0:tp0:model.norm.weight"] != second["dp0:pp0:tp0:model.norm.weight"]

    play(scenario)


def test_the_key_is_in_no_command_line_or_environment_of_the_server(engine):
    server = psutil.Process(engine.process.pid)
    for process in (server, *server.children(recursive=True)):
        assert engine.key not in " ".join(process.cmdline())
        assert engine.key not in "".join(process.environ().values())


@pytest.mark.parametrize(
    "http",
    [
        HttpRequest("POST", "/generate", {}),
        HttpRequest("GET", "/model_info"),
        HttpRequest("GET", "/server_info"),
        *SPEAKS.pause("keep"),
        *SPEAKS.resume(),
        *CONTROL.begin(),
        *CONTROL.leave(GROUP),
        *CONTROL.finish("mine"),
    ],
    ids=lambda http: http.path,
)
def test_no_route_that_matters_answers_without_the_key(engine, http):
    assert engine.http(http.method, http.path, http.body)[0] == 401
    assert engine.http(http.method, http.path, http.body, key="wrong")[0] == 401


async def is_decoding(trainer: Trainer, samples: int = 1) -> None:
    """Until SGLang has sampled SAMPLED tokens for each of so many requests. Its count of running ones alone says
    nothing of tokens: a request counts from its prefill on."""
    core = SPEAKS.load()
    while True:
        reply = await trainer.client.request(
            trainer.where.url, core, key=trainer.where.read_key(), timeout=SECONDS, retry=False
        )
        (load,) = reply["loads"]
        if load["num_running_reqs"] >= samples and load["num_used_tokens"] >= samples * SAMPLED:
            return
