"""From the collector's groups to the trainer's batch, and the metrics of its making."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rltool.algorithms.batch import Put, TrainBatch
from rltool.config.train import TrainConfig
from rltool.errors import TrainingStopped
from rltool.report.samples import SampleRecord
from rltool.rollout.batching import mask_metrics, samples_to_batch, trim
from rltool.rollout.collector import Collected
from rltool.rollout.measure.metrics import rollout_metrics
from rltool.rollout.measure.sample_metrics import all_sample_metrics, speed_metrics
from rltool.rollout.measure.sample_records import records_to_keep
from rltool.rollout.own_batch import ChangedBatch
from rltool.rollout.rewards.scoring import ScoreStats
from rltool.rollout.sample import Sample
from rltool.rollout.tokenizer import Tokenizer
from rltool.training.checks.modalities import check_samples


@dataclass(frozen=True)
class Rollout:
    """One batch. samples: all of them where rollout.dump is set, else empty; versions: all weights that sampled its
    tokens; kept: row of the batch -> record, of the few samples that are kept for people to look at."""

    batch: TrainBatch
    metrics: dict[str, float]
    versions: tuple[str, ...]
    samples: list[Sample] = field(default_factory=list)
    kept: Mapping[int, SampleRecord] = field(default_factory=dict)


async def to_rollout(
    config: TrainConfig, collected: Collected, stats: ScoreStats, step: int, tokenizer: Tokenizer, gpus: int,
    *, trains: bool, change: Callable[[list[Sample]], ChangedBatch] | None = None, put: Put | None = None,
) -> Rollout:  # fmt: skip
    """Trims where that is configured, and builds the batch in a thread. gpus: of the engines that serve.
    trains: whether a trainer is to read it. change: what rollout.batch_hook makes of it. put: as of samples_to_batch.
    TrainingStopped where no sample is left, or one that it cannot read."""
    groups = [group.samples for group in collected.groups]
    dropped, added = {"reward_failed": stats.failed, "aborted": stats.aborted}, {}
    if change is not None:
        changed = await asyncio.to_thread(change, [sample for group in groups for sample in group])
        groups, dropped["batch_hook"] = [changed.samples], changed.dropped
        added = {"rollout/samples_added": float(changed.added)}
    if config.rollout.batch_size == "trim":
        groups, dropped["trimmed"] = trim(groups, config.samples_per_optimizer_step)
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise TrainingStopped(f"step {step}: no sample is left ({dropped}). {stats.describe()}")
    if trains:
        await asyncio.to_thread(check_samples, config, samples)
    mask_truncated, weights = config.rollout.mask_truncated, config.part_weights
    batch = await asyncio.to_thread(
        samples_to_batch, samples, mask_truncated=mask_truncated, part_weights=weights, put=put
    )
    metrics = rollout_metrics(samples, seconds=None, dropped=dropped)
    metrics |= mask_metrics(samples, mask_truncated=mask_truncated) | added
    monitor = config.monitor
    metrics |= await asyncio.to_thread(
        all_sample_metrics, samples, pass_reward=monitor.pass_reward, category_key=monitor.category_key
    )
    metrics |= _collection_metrics(collected, stats)
    metrics |= speed_metrics(metrics, samples, seconds=collected.seconds, gpus=gpus)
    versions = tuple(sorted({span.version for sample in samples for span in sample.versions}))
    kept = await asyncio.to_thread(records_to_keep, samples, monitor.samples_per_step, tokenizer)
    return Rollout(batch, metrics, versions, samples if config.rollout.dump else [], kept)


def _collection_metrics(collected: Collected, stats: ScoreStats) -> dict[str, float]:
    metrics = {
        "rollout/tokens_per_second": collected.tokens / collected.interval,
        "rollout/dropped_groups": float(collected.dropped.total()),
        "rollout/resampled_groups": float(collected.resampled),
        "rollout/resampled_tokens": float(collected.resampled_tokens),
        "rollout/interrupted_groups": float(collected.interrupted),
        "time/generate_seconds": collected.seconds,
        "time/reward_seconds": stats.seconds / max(stats.groups, 1),
    }
    if collected.filtered_reward is not None:
        metrics["rollout/filtered_reward_mean"] = collected.filtered_reward
    return metrics | {f"rollout/dropped_groups_{reason}": float(count) for reason, count in collected.dropped.items()}
