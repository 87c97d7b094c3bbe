"""Weight transfer into the real vLLM: values, not status codes. HF's forward pass is the reference."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psutil
import pytest
from safetensors.torch import save_file

from rltool.engines import wire
from rltool.engines.client import EngineClient
from rltool.engines.dialects import dialect
from rltool.engines.types import TensorMeta
from rltool.errors import EngineError
from rltool.weights.transport import Rendezvous
from rltool.weights.transports.vllm import bucket_request
from tests.e2e.weights import (
    DISK,
    GLOO,
    GROUP,
    PROMPT,
    TIMEOUT,
    Sender,
    buckets_of,
    mean_difference,
    new_request,
    perturbed_model,
    tensors_of,
)

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
        for _ in range(8):
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
            # each part has the log-probabilities of the weights that sampled it: the first part's cache was recomputed
            for model, span in ((old, first), (new, second)):
                tokens, logprobs = sample.token_ids[span.start : span.end], sample.logprobs[span.start : span.end]
                part = replace(sample, token_ids=tokens, logprobs=logprobs, versions=())
                assert mean_difference(model, part, prompt=PROMPT + sample.token_ids[: span.start]) < EQUAL

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
        speaks = dialect("vllm")
        await sender.control(speaks.pause("keep"))
        await sender.control(DISK.init(Rendezvous("disk", 2, GROUP), rank_offset=1, timeout_seconds=TIMEOUT))
        await sender.control(DISK.begin())
        # ... and here the trainer died. What another one does before its first sync:
        await sender.control(DISK.leave(GROUP))
        await sender.control(speaks.resume())
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
