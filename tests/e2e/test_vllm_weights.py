"""Weight transfer into the real vLLM: values, not status codes. HF's forward pass is the reference."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from dataclasses import replace

import psutil
import pytest
from safetensors.torch import save_file

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.plugin.server import RELOAD_PATH, STARTING_VERSION
from rltool.engines.transfer import wire
from rltool.engines.types import HttpRequest, TensorMeta
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError
from rltool.weights.connections import Trainer
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.transport import Rendezvous, transport
from rltool.weights.transports.vllm import bucket_request
from rltool.weights.verify.values import ValueCheck
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import (
    DISK,
    GLOO,
    GROUP,
    PROMPT,
    TIMEOUT,
    Sender,
    buckets_of,
    first_model,
    mean_difference,
    new_request,
    perturbed_model,
    tensors_of,
)
from tests.ranks import flat_bytes

pytestmark = pytest.mark.e2e

EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities, vLLM's kernels against torch's."""
DIFFERENT = 0.05
"""What two sets of perturbed weights differ by at least."""


@pytest.fixture(params=["tied", "untied"])
def engine(request):
    return request.getfixturevalue(f"vllm_engine_{request.param}")


def session(engine, scenario):
    """Run `scenario(sender)` with a client of its own; the engine is not left paused, whatever happens."""

    async def run():
        async with EngineClient() as client:
            sender = Sender(client, engine)
            try:
                await scenario(sender)
            finally:
                await sender.control(dialect("vllm").resume())

    asyncio.run(run())


def assert_computed_with(sample, *models):
    """Each part of the sample has the log-probabilities of the weights that sampled it."""
    assert len(sample.versions) == len(models)
    for span, model in zip(sample.versions, models, strict=True):
        tokens, logprobs = sample.token_ids[span.start : span.end], sample.logprobs[span.start : span.end]
        part = replace(sample, token_ids=tokens, logprobs=logprobs, versions=())
        assert mean_difference(model, part, prompt=PROMPT + sample.token_ids[: span.start]) < EQUAL


@pytest.mark.parametrize("transport", ["gloo", "disk", "one request"])
def test_after_a_sync_the_engine_computes_with_the_trainers_weights(engine, transport, tmp_path):
    async def scenario(sender: Sender):
        before = perturbed_model(engine.launch.model, seed=1)
        after = perturbed_model(engine.launch.model, seed=2)
        await sender.gloo(tensors_of(before), "one")
        sample = await sender.one()
        assert mean_difference(before, sample) < EQUAL
        assert mean_difference(after, sample) > DIFFERENT

        if transport != "disk":
            await sender.gloo(tensors_of(after), "two", in_one_request=transport == "one request")
            if transport == "one request":
                assert (await sender.client.probe(engine.endpoint)).paused is True
                await sender.control(dialect("vllm").resume())
        else:
            await sender.disk(tensors_of(after), "two", tmp_path)
        sample = await sender.one()
        assert mean_difference(after, sample) < EQUAL
        assert mean_difference(before, sample) > DIFFERENT
        assert [span.version for span in sample.versions] == ["two"]
        assert (await sender.client.probe(engine.endpoint)).weight_version == "two"

    session(engine, scenario)


def test_the_weights_that_an_engine_started_with_can_be_loaded_again(engine):
    async def scenario(sender: Sender):
        first, after = first_model(engine.launch.model), perturbed_model(engine.launch.model, seed=2)
        await sender.gloo(tensors_of(after), "two")
        assert mean_difference(after, await sender.one()) < EQUAL
        files = engine.launch.model / "model.safetensors"
        aside = files.rename(files.with_suffix(".aside"))
        try:
            with pytest.raises(EngineError, match="could not be loaded again"):
                await sender.control([HttpRequest("POST", RELOAD_PATH)])
        finally:
            aside.rename(files)
        assert mean_difference(after, await sender.one()) < EQUAL, "it computes with what it had"
        await sender.control([HttpRequest("POST", RELOAD_PATH)])
        sample = await sender.one()
        assert mean_difference(first, sample) < EQUAL
        assert mean_difference(after, sample) > DIFFERENT
        assert [span.version for span in sample.versions] == [STARTING_VERSION]

    session(engine, scenario)


