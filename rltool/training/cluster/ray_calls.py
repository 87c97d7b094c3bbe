"""Waiting for Ray actors: our own errors as they were raised, deadlines with their names, waits that a signal can end,
and of several failures the one that caused the others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)

from rltool.errors import HostLost, PartLost, RltoolError, RunFault

Waiting = Callable[[float], None]
"""Called now and then during a wait, with the seconds so far; what it raises ends the wait."""

POLL_SECONDS = 0.2
"""How long one wait inside Ray takes at most: Python's signal handlers run between two of them."""

PEER_SECONDS = 10.0
"""After a rank has crashed, for the others' errors: Ray reports a death a moment after the peers have
seen their connections close."""

_LOOK_SECONDS, _LOOKS = 1.0, 20
"""For a process of Ray's that others have seen to die."""

_OF_A_PEER = re.compile(
    r"connection (closed|reset) by peer|gloo/transport|timed out waiting|ncclRemoteError|ncclSystemError|"
    r"collective operation timeout|broken pipe",
    re.IGNORECASE,
)
"""The errors of gloo and NCCL on a rank that waited for another one."""

_DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError, OutOfMemoryError, RaySystemError)

_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(There are some potential|Some common causes|$)", re.DOTALL)
"""Ray's text on a process that ended by itself or was killed; it goes on with guesses, several lines of them."""


_NODE_DIED = re.compile(r"because its node has died.*?node was terminated[^:]*: *([^.\n]*)", re.DOTALL)
"""In Ray's text: the host of an actor is gone; why Ray thinks so."""

_CALL = re.compile(r"ray::(?:\w+\.)?(\w+)\(\)")
"""In Ray's text on what an actor raised: the method that was called."""


@dataclass
class Loss:
    """Of a process of Ray's, without which some calls are never answered. text: for people, None while all live; kind:
    of the error.

    The main thread's wait, or its next one, raises PartLost of it. Once: what closes the run may still ask actors.
    look: writes text where such a process has ended, and returns its name; asked before another's death is reported,
    which may be what followed from it.
    """

    text: str | None = None
    kind: type[PartLost] = PartLost
    was_raised: bool = False
    look: Callable[[], object] | None = None

    def raise_once(self) -> None:
        if self.text is not None and not self.was_raised and threading.current_thread() is threading.main_thread():
            self.was_raised = True
            raise self.kind(self.text)


LOSS = Loss()
"""Of the Ray that this process is connected with: there is one at most. A watch (ray_start.py) writes it."""


class DeadlinePassed(RunFault):
    """An actor did not answer in time."""


def get_all(
    refs: Sequence[ray.ObjectRef], deadline: float, name: str, *, who: Sequence[str],
    while_waiting: Waiting | None = None, lag: float | None = None,
) -> list[Any]:  # fmt: skip
    """The results of all refs, in order. Raises what the actors raised, our own errors as they are; of several failures
    the cause of the others (see `cause`).

    deadline: seconds; name: of the setting, which the error of a passed deadline quotes. who: whose each ref is, for
    errors. while_waiting(seconds so far): called now and then. lag: seconds that the others may still take when the
    first has answered, for ranks of which that one has the most to do (trainer.rendezvous_timeout).
    """
    wait = _Wait(refs, who, lag)
    started = now = time.monotonic()
    while wait.goes_on(now):
        if now - started > deadline:
            raise DeadlinePassed(
                f"{wait.missing} did not answer within {name} = {deadline:g} s; see the logs of the run (`rltool "
                "logs`)"
            )
        wait.poll(now)
        if wait.pending and while_waiting is not None:
            while_waiting(now - started)
        now = time.monotonic()
    return wait.results()


def is_ready(ref: ray.ObjectRef) -> bool:
    """Whether a call has ended, in any way: then `get_all` returns or raises at once."""
    return bool(ray.wait([ref], timeout=0)[0])


