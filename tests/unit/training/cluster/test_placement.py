import pytest

from rltool.config.rollout import EnginesConfig
from rltool.config.sections import TrainerConfig
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.training.cluster.placement import plan_placement


def config(mode: str, world_size: int = 4, engines: int = 2, gpus: int = 3) -> TrainConfig:
    return TrainConfig(
        model={"path": "m"},
        trainer=TrainerConfig(world_size=world_size),
        engines=EnginesConfig(mode=mode, groups=({"count": engines, "tp": gpus},)),
    )


def test_external_engines_ask_for_the_trainers_world_size_and_not_one_bundle_more():
    plan = plan_placement(config("external", engines=64, gpus=8), gpu=True)
    assert len(plan.bundles) == 4 and plan.total("GPU") == 4 and plan.engines == ()


def test_managed_engines_come_on_top():
    plan = plan_placement(config("managed"), gpu=True)
    assert (len(plan.trainer), len(plan.engines), plan.total("GPU")) == (4, 2, 10)
    assert all(bundle["GPU"] == 3 for bundle in plan.engines), "a bundle never straddles two hosts, so no engine does"


def test_an_engine_that_no_host_has_room_for_is_cut_over_several():
    plan = plan_placement(config("managed", engines=1, gpus=16), gpu=True, gpus_per_host=8)
    assert [bundle["GPU"] for bundle in plan.engines] == [8, 8] and plan.slots[0].shares == (8, 8)


def test_placeholders_have_bundles_so_that_nobody_else_takes_their_gpus():
    groups = ({"tp": 2}, {"name": "keep", "role": "placeholder", "count": 2})
    made = config("managed").model_copy(update={"engines": EnginesConfig(mode="managed", groups=groups)})
    assert [bundle["GPU"] for bundle in plan_placement(made, gpu=True).engines] == [2, 1, 1]


def test_colocated_engines_ask_for_no_bundle_beside_the_trainers():
    plan = plan_placement(config("colocate", world_size=8), gpu=True)
    assert (len(plan.trainer), plan.engines, plan.total("GPU")) == (8, (), 8)
    assert plan.shares_gpus and [slot.shares for slot in plan.slots] == [(3,), (3,)]
    assert "share the trainer's bundles" in plan.describe()


def test_colocated_engines_on_more_gpus_than_the_trainers_are_refused():
    with pytest.raises(UsageError, match=r"takes 6 GPUs, and the trainer has 4 \(trainer.world_size\)"):
        plan_placement(config("colocate"), gpu=True)


def test_rollout_only_has_no_trainer_bundles_and_train_only_no_engine_bundles():
    assert plan_placement(config("managed"), gpu=True, trains=False).trainer == ()
    assert plan_placement(config("external"), gpu=True, trains=False).bundles == ()
    assert plan_placement(config("managed"), gpu=True, generates=False).engines == ()


def test_on_the_cpu_no_gpu_is_asked_for():
    assert plan_placement(config("managed"), gpu=False).total("GPU") == 0


def shared(mode: str, world_size: int, **group) -> TrainConfig:
    made = config(mode, world_size)
    return made.model_copy(update={"engines": EnginesConfig(mode=mode, groups=({"engines_per_gpu": 2, **group},))})


def test_engines_that_share_gpus_ask_for_these_once():
    managed = plan_placement(shared("managed", 1, count=3, tp=2), gpu=True)
    assert [bundle["GPU"] for bundle in managed.engines] == [2, 2] and len(managed.slots) == 3
    colocated = plan_placement(shared("colocate", 1, count=2), gpu=True)
    assert (len(colocated.slots), colocated.total("GPU")) == (2, 1)
    with pytest.raises(UsageError, match="takes 2 GPUs, and the trainer has 1.*set engines_per_gpu"):
        plan_placement(shared("colocate", 1, count=3), gpu=True)


def test_colocated_engines_on_the_cpu_have_no_gpu_to_share_and_are_as_many():
    plan = plan_placement(shared("colocate", 1, count=2), gpu=False)
    assert [slot.shares for slot in plan.slots] == [(0,), (0,)] and plan.total("GPU") == 0
