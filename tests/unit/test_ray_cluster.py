import os

from rltool.config.train import ModelConfig, RayConfig, TrainConfig
from rltool.training.cluster import ray_cluster
from rltool.training.placement import plan_placement


def test_without_an_address_a_cluster_of_ones_own_is_started_whatever_else_runs_on_the_machine(monkeypatch):
    import ray

    asked = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with ray_cluster(
        RayConfig(), plan_placement(TrainConfig(model=ModelConfig(path="model")), gpu=False, generates=False),
        preflight=30.0,
    ):
        assert asked["address"] == "local" and asked["num_cpus"] == 1


def test_a_local_cluster_hands_out_the_gpus_of_the_run_and_gives_nobody_a_niceness(monkeypatch):
    import ray

    seen = {}

    def init(**options):
        seen.update(os.environ, num_gpus=options["num_gpus"])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    plan = plan_placement(TrainConfig(model=ModelConfig(path="model"), trainer={"world_size": 2}), gpu=True)
    with ray_cluster(RayConfig(), plan, gpus=(4, 6), preflight=30.0):
        assert seen["CUDA_VISIBLE_DEVICES"] == "4,6" and seen["num_gpus"] == 2
        assert seen["RAY_worker_niceness"] == "0"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "the driver's own stays"
