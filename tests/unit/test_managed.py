"""Which engines serve which model, when the hosts that started them say what they have."""

from __future__ import annotations

from pathlib import Path

from rltool.config.serve import EngineLaunch
from rltool.engines.endpoints import EngineEndpoint
from rltool.training.managed import by_model


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
