"""Generation of one group without a data plane: seeds, continuation of aborted responses, interruption, errors."""

from __future__ import annotations

import asyncio
import threading
from array import array
from dataclasses import replace

import pytest

from rltool.engines.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, RltoolError, UsageError
from rltool.rollout.data import Prompt
from rltool.rollout.generate import MAX_CONTINUATIONS, GenerateContext, continue_response, fill_group, generate_group
from rltool.rollout.groups import new_samples
from rltool.rollout.sample import SampleStatus

SAMPLING = SamplingParams(max_tokens=6, temperature=0.7, stop_token_ids=(1,))


def completion(*ids, reason="stop", version="run:0:1"):
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    return Completion(ids, tuple(-0.1 * i for i in ids), reason, spans)


class Plane:
    """Answers with `reply(request, number of earlier requests)`; remembers all requests."""

    def __init__(self, reply=None):
        self.requests: list[GenerateRequest] = []
        self.reply = reply or (lambda request, _: [completion(5, 1) for _ in range(request.n)])

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        return self.reply(request, len(self.requests) - 1)


def group_of(samples=2, number=3, ids=(2, 3)):
    return new_samples(number, Prompt(0, ids, "p0", "x", metadata={"k": [0]}), count=samples, run_seed=0)


def fill(group, plane, function=None, **options):
    asyncio.run(fill_group(group, GenerateContext(plane.generate, SAMPLING, 10, **options), function))
    return group


def test_seeds_follow_from_run_and_group_alone_and_are_consecutive_within_a_group():
    first = [sample.seed for sample in group_of(3)]
    assert first == [sample.seed for sample in group_of(3)] == [first[0] + i for i in range(3)]
    seeds = {new_samples(g, Prompt(0, (1,), "p"), count=1, run_seed=r)[0].seed for g in range(30) for r in range(3)}
    assert len(seeds) == 90 and all(0 <= seed < 2**31 for seed in seeds)


def test_samples_of_a_group_have_their_own_metadata():
    group = group_of(2)
    group[0].metadata["k"].append("changed by a reward")
    assert group[1].metadata == {"k": [0]}


def test_one_request_asks_for_all_samples_of_a_prompt():
    plane = Plane()
    group = fill(group_of(4), plane)
    [request] = plane.requests
    assert (request.n, request.prompt_ids, request.sampling, request.seed) == (4, (2, 3), SAMPLING, group[0].seed)
    assert len(request.request_id) == 32
    assert all(
        s.status is SampleStatus.COMPLETED and s.response_ids == [5, 1] and s.response_mask == [1, 1] for s in group
    )


def test_pictures_of_one_prompt_are_read_beside_those_of_another(monkeypatch):
    both = threading.Barrier(2, timeout=30)
    monkeypatch.setattr("rltool.rollout.pictures.for_engine", lambda inputs, places: (both.wait(), ())[1])
    groups = [group_of(1, number) for number in (3, 4)]
    for [sample] in groups:
        sample.picture_places = array("q", [0, 1, 1, 9])
    plane = Plane()

    async def fill_both():
        context = GenerateContext(plane.generate, SAMPLING, 10)
        await asyncio.gather(*(fill_group(group, context) for group in groups))

    asyncio.run(fill_both())
    assert [sample.response_ids for [sample] in groups] == [[5, 1], [5, 1]]


# -- aborted responses


def abort_once(request, number):
    if number == 0:
        return [completion(4, 5, reason="abort", version="run:0:1"), completion(6, 1)]
    return [completion(7, 1, version="run:0:2")]


def test_an_aborted_response_is_continued_from_its_own_tokens():
    plane = Plane(abort_once)
    cut, whole = fill(group_of(2), plane)
    again = plane.requests[1]
    assert again.prompt_ids == (2, 3, 4, 5)
    assert again.sampling.max_tokens == SAMPLING.max_tokens - 2
    assert again.n == 1 and again.seed not in (cut.seed, whole.seed)
    assert cut.response_ids == [4, 5, 7, 1]
    assert cut.response_logprobs == [-0.4, -0.5, -0.1 * 7, -0.1]
    assert cut.versions == [VersionSpan("run:0:1", 0, 2), VersionSpan("run:0:2", 2, 4)]
    assert cut.status is SampleStatus.COMPLETED and whole.response_ids == [6, 1]


def test_each_continuation_has_a_seed_of_its_own_even_where_nothing_came():
    plane = Plane(lambda request, number: [completion(reason="abort")] if number < 4 else [completion(1)])
    fill(group_of(1), plane)
    seeds = [request.seed for request in plane.requests]
    assert len(set(seeds)) == len(seeds) == 5


def test_a_response_aborted_at_its_last_token_is_truncated_without_another_request():
    plane = Plane(lambda request, _: [completion(2, 2, 2, 2, 2, 2, reason="abort")])
    [sample] = fill(group_of(1), plane)
    assert sample.status is SampleStatus.TRUNCATED and len(plane.requests) == 1


def test_continuation_is_bounded():
    plane = Plane(lambda request, _: [completion(reason="abort")])
    [sample] = fill(group_of(1), plane)
    assert sample.status is SampleStatus.ABORTED
    assert len(plane.requests) == 1 + MAX_CONTINUATIONS


# -- interruption


