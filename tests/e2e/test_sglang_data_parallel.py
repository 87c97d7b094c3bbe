"""A real SGLang with two data-parallel replicas on the CPU: weights by disk, and by nothing else.

Values are the proof: HF's forward pass scores what each replica sampled, after each of several syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rltool.config.rollout import WeightsConfig
from rltool.engines.client import EngineClient
from rltool.engines.dialects.sglang import parse_reply
from rltool.engines.dialects.table import dialect
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.fleet.resume import TRANSFER_GROUP, resume_engines
from rltool.engines.types import Completion, EngineInfo, Holder
from rltool.engines.weight_version import WeightVersion
from rltool.errors import EngineError, UsageError
from rltool.weights.connections import Trainer
from rltool.weights.sync import SyncDeadlines, WeightSync
from rltool.weights.transport import Rendezvous, choose, transport
from rltool.weights.verify.values import ValueCheck
from tests.e2e.engines import RunningEngine, serving_sglang
from tests.e2e.hf_ranks import HfRanks
from tests.e2e.weights import mean_difference, new_request, perturbed_model
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

RUN = "d" * 32
REPLICAS = 2
EQUAL = 1e-4
"""Mean absolute difference of fp32 log-probabilities; measured 1e-5."""
DIFFERENT = 0.05
SECONDS = 60.0
REQUESTS = 8
"""In turns, as SGLang's controller hands them out."""


@pytest.fixture(scope="module")
def engine(tiny_untied_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    work = tmp_path_factory.mktemp("sglang-dp2")
    with serving_sglang(tiny_untied_dir, work, dp=REPLICAS, extra_args=("--dp-size", str(REPLICAS))) as running:
        yield running


def play(engine: RunningEngine, scenario: Callable[[EngineClient, EngineInfo], Awaitable[None]]) -> None:
    async def session() -> None:
        async with EngineClient() as client:
            try:
                await scenario(client, await client.probe(engine.endpoint))
            finally:
                await client.run(engine.endpoint, dialect("sglang").resume(), timeout=SECONDS)

    asyncio.run(asyncio.wait_for(session(), 240))


def sampled_at(engine: RunningEngine, replica: int | None = None) -> tuple[int, Completion]:
    """The replica that answered, and its sample; asked by number, or in turn."""
    [body] = (request.body for request in dialect("sglang").generate(new_request(seed=None)))
    asked = body if replica is None else {**body, "routed_dp_rank": replica}
    status, reply = engine.http("POST", "/generate", asked, key=engine.key)
    assert status == 200 and isinstance(reply, dict), reply
    return reply["meta_info"]["dp_rank"], parse_reply(reply)


def test_replicas_draw_the_same_numbers(engine: RunningEngine):
    """Of which `train` warns (rltool/training/checks/preflight.py, alike_replicas). Where this fails SGLang has mended
    it: no warning is needed from that version on. First of all, for what was drawn unevenly sets them apart."""

    async def scenario(client: EngineClient, info: EngineInfo) -> None:
        drawn = [[sampled_at(engine, replica)[1].token_ids for replica in range(REPLICAS)] for _ in range(3)]
        assert len(set(map(tuple, drawn))) == 3 and all(first == second for first, second in drawn)
        assert info.own_seeds is False

    play(engine, scenario)


def test_every_replica_samples_with_the_weights_that_lie_on_disk(engine: RunningEngine, tmp_path: Path):
    """Two syncs over one connection, the second with requests in flight, and the end of the run."""
    config, endpoint, model = WeightsConfig(bucket_bytes=200_000), engine.endpoint, engine.launch.model
    ranks, fleet = HfRanks(config, model, deadline=SECONDS), Fleet()

    async def scenario(client: EngineClient, info: EngineInfo) -> None:
        assert (info.world_size, info.dp_size) == (REPLICAS, REPLICAS)
        assert choose(info, config, "cpu") == "disk", "without being told"
        fleet.add_probed(endpoint, info)
        sync = WeightSync(
            EngineSet(fleet, client), Trainer(ranks, "cpu", tmp_path / "weights", VOCAB_SIZE), config,
            ValueCheck(VOCAB_SIZE, 1.0, EQUAL, info.max_model_len), SyncDeadlines(SECONDS, SECONDS),
        )  # fmt: skip
        running: list[asyncio.Task[list[Completion]]] = []
        for step, seed in enumerate((51, 52)):
            old, ranks.model = ranks.model, perturbed_model(model, seed=seed)
            version = WeightVersion(RUN, 0, step)
            report = await sync.sync(version, check_all=True)
            assert (report.updated, report.failed) == ((endpoint.url,), {})
            assert report.difference is not None and report.difference < EQUAL
            named = [sampled_at(engine, replica) for replica in range(REPLICAS)]
            in_turn = [sampled_at(engine) for _ in range(REQUESTS)]
            assert [replica for replica, _ in named] == list(range(REPLICAS)) == sorted({at for at, _ in in_turn})
            for _, sample in (*named, *in_turn):
                assert mean_difference(ranks.model, sample) < EQUAL
                assert old is None or mean_difference(old, sample) > DIFFERENT
                assert [span.version for span in sample.versions] == [str(version)]
            running.append(
                asyncio.create_task(client.generate(endpoint, new_request(n=4, max_tokens=200), timeout=SECONDS))
            )
        await asyncio.gather(*running)
        digests = await client.checksums(endpoint, timeout=SECONDS)
        assert digests is not None
        first, second = ({k.split(":", 1)[1]: v for k, v in digests.items() if k.startswith(f"dp{r}:")} for r in (0, 1))
        assert first and first == second
        assert await sync.leave() == {}

    try:
        play(engine, scenario)
    finally:
        ranks.close()


def test_gloo_is_refused_by_name_and_the_server_itself_would_not_join(engine: RunningEngine):
    async def scenario(client: EngineClient, info: EngineInfo) -> None:
        with pytest.raises(UsageError) as refusal:
            choose(info, WeightsConfig(transport="gloo"), "cpu")
        assert "2 data-parallel replicas" in str(refusal.value)
        assert 'set weights.transport = "disk", or "auto"' in str(refusal.value)
        meeting = Rendezvous("gloo", 1 + REPLICAS, TRANSFER_GROUP, "127.0.0.1", 1)
        init = transport("sglang", "gloo").control.init(meeting, rank_offset=1, timeout_seconds=SECONDS)
        with pytest.raises(EngineError, match="init_weights_update_group answered 500"):
            await client.run(engine.endpoint, init, timeout=SECONDS)
        while "data-parallel replicas are not supported for update weights" not in engine.log.read_text():
            await asyncio.sleep(0.1)  # its log comes after its answer

    play(engine, scenario)


def test_an_update_that_a_dead_trainer_left_open_is_closed_by_engines_resume(engine: RunningEngine):
    async def scenario(client: EngineClient, info: EngineInfo) -> None:
        control = transport("sglang", "disk").control
        await client.run(engine.endpoint, [*dialect("sglang").pause("keep"), *control.begin()], timeout=SECONDS)
        [resumed] = await resume_engines(
            client, [engine.endpoint], timeout=SECONDS, holder=Holder("a" * 32, "r", "h", 1)
        )
        assert resumed.error is None and resumed.was_paused
        await client.run(engine.endpoint, [*control.begin(), *control.leave(TRANSFER_GROUP)], timeout=SECONDS)

    play(engine, scenario)
