"""Deltas through a bucket: an S3 server in one process, the trainer that writes in another, a real vLLM that fetches in
a third. Trainer and engine know of the server from their environment alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import boto3
import pytest

from rltool.config.rollout import WeightsConfig
from rltool.engines.delta import chain
from rltool.engines.delta.store import open_store
from rltool.engines.weight_version import WeightVersion
from rltool.weights.send.sender import SendReport
from rltool.weights.sync_report import WeightSyncFailed
from tests.e2e.delta_trainer import EQUAL, RUN, SECONDS, Trainer, trainer
from tests.e2e.engines import RunningEngine, serving_vllm
from tests.e2e.weights import mean_difference, new_request
from tests.s3_server import ENVIRONMENT, s3_server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

STORE, LOG = "s3://weights/runs/a", "s3.log"
STEPS, LOST, DAMAGED = 6, 2, 4


@pytest.fixture
def engine(tiny_untied_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningEngine]:
    """A vLLM that has the address and the key of an S3 server, with an empty bucket, as its user has set them."""
    with s3_server(tmp_path / LOG) as address:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": address}.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="weights")
        with serving_vllm(tiny_untied_dir, tmp_path) as running:
            yield running


def test_vllm_fetches_from_a_bucket_also_after_patches_were_lost_and_damaged(engine: RunningEngine, tmp_path: Path):
    """Two versions do not reach the engine: it goes on with what it has, and the next syncs bring it up again."""
    config = WeightsConfig(transport="delta", store=STORE, anchor_every=10, bucket_bytes=200_000)

    async def scenario() -> None:
        async with trainer(engine, config, tmp_path) as made:
            for step in range(1, STEPS):
                if step == LOST:
                    await fail(made, step, "is not there", delete)
                if step == DAMAGED:
                    await fail(made, step, "is damaged", cut_off)
                await made.step(step)
                await made.assert_bit_equal()

    asyncio.run(scenario())
    expired = [set(), set()]  # older than the last two anchors
    assert [kinds(step) for step in range(STEPS)] == [*expired, {"model"}, {"patch"}, {"model", "patch"}, {"patch"}]
    fetched = re.findall(rf"^GET \S+/{RUN}-0-(\d+)/(model|patch)-\S+ 20\d$", (tmp_path / LOG).read_text(), re.MULTILINE)
    assert {(int(step), kind) for step, kind in fetched} == {
        (0, "model"), (1, "patch"), (LOST, "model"), (LOST + 1, "patch"), (DAMAGED, "patch"), (DAMAGED, "model"),
        (DAMAGED + 1, "patch"),
    }  # fmt: skip


async def fail(made: Trainer, step: int, why: str, harm: Callable[[list[str]], None]) -> None:
    """A sync whose patches come to harm between the trainer's last write and the engine's first read; the engine then
    samples with the weights that it had."""
    send, old = made.ranks.send, made.ranks.at(step - 1)

    async def harmed(name: str, urls: Collection[str]) -> SendReport:
        report = await send(name, urls)
        harm([key for key in open_store(STORE).sizes(chain.directory(name)) if "/patch-" in key])
        return report

    made.ranks.send = harmed
    try:
        with pytest.raises(WeightSyncFailed, match=why):
            await made.sync.sync(WeightVersion(RUN, 0, step))
    finally:
        made.ranks.send = send
    [sample] = await made.client.generate(made.endpoint, new_request(), timeout=SECONDS)
    assert mean_difference(old, sample) < EQUAL
    assert {span.version for span in sample.versions} == {str(WeightVersion(RUN, 0, step - 1))}


def delete(keys: list[str]) -> None:
    assert keys
    open_store(STORE).delete(keys)


def cut_off(keys: list[str]) -> None:
    store = open_store(STORE)
    store.put(keys[0], store.get(keys[0])[:-1])


def kinds(step: int) -> set[str]:
    """Of the files of this version in the bucket."""
    keys = open_store(STORE).sizes(chain.directory(str(WeightVersion(RUN, 0, step))))
    return {key.rpartition("/")[2].partition("-")[0] for key in keys if key.endswith(".safetensors")}
