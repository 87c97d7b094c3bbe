"""Which engines may serve, as a pure state machine. No sockets, no tasks, no Ray, no router, no processes: the owner of
those (the rollout manager) reports *facts* to the fleet, gives it *commands*, and asks it for *decisions*.

- Facts (`probe_succeeded`, `probe_failed`, `fell_silent`, `request_succeeded`, `request_failed`, `process_exited`) are
  what was observed. They come from concurrent tasks, so they are accepted in every state, and ignored when they are
  about an engine that has been removed meanwhile or about a moment before the engine's last transition (`sent_at`).
- Commands (`add`, `pause`, `update_began`, `advance`, `resume`, `drain`, ...) are what the owner decided. One that the
  state does not allow raises IllegalTransition and changes nothing: it is a bug of the caller, never bad luck.
- Decisions (`serving`, `syncable`, `to_probe`, `canaries_due`, `take_transitions`) are read by the owner, who acts on
  them: it moves workers in and out of the router, starts processes again, logs.

Three rules decide everything else.

1. An engine that takes weights serves only at the fleet's version. **There is no transition from STALE to READY**, and
   none from STARTING or DEAD to READY for such an engine: a healthy probe means that a server answers, and the version
   it echoes is a label, not proof of what is in its memory. The one way back is a full sync: STALE -> PAUSED -> READY.
   (The trap: a worker restarted under its old URL answers its health route at once, with the weights of the checkpoint
   on disk. A router takes it back; the batch that it then samples is off-policy by the whole run, and nothing raises.)
2. Probes and requests fail apart. A wedged engine answers probes for ever, so no healthy probe forgives failed
   requests: a canary request does. Nor does a pause of ours, during which an engine may well refuse both, count as
   failure.
3. DRAINING has no way back. A healthy probe does not overrule a removal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.state import (
    QUIET,
    TRANSITIONS,
    FleetPolicy,
    IllegalTransition,
    Member,
    State,
    Transition,
)
from rltool.engines.types import EngineInfo
from rltool.engines.weight_version import WeightVersion

__all__ = ["TRANSITIONS", "Fleet", "FleetPolicy", "IllegalTransition", "Member", "State", "Transition", "WeightVersion"]


_PAUSABLE = (State.READY, State.STALE, State.ASLEEP)


class Fleet:
    """The engines of one model. Engines are named by their control-plane URL. Not thread-safe: it has one owner."""

    def __init__(
        self, policy: FleetPolicy | None = None, *, clock: Callable[[], float] = time.monotonic, labelled: bool = True
    ) -> None:
        """labelled: engines report the version that they hold; False: they hold several, as adapters, and report that
        of the model beside these."""
        self._labelled = labelled
        self.policy = policy or FleetPolicy()
        self.version: WeightVersion | None = None
        self.clock = clock
        self.revision = 0
        """Changes with each engine that joins, leaves or has another address, and with state and version of those that
        serve: who may have a request is decided anew only then. In a sync hundreds change, one after the other."""
        self._members: dict[str, Member] = {}
        self._transitions: list[Transition] = []

    # -- decisions

    def members(self, *states: State) -> tuple[Member, ...]:
        """Those in one of these states; without any all."""
        return tuple(m for m in self._members.values() if not states or m.state in states)

    def member(self, url: str) -> Member:
        try:
            return self._members[url]
        except KeyError:
            known = ", ".join(self._members) or "none"
            raise IllegalTransition(f"{url} is not an engine of this fleet (known: {known})") from None

    def find(self, url: str) -> Member | None:
        """None: it is no engine of this fleet, or no longer."""
        return self._members.get(url)

    def serving(self) -> tuple[str, ...]:
        """Engines that may be given generation requests."""
        return tuple(m.url for m in self.members(State.READY))

    def syncable(self) -> tuple[str, ...]:
        """Engines that take weights and can be paused for a sync now: the members of the next transfer group. Those
        that are asleep wake up in it; those that are put off are among them only where there are no others."""
        there = [m for m in self.members(*_PAUSABLE) if m.takes_weights]
        now = self.clock()
        return tuple(m.url for m in [m for m in there if m.put_off_until <= now] or there)

    def can_be_paused(self, url: str) -> bool:
        """Whether a sync that has begun with this engine may go on with it."""
        member = self._members.get(url)
        return member is not None and member.takes_weights and member.state in _PAUSABLE

    def to_probe(self) -> tuple[str, ...]:
        """Engines to be probed every `probe_seconds`. The paused, the sleeping and the leaving are left alone."""
        return tuple(m.url for m in self.members() if m.state not in QUIET | {State.DRAINING})

    def canaries_due(self) -> tuple[str, ...]:
        """Engines due for a canary request, a generation of one token: those that answer probes but fail requests, and
        serving ones whose last request failed, is long ago, or may have been lost behind a router.

        The owner sends it and reports the outcome. Handing one out starts its `canary_seconds`.
        """
        now = self.clock()
        due = [m for m in self.members() if self._canary_is_due(m, now)]
        for member in due:
            self._update(member, last_canary_at=now, canary_wanted=False)
        return tuple(m.url for m in due)

    def take_transitions(self) -> tuple[Transition, ...]:
        """What happened since the last call, oldest first."""
        taken, self._transitions = tuple(self._transitions), []
        return taken

    @property
    def has_transitions(self) -> bool:
        """Whether there is something to take."""
        return bool(self._transitions)

    # -- commands: membership

    def add(self, endpoint: EngineEndpoint, info: EngineInfo, *, takes_weights: bool = True) -> None:
        """-> STARTING. `takes_weights` False: a judge or frozen reference, which is never PAUSED and never STALE."""
        url = endpoint.url
        if url in self._members:
            raise IllegalTransition(f"{url} is in the fleet already; one URL is one engine")
        now = self.clock()
        self._members[url] = Member(endpoint.probed(info), info, takes_weights, State.STARTING, now, "added")
        self.revision += 1
        self._transitions.append(Transition(now, url, None, State.STARTING, "added"))

    def add_probed(self, endpoint: EngineEndpoint, info: EngineInfo, *, takes_weights: bool = True) -> None:
        """`add`, of an engine that has just given `info` in answer to a probe: -> STARTING -> READY or STALE."""
        self.add(endpoint, info, takes_weights=takes_weights)
        self.probe_succeeded(endpoint.url, info, sent_at=self.member(endpoint.url).since)

    def drain(self, url: str, reason: str) -> None:
        """READY, STALE or SUSPECT -> DRAINING. A PAUSED engine is resumed first, for its requests are frozen."""
        self._require(url, "drain", State.READY, State.STALE, State.SUSPECT)
        self._move(url, State.DRAINING, reason)

    def remove(self, url: str, reason: str) -> None:
        """Forget an engine. Not from READY (drain it first) or PAUSED (a transfer group counts on it)."""
        member = self._require(url, "remove", State.STARTING, State.STALE, State.SUSPECT, State.DEAD, State.DRAINING)
        del self._members[url]
        self.revision += 1
        self._transitions.append(Transition(self.clock(), url, member.state, None, reason))

    def restarted(self, url: str) -> None:
        """DEAD -> STARTING: the owner has launched a new process at this URL. (An external engine revives by
        itself.)"""
        self._require(url, "restart", State.DEAD)
        self._move(
            url, State.STARTING, "process launched again", boot_id=None, version=None, probe_failures=0, incidents=0
        )

    # -- commands: GPUs that engines and trainer use in turns

    def fall_asleep(self, url: str) -> None:
        """READY or STALE -> ASLEEP, before the engine frees its GPUs: its weights go, its process and its
        connection with the trainer stay."""
        self._require(url, "put to sleep", State.READY, State.STALE)
        self._move(url, State.ASLEEP, "its GPUs are the trainer's")

    def wake_up(self, url: str) -> None:
        """ASLEEP -> READY, of an engine with fixed weights, once it holds them again. The others are paused."""
        member = self._require(url, "wake up", State.ASLEEP)
        if member.takes_weights:
            raise IllegalTransition(f"{url} takes weights, so only a sync wakes it up")
        self._move(url, State.READY, "awake again")

    # -- commands: weights. pause -> update_began -> update_finished (or update_failed); then advance, then resume in
    # `finally`

    def pause(self, url: str) -> None:
        """READY, STALE or ASLEEP -> PAUSED, before the pause is sent."""
        member = self._require(url, "pause", State.READY, State.STALE, State.ASLEEP)
        if not member.takes_weights:
            raise IllegalTransition(f"{url} takes no weights, so there is no sync to pause it for")
        version = None if member.state is State.ASLEEP else member.version
        self._move(url, State.PAUSED, "paused for a weight sync", version=version)

    def update_began(self, url: str) -> None:
        """From here until `update_finished` the weights are neither the old nor the new ones, however the sync ends."""
        self._update(self._require(url, "begin an update of", State.PAUSED), version=None)

    def update_finished(self, url: str, version: WeightVersion) -> None:
        """It has acknowledged all of `version`, and serves once the fleet is at that version and it is resumed."""
        self._update(self._require(url, "finish an update of", State.PAUSED), version=version)

    def update_failed(self, url: str, reason: str) -> None:
        """PAUSED -> STALE."""
        self._require(url, "fail an update of", State.PAUSED)
        self._move(url, State.STALE, reason, version=None)

    def not_reached(self, url: str, reason: str) -> None:
        """Why an engine that is STALE still is, for those who wait for it."""
        if (member := self.find(url)) is not None and member.state is State.STALE:
            self._update(member, reason=reason)

    def put_off(self, url: str, seconds: float) -> None:
        """Leave it out of syncs for so long, or until it is in another state than READY or STALE."""
        if (member := self.find(url)) is not None:
            self._update(member, put_off_until=self.clock() + seconds)

    def advance(self, version: WeightVersion) -> None:
        """The fleet is at `version` from now on; engines that serve with another are STALE at once.

        Refused before a paused engine has received all of it: a version that is bumped first, for a transfer that then
        fails, would leave a fleet in which old and new weights cannot be distinguished. Refused, too, for an earlier or
        foreign version.
        """
        if not any(m.state is State.PAUSED and m.version == version for m in self.members()):
            raise IllegalTransition(
                f"no paused engine has received {version}: the version follows the weights, never the reverse"
            )
        if self.version not in (None, version) and not version.follows(self.version):
            raise IllegalTransition(f"the fleet is at {self.version}; {version} is not a later version of the same run")
        self.version = version
        for member in self.members(State.READY):
            if not self._is_current(member):
                self._move(member.url, State.STALE, f"missed the sync to {version}")

    def resume(self, url: str) -> None:
        """PAUSED -> READY if its last full sync brought the fleet's version, else STALE. The resume was sent."""
        member = self._require(url, "resume", State.PAUSED)
        if self._is_current(member):
            self._move(url, State.READY, f"resumed at {self.version}")
        else:
            self._move(url, State.STALE, f"resumed without the fleet's weights ({self.version or 'no sync yet'})")

    # -- facts

    def probe_succeeded(self, url: str, info: EngineInfo, *, sent_at: float) -> None:
        """The engine answered. Its boot id and version in `info` are None where its kind has none."""
        member = self._observable(url, sent_at)
        if member is None:
            return
        if not self._labelled:
            info = replace(info, weight_version=None)
        boot_id = info.boot_id
        member = self._update(member, info=info, endpoint=member.endpoint.probed(info))
        if member.state in QUIET:
            # In the middle of an update its version is no news, but a new process has lost whatever it was sent.
            if boot_id is not None:
                self._update(self._check_identity(member, boot_id, None), boot_id=boot_id)
            return
        member = self._check_identity(member, boot_id, info.weight_version)
        member = self._update(member, probe_failures=0, boot_id=boot_id)
        if member.state is State.STARTING:
            self._rejoin(member, "answered its first probe")
        elif member.state is State.READY and not self._is_current(member):
            self._move(
                url, State.STALE, f"its weights are no longer those of {self.version} (restarted, or updated by others)"
            )
        elif member.state in (State.SUSPECT, State.DEAD) and not self._is_wedged(member):
            self._rejoin(member, "answers probes again")

    def probe_failed(self, url: str, reason: str, *, sent_at: float) -> None:
        """No healthy answer. Expected while STARTING, until `start_seconds`; our doing while PAUSED or ASLEEP."""
        member = self._observable(url, sent_at)
        if member is None or member.state in QUIET | {State.STARTING}:
            return
        member = self._update(member, probe_failures=member.probe_failures + 1)
        self._judge(member, f"{member.probe_failures} probes in a row failed, the last with: {reason}")

    def fell_silent(self, url: str, reason: str, *, checks: int) -> None:
        """It missed this many health checks in a row, in the middle of a weight sync, whose failure it is already. They
        weigh as much as probes."""
        member = self._members.get(url)
        if member is not None and member.state not in QUIET | {State.STARTING}:
            self._judge(self._update(member, probe_failures=member.probe_failures + checks), reason)

    def request_succeeded(self, url: str, *, sent_at: float) -> None:
        """A generation (or a canary request) came back whole."""
        member = self._observable(url, sent_at)
        if member is None or member.state in QUIET | {State.STARTING}:
            return
        member = self._update(
            member,
            incidents=0,
            last_incident_at=None,
            canary_wanted=False,
            last_success_at=self.clock(),
        )
        if member.state in (State.SUSPECT, State.DEAD) and member.probe_failures == 0:
            self._rejoin(member, "a canary request succeeded")

    def request_failed(self, url: str, reason: str, *, sent_at: float) -> None:
        """A generation failed after the client's retries: 5xx, broken connection or deadline. Never a 4xx, which is the
        caller's fault.

        Requests in flight together break together, and count as one incident: only one sent after the last incident
        counts anew.
        """
        member = self._observable(url, sent_at)
        if member is None or member.state in QUIET | {State.STARTING}:
            return
        if member.last_incident_at is not None and sent_at <= member.last_incident_at:
            return
        member = self._update(member, incidents=member.incidents + 1, last_incident_at=self.clock())
        self._judge(member, f"{member.incidents} requests in a row failed, the last with: {reason}")

    def request_lost(self) -> None:
        """A request failed behind a router, which does not report where: every serving engine must show that it
        works."""
        for member in self.members(State.READY):
            self._update(member, canary_wanted=True)

    def version_refused(self, url: str, reason: str, *, sent_at: float) -> None:
        """A completion had a version that this engine should not have.
        READY -> STALE: only a full sync makes it ours again."""
        member = self._observable(url, sent_at)
        if member is not None and member.state is State.READY and member.takes_weights:
            self._move(url, State.STALE, reason, version=None)

    def process_exited(self, url: str, reason: str) -> None:
        """The supervisor saw the process end: no threshold applies. The next process at this URL has other weights."""
        member = self._members.get(url)
        if member is None or member.state is State.DRAINING:
            return
        if member.state is not State.DEAD:
            self._move(url, State.DEAD, reason)
        self._update(self._members[url], boot_id=None, version=None, incidents=0)

    def tick(self) -> None:
        """Time has passed. Call it as often as engines are probed."""
        now = self.clock()
        for member in self.members():
            waited = now - member.since
            if member.state is State.STARTING and waited > self.policy.start_seconds:
                self._move(
                    member.url, State.DEAD, f"no healthy probe within {self.policy.start_seconds:g} s of its start"
                )
            elif member.state is State.PAUSED and waited > self.policy.pause_seconds:
                reason = f"still paused after {self.policy.pause_seconds:g} s: its sync never ended"
                self._move(member.url, State.STALE, reason, version=None)

    # -- the rest is private

    def _is_current(self, member: Member) -> bool:
        return not member.takes_weights or (self.version is not None and member.version == self.version)

    def _is_wedged(self, member: Member) -> bool:
        return member.incidents >= self.policy.incidents_to_suspect

    def _canary_is_due(self, member: Member, now: float) -> bool:
        last = member.last_canary_at
        if last is not None and now - last < self.policy.canary_seconds:
            return False
        if member.state in (State.SUSPECT, State.DEAD):
            return self._is_wedged(member) and member.probe_failures == 0
        if member.state is not State.READY:
            return False
        seen = max(at for at in (last, member.last_success_at, member.since) if at is not None)
        return member.canary_wanted or member.incidents > 0 or now - seen >= self.policy.idle_canary_seconds

    def _observable(self, url: str, sent_at: float) -> Member | None:
        """The member, if a fact gathered at `sent_at` is still valid."""
        member = self._members.get(url)
        if member is None or sent_at < member.since:
            return None
        return member

    def _check_identity(self, member: Member, boot_id: str | None, version: str | None) -> Member:
        """Forget the weights of an engine that cannot be shown to be the process, and to hold what it was sent."""
        rebooted = member.boot_id is not None and boot_id != member.boot_id
        relabelled = version is not None and member.version is not None and version != str(member.version)
        # An engine that was out of sight and reports neither boot id nor version may have been restarted
        # meanwhile.
        unprovable = member.probe_failures > 0 and boot_id is None and version is None
        if rebooted:
            member = self._update(member, incidents=0, last_incident_at=None)
        return self._update(member, version=None) if rebooted or relabelled or unprovable else member

    def _judge(self, member: Member, reason: str) -> None:
        """Move an engine whose failures have reached a threshold."""
        policy = self.policy
        dead = member.probe_failures >= policy.probes_to_dead or member.incidents >= policy.incidents_to_dead
        suspect = member.probe_failures >= policy.probes_to_suspect or self._is_wedged(member)
        if dead and member.state is State.SUSPECT:
            self._move(member.url, State.DEAD, reason)
        elif suspect and member.state in (State.READY, State.STALE):
            self._move(member.url, State.SUSPECT, reason)

    def _rejoin(self, member: Member, reason: str) -> None:
        """Back among the healthy: to work if its weights are still ours, else to wait for a full sync.

        An engine that takes weights and was dead or not yet seen is STALE whatever is on record: while it was away,
        transfer groups were built without it.
        """
        was_away = member.state in (State.STARTING, State.DEAD)
        if member.takes_weights and (was_away or not self._is_current(member)):
            self._move(member.url, State.STALE, reason, version=None)
        else:
            self._move(member.url, State.READY, reason)

    def _require(self, url: str, command: str, *states: State) -> Member:
        member = self.member(url)
        if member.state not in states:
            allowed = ", ".join(state.value for state in states)
            raise IllegalTransition(
                f"cannot {command} {url}: it is {member.state.value} ({member.reason}), not {allowed}"
            )
        return member

    def _update(self, member: Member, **changes: object) -> Member:
        before, changed = self._members[member.url], replace(member, **changes)
        self._members[member.url] = changed
        serves = State.READY in (before.state, changed.state)
        moved = (before.state, before.version) != (changed.state, changed.version)
        readdressed = changed.endpoint is not before.endpoint and changed.endpoint != before.endpoint
        self.revision += (serves and moved) or readdressed
        return changed

    def _move(self, url: str, state: State, reason: str, **changes: object) -> None:
        before = self._members[url]
        if state not in TRANSITIONS[before.state]:
            raise IllegalTransition(
                f"there is no transition from {before.state.value} to {state.value} ({url}: {reason})"
            )
        now = self.clock()
        if state is not State.STALE:
            changes = {"put_off_until": 0.0, **changes}
        self._update(before, state=state, since=now, reason=reason, **changes)
        self._transitions.append(Transition(now, url, before.state, state, reason))
