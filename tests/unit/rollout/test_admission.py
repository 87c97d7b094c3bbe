"""How many groups may start, and which make a batch. Pure."""

import random

import pytest

from rltool.rollout.admission import AdmissionPolicy, Candidate, choose


def groups(*ready, oldest=0, first=0):
    return [Candidate(first + i, r, oldest) for i, r in enumerate(ready)]


def capacity(policy, *, published=0, delivered=0, live=0, requested=True):
    return policy.capacity(published=published, delivered=delivered, live=live, requested=requested)


def test_nothing_starts_before_weights_are_published():
    assert capacity(AdmissionPolicy(batch=4, max_staleness=2), published=None) == 0


def test_synchronous_rollouts_start_one_batch_and_only_when_it_is_asked_for():
    policy = AdmissionPolicy(batch=4)
    assert capacity(policy, requested=False) == 0
    assert capacity(policy) == 4
    assert capacity(policy, live=3) == 1
    assert capacity(policy, published=7, delivered=7) == 4


def test_with_staleness_the_next_batches_start_by_themselves_and_no_more_than_the_bound_allows():
    policy = AdmissionPolicy(batch=4, max_staleness=2)
    assert capacity(policy, requested=False) == 12
    assert capacity(policy, requested=False, delivered=1, live=8) == 0
    assert capacity(policy, requested=False, delivered=1, live=8, published=1) == 4


def test_oversampling_starts_the_surplus_beside_the_batch():
    assert capacity(AdmissionPolicy(batch=4, oversampling=1.5)) == 6


def test_a_batch_is_the_first_groups_by_number_and_waits_for_the_one_that_is_late():
    policy = AdmissionPolicy(batch=2, max_staleness=1)
    assert choose(policy, groups(True, False, True, True), 0).batch is None
    assert choose(policy, groups(True, True, False, True), 0).batch == (0, 1)


def test_with_oversampling_the_first_that_are_ready_win_and_the_rest_is_dropped_when_it_would_be_too_old():
    policy = AdmissionPolicy(batch=2, oversampling=2)
    choice = choose(policy, groups(False, True, False, True), 0)
    assert choice.batch == (1, 3) and choice.surplus == (0, 2) and choice.interrupt == ()


def test_a_surplus_that_may_still_be_trained_on_next_time_goes_on():
    policy = AdmissionPolicy(batch=2, oversampling=2, max_staleness=1)
    choice = choose(policy, groups(False, True, False, True), 0)
    assert choice.batch == (1, 3) and choice.surplus == () and choice.interrupt == ()


def test_partial_rollout_interrupts_what_still_runs_and_keeps_it():
    policy = AdmissionPolicy(batch=2, oversampling=2, partial_rollout=True, mask_older_than=0)
    choice = choose(policy, groups(False, True, True, True), 0)
    assert choice.batch == (1, 2) and choice.interrupt == (0,) and choice.surplus == ()


def test_partial_rollout_leaves_groups_that_are_being_scored_alone():
    policy = AdmissionPolicy(batch=2, oversampling=2, max_staleness=1, partial_rollout=True)
    scored = Candidate(0, False, 0, scoring=True)
    choice = choose(policy, [scored, *groups(True, True, False, oldest=1, first=1)], 0)
    assert choice.batch == (1, 2) and choice.interrupt == (3,) and choice.surplus == ()


def test_a_ready_group_that_is_too_old_is_never_part_of_a_batch():
    policy = AdmissionPolicy(batch=2, max_staleness=1)
    old, young = groups(True, True, oldest=0), groups(True, True, oldest=2, first=2)
    choice = choose(policy, old + young, 2)
    assert choice.too_old == (0, 1) and choice.batch == (2, 3)


def test_tokens_that_are_masked_do_not_make_a_group_too_old():
    for policy in (
        AdmissionPolicy(batch=2, max_staleness=1, on_stale="mask"),
        AdmissionPolicy(batch=2, max_staleness=1, mask_older_than=0),
    ):
        assert choose(policy, groups(True, True, oldest=0), 5).batch == (0, 1)


def test_when_stale_groups_are_resampled_a_batch_takes_what_is_ready_and_waits_for_nobody():
    policy = AdmissionPolicy(batch=2, max_staleness=1, on_stale="resample")
    assert choose(policy, groups(False, True, True), 0).batch == (1, 2)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_admission_alone_keeps_every_group_within_the_bound_whatever_the_order_of_completion(staleness):
    """Groups finish in random order over hundreds of steps; each step takes its batch once it is complete."""
    rng = random.Random(staleness)
    policy = AdmissionPolicy(batch=3, max_staleness=staleness)
    started: dict[int, int] = {}
    ready: set[int] = set()
    issued, oldest_ages = 0, []
    for step in range(300):
        batch = None
        while batch is None:
            room = policy.capacity(published=step, delivered=step, live=len(started), requested=True)
            started |= {number: step for number in range(issued, issued + room)}
            issued += room
            running = [number for number in started if number not in ready]
            if running:
                done = rng.choice(running)
                if rng.random() < 0.1:  # filtered out: another takes its place
                    del started[done]
                else:
                    ready.add(done)
            batch = choose(policy, [Candidate(n, n in ready, at) for n, at in started.items()], step).batch
        oldest_ages.append(max(step - started[number] for number in batch))
        for number in batch:
            del started[number]
        ready -= set(batch)
    assert max(oldest_ages) <= staleness
    assert max(oldest_ages) == staleness, "the bound is used, or the test shows nothing"