def test_a_prompt_cached_before_a_sync_is_computed_anew_after_it(vllm_engine_tied):
    """vLLM keeps the keys and values of prompts. A pause drops them as well, so this sync goes without one."""
    engine = vllm_engine_tied
    prompt = PROMPT * 25  # longer than a cache block, which has 128 tokens on the CPU

    async def scenario(sender: Sender):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (3, 4))
        await sender.gloo(tensors_of(old), "old")
        for _ in range(2):  # the second one takes the prompt from the cache
            assert mean_difference(old, await sender.one(new_request(prompt=prompt)), prompt=prompt) < EQUAL
        await sender.gloo(tensors_of(new), "new")
        assert mean_difference(new, await sender.one(new_request(prompt=prompt)), prompt=prompt) < EQUAL

    session(engine, scenario)


@pytest.mark.parametrize("in_one_request", [False, True], ids=["step by step", "one request"])
def test_requests_frozen_during_a_sync_go_on_and_name_both_versions(vllm_engine_tied, in_one_request):
    engine = vllm_engine_tied

    async def freeze_in_the_middle(sender: Sender, old, new):
        """Samples of which some were begun under the old weights and ended under the new ones."""
        seconds = 0.3  # into the generation; how long it takes depends on the machine, so this is adapted
        for _ in range(20):
            await sender.gloo(tensors_of(old), "old")
            many = new_request(n=48, max_tokens=240)
            running = asyncio.create_task(sender.client.generate(engine.endpoint, many, timeout=TIMEOUT))
            await asyncio.sleep(seconds)
            if not in_one_request:
                await sender.control(dialect("vllm").pause("keep"))
            finished = running.done()
            await sender.gloo(tensors_of(new), "new", in_one_request=in_one_request)
            await sender.control(dialect("vllm").resume())
            samples = await running
            if any(len(sample.versions) == 2 for sample in samples):
                return samples
            seconds *= 0.5 if finished else 1.5
        raise AssertionError("no generation could be frozen in its middle")

    async def scenario(sender: Sender):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (5, 6))
        samples = await freeze_in_the_middle(sender, old, new)
        assert len(samples) == 48 and all(len(sample.token_ids) == 240 for sample in samples)
        for sample in [sample for sample in samples if len(sample.versions) == 2][:3]:
            first, second = sample.versions
            assert (first.version, second.version) == ("old", "new")
            assert (first.start, first.end, second.end) == (0, second.start, 240)
            assert_computed_with(sample, old, new)  # the cache of the first part was computed anew

    session(engine, scenario)


# -- weights that arrive while the engine generates (weights.staged)

STAGED = WeightsConfig(bucket_bytes=100_000, transport="gloo", staged=True)
"""More than ten buckets for the tiny model."""


class HeldRanks(HfRanks):
    """Half of the tensors are sent, and the others after `go_on`. holds: the next time; half: they are sent."""

    def __init__(self, config, model_files):
        super().__init__(config, model_files, deadline=TIMEOUT)
        self.holds, self.half, self.go_on = False, threading.Event(), threading.Event()

    def stream(self, step):
        pairs = list(super().stream(step))
        for number, pair in enumerate(pairs):
            if self.holds and number == len(pairs) // 2:
                self.half.set()
                assert self.go_on.wait(TIMEOUT)
            yield pair


async def staged_sync(client: EngineClient, engine, ranks: HeldRanks, directory) -> WeightSync:
    """rltool's own, for this engine."""
    fleet, info = Fleet(), await client.probe(engine.endpoint)
    fleet.add_probed(engine.endpoint, info)
    vocabulary = json.loads((engine.launch.model / "config.json").read_text())["vocab_size"]
    return WeightSync(
        EngineSet(fleet, client), Trainer(ranks, "cpu", directory, vocabulary), ranks.config,
        ValueCheck(vocabulary, temperature=1.0, tolerance=EQUAL, max_model_len=256), SyncDeadlines(TIMEOUT, TIMEOUT),
    )  # fmt: skip


