"""The rollout manager against fake engines on real sockets, with stand-ins for the ranks; and `debug rollout-only`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import test_utils, web

from rltool.algorithms.batch import Put, fetched
from rltool.cli import main
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from rltool.engines.fleet.fleet import FleetPolicy
from rltool.engines.types import Routing
from rltool.engines.weight_version import Lineage, WeightVersion
from rltool.errors import (
    ContractViolation,
    EngineConflict,
    EngineError,
    RltoolError,
    TrainingStopped,
    UnknownEngine,
    UsageError,
)
from rltool.quickstart.tiny_model import make_tiny_model
from rltool.rollout.collector import CollectionInterrupted
from rltool.rollout.groups import GroupState
from rltool.rollout.measure.dump import dumped_steps, read_dump
from rltool.rollout.sample import SampleStatus
from rltool.rollout.serving.guard import TooFewEngines
from rltool.rollout.snapshot import SourceState
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from rltool.training.engine_benchmark import simulate_sync
from rltool.training.manager import service as rollout_service
from rltool.training.manager import weight_updates
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.service import Rollout, RolloutService
from rltool.weights.sync_report import WeightSyncFailed
from rltool.weights.verify.values import Compared, ValueCheck
from tests.contract.fakes.experts import chosen
from tests.contract.fakes.sglang import EXPECTED_KEY, VOCAB_SIZE, FakeSglang
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.rollout_functions import SESSIONS, STALE, TOOL
from tests.declared import Store
from tests.metric_names import undocumented
from tests.ranks import SenderRanks

EOS = 1
RUN = "c" * 32
GENERATE, ABORT = "/rltool/generate", "/inference/v1/abort_requests"
LONG = 60.0
"""Seconds: far more than anything here takes."""
FUNCTIONS = "tests.contract.rollout_functions"
WORDS = ["sun", "bird", "chess", "neon", "bingo", "bliss", "cat", "dog", "owl"]
STOPS = tuple(range(2, 12))
"""With these the fakes' answers end after six tokens on average, some after one, some never."""


class Speller(FakeVllm):
    """Knows the task, and answers rightly or wrongly by the parity of the seed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.vocab_size = 64
        self.tokenizer = tokenizer

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        word, _, begun = self.tokenizer.decode(ids).partition("=")
        answer = word[::-1] if (sampling["seed"] + index) % 2 else word + "x"
        return [*self.tokenizer.encode_prompt(answer), EOS][len(begun) :][:limit]


class Ranks(SenderRanks):
    """Ranks whose model is the step's number, and whose log-probabilities are the engines'."""

    def weights(self, step):
        return {"a": torch.full((4,), float(step))}

    async def logprobs(self, batch):
        return batch.rollout_logprobs.clone()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "words.jsonl"
    rows = [{"prompt": f"{w}=", "label": w[::-1]} for w in [*WORDS, "much too long a prompt"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def spellers(stack, tokenizer):
    return [stack.enter_context(Speller(tokenizer)) for _ in range(2)]


@pytest.fixture
def fakes(stack):
    """One of each dialect."""
    vllm = stack.enter_context(FakeVllm())
    vllm.vocab_size = VOCAB_SIZE  # an answer that one began may be continued by the other
    return [vllm, stack.enter_context(FakeSglang())]


@pytest.fixture
def settings(model_dir, data_file):
    """(sections) -> TrainConfig: four groups of four samples a batch."""

    def make(**sections: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "model": {"path": model_dir},
            "seed": 3,
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
            "weights": {"transport": "disk"},
            "deadlines": {"generate": LONG, "sync": LONG},
            "data": {"train": [data_file]},
            "eval": {"sets": {"words": data_file}, "samples_per_prompt": 2},
            "reward": {"function": f"{FUNCTIONS}:long_is_good"},
        }
        for name, changes in sections.items():
            values[name] = {**values.get(name, {}), **changes} if isinstance(changes, dict) else changes
        return TrainConfig.model_validate(values)

    return make


@pytest.fixture
def serve(tmp_path):
    """(config, engines) -> a started RolloutService in an `async with`; lineage None: nobody syncs. evaluation: engines
    for that alone."""
    key = tmp_path / "engine-key"
    key.write_text(EXPECTED_KEY)

    @asynccontextmanager
    async def open_(
        config: TrainConfig, engines: list[Any], *, lineage: Lineage | None = Lineage(RUN, 0),
        evaluation: Sequence[Any] = (),
    ) -> AsyncIterator[RolloutService]:  # fmt: skip
        async def found(fakes: Sequence[Any]) -> Engines:
            endpoints = [endpoint_of(engine, key) for engine in fakes]
            async with EngineClient() as client:
                return Engines(tuple(endpoints), {e.url: await client.probe(e) for e in endpoints})

        whole = replace(await found(engines), evaluation=await found(evaluation) if evaluation else None)
        ranks = Ranks(config.weights, tmp_path / "nothing")
        syncing = None if lineage is None else Syncing(ranks, lineage, "cpu", tmp_path / "weights", vocab_size=64)
        service = RolloutService(config, whole, syncing=syncing, log=lambda line: None)
        try:
            await service.start()
            yield service
        finally:
            await service.close()

    open_.key = key
    return open_


def endpoint_of(engine: Any, key: Path | None) -> EngineEndpoint:
    if isinstance(engine, FakeVllm):
        return EngineEndpoint(url=engine.url, dialect="vllm", key_file=key, role=engine.role)
    return EngineEndpoint(url=engine.url, dialect="sglang", key_file=key)


async def train(service: RolloutService, steps: int, *, first: int = 0, put: Put | None = None) -> list[Rollout]:
    """As the driver does: a sync, a batch, and a step that trains nothing."""
    found = []
    for step in range(first, steps):
        await service.sync_weights(step)
        found.append(await service.next_batch(step, put))
    return found


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(int(LONG / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


def there(engine: FakeVllm, act: Callable[[], None]) -> None:
    """In the engine's own thread."""
    done = threading.Event()
    engine._loop.call_soon_threadsafe(lambda: (act(), done.set()))
    assert done.wait(LONG)


def generated(engine: FakeVllm) -> list[Any]:
    return [recorded.body for recorded in engine.requests if recorded.path in (GENERATE, "/inference/v1/generate")]


def assert_equal(ours: Rollout, theirs: Rollout) -> None:
    for name in ("tokens", "lengths", "loss_mask", "rewards", "group_ids", "rollout_logprobs", "token_versions"):
        assert torch.equal(getattr(ours.batch, name), getattr(theirs.batch, name)), name


def save(state: SourceState, directory: Path) -> dict[str, Any]:
    """As a checkpoint keeps it."""
    directory.mkdir()
    for name, content in state.files.items():
        (directory / name).write_bytes(content)
    return json.loads(json.dumps(state.state))


# -- a batch