class _Wait:
    """What is still pending of some calls, which have failed, and since when that bounds the wait for the others."""

    def __init__(self, refs: Sequence[ray.ObjectRef], who: Sequence[str], lag: float | None) -> None:
        self.pending = list(refs)
        self._refs, self._lag = list(refs), lag
        self._names = dict(zip(refs, who, strict=True))
        self._failures: dict[ray.ObjectRef, BaseException] = {}
        self._crashed_at: float | None = None
        self._first_at: float | None = None

    @property
    def missing(self) -> str:
        return _listed(self._names[ref] for ref in self.pending)

    def goes_on(self, now: float) -> bool:
        """Raises PartLost where the first has answered `lag` seconds ago."""
        if not self.pending or any(map(has_died, self._failures.values())):
            return False
        if self._lag is not None and self._first_at is not None and now - self._first_at > self._lag:
            raise PartLost(
                f"{self.missing} hangs: no answer, {self._lag:g} s (trainer.rendezvous_timeout) after "
                f"{self._names[self._refs[0]]} has done its part; see the logs (`rltool logs`). Go on with "
                "`rltool train --resume`"
            )
        return self._crashed_at is None or now - self._crashed_at <= PEER_SECONDS

    def poll(self, now: float) -> None:
        LOSS.raise_once()
        try:
            done, self.pending = ray.wait(self.pending, num_returns=len(self.pending), timeout=POLL_SECONDS)
        except SystemError as error:  # what Ray makes of a KeyboardInterrupt that comes at the wrong moment
            raise error.__cause__ or error from None
        except RayError as error:
            _look_for_a_loss()
            raise PartLost(f"Ray itself was lost: {error}; go on with `rltool train --resume`") from error
        if self.pending or self._failures:
            self._failures |= _failures(done)
        if self._crashed_at is None and any(map(has_crashed, self._failures.values())):
            self._crashed_at = now
        if self._first_at is None and self._refs[0] not in self.pending:
            self._first_at = now

    def results(self) -> list[Any]:
        failures = self._failures
        try:
            if not failures:
                return ray.get(self._refs)
        except RayError:
            failures = _failures(self._refs)
        if any(map(has_died, failures.values())):
            _look_for_a_loss()
        named = {self._names[ref]: error for ref, error in failures.items()}
        raise cause(named, [self._names[ref] for ref in self.pending]) from next(iter(failures.values()))


def _look_for_a_loss() -> None:
    """Raises it. A killed process closes its connections, by which others see its death, before it has ended."""
    look = LOSS.look
    if look is not None:
        for _ in range(_LOOKS):
            if LOSS.text is not None or look() is not None:
                break
            time.sleep(_LOOK_SECONDS / _LOOKS)
    LOSS.raise_once()


def rank_names(count: int, hosts: Sequence[str] = ()) -> list[str]:
    """hosts: of each rank; they are named where there are several."""
    named = hosts if len(set(hosts)) > 1 else ()
    return [f"trainer rank {rank}{f' on host {named[rank]}' if named else ''}" for rank in range(count)]


def cause(failures: Mapping[str, BaseException], silent: Sequence[str]) -> BaseException:
    """The failure that the others follow from, of those found so far in their order; silent: who has not answered.

    A process that died comes first; then a rank's own error; last its error about a peer: then the culprit is
    among the silent, if there are any.
    """
    for name, error in failures.items():
        if has_died(error):
            return _died(name, error)
    for name, error in failures.items():
        if isinstance(_raised(error), torch.OutOfMemoryError):
            return _out_of_memory(name, error)
        if isinstance(_raised(error), ObjectLostError):
            return PartLost(
                f"{name} was to read what another process of the run held, the rollout manager or a rank, and that one "
                "died. See its log (`rltool logs`); go on with `rltool train --resume`"
            )
        if not is_of_a_peer(error):
            return unwrapped(error)
    name, error = next(iter(failures.items()))
    said = " ".join(_root(error).split())
    if silent:
        return PartLost(
            f"{_listed(silent)} hangs: no answer, and {name} waited for it in vain ({said}). How long ranks wait for "
            "each other is trainer.rendezvous_timeout; see the logs (`rltool logs`). Go on with `rltool train "
            "--resume`"
        )
    ours = unwrapped(error)
    if isinstance(ours, RltoolError):
        return ours
    who = f"{_listed(failures)} lost the connection between them" if len(failures) > 1 else f"{name} lost a peer"
    return PartLost(
        f"{who}: {said}. Does the network between their hosts pass what ranks send (docs/hosts.md)? How long they wait "
        "for each other is trainer.rendezvous_timeout. Go on with `rltool train --resume`"
    )


