"""A living training run, asked from any shell of its host: the driver's loopback endpoint (training/run_server.py).

The messages of both sides are defined here, because the command line must not import the training room. Fields
that one side does not know are for the other to ignore: `rltool status` may be newer or older than the run that it
looks at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.replies import quote
from rltool.engines.sync_client import exchange
from rltool.engines.types import HttpRequest
from rltool.errors import EngineUnreachable, RltoolError, UsageError
from rltool.processes.keys import read_key
from rltool.processes.run_directory import RunDirectory, list_runs, open_run, runs_root
from rltool.processes.state import ProcessState, is_alive, read_state

DRIVER_ROLE = "train"
SERVED_ROLE = "serve-trainer"

READ_SECONDS = 5.0
"""Deadline of GET /status and GET /engines in the driver."""
CHANGE_SECONDS = 60.0
"""Deadline of POST and DELETE /engines in the driver: a new engine is probed, and vLLM's first probe takes seconds."""
COMPARE_SECONDS = 600.0
"""Deadline of POST /weights/compare in the driver: it is answered when the trainer waits for its engines, which may be
after a long training step."""
REASON_CHARACTERS = 4000
"""Of a refusal: the driver's own reasons have lists of engines in them."""
_ON_THE_WAY = 2.0
"""Seconds that a caller waits beyond the driver's own deadline, so that it is the driver's reason that is read."""


class EngineStatus(TypedDict, total=False):
    """One engine as the run's fleet sees it. state: as in engines/fleet/fleet.py; since_seconds: how long in that
    state.

    leaves_within_seconds: of one that is to leave, until it has left at the latest.
    """

    url: str
    state: str
    reason: str
    since_seconds: float
    weight_version: str | None
    takes_weights: bool
    leaves_within_seconds: float


class GroupCounts(TypedDict, total=False):
    """Prompt groups since the run began: issued = running + partial + ready + in_hand + trained + dropped."""

    issued: int
    running: int
    partial: int
    ready: int
    in_hand: int
    trained: int
    dropped: int


class RunStatus(TypedDict, total=False):
    """GET /status. step: finished training steps, of `steps`; progress: what the driver waits for now, in words.

    evaluation_engines: those of eval.engines; router: the address that generation goes through; endpoints_files: those
    that the run was given its engines by.
    """

    step: int
    steps: int
    weight_version: str | None
    engines: list[EngineStatus]
    evaluation_engines: list[EngineStatus]
    groups: GroupCounts
    requests_in_flight: int
    router: str | None
    endpoints_files: list[str]
    progress: str


class CallCounts(TypedDict):
    """Of one kind of call, since the server began. failed: refused by the trainer; seconds: of the trainer's time;
    tokens: of forward and backward passes."""

    calls: int
    failed: int
    seconds: float
    tokens: int


class ServedStatus(TypedDict, total=False):
    """GET /status of a served trainer. calls: by kind, those that were carried out; waiting: by client, calls that
    the trainer has not begun; queued_bytes: by client, of calls and samples that have not ended; result_bytes: by
    client, of results that are kept; models: by client; running: the kind of call that is carried out now, "" for none;
    stalled: why none can be, "" otherwise; samples, sampled_tokens: that ended; samples_in_flight: by client; refused:
    by client, requests that were not accepted; requests: by route, those too."""

    calls: dict[str, CallCounts]
    waiting: dict[str, int]
    queued_bytes: dict[str, int]
    result_bytes: dict[str, int]
    stalled: str
    models: dict[str, int]
    running: str
    samples: int
    sampled_tokens: int
    samples_in_flight: dict[str, int]
    refused: dict[str, int]
    requests: dict[str, int]


class StepRecord(TypedDict):
    """What one step measured. step: as in metrics.jsonl, where -1 is the evaluation before the first."""

    step: int
    metrics: dict[str, float]


class History(TypedDict):
    """GET /history: the last records of the run, oldest first."""

    run: str
    records: list[StepRecord]


class ComparedEngine(TypedDict):
    """equal: whether nothing was found to differ; lines: what was compared, for people."""

    url: str
    equal: bool
    lines: list[str]


class ComparedWeights(TypedDict):
    """POST /weights/compare. weight_version: of the weights that the trainer holds."""

    weight_version: str | None
    engines: list[ComparedEngine]