def test_staged_weights_arrive_while_the_engine_generates_and_it_is_paused_to_load_them(vllm_engine_tied, tmp_path):
    engine, run = vllm_engine_tied, uuid.uuid4().hex
    first, second = (str(WeightVersion(run, 0, number)) for number in (1, 2))

    async def scenario(sender: Sender):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (20, 21))
        ranks = HeldRanks(STAGED, engine.launch.model)
        ranks.model = old
        sync = await staged_sync(sender.client, engine, ranks, tmp_path)
        try:
            assert (await sync.sync(WeightVersion(run, 0, 1))).failed == {}, "the value check has compared"
            ranks.model, ranks.holds = new, True
            began = time.perf_counter()
            syncing = asyncio.create_task(sync.sync(WeightVersion(run, 0, 2)))
            assert await asyncio.to_thread(ranks.half.wait, TIMEOUT)
            assert sync.fleet.serving() == (engine.url,) and not (await sender.client.probe(engine.endpoint)).paused
            whole = await sender.one(new_request(max_tokens=200))
            assert whole.finish_reason == "length" and [span.version for span in whole.versions] == [first]
            assert_computed_with(whole, old)

            many = new_request(n=48, max_tokens=240)
            running = asyncio.create_task(sender.client.generate(engine.endpoint, many, timeout=TIMEOUT))
            while (await sender.client.load(engine.endpoint)).running < 48:
                await asyncio.sleep(0.01)
            held = time.perf_counter() - began
            ranks.go_on.set()
            report = await syncing
            assert report.failed == {} and report.updated == (engine.url,)
            assert 0 < report.paused < held
            samples = await running
        finally:
            ranks.go_on.set()
            await sync.leave()
        assert all(len(sample.token_ids) == 240 for sample in samples)
        across = [sample for sample in samples if [span.version for span in sample.versions] == [first, second]]
        assert across, "requests in flight went on to the end, before the pause and after it"
        for sample in across[:2]:
            assert_computed_with(sample, old, new)
        after = await sender.one()
        assert [span.version for span in after.versions] == [second]
        assert mean_difference(new, after) < EQUAL and mean_difference(old, after) > DIFFERENT

    session(engine, scenario)


def test_a_trainer_that_dies_while_staged_weights_arrive_leaves_the_old_ones_serving(vllm_engine_tied, tmp_path):
    """Its sockets close, and nobody tells the engine anything."""
    engine, control = vllm_engine_tied, transport("vllm", "gloo").staged

    async def scenario(sender: Sender):
        old, new = (perturbed_model(engine.launch.model, seed=seed) for seed in (22, 23))
        await sender.gloo(tensors_of(old), "old")
        buckets = buckets_of(tensors_of(new))
        store = wire.host_store("127.0.0.1", 0, TIMEOUT)
        meeting = Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port)
        init = control.init(meeting, rank_offset=1, timeout_seconds=TIMEOUT)
        join = asyncio.to_thread(wire.open_group, "127.0.0.1", store.port, 0, 2, GROUP, TIMEOUT, store=store)
        _, group = await asyncio.gather(sender.control(init), join)
        prefetch = control.prefetch(buckets, meeting, version="new", seconds=TIMEOUT)
        fetching = asyncio.create_task(sender.control(prefetch))
        await asyncio.to_thread(wire.broadcast, group, flat_bytes(tensors_of(new), buckets[0]))
        del group, store  # which closes their sockets
        with pytest.raises(EngineError, match="broadcast of .* bytes from the trainer failed"):
            await fetching

        info = await sender.client.probe(engine.endpoint)
        assert (info.paused, info.weight_version, info.exact) == (False, "old", False)
        sample = await sender.one()
        assert [span.version for span in sample.versions] == ["old"] and mean_difference(old, sample) < EQUAL

        ranks = HeldRanks(STAGED, engine.launch.model)
        ranks.model = new
        sync = await staged_sync(sender.client, engine, ranks, tmp_path)
        report = await sync.sync(WeightVersion(uuid.uuid4().hex, 0, 1))
        await sync.leave()
        assert report.failed == {} and mean_difference(new, await sender.one()) < EQUAL

    session(engine, scenario)


WRONG_UPDATES = {
    "a wrong shape": lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1].clone()},
    "an unknown name": lambda tensors: {**tensors, "model.layers.0.unheard_of.weight": tensors["model.norm.weight"]},
    "a missing tensor": lambda tensors: {
        n: t for n, t in tensors.items() if n != "model.layers.1.self_attn.k_proj.weight"
    },
    "a missing embedding": lambda tensors: {n: t for n, t in tensors.items() if n != "model.embed_tokens.weight"},
}


@pytest.mark.parametrize("in_one_request", [False, True], ids=["step by step", "one request"])
@pytest.mark.parametrize("wrong", WRONG_UPDATES)
def test_a_wrong_update_is_an_error_and_the_next_good_one_works(vllm_engine_untied, wrong, in_one_request):
    engine = vllm_engine_untied

    async def scenario(sender: Sender):
        good, bad, better = (perturbed_model(engine.launch.model, seed=seed) for seed in (7, 8, 9))
        await sender.gloo(tensors_of(good), "good")
        with pytest.raises(EngineError, match=r"norm|unheard_of|qkv_proj|embed_tokens"):
            await sender.gloo(WRONG_UPDATES[wrong](tensors_of(bad)), "bad", in_one_request=in_one_request)
        assert (await sender.client.probe(engine.endpoint)).paused is in_one_request
        await sender.control(dialect("vllm").resume())
        assert (await sender.client.probe(engine.endpoint)).weight_version == "incomplete"
        await sender.one()  # it still serves: half-loaded layers have their old weights back
        await sender.gloo(tensors_of(better), "better")
        sample = await sender.one()
        assert mean_difference(better, sample) < EQUAL
        assert [span.version for span in sample.versions] == ["better"]

    session(engine, scenario)