def test_an_interrupted_group_keeps_what_it_has_and_asks_for_nothing_more():
    plane = Plane(abort_once)
    cut, whole = fill(group_of(2), plane, interrupted=lambda: bool(plane.requests))
    assert len(plane.requests) == 1
    assert (cut.status, cut.response_ids) == (SampleStatus.ABORTED, [4, 5])
    assert (whole.status, whole.response_ids) == (SampleStatus.COMPLETED, [6, 1])


def test_a_group_is_taken_up_where_it_stands():
    group = group_of(3)
    group[0].append_response_tokens(completion(6, 1))
    group[1].append_response_tokens(completion(4, reason="abort"))
    plane = Plane(lambda request, _: [completion(7, 1, version="run:0:2")])
    fill(group, plane)
    assert [sample.response_ids for sample in group] == [[6, 1], [4, 7, 1], [7, 1]]
    assert sorted(request.prompt_ids for request in plane.requests) == [(2, 3), (2, 3, 4)]
    [fresh] = [request for request in plane.requests if request.prompt_ids == (2, 3)]
    assert (fresh.n, fresh.seed) == (1, group[2].seed), "as if its group had never been interrupted"


def test_a_group_that_is_complete_asks_for_nothing():
    group = group_of(2)
    for sample in group:
        sample.append_response_tokens(completion(6, 1))
    plane = Plane()
    fill(group, plane)
    assert plane.requests == []


def test_an_interrupted_continuation_stops_after_the_request_that_was_aborted():
    [sample] = group_of(1)
    sample.append_response_tokens(completion(4, reason="abort"))
    plane = Plane(lambda request, _: [completion(7, reason="abort")])
    context = GenerateContext(plane.generate, SAMPLING, 10, interrupted=lambda: len(plane.requests) >= 2)
    asyncio.run(continue_response(sample, context))
    assert len(plane.requests) == 2 and sample.response_ids == [4, 7, 7] and sample.status is SampleStatus.ABORTED


# -- errors


def test_a_4xx_keeps_its_status_and_a_note_names_the_prompt():
    def refuse(request, _):
        raise EngineRejected("POST http://a/generate answered 422: prompt too long", 422)

    with pytest.raises(EngineRejected, match="^POST http:.*prompt too long") as caught:
        fill(group_of(), Plane(refuse))
    assert caught.value.status == 422 and caught.value.__notes__ == ["prompt 0 (2 tokens, 'p0')"]


def test_other_engine_errors_keep_their_type_and_name_the_prompt_too():
    def unreachable(request, _):
        raise EngineUnreachable("connection refused")

    with pytest.raises(EngineUnreachable, match="connection refused") as caught:
        fill(group_of(), Plane(unreachable))
    assert "prompt 0" in caught.value.__notes__[0]


def test_a_prompt_id_outside_the_vocabulary_is_not_sent():
    plane = Plane()
    with pytest.raises(UsageError, match="token id 10 is outside the model's vocabulary of 10"):
        fill(group_of(ids=(2, 10)), plane)
    assert plane.requests == []


def test_a_completion_without_weight_version_is_an_error_unless_allowed():
    def unversioned(request, _):
        return [Completion((5, 1), (-0.1, -0.2), "stop")]

    with pytest.raises(EngineError, match="no weight version at all"):
        fill(group_of(1), Plane(unversioned))
    [sample] = fill(group_of(1), Plane(unversioned), require_versions=False)
    assert sample.response_ids == [5, 1]


def test_version_spans_that_leave_tokens_uncovered_are_an_error():
    def partly(request, _):
        return [Completion((5, 1), (-0.1, -0.2), "stop", (VersionSpan("v", 0, 1),))]

    with pytest.raises(EngineError, match="versions for 1 of 2 tokens"):
        fill(group_of(1), Plane(partly))


def test_too_few_completions_are_an_error():
    with pytest.raises(EngineError, match="asked for 2 samples, the engine returned 1"):
        fill(group_of(2), Plane(lambda request, _: [completion(1)]))


# -- own functions


def test_an_own_function_fills_multi_turn_samples():
    async def two_turns(group, context):
        await generate_group(group, context)
        for sample in group:
            sample.append_environment_tokens([8, 8])
            left = replace(context.sampling, max_tokens=context.sampling.max_tokens - len(sample.response_ids))
            request = GenerateRequest((*sample.prompt_ids, *sample.response_ids), left, "0" * 32, seed=sample.seed)
            [answer] = await context.generate(request)
            sample.append_response_tokens(answer)

    plane = Plane()
    [sample] = fill(group_of(1), plane, two_turns)
    assert plane.requests[1].prompt_ids == (2, 3, 5, 1, 8, 8)
    assert sample.response_ids == [5, 1, 8, 8, 5, 1]
    assert sample.response_mask == [1, 1, 0, 0, 1, 1]
    assert sample.versions == [VersionSpan("run:0:1", 0, 2), VersionSpan("run:0:1", 4, 6)]


def test_an_own_function_that_leaves_a_sample_pending_is_an_error_unless_it_was_interrupted():
    async def nothing(group, context):
        pass

    with pytest.raises(RltoolError, match="without a response"):
        fill(group_of(1), Plane(), nothing)
    [sample] = fill(group_of(1), Plane(), nothing, interrupted=lambda: True)
    assert sample.status is SampleStatus.PENDING


def test_what_an_own_function_raises_is_raised_as_it_is():
    async def fails(group, context):
        raise RltoolError("boom")

    with pytest.raises(RltoolError, match="boom"):
        fill(group_of(1), Plane(), fails)
