"""The process of one planned engine, and its next one where it ends by itself."""

from __future__ import annotations

import uuid

from rltool.config.serve import EngineLaunch
from rltool.engines.dialects.table import launches
from rltool.engines.endpoints import Endpoints, edit_endpoints
from rltool.engines.fleet.liveness import LivenessFromStart
from rltool.engines.launch.plan import url_of
from rltool.engines.launch.ready import process_role
from rltool.processes.relaunch import Relaunch
from rltool.processes.spawn import ProcessSpec, RunningProcess


def engine_spec(launch: EngineLaunch) -> ProcessSpec:
    """Argv and environment by the engine's dialect; the address of the part that serves alone."""
    engine_dialect = launches(launch.engine)
    return ProcessSpec(
        role=process_role(launch),
        argv=tuple(engine_dialect.argv(launch)),
        environment=engine_dialect.environment(launch),
        url=url_of(launch) if launch.node_rank == 0 else None,
        gpus=launch.gpus,
        # Not the user's directory: a folder called "vllm" or "tokenizers" there would be imported instead of the
        # package.
        cwd=launch.work_dir,
        temporary_in=engine_dialect.temporary_in,
    )


class EngineRelaunch(Relaunch[EngineLaunch]):
    """`Restarts` of the engines in a group, under their old addresses, while `serve-engines` watches them.

    A run that trains with them finds them there by its probes, and brings them to its weights. Ended first is what a
    killed server leaves: its engine core, and that core's GPU memory."""

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
