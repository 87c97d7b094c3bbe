"""Which engines serve which model, when the hosts that started them say what they have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import ray
from ray.exceptions import RayError

from rltool.config.serve import EngineLaunch
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.launch.startup import Phase
from rltool.training.cluster import managed
from rltool.training.cluster.managed import ManagedEngines, by_model
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.places import Place


def launch(index: int, model: str, **changes: object) -> EngineLaunch:
    fields = {
        "index": index, "model": Path("/models/tiny"), "host": "127.0.0.1", "port": 8100 + index, "gpus": (index,),
        "tp": 1, "device": "cuda", "served_name": model, "model_name": model, "dtype": None, "max_model_len": 4096,
        "seed": index, "trust_remote_code": False, "python": Path("/bin/python"), "key_file": Path("/key"),
        "boot_id": f"{index:032x}", "weight_backend": "nccl", "work_dir": Path("/work"),
    }  # fmt: skip
    return EngineLaunch.model_validate(fields | changes)


def test_engines_are_known_by_their_addresses_for_an_older_sglang_has_a_boot_id_of_its_own():
    launches = [launch(0, "policy"), launch(1, "judge"), launch(2, "policy")]
    told = [EngineEndpoint(url=f"http://127.0.0.1:{8100 + i}", boot_id="f" * 32) for i in range(3)]
    found = by_model(launches, told)
    assert found == {"policy": [told[0], told[2]], "judge": [told[1]]}


def test_what_engines_do_is_asked_beside_the_wait_and_a_host_that_does_not_answer_holds_nothing_up(monkeypatch):
    ready, answers, looked = [False], iter([{"engine-1": Phase("compiling")}, RayError("it has died")]), list[float]()

    def get(refs):
        answer = next(answers)
        if isinstance(answer, RayError):
            raise answer
        return [{"engine-0": Phase("loading weights", 0.5)}, answer]

    monkeypatch.setattr(managed, "is_ready", lambda ref: ready[0])
    monkeypatch.setattr(ray, "get", get)
    engines = object.__new__(ManagedEngines)
    engines.starting = ""
    asks: list[int] = []
    engines._hosts = [
        (name, SimpleNamespace(starting=SimpleNamespace(remote=lambda: asks.append(1)))) for name in "ab"
    ]
    see = engines._seeing(looked.append)
    see(0.0)
    see(1.0)
    assert (engines.starting, len(asks)) == ("", 2), "not asked again before it has answered"
    ready[0] = True
    see(2.0)
    assert engines.starting == "engine-0: loading weights 50%; engine-1: compiling"
    see(3.0)
    assert engines.starting.startswith("engine-0") and looked == [0.0, 1.0, 2.0, 3.0]


def test_engines_that_share_gpus_are_in_the_same_bundle():
    """Managed ones: two bundles of two GPUs for three engines."""
    groups = ({"count": 3, "tp": 2, "engines_per_gpu": 2},)
    config = TrainConfig(model={"path": "m"}, engines={"mode": "managed", "groups": groups})
    engines = object.__new__(ManagedEngines)
    engines._plan = plan_placement(config, gpu=True)
    assert len(engines._plan.engines) == 2
    engines._places = [Place(1, "node", "127.0.0.1", (1, 2)), Place(2, "node", "127.0.0.1", (3, 4))]
    assert [[seat.gpus for seat in taken] for taken in engines._seats()] == [[(1, 2)], [(1, 2)], [(3, 4)]]
