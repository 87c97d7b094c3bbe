"""What the fleet knows of an engine: its state, the transitions that exist, and the thresholds between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import WeightVersion


class State(StrEnum):
    STARTING = "starting"  # launched or just named to us; has not answered a probe yet
    READY = "ready"  # healthy and at the fleet's version: the only state that serves
    PAUSED = "paused"  # frozen by us for a weight sync; its silence is no failure
    STALE = "stale"  # healthy, but its weights are not the fleet's: waits for a full sync
    SUSPECT = "suspect"  # has failed too often to be given work, not often enough to be dead
    DEAD = "dead"  # its process exited, or it failed for too long
    ASLEEP = "asleep"  # its GPUs are the trainer's for now: it has no work, and nothing is expected of it
    DRAINING = "draining"  # leaving: finishes what it has, gets nothing new


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.STALE, State.DEAD}),
    State.READY: frozenset(
        {State.PAUSED, State.STALE, State.SUSPECT, State.DEAD, State.DRAINING, State.ASLEEP}
    ),
    State.PAUSED: frozenset({State.READY, State.STALE, State.DEAD}),
    State.STALE: frozenset({State.PAUSED, State.SUSPECT, State.DEAD, State.DRAINING, State.ASLEEP}),
    State.ASLEEP: frozenset({State.PAUSED, State.READY, State.DEAD}),
    State.SUSPECT: frozenset({State.READY, State.STALE, State.DEAD, State.DRAINING}),
    State.DEAD: frozenset({State.READY, State.STALE, State.STARTING}),
    State.DRAINING: frozenset(),
}
"""All that exist. STARTING, DEAD and ASLEEP -> READY are for engines with fixed weights alone, PAUSED and STALE for the
others: these wake up in a full sync."""

QUIET = frozenset({State.PAUSED, State.ASLEEP})
"""States that we have brought an engine into, and in which its silence is no failure."""


class IllegalTransition(RuntimeError):
    """The owner gave a command that the engine's state does not allow.
    A programming error, so it is shown with its traceback."""


@dataclass(frozen=True)
class FleetPolicy:
    """Thresholds. Failures are counted in a row: one success sets its own count, and only that, back to 0."""

    probe_seconds: float = 5.0
    """How often the owner probes. A probe is one small GET; a dead engine is noticed within `probes_to_suspect` of
    these."""
    probes_to_suspect: int = 2
    """One lost probe is a busy event loop (a server that tokenises or compiles misses one now and then);
    two are a sign."""
    probes_to_dead: int = 6
    """Half a minute at the default interval: longer than a stall while graphs are captured or a host swaps,
    shorter than a step."""
    incidents_to_suspect: int = 2
    """The client has already repeated a request before it reports a failure, so one incident is several attempts."""
    incidents_to_dead: int = 5
    """Beyond `incidents_to_suspect` these are canary requests of one token: three in a row is not a poisoned prompt."""
    canary_seconds: float = 10.0
    """Pause between two canary requests to an engine that answers probes but fails requests."""
    idle_canary_seconds: float = 60.0
    """A serving engine that has brought no request to its end for so long gets a canary request: one whose requests
    hang answers probes for ever, and behind a router it is unknown which engine that is."""
    start_seconds: float = 900.0
    """From launch to the first healthy probe. Loading 70B parameters from a network disk and capturing graphs takes ten
    minutes."""
    pause_seconds: float = 1800.0
    """A pause that lasts longer was forgotten by a sync that died; the engine is then given to the next full sync."""

    def __post_init__(self) -> None:
        for name in ("probe_seconds", "canary_seconds", "idle_canary_seconds", "start_seconds", "pause_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is a number of seconds above 0, not {getattr(self, name)}")
        for first, second in (("probes_to_suspect", "probes_to_dead"), ("incidents_to_suspect", "incidents_to_dead")):
            if not 1 <= getattr(self, first) < getattr(self, second):
                raise ValueError(
                    f"1 <= {first} < {second} must hold, not {getattr(self, first)} and {getattr(self, second)}: "
                    "an engine is SUSPECT before it is DEAD, or a hiccup costs a full sync"
                )


@dataclass(frozen=True)
class Member:
    """What the fleet knows of one engine. A snapshot: transitions and probes replace it, so code that awaits keeps the
    endpoint that it began with, also when the engine leaves meanwhile."""

    endpoint: EngineEndpoint
    """Where it is, with what its last probe found: its dialect is known."""
    info: EngineInfo
    """What its last probe found."""
    takes_weights: bool
    state: State
    since: float
    """Clock of the last transition."""
    reason: str
    boot_id: str | None = None
    """Of the process that last answered a probe; None if this kind of engine does not report it."""
    version: WeightVersion | None = None
    """Of the last full sync that it completed; None: its weights are unknown to us, whatever it reports."""
    probe_failures: int = 0
    incidents: int = 0
    """Failed requests in a row, those that broke together counted once."""
    last_incident_at: float | None = None
    last_canary_at: float | None = None
    last_success_at: float | None = None
    """When a request that it brought to its end was reported."""
    canary_wanted: bool = False
    """A request failed, and it may have been this engine's fault."""
    put_off_until: float = 0.0
    """Clock until which it is left out of syncs, for it held up the last one."""

    @property
    def url(self) -> str:
        return self.endpoint.url


def gpus_of(members: Iterable[Member]) -> int:
    """GPUs that these engines use: one that several share counts once, where their starter knew which it is."""
    members = list(members)
    known = {uuid for member in members for uuid in member.endpoint.gpu_uuids}
    return len(known) + sum(member.info.world_size for member in members if not member.endpoint.gpu_uuids)


@dataclass(frozen=True)
class Transition:
    """One line for the log, and the owner's cue to update the router.
    `before` is None for a new engine, `after` for a removed one."""

    at: float
    url: str
    before: State | None
    after: State | None
    reason: str