@dataclass(frozen=True)
class Driver:
    """The driver of a living run. Every call raises EngineUnreachable where it does not answer within its deadline.
    role: SERVED_ROLE of a served trainer, which has `served` alone."""

    url: str
    key_file: Path
    role: str = DRIVER_ROLE

    def status(self) -> RunStatus:
        return self._ask(HttpRequest("GET", "/status"), READ_SECONDS)

    def served(self) -> ServedStatus:
        """Of a served trainer."""
        return self._ask(HttpRequest("GET", "/status"), READ_SECONDS)

    def history(self) -> History:
        return self._ask(HttpRequest("GET", "/history"), READ_SECONDS)

    def engines(self) -> list[EngineStatus]:
        return self._ask(HttpRequest("GET", "/engines"), READ_SECONDS)

    def add_engine(self, engine: EngineEndpoint) -> EngineStatus:
        """Have the run use this engine; it serves after a weight sync. Raises RltoolError with the run's reason.

        Group and role are sent where they are no defaults: a driver of an older version refuses what it does not know.
        """
        body = {"url": engine.url, "key_file": str(engine.key_file.absolute()) if engine.key_file else None}
        body |= engine.model_dump(mode="json", include={"group", "role"}, exclude_defaults=True)
        return self._ask(HttpRequest("POST", "/engines", body), CHANGE_SECONDS)

    def remove_engine(self, url: str) -> EngineStatus:
        """Have the run leave this engine: it gets no new request, and finishes those that it has."""
        return self._ask(HttpRequest("DELETE", "/engines", query={"url": url}), CHANGE_SECONDS)

    def compare_weights(self, urls: Sequence[str]) -> ComparedWeights:
        """Do these engines (none: all of the run) hold what its trainer holds? Waits for a moment between two steps."""
        return self._ask(HttpRequest("POST", "/weights/compare", {"engines": list(urls)}), COMPARE_SECONDS)

    def _ask(self, request: HttpRequest, deadline: float) -> Any:
        status, body = exchange(self.url, request, key=self._key(), timeout=deadline + _ON_THE_WAY)
        try:
            reply = json.loads(body)
        except ValueError as error:
            what = f"{request.method} {self.url}{request.path}"
            raise RltoolError(f"{what} answered {status}, not with JSON, so it is no driver: {body[:200]!r}") from error
        if status < 300:
            return reply
        reason = quote(str(reply.get("error", reply)) if isinstance(reply, dict) else str(reply), REASON_CHARACTERS)
        if status == 401:
            raise RltoolError(f"the driver at {self.url} refuses the key in {self.key_file}: {reason}")
        if status == 503:
            raise EngineUnreachable(reason)
        raise UsageError(reason) if status == 400 else RltoolError(reason)

    def _key(self) -> str:
        return read_key(self.key_file, "the run")


def driver_of(run: RunDirectory, state: ProcessState | None, role: str = DRIVER_ROLE) -> Driver | None:
    """The endpoint that this driver's state names; None where the process has ended or has none (yet)."""
    if state is None or state.role != role or state.url is None or not is_alive(state):
        return None
    return Driver(state.url, run.key_file, role)


def choose_driver(
    name: str | None, *, root: Path | None = None, roles: Sequence[str] = (DRIVER_ROLE,)
) -> tuple[RunDirectory, Driver]:
    """The driver of the run called `name`; without a name that of the only run that is training. Raises UsageError."""
    runs = list_runs(root) if name is None else [open_run(name, create=False, root=root)]
    found = ((run, driver_of(run, read_state(run, role), role)) for run in runs for role in roles)
    living = [(run, driver) for run, driver in found if driver is not None]
    if len(living) == 1:
        return living[0]
    if living:
        names = ", ".join(run.name for run, _ in living)
        raise UsageError(f"several runs are training: {names}; choose one with --run NAME")
    which = f"run {name} is not training" if name is not None else f"no run in {runs_root(root)} is training"
    raise UsageError(
        f"{which} now, or has not come to its engines yet, so no driver answers for them (`rltool status` shows "
        f"its processes); a run that starts is given its engines by `rltool train --rollout-external`"
    )
