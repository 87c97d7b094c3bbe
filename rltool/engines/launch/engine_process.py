"""The process of one planned engine."""

from __future__ import annotations

from rltool.config.serve import EngineLaunch
from rltool.engines.dialects.table import launches
from rltool.engines.launch.plan import url_of
from rltool.engines.launch.ready import process_role
from rltool.processes.spawn import ProcessSpec


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