def has_died(error: BaseException) -> bool:
    """Its process, or Ray under it; not an exception that it raised."""
    return isinstance(error, _DEATHS)


def has_crashed(error: BaseException) -> bool:
    """An unexpected error: it is in no collective any more, and its peers may wait there for long.

    An expected error is raised by all ranks, or leaves them whole: they are waited for, so that a checkpoint can be
    written.
    """
    return not isinstance(unwrapped(error), RltoolError)


def is_of_a_peer(error: BaseException) -> bool:
    """It reports that another rank failed, not why."""
    ours = unwrapped(error)
    if isinstance(ours, RltoolError):
        return ours.of_a_peer
    return bool(_OF_A_PEER.search(_root(error)))


def unwrapped(error: BaseException) -> BaseException:
    """Our own error inside Ray's wrapper, or one that names the process that died; any other is returned as it is."""
    if has_died(error):
        return _died("a process of the run", error)
    if isinstance(error, RayTaskError) and isinstance(error.cause, RltoolError):
        return error.cause
    return error


def _failures(refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, BaseException]:
    """Of refs that are ready."""
    found: dict[ray.ObjectRef, BaseException] = {}
    for ref in refs:
        try:
            ray.get(ref, timeout=0)
        except GetTimeoutError:
            continue
        except RayError as error:
            found[ref] = error
    return found


def _died(name: str, error: BaseException) -> PartLost:
    kind, text = death(name, error)
    if kind is HostLost:
        return HostLost(
            f"{text}. Either the host went down, or the network between the two. Go on with `rltool train --resume` on "
            "the hosts that are left (trainer.world_size), or join it again: `ray stop --force` and `ray start` there"
        )
    return PartLost(f"{text}. See its log (`rltool logs`); go on with `rltool train --resume`")


def death(name: str, error: BaseException) -> tuple[type[PartLost], str]:
    """Whether the process of that name died or its host is gone, and the words for it. error: one of `has_died`."""
    text = str(error)
    if (lost := _NODE_DIED.search(text)) is not None or isinstance(error, NodeDiedError):
        address, why = re.search(r"\bip: (\S+)", text), lost[1].strip() if lost is not None else ""
        return HostLost, (
            f"{name} was lost with its host{f', {address[1]}' if address else ''}: from Ray's head at {_head()} that "
            f"is gone{f' ({why})' if why else ''}"
        )
    pid = re.search(r"pid[:=]\s*(\d+)", text)
    who = f"{name} (pid {pid[1]})" if pid else name
    detail = _EXIT_DETAIL.search(text)
    if detail:
        text = f"{detail[1].strip()} It was killed (by the kernel for memory? see `dmesg`), or crashed"
    return PartLost, f"{who} died: {text}"


def _head() -> str:
    # Asked by a process that is not connected, get_runtime_context starts a Ray.
    return ray.get_runtime_context().gcs_address if ray.is_initialized() else "its address"


def _out_of_memory(name: str, error: BaseException) -> PartLost:
    said = _root(error).partition("If reserved but unallocated memory is large")[0].strip()
    call = _CALL.search(str(error))
    return PartLost(
        f"{name} ran out of GPU memory{f' in {call[1]}' if call else ''}: {said} In a training step, lower "
        "trainer.max_tokens_per_micro_batch or compute activations again (trainer.recompute = \"selective\" or "
        '"full"), elsewhere trainer.logprob_tokens_per_micro_batch, if it is set; in any case leave it more room '
        "beside what else is on that GPU (--gpu-memory-utilization of engines). Then go on with `rltool train "
        "--resume`, or from the start where there is no checkpoint yet"
    )


def _root(error: BaseException) -> str:
    """What was raised there, without the traceback that Ray puts around it."""
    return str(_raised(error))


def _raised(error: BaseException) -> BaseException | None:
    return error.cause if isinstance(error, RayTaskError) else error


def _listed(names: Any) -> str:
    return " and ".join(names)
