import os
from contextlib import suppress
from pathlib import Path

from rltool.config.sections import ModelConfig, RayConfig
from rltool.config.train import TrainConfig
from rltool.errors import TrainingStopped
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.ray_cluster import UNUSED_SERVICES, ray_cluster


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


def test_the_directory_of_a_local_ray_is_closed_to_others_and_goes_with_it_but_the_logs_of_a_failure_stay(
    monkeypatch, tmp_path
):
    import ray

    given = []

    def init(**options):
        directory = Path(options["_temp_dir"])
        (directory / "session_1" / "logs").mkdir(parents=True)
        (directory / "session_1" / "logs" / "raylet.out").write_text("why")
        (directory / "session_latest").symlink_to("session_1")
        given.append(directory)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    plan = plan_placement(TrainConfig(model=ModelConfig(path="model")), gpu=False, generates=False)
    for ended_by in (None, TrainingStopped("failing rewards")):
        logs = tmp_path / str(ended_by)
        with suppress(TrainingStopped), ray_cluster(RayConfig(), plan, preflight=30.0, logs=logs):
            assert given[-1].parent.stat().st_mode & 0o777 == 0o700
            if ended_by is not None:
                raise ended_by
        assert not given[-1].parent.exists()
        assert (logs / "raylet.out").exists() == (ended_by is not None)


def test_a_local_cluster_starts_no_service_that_a_run_does_not_use_and_others_get_theirs_back(monkeypatch):
    import ray
    from ray._private.node import Node

    started = []
    for name in UNUSED_SERVICES:
        assert hasattr(Node, name), "this version of Ray has it under another name"
        monkeypatch.setattr(Node, name, lambda _node, name=name, **_options: started.append(name))

    def init(**_options):
        Node.start_monitor(None)  # pyright: ignore
        Node.start_log_monitor(None)  # pyright: ignore
        Node.start_api_server(None, include_dashboard=False, raise_on_failure=False)  # pyright: ignore

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    plan = plan_placement(TrainConfig(model=ModelConfig(path="model")), gpu=False, generates=False)
    with ray_cluster(RayConfig(), plan, preflight=30.0):
        assert started == []
    init()
    assert started == list(UNUSED_SERVICES)


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
