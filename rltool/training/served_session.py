"""The ranks of a served trainer, from nothing to weights that are loaded: what `serve-trainer` drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rltool.config.train import TrainConfig
from rltool.errors import RunFault
from rltool.models.registry import family_for, read_hf_config
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.places import find_places, in_order
from rltool.training.cluster.ray_calls import Waiting
from rltool.training.cluster.ray_cluster import placed, ray_cluster
from rltool.training.prepare import trainer_device
from rltool.training.ranks.trainer_group import TrainerGroup
from rltool.training.served import RankedTrainer


@dataclass(frozen=True)
class ServedSession:
    """ranks: of the trainer, for what sends their weights. vocab_size: of the model."""

    trainer: RankedTrainer
    ranks: TrainerGroup
    vocab_size: int


@contextmanager
def served_trainer(
    config: TrainConfig, log_dir: Path | None, *, gpus: Sequence[int] = (), while_waiting: Waiting = lambda _: None
) -> Iterator[ServedSession]:
    """Starts Ray as [ray] says and the ranks of [trainer], and loads model.path; all of it ends with the block.

    Of `config` only model, trainer, ray, seed, deadlines and weights count: models bring their own adapters, losses and
    Adam.
    gpus, while_waiting: as for `ray_cluster`. After PartLost, from any call, end the block and open another; its
    trainer begins from a snapshot (`restore`).
    """
    deadlines = config.deadlines
    plan = plan_placement(config, gpu=trainer_device(config) == "cuda", generates=False)
    logs = None if log_dir is None else log_dir / "ray"
    with (
        ray_cluster(
            config.ray, plan, gpus=gpus, deadline=deadlines.start, preflight=deadlines.preflight,
            while_waiting=while_waiting, logs=logs,
        ),
        placed(plan, deadlines.start, while_waiting) as group,
    ):  # fmt: skip
        places = in_order(find_places(config.ray, group, plan.bundles, deadlines.start, while_waiting))
        order = [place.bundle for place in places]
        ranks = TrainerGroup(config, plan, group, log_dir, order=order or None, served=True)
        ranks.start(1, while_waiting)
        ranks.load_weights(while_waiting)
        vocab_size = family_for(read_hf_config(config.model.path), config.model.family).vocab_size
        trainer = RankedTrainer(ranks, vocab_size=vocab_size, max_tokens=config.trainer.micro_batch_tokens)
        yield ServedSession(trainer, ranks, vocab_size)
        with suppress(RunFault):  # of a rank that has died; its caller knows
            ranks.close()
