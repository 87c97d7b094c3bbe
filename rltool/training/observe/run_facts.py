"""A report's facts about a run beside its settings: when it started, on what, which model of which size."""

from __future__ import annotations

import socket
from collections import Counter
from datetime import datetime
from typing import Any

from rltool.config.train import TrainConfig
from rltool.models.memory import parameters_of
from rltool.models.registry import family_for, read_hf_config
from rltool.report.page import installed_versions
from rltool.training.checks.preflight import ProbedFleet


def run_facts(config: TrainConfig, devices: str, fleet: ProbedFleet | None) -> dict[str, Any]:
    """JSON-able. devices: of the trainer's ranks, in words; fleet: None where no engine was probed at the start."""
    family = family_for(read_hf_config(config.model.path), config.model.family)
    engines = Counter(f"{info.dialect} {info.engine_version}" for info in fleet.infos.values()) if fleet else Counter()
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": devices,
        "engines": ", ".join(f"{count} {name}" for name, count in engines.items()) or None,
        "model": f"{family.architecture} {config.model.path}",
        "parameters": parameters_of(family).total,
        "steps": config.steps,
        "versions": installed_versions(),
    }
