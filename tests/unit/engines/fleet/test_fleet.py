"""The fleet, sentence by sentence; then a seeded random walk against a simulated truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from rltool.engines.fleet.fleet import TRANSITIONS, Fleet, FleetPolicy, IllegalTransition, State
from rltool.engines.fleet.state import gpus_of
from rltool.engines.weight_version import BadWeightVersion, WeightVersion
from tests import fleets
from tests.clock import Clock

RUN = "0123456789abcdef" * 2
OTHER_RUN = "fedcba9876543210" * 2
V0 = WeightVersion(RUN, 0, 0)
V1 = replace(V0, number=V0.number + 1)
V2 = replace(V0, number=V0.number + 2)
A, B, JUDGE = "http://a:1", "http://b:1", "http://judge:1"


class World:
    """A fleet with the clock in hand, and the phrases that the tests are written in."""

    def __init__(self, **policy: float) -> None:
        self.clock = Clock(1000.0)
        self.fleet = Fleet(FleetPolicy(**policy), clock=self.clock)
        self.boots: dict[str, str | None] = {}

    def later(self, seconds: float = 1.0) -> float:
        self.clock.now += seconds
        return self.clock.now

    def added(self, *urls: str, takes_weights: bool = True) -> World:
        for url in urls:
            fleets.add(self.fleet, url, takes_weights=takes_weights)
            self.boots[url] = f"boot of {url}"
        return self

    def answers(self, url: str, *, version: str | None = None, boot_id: str | None = "") -> None:
        boot_id = self.boots[url] if boot_id == "" else boot_id
        fleets.answers(self.fleet, url, sent_at=self.later(), boot_id=boot_id, version=version)

    def misses_probes(self, url: str, times: int) -> None:
        for _ in range(times):
            self.fleet.probe_failed(url, "timed out", sent_at=self.later())

    def fails_requests(self, url: str, times: int) -> None:
        for _ in range(times):
            self.fleet.request_failed(url, "reset", sent_at=self.later())
            self.later()

    def answers_requests(self, url: str) -> None:
        self.fleet.request_succeeded(url, sent_at=self.later())

    def synced(self, version: WeightVersion, *urls: str) -> World:
        for url in urls:
            self.fleet.pause(url)
        for url in urls:
            self.fleet.update_began(url)
            self.fleet.update_finished(url, version)
        self.fleet.advance(version)
        for url in urls:
            self.fleet.resume(url)
        return self

    def serving(self, *urls: str, version: WeightVersion = V0) -> World:
        """These engines have been added, probed and synced."""
        self.added(*urls)
        for url in urls:
            self.answers(url)
        return self.synced(version, *urls)

    def state(self, url: str) -> State:
        return self.fleet.member(url).state


# -- starting


def test_a_new_engine_starts_and_does_not_serve():
    world = World().added(A)
    assert world.state(A) is State.STARTING
    assert world.fleet.serving() == ()


def test_an_engine_that_takes_weights_is_stale_when_it_first_answers():
    world = World().added(A)
    world.answers(A)
    assert world.state(A) is State.STALE
    assert world.fleet.serving() == ()
    assert world.fleet.syncable() == (A,)


def test_an_engine_that_held_up_a_sync_is_left_out_for_a_while_unless_there_is_no_other():
    world = World().added(A, B)
    world.answers(A)
    world.answers(B)
    world.fleet.put_off(A, 30.0)
    assert world.fleet.syncable() == (B,)
    world.later(29.0)
    assert world.fleet.syncable() == (B,)
    world.later(1.0)
    assert set(world.fleet.syncable()) == {A, B}
    world.fleet.put_off(A, 30.0)
    world.fleet.put_off(B, 30.0)
    assert set(world.fleet.syncable()) == {A, B}, "nobody else is there"
    world.fleet.pause(B)
    world.fleet.update_failed(B, "slow")
    assert world.fleet.syncable() == (B,), "a pause ends it"
    world.fleet.not_reached(A, "a firewall")
    assert world.state(A) is State.STALE and world.fleet.member(A).reason == "a firewall"


def test_an_engine_with_fixed_weights_serves_as_soon_as_it_answers():
    world = World().added(JUDGE, takes_weights=False)
    world.answers(JUDGE)
    assert world.fleet.serving() == (JUDGE,)
    assert world.fleet.syncable() == ()


def test_failed_probes_of_a_starting_engine_do_not_count():
    world = World().added(A)
    world.misses_probes(A, 50)
    assert world.state(A) is State.STARTING
    world.answers(A)
    assert world.fleet.member(A).probe_failures == 0


def test_an_engine_that_never_answers_is_dead_after_its_start_time():
    world = World(start_seconds=60).added(A)
    world.later(60)
    world.fleet.tick()
    assert world.state(A) is State.STARTING
    world.later(1)
    world.fleet.tick()
    assert world.state(A) is State.DEAD


def test_the_version_that_a_new_engine_claims_does_not_make_it_current():
    world = World().serving(A)
    world.added(B)
    world.answers(B, version=str(V0))
    assert world.state(B) is State.STALE


# -- syncs


def test_a_synced_engine_serves():
    assert World().serving(A).fleet.serving() == (A,)


def test_a_paused_engine_does_not_serve_and_its_silence_is_no_failure():
    world = World().serving(A)
    world.fleet.pause(A)
    world.misses_probes(A, 50)
    world.fails_requests(A, 50)
    assert world.state(A) is State.PAUSED
    assert world.fleet.serving() == () and world.fleet.to_probe() == ()
    world.fleet.resume(A)
    assert world.fleet.serving() == (A,)
    assert (world.fleet.member(A).probe_failures, world.fleet.member(A).incidents) == (0, 0)


def test_a_pause_without_an_update_ends_where_it_began():
    world = World().serving(A)
    world.fleet.pause(A)
    world.fleet.resume(A)
    assert world.fleet.serving() == (A,)


def test_an_engine_resumed_in_the_middle_of_an_update_is_stale():
    world = World().serving(A)
    world.fleet.pause(A)
    world.fleet.update_began(A)
    world.fleet.resume(A)  # the sync died; its `finally` resumed
    assert world.state(A) is State.STALE


def test_an_engine_whose_update_failed_is_stale_even_if_it_still_names_the_fleets_version():
    world = World().serving(A, B)
    world.fleet.pause(A)
    world.fleet.update_began(A)
    world.fleet.update_failed(A, "broken pipe")
    world.answers(A, version=str(V0))
    assert world.state(A) is State.STALE
    assert world.fleet.serving() == (B,)


def test_an_engine_that_missed_a_sync_is_stale_at_once():
    world = World().serving(A, B).synced(V1, A)
    assert world.state(B) is State.STALE
    assert world.fleet.serving() == (A,)


def test_a_stale_engine_is_brought_back_by_a_full_sync_of_the_current_version():
    world = World().serving(A, B).synced(V1, A).synced(V1, B)
    assert world.fleet.serving() == (A, B)


def test_an_engine_synced_to_an_older_version_stays_stale():
    world = World().serving(A, B).synced(V1, A)
    world.fleet.pause(B)
    world.fleet.update_began(B)
    world.fleet.update_finished(B, V0)
    world.fleet.resume(B)
    assert world.state(B) is State.STALE


def test_the_version_cannot_advance_before_an_engine_has_received_it():
    world = World().serving(A)
    world.fleet.pause(A)
    world.fleet.update_began(A)
    with pytest.raises(IllegalTransition, match="follows the weights"):
        world.fleet.advance(V1)
    assert world.fleet.version == V0


@pytest.mark.parametrize("version", [V0, WeightVersion(OTHER_RUN, 0, 9)], ids=["earlier", "of another run"])
def test_the_version_cannot_go_back_or_to_another_run(version):
    world = World().serving(A, version=V1)
    world.fleet.pause(A)
    world.fleet.update_began(A)
    world.fleet.update_finished(A, version)
    with pytest.raises(IllegalTransition, match="not a later version"):
        world.fleet.advance(version)


def test_a_pause_that_was_forgotten_ends_stale():
    world = World(pause_seconds=100).serving(A)
    world.fleet.pause(A)
    world.later(101)
    world.fleet.tick()
    assert world.state(A) is State.STALE
    assert world.synced(V1, A).fleet.serving() == (A,)


def test_an_engine_with_fixed_weights_is_never_paused_and_never_stale():
    world = World().added(JUDGE, takes_weights=False)
    world.answers(JUDGE)
    with pytest.raises(IllegalTransition, match="takes no weights"):
        world.fleet.pause(JUDGE)
    world.serving(A)
    world.answers(JUDGE, boot_id="another process", version="something else")
    assert world.state(JUDGE) is State.READY


# -- restarts and foreign weights


def test_a_ready_engine_with_a_new_boot_id_is_stale():
    world = World().serving(A)
    world.answers(A, boot_id="another process", version=str(V0))
    assert world.state(A) is State.STALE


def test_a_ready_engine_with_another_version_is_stale():
    world = World().serving(A)
    world.answers(A, version=str(WeightVersion(OTHER_RUN, 0, 0)))
    assert world.state(A) is State.STALE


def test_a_ready_engine_that_repeats_its_boot_id_and_version_stays_ready():
    world = World().serving(A)
    world.answers(A, version=str(V0))
    assert world.state(A) is State.READY


@pytest.mark.parametrize("version", [None, str(V0)], ids=["silent", "claiming the current version"])
def test_a_revived_engine_is_not_served_before_a_sync(version):
    world = World().serving(A)
    world.misses_probes(A, 6)
    assert world.state(A) is State.DEAD
    world.answers(A, version=version)
    assert world.state(A) is State.STALE
    world.answers(A, version=version)
    assert world.state(A) is State.STALE
    assert world.synced(V1, A).fleet.serving() == (A,)


def test_a_revived_engine_is_not_made_current_by_a_pause_without_an_update():
    world = World().serving(A)
    world.misses_probes(A, 6)
    world.answers(A, version=str(V0))
    world.fleet.pause(A)
    world.fleet.resume(A)
    assert world.state(A) is State.STALE


def test_a_revived_engine_with_fixed_weights_serves_again():
    world = World().added(JUDGE, takes_weights=False)
    world.answers(JUDGE)
    world.misses_probes(JUDGE, 6)
    world.answers(JUDGE)
    assert world.fleet.serving() == (JUDGE,)


def test_an_engine_whose_process_exited_is_dead_at_once_and_stale_when_it_is_back():
    world = World().serving(A)
    world.fleet.process_exited(A, "exit code -9")
    assert world.state(A) is State.DEAD
    world.fleet.restarted(A)
    assert world.state(A) is State.STARTING
    world.answers(A, boot_id="another process")
    assert world.state(A) is State.STALE


def test_an_engine_that_restarts_while_paused_is_stale_when_it_is_resumed():
    world = World().serving(A)
    world.fleet.pause(A)
    world.answers(A, boot_id="another process", version=str(V0))
    world.fleet.resume(A)
    assert world.state(A) is State.STALE


def test_a_process_that_exits_while_paused_is_dead():
    world = World().serving(A)
    world.fleet.pause(A)
    world.fleet.process_exited(A, "exit code -9")
    assert world.state(A) is State.DEAD
    with pytest.raises(IllegalTransition, match="it is dead"):
        world.fleet.update_finished(A, V1)


def test_the_failed_requests_of_a_process_die_with_it():
    world = World()
    world.added(A)
    world.answers(A, boot_id=None)
    world.synced(V0, A)
    world.fails_requests(A, 5)
    world.fleet.process_exited(A, "exit code -9")
    world.answers(A, boot_id=None)  # started again by somebody; it does not tell that it is another process
    assert world.state(A) is State.STALE


# -- failing probes, failing requests


def test_one_lost_probe_changes_nothing():
    world = World().serving(A)
    world.misses_probes(A, 1)
    assert world.state(A) is State.READY
    world.answers(A, version=str(V0))
    world.misses_probes(A, 1)
    assert world.state(A) is State.READY


def test_lost_probes_make_an_engine_suspect_and_then_dead():
    world = World().serving(A)
    world.misses_probes(A, 2)
    assert world.state(A) is State.SUSPECT
    world.misses_probes(A, 3)
    assert world.state(A) is State.SUSPECT
    world.misses_probes(A, 1)
    assert world.state(A) is State.DEAD


def test_a_suspect_that_answers_as_the_same_process_serves_on():
    world = World().serving(A)
    world.misses_probes(A, 2)
    world.answers(A)
    assert world.fleet.serving() == (A,)


def test_a_suspect_that_tells_neither_boot_id_nor_version_needs_a_sync():
    world = World().added(A)
    world.answers(A, boot_id=None)
    world.synced(V0, A)
    world.answers(A, boot_id=None)
    assert world.state(A) is State.READY  # never out of sight
    world.misses_probes(A, 2)
    world.answers(A, boot_id=None)
    assert world.state(A) is State.STALE


def test_a_suspect_that_missed_a_sync_is_stale_when_it_answers():
    world = World().serving(A, B)
    world.misses_probes(B, 2)
    world.synced(V1, A)
    world.answers(B)
    assert world.state(B) is State.STALE


def test_failed_requests_are_not_forgiven_by_healthy_probes():
    world = World().serving(A)
    world.fails_requests(A, 2)
    assert world.state(A) is State.SUSPECT
    for _ in range(10):
        world.answers(A, version=str(V0))
    assert world.state(A) is State.SUSPECT


def test_a_wedged_engine_is_tried_at_intervals_and_serves_after_a_successful_canary():
    world = World(canary_seconds=10).serving(A)
    assert world.fleet.canaries_due() == ()
    world.fails_requests(A, 2)
    assert world.fleet.canaries_due() == (A,)
    assert world.fleet.canaries_due() == ()
    world.later(10)
    assert world.fleet.canaries_due() == (A,)
    world.answers_requests(A)
    assert world.fleet.serving() == (A,)


def test_a_serving_engine_whose_last_request_failed_gets_a_canary():
    world = World(canary_seconds=10).serving(A, B)
    world.fails_requests(A, 1)
    assert world.state(A) is State.READY and world.fleet.canaries_due() == (A,)
    assert world.fleet.canaries_due() == ()
    world.later(10)
    assert world.fleet.canaries_due() == (A,)
    world.answers_requests(A)
    world.later(10)
    assert world.fleet.canaries_due() == ()


def test_a_serving_engine_that_has_ended_no_request_for_long_gets_a_canary():
    world = World(canary_seconds=10, idle_canary_seconds=60).serving(A, B)
    world.later(50)
    world.answers_requests(A)
    world.later(20)
    assert world.fleet.canaries_due() == (B,)
    world.later(50)
    assert world.fleet.canaries_due() == (A,)


def test_a_request_lost_behind_a_router_has_every_serving_engine_show_that_it_works():
    world = World(canary_seconds=10).serving(A, B)
    world.misses_probes(B, 2)
    assert world.state(B) is State.SUSPECT
    world.fleet.request_lost()
    assert world.fleet.canaries_due() == (A,)
    world.fleet.request_lost()
    world.answers_requests(A)
    world.later(10)
    assert world.fleet.canaries_due() == (), "it has shown it since"


@pytest.mark.parametrize(("checks", "state"), [(1, State.STALE), (2, State.SUSPECT), (3, State.SUSPECT)])
def test_an_engine_that_fell_silent_in_a_sync_is_suspect_for_that_reason(checks, state):
    world = World().serving(A, B)
    world.fleet.pause(A)
    world.fleet.fell_silent(A, "out of turn", checks=checks)
    assert world.state(A) is State.PAUSED
    world.fleet.update_failed(A, "silent in the sync")
    world.fleet.fell_silent(A, "silent in the sync", checks=checks)
    assert world.state(A) is state and world.fleet.member(A).reason == "silent in the sync"
    world.misses_probes(A, 6 - checks)
    assert world.state(A) is State.DEAD, "health checks weigh as much as probes"
    world.fleet.fell_silent("http://gone:1", "left meanwhile", checks=checks)


def test_a_wedged_engine_whose_canaries_fail_is_dead_and_revived_only_by_a_canary_or_a_restart():
    world = World().serving(A)
    world.fails_requests(A, 5)
    assert world.state(A) is State.DEAD
    world.answers(A, version=str(V0))
    assert world.state(A) is State.DEAD
    assert world.fleet.canaries_due() == (A,)
    world.answers_requests(A)
    assert world.state(A) is State.STALE

    world.synced(V1, A)
    world.fails_requests(A, 5)
    world.answers(A, boot_id="another process")
    assert world.state(A) is State.STALE


def test_requests_that_break_together_are_one_incident():
    world = World().serving(A)
    sent_at = world.later()
    world.later(30)
    for _ in range(64):
        world.fleet.request_failed(A, "reset", sent_at=sent_at)
    assert world.fleet.member(A).incidents == 1
    assert world.state(A) is State.READY


def test_a_successful_request_ends_the_row_of_incidents_but_not_of_lost_probes():
    world = World().serving(A)
    world.fails_requests(A, 1)
    world.misses_probes(A, 1)
    world.answers_requests(A)
    member = world.fleet.member(A)
    assert (member.incidents, member.probe_failures) == (0, 1)


def test_an_engine_that_fails_probes_and_requests_must_mend_both():
    world = World().serving(A)
    world.misses_probes(A, 2)
    world.fails_requests(A, 2)
    world.answers(A, version=str(V0))
    assert world.state(A) is State.SUSPECT
    world.answers_requests(A)
    assert world.state(A) is State.READY


def test_what_was_observed_before_the_last_transition_says_nothing():
    world = World().serving(A)
    sent_at = world.later()
    world.later()
    world.synced(V1, A)
    fleets.answers(world.fleet, A, sent_at=sent_at, boot_id=world.boots[A], version=str(V0))
    world.fleet.probe_failed(A, "late", sent_at=sent_at)
    world.fleet.request_failed(A, "late", sent_at=sent_at)
    assert world.state(A) is State.READY
    assert (world.fleet.member(A).probe_failures, world.fleet.member(A).incidents) == (0, 0)


def test_a_probe_is_what_is_known_of_an_engine_unless_it_was_sent_before_the_last_transition():
    world = World().serving(A)
    engine, before = fleets.endpoint(A, plugin=True, role="decode"), world.fleet.member(A)
    sent_at, found = world.later(), fleets.info_of(engine, boot_id=world.boots[A], version=str(V0), role="decode")
    world.fleet.probe_succeeded(A, found, sent_at=sent_at)
    known = world.fleet.member(A)
    assert known.info == found and (known.endpoint.plugin, known.endpoint.role) == (True, "decode")
    assert not before.endpoint.plugin, "who looked before keeps what it saw"
    late = world.later()
    world.later()
    world.synced(V1, A)
    world.fleet.probe_succeeded(A, replace(found, role="prefill"), sent_at=late)
    assert world.fleet.member(A).info == found and world.fleet.member(A).endpoint.role == "decode"


def test_members_are_found_by_url_and_by_state_and_a_stranger_is_none():
    world = World().serving(A).added(B)
    assert world.fleet.find(A) == world.fleet.member(A) and world.fleet.find(JUDGE) is None
    assert [m.url for m in world.fleet.members(State.READY)] == [A]
    assert [m.url for m in world.fleet.members(State.READY, State.STARTING)] == [A, B]
    assert [m.url for m in world.fleet.members()] == [A, B]


def test_facts_about_an_engine_that_was_removed_are_ignored():
    world = World().added(A)
    world.fleet.remove(A, "gone")
    fleets.answers(world.fleet, A, sent_at=world.later())
    world.fleet.probe_failed(A, "late", sent_at=world.later())
    world.fleet.request_failed(A, "late", sent_at=world.later())
    world.fleet.request_succeeded(A, sent_at=world.later())
    world.fleet.process_exited(A, "late")
    assert world.fleet.members() == ()


# -- leaving


def test_a_draining_engine_gets_nothing_new_and_no_probe_brings_it_back():
    world = World().serving(A)
    world.fleet.drain(A, "scaling down")
    world.answers(A, version=str(V0))
    world.misses_probes(A, 50)
    world.answers_requests(A)
    world.fleet.process_exited(A, "done")
    assert world.state(A) is State.DRAINING
    assert world.fleet.serving() == () and world.fleet.syncable() == () and world.fleet.to_probe() == ()
    world.fleet.remove(A, "drained")
    assert world.fleet.members() == ()


@pytest.mark.parametrize("state", [State.READY, State.PAUSED])
def test_an_engine_at_work_or_in_a_sync_is_not_removed(state):
    world = World().serving(A)
    if state is State.PAUSED:
        world.fleet.pause(A)
    with pytest.raises(IllegalTransition, match=f"it is {state.value}"):
        world.fleet.remove(A, "in a hurry")


def test_a_paused_engine_is_not_drained():
    world = World().serving(A)
    world.fleet.pause(A)
    with pytest.raises(IllegalTransition, match="it is paused"):
        world.fleet.drain(A, "in a hurry")


# -- transitions, commands, policy, versions


def test_transitions_are_told_once_with_their_reason():
    world = World().serving(A)
    world.fleet.take_transitions()
    world.misses_probes(A, 2)
    (told,) = world.fleet.take_transitions()
    assert (told.url, told.before, told.after) == (A, State.READY, State.SUSPECT)
    assert "2 probes in a row failed" in told.reason and "timed out" in told.reason
    assert world.fleet.take_transitions() == ()


def test_one_url_is_one_engine():
    with pytest.raises(IllegalTransition, match="already"):
        World().added(A, A)


def test_a_command_to_an_unknown_engine_names_the_known_ones():
    with pytest.raises(IllegalTransition, match=f"known: {A}"):
        World().added(A).fleet.pause(B)


@pytest.mark.parametrize(
    "wrong",
    [
        {"probe_seconds": 0},
        {"pause_seconds": -1},
        {"probes_to_suspect": 0},
        {"probes_to_suspect": 6},
        {"incidents_to_dead": 2},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FleetPolicy(**wrong)


def test_a_weight_version_survives_its_text_form():
    version = WeightVersion(RUN, 3, 41)
    assert WeightVersion.parse(str(version)) == version


@pytest.mark.parametrize(
    "text", ["default", "3", "", f"{RUN}:0", f"{RUN}:0:-1", f"{RUN}:00:1", f"{RUN}:0:1 ", f"{RUN.upper()}:0:1"]
)
def test_what_no_trainer_of_ours_wrote_is_not_a_weight_version(text):
    with pytest.raises(BadWeightVersion):
        WeightVersion.parse(text)


def test_later_means_same_run_and_later_attempt_or_number():
    assert V1.follows(V0)
    assert WeightVersion(RUN, 1, 0).follows(V2)
    assert not V0.follows(V0)
    assert not V0.follows(WeightVersion(RUN, 1, 0))
    assert not WeightVersion(OTHER_RUN, 5, 5).follows(V0)


# -- GPUs that the trainer takes in turns


def test_a_sleeping_engine_serves_again_only_after_a_full_sync():
    world = World().added(A)
    world.answers(A)
    world.synced(V0, A)
    world.fleet.fall_asleep(A)
    assert world.fleet.serving() == () and world.fleet.syncable() == (A,)
    assert world.fleet.member(A).version == V0, "its connection is the one that it had"
    world.fleet.pause(A)
    world.fleet.resume(A)  # the sync ended before it reached this engine
    assert world.fleet.member(A).state is State.STALE
    world.synced(V0, A)
    assert world.fleet.serving() == (A,)


def test_nothing_is_expected_of_a_sleeping_engine():
    world = World().added(A)
    world.answers(A)
    world.synced(V0, A)
    world.fleet.fall_asleep(A)
    world.later(1e6)
    world.misses_probes(A, 20)
    world.fails_requests(A, 20)
    world.fleet.tick()
    assert world.fleet.member(A).state is State.ASLEEP
    assert world.fleet.to_probe() == () and world.fleet.canaries_due() == ()
    world.fleet.process_exited(A, "killed")
    assert world.fleet.member(A).state is State.DEAD


def test_an_engine_with_fixed_weights_wakes_up_without_a_sync():
    world = World().added(JUDGE, takes_weights=False)
    world.answers(JUDGE)
    world.fleet.fall_asleep(JUDGE)
    assert world.fleet.serving() == () and world.fleet.syncable() == ()
    world.fleet.wake_up(JUDGE)
    assert world.fleet.serving() == (JUDGE,)


def test_an_engine_of_the_policy_cannot_be_woken_up_by_itself():
    world = World().added(A)
    world.answers(A)
    world.fleet.fall_asleep(A)
    with pytest.raises(IllegalTransition, match="only a sync wakes it up"):
        world.fleet.wake_up(A)


# -- random walk


@dataclass
class Truth:
    """What a simulated engine really is, whatever the fleet believes."""

    takes_weights: bool
    tells: bool
    boot: int = 0
    weights: WeightVersion | None = None
    probed_since_boot: bool = False


@dataclass
class Walk:
    """Facts and commands in random order, legal or not, against simulated engines that restart unseen."""

    rng: random.Random
    world: World = field(default_factory=lambda: World(start_seconds=400, pause_seconds=200))
    truth: dict[str, Truth] = field(default_factory=dict)
    seen: set[tuple[State, State]] = field(default_factory=set)
    number: int = 0

    def run(self, steps: int) -> None:
        for name in "abcd":
            self.truth[name] = Truth(takes_weights=name != "d", tells=name != "c")
            fleets.add(self.world.fleet, name, takes_weights=name != "d")
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        fleet, rng = self.world.fleet, self.rng
        self.world.later(rng.choice([0.1, 1, 5, 30]))
        url = rng.choice(list(self.truth))
        before = dict(fleet._members)
        actions = [self.probe] * 8 + [self.break_down] * 3 + [self.requests] * 2 + [self.sync] * 6 + [self.command] * 4
        rng.choice([*actions, self.reboot, self.tick])(url)
        for told in fleet.take_transitions():
            if told.before is not None and told.after is not None:
                assert told.after in TRANSITIONS[told.before]
                self.seen.add((told.before, told.after))
                self.check_rule_one(told)
        self.check_invariants(before)

    # -- what may happen

    def probe(self, url: str) -> None:
        truth = self.truth[url]
        told = {"boot_id": str(truth.boot), "version": str(truth.weights)} if truth.tells else {}
        if self.rng.random() < 0.5 and truth.tells:
            told["version"] = None
        fleets.answers(self.world.fleet, url, sent_at=self.world.clock.now, **told)
        truth.probed_since_boot = True

    def break_down(self, url: str) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            self.world.fleet.probe_failed(url, "lost", sent_at=self.world.later(1))

    def requests(self, url: str) -> None:
        if self.rng.random() < 0.5:
            self.world.fleet.request_succeeded(url, sent_at=self.world.clock.now)
        for _ in range(self.rng.randrange(0, 6)):
            self.world.fleet.request_failed(url, "reset", sent_at=self.world.later(1))

    def tick(self, _: str) -> None:
        self.world.later(self.rng.choice([1, 300]))
        self.world.fleet.tick()

    def reboot(self, url: str) -> None:
        """Behind the fleet's back. An engine that tells nothing of itself is noticed only if it also misses a probe."""
        truth = self.truth[url]
        truth.boot, truth.weights, truth.probed_since_boot = truth.boot + 1, None, False
        if not truth.tells:
            self.world.fleet.probe_failed(url, "restarting", sent_at=self.world.clock.now)

    def sync(self, _: str) -> None:
        """A sync that may fail anywhere, for any engine, and may be of the current version."""
        fleet, rng = self.world.fleet, self.rng
        syncable = fleet.syncable()
        urls = [u for u in syncable if rng.random() < 0.8]
        if fleet.version is None or rng.random() < 0.5:
            self.number += 1
        version = WeightVersion(RUN, 0, self.number)
        for url in urls:
            fleet.pause(url)
            if rng.random() < 0.1:
                continue  # the sync dies before it reaches this one
            fleet.update_began(url)
            self.truth[url].weights = None
            if rng.random() < 0.2:
                fleet.update_failed(url, "broken pipe")
            elif rng.random() < 0.9:
                self.truth[url].weights = version
                fleet.update_finished(url, version)
        if any(m.state is State.PAUSED and m.version == version for m in fleet.members()):
            fleet.advance(version)
        for url in urls:
            if fleet.member(url).state is State.PAUSED and rng.random() < 0.9:
                fleet.resume(url)

    def command(self, url: str) -> None:
        """Any command, most often an illegal one, which must change nothing."""
        fleet, rng = self.world.fleet, self.rng
        names = ["add", "pause", "resume", "drain", "remove", "restarted", "update_failed", "process_exited"]
        name = rng.choice([*names, "fall_asleep", "wake_up"])
        snapshot = dict(fleet._members)
        arguments = (url, "walk") if name in ("drain", "remove", "update_failed", "process_exited") else (url,)
        try:
            if name == "add":
                fleets.add(fleet, url)
            else:
                getattr(fleet, name)(*arguments)
        except IllegalTransition:
            assert fleet._members == snapshot
            return
        if name in ("restarted", "process_exited"):
            self.reboot(url)
        if name == "fall_asleep":
            self.truth[url].weights = None
        if name == "remove" or (name == "drain" and rng.random() < 0.9):
            if name == "drain":
                fleet.remove(url, "drained")
            fleets.add(fleet, url, takes_weights=self.truth[url].takes_weights)
            self.reboot(url)

    # -- what must hold

    def check_rule_one(self, told) -> None:
        if not self.truth[told.url].takes_weights:
            assert told.after not in (State.STALE, State.PAUSED)
        elif told.after is State.READY:
            assert told.before in (State.PAUSED, State.SUSPECT)

    def check_invariants(self, before: dict) -> None:
        fleet = self.world.fleet
        for url in fleet.serving():
            truth, member = self.truth[url], fleet.member(url)
            assert member.state is State.READY
            if truth.takes_weights:
                assert member.version == fleet.version is not None
                if truth.probed_since_boot and truth.tells:
                    assert truth.weights == fleet.version, f"{url} serves {truth.weights}"
            assert member.incidents < fleet.policy.incidents_to_suspect
            assert member.probe_failures < fleet.policy.probes_to_suspect
        left_alone = (State.PAUSED, State.ASLEEP, State.DRAINING)
        assert not set(fleet.to_probe()) & {m.url for m in fleet.members() if m.state in left_alone}


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_serves_weights_that_are_not_the_fleets(seed):
    Walk(random.Random(seed)).run(1500)


def test_the_walks_take_every_transition_that_exists():
    seen: set[tuple[State, State]] = set()
    for seed in range(10):
        walk = Walk(random.Random(seed))
        walk.run(1500)
        seen |= walk.seen
    assert seen == {(before, after) for before, afters in TRANSITIONS.items() for after in afters}


def test_a_gpu_that_engines_share_counts_once():
    world = World()
    for url in (A, B):
        fleets.add(world.fleet, fleets.endpoint(url, gpu_uuids=("x",)))
    assert gpus_of(world.fleet.members()) == 1
    fleets.add_probed(world.fleet, JUDGE, world_size=4)  # known by its address alone
    assert gpus_of(world.fleet.members()) == 5