def test_a_batch_has_the_experts_that_the_engines_chose_and_evaluations_ask_for_none(
    serve, settings, fakes, model_dir, tmp_path
):
    mixture = shutil.copytree(model_dir, tmp_path / "mixture")
    sizes = dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=32, vocab_size=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=64, rope_theta=1e4,
        rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
    )  # fmt: skip
    (mixture / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"], **sizes}))
    config = settings(model={"path": mixture}, algorithm={"routing_replay": True})
    routing, store = Routing(3, 2, 8), Store()

    async def run():
        async with serve(config, fakes) as service:
            batches = [rollout.batch for rollout in await train(service, 2, put=store.put)]
            assert fakes[1].bodies["/generate"]["return_routed_experts"] is True
            await service.evaluate()
            assert "return_routed_experts" not in fakes[1].bodies["/generate"]
            return batches

    for engine in fakes:
        engine.routing = routing
    given = asyncio.run(run())
    assert all(batch.has("routed_experts") and batch.routed_experts is None for batch in given), "they are in the store"
    for batch in fetched(given, store.get):
        start = 0
        assert batch.routed_experts.dtype == torch.uint8
        for length in batch.lengths.tolist():
            tokens, found = (values[start : start + length] for values in (batch.tokens, batch.routed_experts))
            assert found[:-1].tolist() == chosen(tokens.tolist(), routing).reshape(-1, 6).tolist()
            assert (found[-1] == 255).all()
            start += length


def test_prefill_and_decode_engines_sample_what_regular_ones_do_and_both_are_synced(serve, settings, spellers):
    async def run():
        config = settings(weights={"pause_mode": "abort"})
        async with serve(config, spellers) as service:
            together = await train(service, 2)
        spellers[0].role, spellers[0].kv_connector, spellers[1].role = "prefill", True, "decode"
        for engine in spellers:
            engine.requests.clear()
        async with serve(config, spellers) as service:
            apart = await train(service, 2)
            assert [member.version for member in service.fleet.members()] == [Lineage(RUN, 0).version(1)] * 2
        for one, other in zip(together, apart, strict=True):
            assert_equal(one, other)
        filled = [body for body in generated(spellers[0]) if "kv_transfer_params" in body]
        fetched = [params["remote_request_id"] for params in spellers[1].fetched]
        assert len(filled) == len(fetched) == len(set(fetched)) == 2 * 16
        assert {body["sampling_params"]["max_tokens"] for body in filled} == {1}

    asyncio.run(run())


def test_a_rollout_is_generated_scored_and_measured(serve, settings, spellers, tokenizer):
    async def run():
        config = settings(rollout={"dump": True}, reward={"function": "rltool.rollout.rewards.shipped:exact_match"})
        async with serve(config, spellers) as service:
            await service.sync_weights(0)
            for engine in spellers:
                engine.requests.clear()
            rollout = await service.next_batch(0)
            assert len(rollout.samples) == 16 and rollout.batch.num_samples == 16
            for sample in rollout.samples:
                text = tokenizer.decode(sample.response_ids)
                assert sample.reward == float(text == sample.label) == float(sample.seed % 2)
                assert sample.status is SampleStatus.COMPLETED and sample.response_ids[-1] == EOS
            assert rollout.versions == (f"{RUN}:0:0",)
            assert rollout.metrics["rollout/reward_mean"] == 0.5 and rollout.metrics["rollout/tokens_per_second"] > 0
            assert rollout.metrics["rollout/engines_serving"] == 2
            assert [len(generated(engine)) for engine in spellers] == [2, 2]
            assert generated(spellers[0])[0]["sampling_params"]["stop_token_ids"] == [EOS]

    asyncio.run(run())


def test_bad_data_fails_at_the_start(serve, settings, spellers, data_file):
    async def run():
        data_file.write_text('{"prompt": "a="}\n{broken\n')
        with pytest.raises(UsageError, match=r"words.jsonl, line 2"):
            async with serve(settings(), spellers):
                pass

    asyncio.run(run())


def test_a_refused_group_is_dropped_and_many_of_them_quote_the_engine(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            await service.sync_weights(0)
            spellers[0].fail(GENERATE, 400, body={"error": "this model is tired"}, times=1)
            rollout = await service.next_batch(0)
            assert rollout.metrics["rollout/dropped_groups_rejected"] == 1
            assert rollout.metrics["rollout/groups_dropped_total"] == 1, "kept by checkpoints"
            for engine in spellers:
                engine.fail(GENERATE, 400, body={"error": "this model is tired"})
            await service.sync_weights(1)
            with pytest.raises(TrainingStopped, match="max_failed_fraction.*this model is tired"):
                await service.next_batch(1)
            service.collector.ledger.check()

    asyncio.run(run())


# -- the same again


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
def test_two_runs_and_a_resume_are_bit_equal_when_synchronous(serve, settings, stack, tmp_path, kind):
    fakes = [stack.enter_context(kind()) for _ in range(2)]
    config = settings(sampling={"stop_token_ids": STOPS})

    async def whole(steps):
        async with serve(config, fakes) as service:
            return await train(service, steps)

    async def resumed(after, steps):
        async with serve(config, fakes) as service:
            await train(service, after)
            state = save(await service.state_dict(after), tmp_path / "checkpoint")
        async with serve(config, fakes, lineage=Lineage(RUN, 0).resumed(1, after)) as service:
            await service.load_state_dict(state, tmp_path / "checkpoint")
            return await train(service, steps, first=after)

    first, second = asyncio.run(whole(6)), asyncio.run(whole(6))
    assert first[0].batch.tokens.tolist() != first[1].batch.tokens.tolist()
    for ours, theirs in zip(first, second, strict=True):
        assert_equal(ours, theirs)
    for ours, theirs in zip(first[3:], asyncio.run(resumed(3, 6)), strict=True):
        assert_equal(ours, theirs)


def test_every_metric_of_a_batch_and_of_an_evaluation_is_explained_in_the_docs(serve, settings, spellers):
    async def run():
        config = settings(eval={"pass_at": [1, 2]}, monitor={"category_key": "source_dataset", "samples_per_step": 3})
        async with serve(config, spellers) as service:
            synced = await service.sync_weights(0)
            rollout = await service.next_batch(0)
            return rollout, {**synced.metrics(), **rollout.metrics, **(await service.evaluate()).metrics}

    rollout, metrics = asyncio.run(run())
    assert undocumented(metrics) == [] and len(metrics) > 50
    assert metrics["rollout/tokens_per_second_per_gpu"] == pytest.approx(metrics["rollout/tokens_per_second"] / 2)
    kept, all_rewards = sorted(r.reward for r in rollout.kept.values()), rollout.batch.rewards
    assert len(kept) == 3 and (kept[0], kept[-1]) == (all_rewards.min(), all_rewards.max())
    for row, record in rollout.kept.items():
        end = int(rollout.batch.lengths[: row + 1].sum())
        assert rollout.batch.tokens[end - len(record.token_ids) : end].tolist() == list(record.token_ids)


def test_truncated_samples_come_with_what_was_left_to_choose_from_and_evaluations_without(serve, settings, spellers):
    async def run():
        async with serve(settings(sampling={"top_p": 0.9, "top_k": 4}), spellers) as service:
            await service.sync_weights(0)
            batch = (await service.next_batch(0)).batch
            await service.evaluate()
            return batch

    batch = asyncio.run(run())
    assert batch.sampling_mask is not None and batch.sampling_mask.shape == (len(batch.tokens), 4)
    assert torch.equal((batch.sampling_mask >= 0).sum(1) > 0, batch.sampled > 0)
    asked = [body["sampling_params"] for engine in spellers for body in generated(engine)]
    assert {(p["top_k"], p["logprobs"] > 0) for p in asked} == {(4, True), (-1, False)}


def test_each_evaluation_set_has_its_own_sampling_reward_and_number_of_samples(serve, settings, spellers, data_file):
    config = settings(
        reward={"function": "rltool.rollout.rewards.shipped:exact_match"},
        eval={
            "sets": {"words": data_file, "long": data_file},
            "samples_per_prompt": 2,
            "pass_at": [1, 2],
            "seed": 5,
            "sampling": {"temperature": 0.5, "top_p": 0.9, "max_response_tokens": 7},
            "overrides": {
                "long": {"samples_per_prompt": 4, "max_prompts": 3, "reward": f"{FUNCTIONS}:long_is_good", "top_k": 5}
            },
        },
    )

    async def run():
        async with serve(config, spellers) as service:
            await service.sync_weights(0)
            return await service.evaluate()

    found = asyncio.run(run())
    asked = [body["sampling_params"] for engine in spellers for body in generated(engine)]
    asked = [p for p in asked if p["max_tokens"] == 7]  # the others are of the value check
    assert {p["temperature"] for p in asked} == {0.5} and {p["top_p"] for p in asked} == {0.9}
    assert sorted(p.get("top_k", -1) > 0 for p in asked) == [False] * 9 + [True] * 3
    metrics = found.metrics
    # half of the two samples of each word are right, by the parity of their seeds
    assert metrics["eval/words/accuracy"] == metrics["eval/words/pass_at_1"] == 0.5
    assert metrics["eval/words/pass_at_2"] == 1.0 > metrics["eval/words/pass_at_2_low"] > 0.5
    assert metrics["eval/words/accuracy_low"] == metrics["eval/words/accuracy_high"] == 0.5
    assert metrics["eval/long/prompts"] == 3 and metrics["eval/long/samples"] == 12
    assert metrics["eval/long/accuracy"] > 1, "the length of an answer is its reward there"
    assert {name: len(samples) for name, samples in found.samples.items()} == {"words": 18, "long": 12}


def test_evaluation_draws_the_same_samples_before_and_after_and_takes_no_prompt(serve, settings, spellers):
    async def run():
        config = settings(reward={"function": "rltool.rollout.rewards.shipped:exact_match"})
        async with serve(config, spellers) as service:
            await service.sync_weights(0)
            before = (await service.evaluate()).metrics
            await train(service, 1)
            after = (await service.evaluate()).metrics
            assert before["eval/words/accuracy"] == after["eval/words/accuracy"] == 0.5
            assert before["eval/words/samples"] == 18
            assert service.collector.ledger.counts()["issued"] == 4

    asyncio.run(run())


# -- weights compared


def test_a_comparison_is_made_when_the_trainer_waits_for_a_batch(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            await train(service, 1)
            asked = asyncio.create_task(service.compare_weights([]))
            await service.sync_weights(1)  # the ranks have something else to do
            assert not asked.done()
            await service.next_batch(1)
            found = await asked
            assert found["weight_version"] == f"{RUN}:0:1"
            assert sorted(row["url"] for row in found["engines"]) == sorted(engine.url for engine in spellers)
            assert all(row["equal"] for row in found["engines"])

    asyncio.run(run())


def test_an_engine_that_does_not_serve_is_not_compared_and_named(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            await service.sync_weights(0)
            service.fleet.process_exited(spellers[1].url, "killed")
            asked = asyncio.create_task(service.compare_weights([spellers[1].url]))
            await service.next_batch(0)
            [row] = (await asked)["engines"]
            assert row["lines"] == ["it is dead: killed"] and row["equal"] is False

    asyncio.run(run())


def test_nobody_waits_for_ever_for_a_comparison(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            with pytest.raises(UnknownEngine, match="no engine of this run"):
                await service.compare_weights(["http://127.0.0.1:9"])
            await service.sync_weights(0)
            left = asyncio.create_task(service.compare_weights([spellers[1].url]))
            await asyncio.sleep(0)
            service.fleet.drain(spellers[1].url, "told to leave")
            service.fleet.remove(spellers[1].url, "left")
            await service.next_batch(0)
            with pytest.raises(RltoolError, match="nothing was compared"):
                await left
            asked = asyncio.create_task(service.compare_weights([]))
            await asyncio.sleep(0)
        with pytest.raises(RltoolError, match="the run ended"):
            await asked
        async with serve(settings(), spellers, lineage=None) as service:
            with pytest.raises(UsageError, match="sends no weights"):
                await service.compare_weights([])

    asyncio.run(run())


# -- staleness


@pytest.mark.parametrize(
    ("max_staleness", "pause_mode"),
    [
        (1, "keep"), (4, "abort"), pytest.param(1, "abort", marks=pytest.mark.long),
        pytest.param(4, "keep", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_no_trained_token_is_older_than_the_bound(serve, settings, fakes, max_staleness, pause_mode):
    """A hundred steps with updates in flight, on both dialects; the books are checked at each."""
    for engine in fakes:
        engine.seconds = 0.05

    async def run():
        config = settings(
            rollout={"max_staleness": max_staleness, "prompts_per_step": 4, "samples_per_prompt": 2, "dump": True},
            sampling={"max_response_tokens": 16, "stop_token_ids": STOPS}, weights={"pause_mode": pause_mode},
        )  # fmt: skip
        ages, mixed, groups = set(), 0, []
        async with serve(config, fakes) as service:
            for step in range(100):
                await service.sync_weights(step)
                rollout = await service.next_batch(step)
                service.collector.ledger.check()
                versions = rollout.batch.token_versions[rollout.batch.loss_mask > 0]
                ages |= set((step - versions).tolist())
                groups += sorted(set(rollout.batch.group_ids.tolist()))
                mixed += sum(len({span.version for span in sample.versions}) > 1 for sample in rollout.samples)
            assert not service._plane.counts, "no engine failed, none was stale"
        assert min(ages) >= 0 and 0 < max(ages) <= max_staleness
        assert mixed > 0, "updates were in flight"
        assert len(set(groups)) == len(groups) == 400, "no group is trained twice"

    asyncio.run(run())


def test_an_sglang_that_names_one_version_a_response_is_trained_against_with_aborting_pauses(serve, settings, stack):
    """0.5.17: what one pause cuts off ends under the version that sampled it, and is taken up under the next."""
    engine = stack.enter_context(FakeSglang(version="0.5.17"))
    engine.seconds = 0.1

    async def run():
        config = settings(
            rollout={"max_staleness": 2, "prompts_per_step": 4, "samples_per_prompt": 2, "dump": True},
            sampling={"max_response_tokens": 16}, weights={"pause_mode": "abort"},
        )  # fmt: skip
        mixed = 0
        async with serve(config, [engine]) as service:
            for step in range(12):
                await service.sync_weights(step)
                rollout = await service.next_batch(step)
                versions = rollout.batch.token_versions[rollout.batch.loss_mask > 0]
                ages = (step - versions).tolist()
                assert min(ages) >= 0 and max(ages) <= 2
                mixed += sum(len({span.version for span in sample.versions}) > 1 for sample in rollout.samples)
            assert not service._plane.counts
        assert mixed > 0, "updates were in flight"

    asyncio.run(run())


def test_over_sampling_keeps_what_was_interrupted_and_finishes_it_under_newer_weights(serve, settings, stack):
    engine = stack.enter_context(FakeVllm())
    engine.vocab_size, engine.seconds = 64, 0.3

    async def run():
        config = settings(
            rollout={"max_staleness": 3, "oversampling_factor": 2.0, "partial_rollout": True, "samples_per_prompt": 2,
                     "dump": True},
            sampling={"max_response_tokens": 16, "stop_token_ids": STOPS},
        )  # fmt: skip
        interrupted, continued = 0.0, []
        async with serve(config, [engine]) as service:
            for step in range(25):
                [rollout] = await train(service, step + 1, first=step)
                service.collector.ledger.check()
                interrupted += rollout.metrics["rollout/interrupted_groups"]
                for sample in rollout.samples:
                    numbers = [WeightVersion.parse(span.version).number for span in sample.versions]
                    assert numbers == sorted(numbers) and step - numbers[0] <= 3
                    assert sample.versions[-1].end == len(sample.response_ids)
                    continued += [sample] if len(set(numbers)) > 1 else []
        assert interrupted > 0 and continued
        assert ABORT in engine.paths()

    asyncio.run(run())


# -- stops


def test_an_interrupt_ends_the_wait_for_a_batch_and_aborts_at_the_engines(serve, settings, fakes):
    async def run():
        async with serve(settings(), fakes) as service:
            await service.sync_weights(0)
            for engine in fakes:
                engine.seconds = 600.0
            waiting = asyncio.create_task(service.next_batch(0))
            await until(lambda: all(engine.batch.running for engine in fakes), "both engines generate")
            async with asyncio.timeout(LONG):  # a tenth of a response
                await service.interrupt()
                with pytest.raises(CollectionInterrupted, match="step 0"):
                    await waiting
            ours = {body["request_id"] for body in generated(fakes[0]) if not body["sampling_params"]["ignore_eos"]}
            await until(lambda: ABORT in fakes[0].paths(), "the engine saw the abort")
            [abort] = [recorded.body for recorded in fakes[0].requests if recorded.path == ABORT]
            assert ours and {f"generate-tokens-{name}" for name in ours} <= set(abort["request_ids"])
            await until(lambda: not any(engine.batch.running for engine in fakes), "nothing is generated any more")
            counts = service.collector.ledger.counts()
            assert counts["partial"] == counts["issued"] == 4
            with pytest.raises(CollectionInterrupted):
                await service.next_batch(0)

    asyncio.run(run())


def test_an_evaluation_is_interrupted_too(serve, settings, fakes):
    async def run():
        async with serve(settings(), fakes) as service:
            await service.sync_weights(0)
            for engine in fakes:
                engine.seconds = 600.0
            waiting = asyncio.create_task(service.evaluate())
            await until(lambda: any(engine.batch.running for engine in fakes), "it generates")
            await service.interrupt()
            with pytest.raises(CollectionInterrupted, match="the evaluation was interrupted"):
                await asyncio.wait_for(waiting, LONG)
            await until(lambda: not any(engine.batch.running for engine in fakes), "nothing is generated any more")

    asyncio.run(run())


def test_an_evaluation_has_a_deadline_with_a_name(serve, settings, fakes):
    async def run():
        async with serve(settings(deadlines={"step": 0.5}), fakes) as service:
            await service.sync_weights(0)
            for engine in fakes:
                engine.seconds = 600.0
            with pytest.raises(RltoolError, match=r"deadlines.step = 0.5 s"):
                await service.evaluate()

    asyncio.run(run())


def test_a_run_with_too_few_engines_waits_then_ends_naming_each(serve, settings, stack, monkeypatch):
    monkeypatch.setattr(rollout_service, "GUARD_SECONDS", 0.01)
    engine = stack.enter_context(FakeVllm())

    async def run():
        async with serve(settings(deadlines={"engines": 0.5}), [engine]) as service:
            await service.sync_weights(0)
            engine.seconds = LONG
            waiting = asyncio.create_task(service.next_batch(0))
            await until(lambda: engine.batch.running > 0, "it generates")
            service.fleet.process_exited(engine.url, "killed by the kernel")
            with pytest.raises(TooFewEngines, match=rf"{engine.url}: dead \(killed by the kernel\)"):
                await waiting
            service.collector.ledger.check()
            assert service.collector.ledger.counts()["partial"] == 4, "and no group is lost"

    asyncio.run(run())


def test_a_sync_waits_for_an_engine_to_come_back(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            service.fleet.policy = FleetPolicy(probe_seconds=0.05)
            await train(service, 1)
            for engine in spellers:
                engine.fail("/start_weight_update", 500, times=1)
            assert (await service.sync_weights(1)).failed == {}
            assert any("reached none of 2 engines" in line for line in service.take_events())
            assert (await service.next_batch(1)).versions == (f"{RUN}:0:1",)

    asyncio.run(run())


@pytest.mark.parametrize("times", [1, 2])
def test_engines_that_differ_once_are_synced_again_and_twice_end_the_run(serve, settings, spellers, monkeypatch, times):
    compared = []

    def compare(self, urls, batch, logprobs):
        compared.append(urls)
        if len(compared) <= times:
            return Compared(1.0, dict.fromkeys(urls, "differs"))
        return Compared(0.0, {})

    monkeypatch.setattr(ValueCheck, "compare", compare)

    async def run():
        async with serve(settings(), spellers) as service:
            service.fleet.policy = FleetPolicy(probe_seconds=0.05)
            if times == 1:
                assert (await service.sync_weights(0)).failed == {}
            else:
                with pytest.raises(WeightSyncFailed, match="differs"):
                    await service.sync_weights(0)
            assert len(compared) == 2

    asyncio.run(run())


def test_a_sync_that_finds_no_engine_ends_with_the_guards_error_or_with_a_stop(serve, settings, spellers):
    async def run(stop):
        async with serve(settings(deadlines={"engines": LONG if stop else 0.3}), spellers) as service:
            service.fleet.policy = FleetPolicy(probe_seconds=0.05)
            for engine in spellers:
                engine.fail("/start_weight_update", 500)
            waiting = asyncio.create_task(service.sync_weights(0))
            await until(lambda: spellers[0].paths().count("/start_weight_update") > 1, "it is tried again")
            if stop:
                await service.interrupt()
            with pytest.raises(CollectionInterrupted if stop else TooFewEngines):
                await waiting

    for stop in (True, False):
        asyncio.run(run(stop))


# -- rewards, filters, hooks


def test_samples_whose_reward_fails_are_dropped_and_counted(serve, settings, spellers):
    async def run():
        config = settings(reward={"function": f"{FUNCTIONS}:first_is_not_a_number", "max_failure_fraction": 0.25})
        async with serve(config, spellers) as service:
            [rollout] = await train(service, 1)
            assert rollout.batch.num_samples == 12 and rollout.metrics["rollout/dropped_reward_failed"] == 4
            assert any("4 of 16 samples failed" in line for line in service.take_events())

    asyncio.run(run())


def test_rewards_that_fail_too_often_stop_the_run_and_lose_no_prompt(serve, settings, spellers):
    async def run():
        config = settings(reward={"function": f"{FUNCTIONS}:always_fails", "max_failure_fraction": 0.2})
        async with serve(config, spellers) as service:
            with pytest.raises(TrainingStopped, match=r"KeyError(.|\n)*max_failure_fraction = 0.2"):
                await train(service, 1)
            assert service.collector.ledger.counts()["dropped"] == 0

    asyncio.run(run())


def test_a_filter_drops_groups_under_its_reason_and_others_take_their_place(serve, settings, spellers):
    async def run():
        async with serve(settings(rollout={"group_filter": f"{FUNCTIONS}:no_odd_groups"}), spellers) as service:
            [rollout] = await train(service, 1)
            assert sorted(set(rollout.batch.group_ids.tolist())) == [0, 2, 4, 6]
            assert rollout.metrics["rollout/dropped_groups_odd"] == rollout.metrics["rollout/dropped_groups"] >= 3
            assert rollout.metrics["rollout/filtered_reward_mean"] > 0

    asyncio.run(run())


def test_a_filter_that_takes_everything_stops_the_run(serve, settings, spellers):
    async def run():
        config = settings(rollout={"group_filter": f"{FUNCTIONS}:all_are_bad", "max_filtered_batches": 2})
        async with serve(config, spellers) as service:
            with pytest.raises(TrainingStopped, match=r"\d+ groups were dropped.*bad.*rollout.max_filtered_batches"):
                await train(service, 1)

    asyncio.run(run())


def test_a_hook_takes_samples_out_of_the_loss_but_not_out_of_the_batch(serve, settings, spellers):
    async def run():
        async with serve(settings(rollout={"group_hook": f"{FUNCTIONS}:remove_the_first"}), spellers) as service:
            [rollout] = await train(service, 1)
            batch = rollout.batch
            assert batch.num_samples == 16 and rollout.metrics["rollout/samples_removed"] == 4
            with_loss = [bool(part.sum()) for part in batch.loss_mask.split(batch.lengths.tolist())]
            assert with_loss == [False, True, True, True] * 4

    asyncio.run(run())


def test_a_batch_is_trimmed_to_whole_global_batches(serve, settings, spellers):
    async def run():
        config = settings(
            rollout={"batch_size": "trim"}, optimizer_steps_per_rollout=4,
            reward={"function": f"{FUNCTIONS}:three_of_the_first_groups_fail", "max_failure_fraction": 0.5},
        )  # fmt: skip
        async with serve(config, spellers) as service:
            [rollout] = await train(service, 1)
            assert rollout.batch.num_samples == 12
            assert (rollout.metrics["rollout/dropped_reward_failed"], rollout.metrics["rollout/dropped_trimmed"]) == (
                3,
                1,
            )

    asyncio.run(run())


def test_truncated_responses_get_no_loss_where_configured(serve, settings, spellers):
    async def run(**rollout):
        config = settings(rollout=rollout, sampling={"max_response_tokens": 5})
        async with serve(config, spellers) as service:
            [found] = await train(service, 1)
            return found

    plain, masked = asyncio.run(run()), asyncio.run(run(mask_truncated=True))
    truncated = plain.metrics["rollout/truncated_fraction"] * 16
    assert 0 < truncated < 16
    assert masked.metrics["rollout/samples_masked_truncated"] == truncated
    assert plain.metrics["rollout/samples_masked_truncated"] == 0
    assert torch.equal(plain.batch.rewards, masked.batch.rewards)
    assert masked.batch.num_loss_tokens == plain.batch.num_loss_tokens - 5 * truncated


def test_a_rollout_function_with_requests_of_its_own_gives_the_batches_of_a_run_and_of_one_that_resumes(
    serve, settings, spellers, tmp_path
):
    config = settings(rollout={"function": f"{FUNCTIONS}:asks_by_itself", "dump": True})

    async def run():
        async with serve(config, spellers) as service:
            first = await train(service, 2)
            state = save(await service.state_dict(1), tmp_path / "checkpoint")
            await service.sync_weights(2)
            service.collector.ledger.check()
        async with serve(config, spellers, lineage=Lineage(RUN, 0).resumed(1, 1)) as service:
            await service.load_state_dict(state, tmp_path / "checkpoint")
            return first, await train(service, 3, first=1)

    first, again = asyncio.run(run())
    found = [sorted({sample.group_id for sample in rollout.samples}) for rollout in (*first, *again)]
    assert found == [[1, 2, 3, 4], [6, 7, 8, 9], [6, 7, 8, 9], [11, 12, 13, 14]]
    assert again[0].samples == first[1].samples, "the batch in hand was kept"
    metrics = again[1].metrics
    assert metrics["rollout/dropped_groups_unused"] == 1 and not undocumented(metrics)
    assert metrics["rollout/groups_dropped_total"] == 3 and metrics["rollout/tokens_per_second"] > 0


def test_a_batch_hook_decides_what_is_trained_on_and_a_resumed_run_asks_it_again(serve, settings, spellers, tmp_path):
    rollout = {"batch_hook": f"{FUNCTIONS}:without_the_first_and_the_last_twice", "dump": True}

    async def run():
        async with serve(settings(rollout=rollout), spellers) as service:
            [first] = await train(service, 1)
            state = save(await service.state_dict(0), tmp_path / "checkpoint")
        async with serve(settings(rollout=rollout), spellers) as service:
            await service.load_state_dict(state, tmp_path / "checkpoint")
            [again] = await train(service, 1)
        return first, again

    first, again = asyncio.run(run())
    places = [(sample.group_id, sample.index) for sample in first.samples]
    assert places == [*[(g, i) for g in (3, 2, 1, 0) for i in (3, 2, 1, 0)][:-1], (3, 3)]
    assert first.batch.group_ids.tolist() == [group for group, _ in places]
    assert first.batch.rewards.min() > 100
    metrics = first.metrics
    assert (metrics["rollout/samples"], metrics["rollout/dropped_batch_hook"]) == (16, 1)
    assert metrics["rollout/samples_added"] == 1 and not undocumented(metrics)
    assert again.samples == first.samples, "of the samples as they were, and not once more of what it had made of them"


def test_a_batch_hook_cannot_bring_back_what_is_too_old(serve, settings, spellers):
    async def run():
        STALE.clear()
        async with serve(settings(rollout={"batch_hook": f"{FUNCTIONS}:puts_an_old_one_in"}), spellers) as service:
            await train(service, 2)

    with pytest.raises(ContractViolation, match="sample 0/0: its oldest weights are of step 0, and step 1 takes none"):
        asyncio.run(run())


def test_a_generate_function_of_ones_own_fills_the_batch(serve, settings, spellers):
    async def run():
        config = settings(rollout={"generate_function": f"{FUNCTIONS}:two_turns", "dump": True})
        async with serve(config, spellers) as service:
            [rollout] = await train(service, 1)
            assert all(
                sample.response_ids[-2:] == [7, 7] and sample.response_mask[-2:] == [0, 0] for sample in rollout.samples
            )

    asyncio.run(run())


def test_what_a_generate_function_and_a_hook_tell_training_is_in_the_batch(serve, settings, spellers):
    async def run():
        functions = {
            "generate_function": f"{FUNCTIONS}:tells_its_length", "group_hook": f"{FUNCTIONS}:tells_the_mean_reward",
        }  # fmt: skip
        async with serve(settings(rollout={**functions, "dump": True}), spellers) as service:
            [rollout] = await train(service, 1)
            batch, rewards = rollout.batch, rollout.batch.rewards
            assert set(batch.metadata) == {"length", "mean"}
            assert torch.equal(batch.metadata["length"], rewards)  # long_is_good
            assert torch.equal(batch.metadata["mean"], rewards.view(4, 4).mean(1).repeat_interleave(4))
            assert [s.train_metadata["length"] for s in rollout.samples] == batch.metadata["length"].tolist()

    asyncio.run(run())


@pytest.fixture
def rows_with_images(tmp_path):
    path = tmp_path / "images.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{w}=", "images": [f"{w}.png", w]}) + "\n" for w in WORDS))
    return path


def test_rows_with_images_are_sampled_without_a_trainer_by_a_function_and_reach_its_reward(
    serve, settings, spellers, rows_with_images
):
    async def run():
        config = settings(
            data={"train": [rows_with_images]}, eval={"sets": {}},
            rollout={"generate_function": f"{FUNCTIONS}:tells_its_length", "dump": True},
            reward={"function": f"{FUNCTIONS}:one_for_each_image"},
        )  # fmt: skip
        async with serve(config, spellers, lineage=None) as service:
            rollout = await service.next_batch(0)
        assert rollout.metrics["rollout/reward_mean"] == 2.0
        for sample in rollout.samples:
            word = sample.prompt_text.removesuffix("=")
            assert sample.multimodal_inputs == {"image": [f"{word}.png", word]}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("lineage", "rollout", "said"),
    [
        (None, {}, "the built-in generation takes text alone"),
        (Lineage(RUN, 0), {"generate_function": f"{FUNCTIONS}:tells_its_length"}, "the trainer's Qwen2ForCausalLM"),
    ],
)
def test_rows_with_images_are_refused_by_who_cannot_read_them(
    serve, settings, spellers, rows_with_images, lineage, rollout, said
):
    async def run():
        config = settings(data={"train": [rows_with_images]}, eval={"sets": {}}, rollout=rollout)
        async with serve(config, spellers, lineage=lineage):
            pass

    with pytest.raises(UsageError, match=f"images.jsonl, line 1: has images, and {said}"):
        asyncio.run(run())
    assert not any(map(generated, spellers))


def test_an_image_that_a_generate_function_gave_the_policy_stops_training(serve, settings, spellers):
    async def run():
        async with serve(settings(rollout={"generate_function": f"{FUNCTIONS}:draws"}), spellers) as service:
            await train(service, 1)

    with pytest.raises(TrainingStopped, match=r"sample 0/0 \(row \d\) has images, and the trainer's"):
        asyncio.run(run())


def test_a_generate_function_has_an_http_session_which_the_run_closes(serve, settings, spellers):
    async def run():
        SESSIONS.clear()
        app = web.Application()
        app.router.add_get("/", lambda request: tool(request))
        asked = []

        async def tool(request):
            asked.append(request.headers.get("Authorization"))
            return web.json_response([7, 7])

        async with test_utils.TestServer(app) as server:
            TOOL["url"] = str(server.make_url("/"))
            config = settings(rollout={"generate_function": f"{FUNCTIONS}:uses_a_tool", "dump": True})
            async with serve(config, spellers) as service:
                [rollout] = await train(service, 1)
                assert all(sample.response_ids[-2:] == [7, 7] for sample in rollout.samples)
                assert rollout.metrics["rollout/tool_seconds_mean"] == 0.5
                [session] = SESSIONS
                assert not session.closed
        assert session.closed and len(asked) >= 16 and set(asked) == {None}, "none of the run's keys is on it"

    asyncio.run(run())


def test_a_generate_function_has_a_deadline(serve, settings, spellers):
    async def run():
        config = settings(rollout={"generate_function": f"{FUNCTIONS}:hangs"}, deadlines={"group": 0.3})
        async with serve(config, spellers) as service:
            with pytest.raises(RltoolError, match=r"deadlines.group = 0.3 s"):
                await train(service, 1)

    asyncio.run(run())


# -- engines


def test_an_engine_that_a_sync_missed_is_synced_while_the_trainer_waits(serve, settings, spellers, monkeypatch):
    monkeypatch.setattr(weight_updates, "RESYNC_SECONDS", 0.01)
    missed, serving = spellers

    async def run():
        async with serve(settings(), spellers) as service:
            missed.fail("/start_weight_update", 500, times=1)
            report = await service.sync_weights(0)
            assert report.failed.keys() == {missed.url}
            assert any("did not reach" in line for line in service.take_events())
            there(serving, serving.batch.freeze)
            waiting = asyncio.create_task(service.next_batch(0))
            await until(lambda: missed.url in service.fleet.serving(), "it has been synced")
            assert missed.version == f"{RUN}:0:0" and not waiting.done()
            there(serving, serving.batch.resume)
            assert (await waiting).versions == (f"{RUN}:0:0",)
            assert serving.paths().count("/pause") == 1, "the other one was left alone"

    asyncio.run(run())


def test_an_engine_that_stays_bad_does_not_hold_a_batch_up(serve, settings, spellers, monkeypatch):
    monkeypatch.setattr(weight_updates, "RESYNC_SECONDS", 0.01)
    missed, serving = spellers

    async def run():
        async with serve(settings(), spellers) as service:
            service.fleet.policy = type(service.fleet.policy)(probe_seconds=600.0)
            missed.fail("/start_weight_update", 500)
            await service.sync_weights(0)
            there(serving, serving.batch.freeze)
            waiting = asyncio.create_task(service.next_batch(0))
            await until(lambda: missed.paths().count("/start_weight_update") == 2, "it was tried again")
            there(serving, serving.batch.resume)
            assert await asyncio.wait_for(waiting, LONG)

    asyncio.run(run())


def test_engines_join_and_leave_a_run(serve, settings, stack, tokenizer, monkeypatch):
    monkeypatch.setattr(weight_updates, "RESYNC_SECONDS", 0.01)
    first, late = (stack.enter_context(Speller(tokenizer)) for _ in range(2))

    async def run():
        async with serve(settings(), [first]) as service:
            await train(service, 1)
            told = {"dialect": None, "group": "late"}
            added = await service.add_engine(endpoint_of(late, None).model_copy(update=told))
            assert added["state"] == "stale"
            assert [(e.url, e.group, e.dialect) for e in service.present_engines()] == [
                (first.url, "default", "vllm"), (late.url, "late", "vllm")
            ]  # fmt: skip
            with pytest.raises(EngineConflict, match="is an engine of this run already"):
                await service.add_engine(endpoint_of(late, None))
            await service.sync_weights(1)
            assert set(service.fleet.serving()) == {first.url, late.url} and late.version == f"{RUN}:0:1"
            await service.next_batch(1)
            assert len(generated(late)) > 1

            assert (await service.remove_engine(first.url))["state"] == "draining"
            before = len(generated(first))
            await train(service, 3, first=2)
            assert len(generated(first)) == before and first.version == f"{RUN}:0:1"
            with pytest.raises(UnknownEngine, match="is no engine of this run"):
                await service.remove_engine("http://127.0.0.1:9")

            assert (await service.add_engine(endpoint_of(first, None)))["state"] == "stale", (
                "taken back, and synced as any other"
            )
            await service.sync_weights(3)
            assert set(service.fleet.serving()) == {first.url, late.url}

    asyncio.run(run())


def test_an_engine_that_does_not_answer_yet_is_in_nobodys_way(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            added = await service.add_engine(EngineEndpoint(url="http://127.0.0.1:9"))
            assert added["state"] == "starting"
            await train(service, 2)
            await service.interrupt()

    asyncio.run(run())


def test_status_says_what_there_is(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            assert (await service.status())["weight_version"] is None
            await train(service, 2)
            status = await service.status()
            json.dumps(status)
            assert (status["step"], status["weight_version"], status["requests_in_flight"]) == (1, f"{RUN}:0:1", 0)
            assert [(e["url"], e["state"], e["weight_version"]) for e in status["engines"]] == [
                (engine.url, "ready", f"{RUN}:0:1") for engine in spellers
            ]
            assert status["groups"] == {
                "issued": 8,
                "running": 0,
                "partial": 0,
                "ready": 0,
                "in_hand": 4,
                "trained": 4,
                "dropped": 0,
            }

    asyncio.run(run())


def test_closing_twice_is_fine_and_leaves_engines_serving(serve, settings, spellers):
    async def run():
        async with serve(settings(), spellers) as service:
            await train(service, 1)
            there(spellers[0], spellers[0].batch.freeze)
            assert await service.close() == []
            assert not any(engine.paused for engine in spellers)
            assert all(engine.transport is None for engine in spellers)

    asyncio.run(run())


# -- checkpoints


def test_a_checkpoint_in_the_middle_of_everything_loses_and_repeats_no_group(serve, settings, stack, tmp_path):
    """Groups that run, that are partial with tokens, that are ready: written to files, taken up by another process."""
    engine = stack.enter_context(FakeVllm())
    engine.vocab_size, engine.seconds = 64, 1.0
    config = settings(
        rollout={"max_staleness": 2, "oversampling_factor": 2.0, "partial_rollout": True, "samples_per_prompt": 2,
                 "dump": True},
        sampling={"max_response_tokens": 32, "stop_token_ids": STOPS[:4]},
    )  # fmt: skip

    async def run():
        trained: list[int] = []
        async with serve(config, [engine]) as service:
            ledger = service.collector.ledger

            def holds() -> bool:
                partial = [g for g in ledger.groups(GroupState.PARTIAL) if any(s.response_ids for s in g.samples)]
                return bool(partial and ledger.groups(GroupState.RUNNING) and ledger.groups(GroupState.READY))

            step = 0
            while True:
                [rollout] = await train(service, step + 1, first=step)
                trained += set(rollout.batch.group_ids.tolist())
                step += 1
                for _ in range(100):
                    if holds():
                        break
                    await asyncio.sleep(0.005)
                if holds():
                    break
                assert step < 30, "never are there groups of every kind"
            partial = [g for g in ledger.groups(GroupState.PARTIAL) if any(s.response_ids for s in g.samples)]
            begun = {(s.group_id, s.index): list(s.response_ids) for g in partial for s in g.samples}
            state = save(await service.state_dict(step), tmp_path / "checkpoint")
        states = {entry["state"] for entry in state["groups"]}
        assert states == {"ready", "partial"}
        assert any(entry["state"] == "partial" and entry["samples"] is None for entry in state["groups"]), (
            "those that ran start over"
        )
        assert len(state["groups"]) + len(trained) + sum(state["dropped"].values()) == state["issued"]

        engine.seconds = 0.05
        async with serve(config, [engine], lineage=Lineage(RUN, 0).resumed(1, step)) as service:
            await service.load_state_dict(state, tmp_path / "checkpoint")
            service.collector.ledger.check()
            finished = {}
            for later in range(step, step + 8):
                [rollout] = await train(service, later + 1, first=later)
                trained += set(rollout.batch.group_ids.tolist())
                finished |= {(s.group_id, s.index): s.response_ids for s in rollout.samples}
            service.collector.ledger.check()
            ended = service.collector.ledger
        assert len(trained) == len(set(trained)), "no group is trained twice"
        open_ = {group.id for group in ended.groups()}
        lost = set(range(ended.issued)) - set(trained) - open_
        assert len(lost) == ended.dropped.total(), "what is neither trained nor open was dropped, and counted"
        kept = [key for key in begun if key in finished]
        assert kept and all(finished[key][: len(begun[key])] == begun[key] for key in kept), (
            "they went on where they stood"
        )

    asyncio.run(run())


def test_a_checkpoint_is_taken_while_tokens_come(serve, settings, fakes):
    """Whatever the groups do meanwhile, a snapshot is of one moment."""
    for engine in fakes:
        engine.seconds = 0.02

    async def run():
        config = settings(rollout={"max_staleness": 4}, sampling={"stop_token_ids": STOPS})
        async with serve(config, fakes) as service:
            for step in range(10):
                rolling = asyncio.create_task(train(service, step + 1, first=step))
                done = service.collector.delivered
                state = await service.state_dict(done)
                entries = state.state["groups"]
                issued = service.collector.ledger.issued
                assert state.state["issued"] <= issued and len({entry["id"] for entry in entries}) == len(entries)
                await rolling

    asyncio.run(run())


# -- debug rollout-only


NO_RAY = "import sys; sys.modules['ray'] = None; sys.modules['megatron'] = None; from rltool.cli import main; main()"
"""With these two not importable, whatever would start a trainer fails."""
ONE_BY_ONE = """
import contextlib, io, json, os, sys
sys.modules['ray'] = sys.modules['megatron'] = None
from rltool.cli import main
ends = []
for words in json.loads(sys.argv[1]):
    sys.argv, said, code = ["rltool", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    ends.append((code, said.getvalue(), os.path.exists("runs")))
print(json.dumps(ends))
"""
"""Commands that end at once, in one process: to import what they need takes seconds."""


def command(cwd, program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd,
        env={**os.environ, "RLTOOL_RUNS": str(cwd / "runs")},
    )  # fmt: skip


def rollout_only(config_file, *arguments, cwd):
    return command(cwd, NO_RAY, "debug", "rollout-only", "--config", str(config_file), *arguments)


@pytest.fixture
def config_file(tmp_path, model_dir, data_file):
    path = tmp_path / "run.toml"
    path.write_text(
        f'seed = 3\nsteps = 5\n[model]\npath = "{model_dir}"\n[optimizer]\nlr = 1e-3\n[data]\ntrain = ["{data_file}"]\n'
        "[rollout]\nprompts_per_step = 4\nsamples_per_prompt = 4\n"
        "[sampling]\nmax_prompt_tokens = 8\nmax_response_tokens = 8\n"
    )
    return path


def test_rollout_only_records_what_the_manager_generates(config_file, tmp_path, spellers, serve, settings):
    addresses = ",".join(engine.url for engine in spellers)
    done = rollout_only(config_file, "--rollout-external", addresses, "--steps", "2", "--out", "dumps", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not used without a trainer: [optimizer]" in done.stdout and "reward 0.500" in done.stdout
    assert dumped_steps(tmp_path / "dumps") == [0, 1]

    async def again():
        config = settings(rollout={"dump": True}, reward={"function": "rltool.rollout.rewards.shipped:exact_match"})
        async with serve(config, spellers, lineage=None) as service:
            return [(await service.next_batch(step)).samples for step in range(2)]

    assert [read_dump(tmp_path / "dumps", step).samples for step in range(2)] == asyncio.run(again())
    assert read_dump(tmp_path / "dumps", 0).weight_versions == ["default"]

    refused = rollout_only(config_file, "--rollout-external", addresses, "--out", "dumps", cwd=tmp_path)
    assert refused.returncode == 2 and "already holds rollouts" in refused.stderr


# -- eval


def evaluation(config_file, *arguments, cwd):
    return command(cwd, NO_RAY, "eval", "--config", str(config_file), *arguments)


def test_eval_alone_prints_a_table_and_writes_results_and_samples(config_file, spellers, data_file, tmp_path):
    addresses = ",".join(engine.url.removeprefix("http://") for engine in spellers)
    sets = f'[eval]\nsets = {{ words = "{data_file}" }}\npass_at = [1, 2]\nsamples_per_prompt = 2\n'
    config_file.write_text(config_file.read_text() + sets)
    done = evaluation(
        config_file, "--rollout-external", addresses, "--out", "results.json", "--dump", "samples", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "pass@2" in done.stdout and "bootstrap over prompts" in done.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    words = found["sets"]["words"]
    assert words["accuracy"] == 0.5 and words["pass_at_2"] == 1.0 and words["samples"] == 18
    assert found["weight_versions"] == ["default"] and found["eval"]["pass_at"] == [1, 2]
    assert len(read_dump(tmp_path / "samples" / "words", 0).samples) == 18
    assert not (tmp_path / "runs").exists()


REFUSED = (
    ("debug rollout-only", (), "without an address"),
    ("debug rollout-only", ("--rollout-external", "127.0.0.1:9", "--set", "trainer.world_size=2"),
     "trainer.world_size (--set)"),
    ("debug rollout-only", ("--rollout-external", "127.0.0.1:9", "--set", "deadlines.preflight=2"),
     "http://127.0.0.1:9"),
    ("eval", (), "nothing to evaluate"),
    ("eval", ("--rollout-external", "127.0.0.1:9", "--checkpoint", "m"), "--checkpoint: give one of them"),
    ("eval", ("--rollout-external", "127.0.0.1:9", "--serve-flags", "--device cpu"), "--serve-flags are of"),
    ("eval", ("--checkpoint", "m"), "is no Hugging Face directory"),
)  # fmt: skip


def test_rollout_only_and_eval_refuse_what_cannot_work_and_start_nothing(config_file, tmp_path):
    words = [[*verb.split(), "--config", str(config_file), *arguments] for verb, arguments, _ in REFUSED]
    done = command(tmp_path, ONE_BY_ONE, json.dumps(words))
    assert done.stdout, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    for (verb, arguments, message), (code, said, has_runs) in zip(REFUSED, ends, strict=True):
        assert code == 2 and message in said and not has_runs, (verb, arguments, said)


def test_rollout_only_is_a_benchmark_of_engines_that_pauses_them_as_a_trainer_would(config_file, spellers, tmp_path):
    addresses = ",".join(engine.url for engine in spellers)
    arguments = ("--rollout-external", addresses, "--steps", "3", "--out", "dumps", "--simulate-sync", "0")
    done = rollout_only(config_file, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for engine in spellers:
        paths = [recorded.path for recorded in engine.requests]
        assert paths.count("/pause") == paths.count("/resume") == 2 and not engine.paused
        assert not [path for path in paths if "weight_transfer" in path or "weight_update" in path]
    assert "tokens of 48 samples" in done.stdout and "simulated syncs: 2," in done.stdout


def test_a_simulated_sync_that_an_engine_refuses_lets_the_others_go_on(serve, spellers):
    endpoints = [endpoint_of(engine, serve.key) for engine in spellers]
    spellers[0].fail("/pause", 500)

    with pytest.raises(EngineError):
        asyncio.run(simulate_sync(endpoints, {e.url: "keep" for e in endpoints}, seconds=0.0, timeout=LONG))
    assert not spellers[1].paused


SERVES = """
import sys, pathlib
from rltool.processes.run_directory import open_run
words = sys.argv[sys.argv.index("serve-engines"):]
run = open_run(words[words.index("--run") + 1], create=True)
assert words[1] == {model!r} and "--detach" in words and words[-2:] == ["--device", "cpu"], words
run.endpoints_file.write_text(pathlib.Path({endpoints!r}).read_text())
"""


def test_eval_of_a_checkpoint_starts_engines_on_it_and_ends_what_it_started(
    config_file, spellers, model_dir, data_file, tmp_path, monkeypatch, capsys
):
    """serve-engines is replaced: it names engines that run already, and the command's own end is looked at."""
    config_file.write_text(config_file.read_text() + f'[eval]\nsets = {{ words = "{data_file}" }}\n')
    endpoints = Endpoints(
        models={"policy": ModelEndpoints(engines=tuple(endpoint_of(engine, None) for engine in spellers))}
    )
    endpoints.save(tmp_path / "endpoints.json")
    script, stopped, run_command = tmp_path / "serves.py", [], subprocess.run
    script.write_text(SERVES.format(model=str(model_dir), endpoints=str(tmp_path / "endpoints.json")))

    def serve_engines(command, **options):
        assert command[1:4] == ["-m", "rltool", "serve-engines"]
        return run_command([sys.executable, str(script), *command[3:]], **options)

    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("rltool.commands.evaluate.subprocess.run", serve_engines)
    monkeypatch.setattr("rltool.processes.stop_run.stop_run", stopped.append)
    words = ["--config", str(config_file), "--checkpoint", str(model_dir), "--serve-flags", "--device cpu"]
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    assert ended.value.code == 0 and "9, 9" in capsys.readouterr().out and len(stopped) == 1
