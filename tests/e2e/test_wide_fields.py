"""Fields that the driver does not read, on real Ray actors: a rollout manager in miniature and two Megatron ranks."""

from __future__ import annotations

import pickle
import random
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from rltool.config.train import TrainConfig
from rltool.engines.types import VersionSpan
from rltool.errors import PartLost
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.sample import Sample, SampleStatus
from rltool.rollout.snapshot import SourceState
from rltool.training.cluster.placement import plan_placement
from rltool.training.manager.actor import RolloutActor
from rltool.training.ranks.trainer_group import TrainerGroup
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOPK, SECONDS = 100, 60.0
BUFFERED = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def scored_samples() -> list[Sample]:
    """Of ten samples what a teacher's engine gives. Token ids are pseudo-random, so each sample's are a mark of it."""
    generator, samples = random.Random(0), []
    for i in range(10):
        length = generator.randint(100, 250)
        made = Sample(i // 2, i % 2, 0, [generator.randrange(VOCAB_SIZE) for _ in range(3)])
        made.status, made.reward = SampleStatus.COMPLETED, float(i)
        made.response_ids = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        made.response_mask, made.response_logprobs = [1] * length, [-1.0] * length
        made.versions = [VersionSpan(f"{'a' * 32}:0:0", 0, length)]
        for _ in range(length):
            made.teacher_topk_ids.extend(generator.sample(range(VOCAB_SIZE), TOPK))
            made.teacher_topk_logprobs.extend([-8.0 - generator.random() for _ in range(TOPK)])
        samples.append(made)
    return samples


@ray.remote(num_cpus=0)
class Manager:
    """Makes the batch as the rollout manager does."""

    def next_batch(self):
        return samples_to_batch(scored_samples(), put=ray.put)

    async def state_dict(self, done):
        class Service:
            async def state_dict(self, done):
                return SourceState({"step": done}, {"samples.bin": BUFFERED})

        actor = RolloutActor.__ray_metadata__.modified_class
        return await actor.state_dict(SimpleNamespace(_service=Service()), done)


def started(model, **trainer) -> TrainerGroup:
    config = TrainConfig.model_validate(
        {
            "model": {"path": model, "teacher": "big"},
            "models": {"big": {"path": model}},
            "algorithm": {"advantage": "none", "distill_kl_coef": 1.0, "distill_top_k": TOPK},
            "trainer": {"world_size": 2, "cpus_per_rank": 0.5, "max_tokens_per_micro_batch": 600, **trainer},
            "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 256},
        }
    )
    group = TrainerGroup(config, plan_placement(config, gpu=False, generates=False), None, log_dir=None)
    group.start(total_optimizer_steps=10)
    group.load_weights()
    return group


def bytes_in_store() -> int:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    address = ray.get_runtime_context().gcs_address
    return get_memory_info_reply(get_state_from_address(address)).store_stats.object_store_bytes_used


def in_the_driver(batch) -> bytes:
    """What it has of the batch. Ray would hold a block for good whose reference pickle has seen."""
    wide = tuple(replace(one, blocks=tuple(block.hex() for block in one.blocks)) for one in batch.wide)
    return repr(wide).encode() + pickle.dumps(batch.here())


def ready(batch):
    return batch.replace(old_logprobs=batch.rollout_logprobs, advantages=batch.loss_mask)


def trained_past_the_driver(group: TrainerGroup, manager, before: int) -> int:
    """What ranks compute is the same as of a batch with the values in it. Returns the bytes of the values."""
    whole = samples_to_batch(scored_samples())
    mark = array("i", scored_samples()[7].teacher_topk_ids[:TOPK]).tobytes()
    given = ray.get(manager.next_batch.remote(), timeout=SECONDS)
    assert mark in pickle.dumps(whole) and mark not in in_the_driver(given)
    assert given.teacher_topk_ids is None and given.has("teacher_topk_ids")
    held = whole.teacher_topk_ids.nbytes + whole.teacher_topk_logprobs.nbytes
    assert bytes_in_store() - before > held / 2 and len(given.wide[0].blocks) > 1
    assert len(in_the_driver(given)) < len(pickle.dumps(whole)) - 0.95 * held

    for part in (list(range(10)), [6, 7, 0, 1], [2, 3, 4, 5, 8, 9]):  # the rollout, and two optimizer steps of it
        expected, found = (group.forward_backward(ready(batch).select(part)) for batch in (whole, given))
        assert found[1] == expected[1] and found[1]["train/distill_kl"] > 0
    group.discard_gradients()
    return held


@pytest.mark.parametrize(
    "layout",
    [{}, *(pytest.param({f"{cut}_parallel": 2}, marks=pytest.mark.long) for cut in ("context", "pipeline"))],
    ids=str,
)
def test_a_wide_field_reaches_the_loss_of_two_ranks_past_the_driver_and_its_memory_is_freed(
    cluster, tiny_tied_dir, layout
):
    group, manager = started(tiny_tied_dir, **layout), Manager.remote()
    try:
        before = bytes_in_store()
        held = trained_past_the_driver(group, manager, before)
        until = time.monotonic() + SECONDS
        while (left := bytes_in_store() - before) > held / 10 and time.monotonic() < until:
            time.sleep(0.1)
        assert left < held / 10
    finally:
        for actor in (*group.ranks, manager):
            ray.kill(actor)


def test_buffered_samples_reach_a_checkpoint_past_the_driver(cluster, tiny_tied_dir, tmp_path):
    group, manager = started(tiny_tied_dir), Manager.remote()
    try:
        found = ray.get(manager.state_dict.remote(3), timeout=SECONDS)
        assert found.state == {"step": 3} and isinstance(found.files, ray.ObjectRef)
        group.save_checkpoint(tmp_path / "step_3", {"step": 3}, {}, found.files)
        assert group.saved(wait=True) is not None
        assert (tmp_path / "step_3" / "samples.bin").read_bytes() == BUFFERED
    finally:
        for actor in (*group.ranks, manager):
            ray.kill(actor)


def test_samples_that_were_lost_with_the_rollout_manager_end_the_run_as_a_lost_part(cluster, tiny_tied_dir):
    group, manager = started(tiny_tied_dir), Manager.remote()
    try:
        given = ray.get(manager.next_batch.remote(), timeout=SECONDS)
        ray.kill(manager)

        def train_until_it_fails() -> None:  # copies on this host can be read for a moment
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                group.forward_backward(ready(given))

        with pytest.raises(PartLost, match="was to read what another process of the run held, the rollout manager"):
            train_until_it_fails()
    finally:
        for actor in group.ranks:
            ray.kill(actor)
