"""The service's waits, made short: a run of seconds then sees what takes an hour at the defaults. One place for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from rltool.engines.client import EngineClient
from rltool.engines.fleet.fleet import FleetPolicy
from rltool.rollout import collector
from rltool.rollout.serving import data_plane
from rltool.rollout.serving import monitor as fleet_monitor
from rltool.training.manager import membership as fleet_membership
from rltool.training.manager import service as rollout_service
from rltool.training.manager import weight_updates
from rltool.weights import engine_calls, engine_update, liveness

POLICY = FleetPolicy(
    probe_seconds=0.05, probes_to_suspect=2, probes_to_dead=4, canary_seconds=0.1, idle_canary_seconds=0.4,
    start_seconds=60.0, pause_seconds=60.0,
)  # fmt: skip
HEALTH = 0.3
CONSTANTS = (
    (fleet_monitor, "HEALTH_SECONDS", HEALTH),
    (fleet_monitor, "CANARY_SECONDS", 0.5),
    (liveness, "HEALTH_SECONDS", HEALTH),
    (data_plane, "RETRY_SECONDS", 0.01),
    (data_plane, "ABORT_SECONDS", HEALTH),
    (engine_calls, "LEAVE_SECONDS", HEALTH),
    (engine_update, "REASON_SECONDS", HEALTH),
    (weight_updates, "RESYNC_SECONDS", 0.02),
    (rollout_service, "GUARD_SECONDS", 0.05),
    (collector, "INTERRUPT_SECONDS", 1.0),
    (fleet_membership, "DRAIN_POLL_SECONDS", 0.01),
    (fleet_membership, "ABORTED_SECONDS", 0.5),
    (fleet_membership, "REPLY_SECONDS", 0.1),
)
DEADLINES = {"generate": 600.0, "sync": 1.5, "close": 0.5, "engines": 600.0, "preflight": 1.0}
"""generate and engines are long on purpose: an engine that hangs must be left for another reason than its deadline."""


@contextmanager
def at_high_speed() -> Iterator[None]:
    with ExitStack() as stack:
        # A fake that was told to send too few samples of one fails, with a traceback of its server.
        stack.enter_context(patch.object(logging.getLogger("aiohttp.server"), "disabled", True))
        for module, name, seconds in CONSTANTS:
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            stack.enter_context(patch.object(module, name, seconds))
        for method in (EngineClient.health, EngineClient.load, EngineClient.probe):
            defaults = method.__kwdefaults__
            stack.enter_context(patch.dict(defaults, timeout=HEALTH))
        yield