def test_an_update_that_its_trainer_left_open_does_not_stop_the_next_trainer(vllm_engine_untied):
    engine = vllm_engine_untied

    async def scenario(sender: Sender):
        model = perturbed_model(engine.launch.model, seed=10)
        engine_dialect = dialect("vllm")
        await sender.control(engine_dialect.pause("keep"))
        await sender.control(DISK.init(Rendezvous("disk", 2, GROUP), rank_offset=1, timeout_seconds=TIMEOUT))
        await sender.control(DISK.begin())
        # ... and here the trainer died. What another one does before its first sync:
        await sender.control(DISK.leave(GROUP))
        await sender.control(engine_dialect.resume())
        await sender.one()
        await sender.gloo(tensors_of(model), "next")
        assert mean_difference(model, await sender.one()) < EQUAL

    session(engine, scenario)


def test_a_file_that_differs_from_its_announcement_is_refused(vllm_engine_untied, tmp_path):
    engine = vllm_engine_untied

    async def scenario(sender: Sender):
        tensors = tensors_of(perturbed_model(engine.launch.model, seed=12))
        bucket = buckets_of(tensors, per_bucket=2)[0]
        lying = (replace(bucket[0], dtype="bfloat16"), bucket[1])
        path = tmp_path / "bucket.safetensors"
        save_file({meta.name: tensors[meta.name].contiguous() for meta in bucket}, path)
        await sender.control(DISK.init(Rendezvous("disk", 2, GROUP), rank_offset=1, timeout_seconds=TIMEOUT))
        for announced, file in (
            (lying, path),
            (bucket[:1], path),
            (bucket, tmp_path / "absent"),
            ((*bucket, TensorMeta("x", "float32", (1,))), path),
        ):
            await sender.control(GLOO.begin())
            with pytest.raises(EngineError, match="does not hold what was announced|cannot read"):
                await sender.control([bucket_request(announced, path=str(file))])
        await sender.control(GLOO.leave(GROUP))
        await sender.gloo(tensors, "good")

    session(engine, scenario)


def test_a_trainer_that_does_not_send_is_given_up_after_the_timeout(vllm_engine_untied):
    engine = vllm_engine_untied

    async def scenario(sender: Sender):
        tensors = tensors_of(perturbed_model(engine.launch.model, seed=13))
        store = wire.host_store("127.0.0.1", 0, TIMEOUT)
        init = GLOO.init(Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port), rank_offset=1, timeout_seconds=2.0)
        join = asyncio.to_thread(wire.open_group, "127.0.0.1", store.port, 0, 2, GROUP, 2.0, store=store)
        _, group = await asyncio.gather(sender.control(init), join)
        await sender.control(GLOO.begin())
        with pytest.raises(EngineError, match="broadcast of .* bytes from the trainer failed"):
            await sender.control([bucket_request(buckets_of(tensors)[0])])
        group.shutdown()
        await sender.gloo(tensors, "good")

    session(engine, scenario)


def test_a_shut_down_transfer_leaves_no_connection_open(vllm_engine_untied):
    engine = vllm_engine_untied

    def open_sockets() -> int:
        # of the engine's own processes alone: the HTTP server's sockets come and go with its clients
        workers = psutil.Process(engine.process.pid).children(recursive=True)
        return sum(len(worker.net_connections(kind="tcp")) for worker in workers)

    async def scenario(sender: Sender):
        await sender.control(GLOO.leave(GROUP))
        before = open_sockets()
        store = wire.host_store("127.0.0.1", 0, TIMEOUT)
        init = GLOO.init(Rendezvous("gloo", 2, GROUP, "127.0.0.1", store.port), rank_offset=1, timeout_seconds=TIMEOUT)
        join = asyncio.to_thread(wire.open_group, "127.0.0.1", store.port, 0, 2, GROUP, TIMEOUT, store=store)
        await asyncio.gather(sender.control(init), join)
        assert open_sockets() > before
        await sender.control(GLOO.leave(GROUP))
        assert open_sockets() == before

    session(engine, scenario)
