from rltool.config.train import ModelConfig, RayConfig, TrainConfig
from rltool.training.cluster import ray_cluster
from rltool.training.placement import plan_placement


def test_without_an_address_a_cluster_of_ones_own_is_started_whatever_else_runs_on_the_machine(monkeypatch):
    import ray

    asked = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with ray_cluster(
        RayConfig(), plan_placement(TrainConfig(model=ModelConfig(path="model")), gpu=False, generates=False)
    ):
        assert asked["address"] == "local" and asked["num_cpus"] == 1
