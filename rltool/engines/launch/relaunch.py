"""Engines of `serve-engines` that end by themselves are started again under their old address, while it watches them.

A run that trains with them finds them there by its probes, and brings them to its weights.
"""

from __future__ import annotations

import uuid

from rltool.config.serve import EngineLaunch
from rltool.engines.endpoints import Endpoints, edit_endpoints
from rltool.engines.fleet.liveness import LivenessFromStart
from rltool.engines.launch.engine_process import engine_spec
from rltool.engines.launch.plan import url_of
from rltool.processes.relaunch import Relaunch
from rltool.processes.spawn import RunningProcess


class EngineRelaunch(Relaunch[EngineLaunch]):
    """`Restarts` of the engines in a group. Ended first is what a killed server leaves: its engine core, and that
    core's GPU memory."""

    vital = True

    def start(self, process: RunningProcess) -> RunningProcess:
        self.end(process)
        launch = self._launches[process.role].model_copy(update={"boot_id": uuid.uuid4().hex})
        url = url_of(launch)
        # First, for what may fail must not leave an unwatched process behind.
        edit_endpoints(self._group.run.endpoints_file, lambda file: _rebooted(file, url, launch.boot_id))
        started = self._group.start(engine_spec(launch), log=process.log)
        self._group.checks[process.role] = LivenessFromStart(
            started.state.pid, url, seconds=launch.ready_timeout, on_serving=lambda: self._budget.started(process.role)
        )
        return started


def _rebooted(file: Endpoints, url: str, boot_id: str) -> Endpoints:
    models = {}
    for name, entry in file.models.items():
        engines = tuple(e.model_copy(update={"boot_id": boot_id}) if e.url == url else e for e in entry.engines)
        models[name] = entry.model_copy(update={"engines": engines})
    return Endpoints(models=models)
