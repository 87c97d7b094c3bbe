"""What [eval] asks for and cannot have, from the configuration alone. Pure.

Every message names the setting and the fix.
"""

from __future__ import annotations

from rltool.config.train import TrainConfig
from rltool.errors import UsageError


def check_evaluation(config: TrainConfig, *, asks_engines: bool) -> None:
    """Raises UsageError for the first setting that cannot work. asks_engines: whether the run has engines."""
    check_best_metric(config)
    check_evaluation_engines(config, asks_engines=asks_engines)
    if not config.eval.blocking and config.engines.shares_gpus:
        raise UsageError(
            'eval.blocking = false and engines.mode = "colocate" contradict each other: engines on the trainer\'s GPUs '
            "sleep while it trains, so nothing is evaluated beside it; leave eval.blocking out"
        )
    if config.eval.stop_at is not None and not (config.eval.sets and config.eval.every_steps):
        raise UsageError(
            "eval.stop_at needs a set in [eval.sets] and eval.every_steps above 0: nothing would ever be measured"
        )


def check_best_metric(config: TrainConfig) -> None:
    """What tells the best checkpoint is measured, as far as that is known beforehand."""
    metric = config.checkpoint.best_metric
    if metric is None or not metric.startswith("eval/"):
        return
    known = [f"eval/{name}/accuracy" for name in config.eval.sets]
    if not any(metric.startswith(f"eval/{name}/") for name in config.eval.sets) or not config.eval.every_steps:
        raise UsageError(
            f"checkpoint.best_metric = {metric!r} would never be measured: it needs a set of that name in [eval.sets] "
            f"(there is {', '.join(known) or 'none'}) and eval.every_steps above 0 (it is {config.eval.every_steps})"
        )


def check_evaluation_engines(config: TrainConfig, *, asks_engines: bool) -> None:
    """eval.engines stand beside engines that rollouts use, and hold weights of their own."""
    if not config.eval.engines:
        return
    if not asks_engines or not config.eval.sets:
        raise UsageError(
            "eval.engines would never be asked: they stand beside engines.external (or managed engines), for the sets "
            "of [eval.sets]; name those too, or leave eval.engines out"
        )
    if config.engines.shares_gpus:
        raise UsageError(
            'eval.engines and engines.mode = "colocate" contradict each other: the trainer has its weights on the GPUs '
            "only while its own engines take them; leave eval.engines out"
        )
    if config.rollout.agent is not None:
        raise UsageError(
            "eval.engines and rollout.agent contradict each other: agents reach the policy through the run's gateway, "
            "which asks the engines that rollouts use; leave eval.engines out"
        )
