"""Generation against in-memory targets: seeds, balance, continuation of aborted responses, errors."""

import asyncio

import pytest

from rltool.engines.types import Completion, SamplingParams, VersionSpan
from rltool.errors import EngineError, EngineRejected, EngineUnreachable, RltoolError, UsageError
from rltool.rollout import generate as module
from rltool.rollout.data import Prompt
from rltool.rollout.generate import DataPlane, GenerateContext, generate_groups, make_groups, sample_seed
from rltool.rollout.sample import SampleStatus

SAMPLING = SamplingParams(max_tokens=6, temperature=0.7, stop_token_ids=(1,))


def completion(*ids, reason="stop", version="run:0:1"):
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    return Completion(ids, tuple(-0.1 * i for i in ids), reason, spans)


class FakeTarget:
    """Answers with `reply(request, number of earlier requests)`; remembers all requests."""

    def __init__(self, name="http://a", reply=None):
        self.name = name
        self.requests = []
        self.running = self.most_running = 0
        self.reply = reply or (lambda request, _: [completion(5, 1) for _ in range(request.n)])

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return self.reply(request, len(self.requests) - 1)


def prompts(count, ids=(2, 3)):
    return [Prompt(index=i, prompt_ids=ids, text=f"p{i}", label="x", metadata={"k": [i]}) for i in range(count)]


def run(groups, *targets, max_in_flight=8, require_versions=True, **options):
    async def main():
        plane = DataPlane(targets, max_in_flight=max_in_flight)
        await generate_groups(groups, GenerateContext(plane.generate, SAMPLING, 10, require_versions), **options)

    asyncio.run(main())
    return [sample for group in groups for sample in group]


def groups_of(count, samples=2, step=3, ids=(2, 3)):
    return make_groups(prompts(count, ids), samples_per_prompt=samples, run_seed=0, step=step)


def test_seed_is_stable_over_processes_and_machines():
    assert sample_seed(7, 12, 345) == 41086077
    values = {sample_seed(r, s, p, o) for r in range(3) for s in range(3) for p in range(3) for o in range(3)}
    assert len(values) == 81 and all(0 <= value < 2**31 for value in values)


def test_a_prompt_that_occurs_twice_in_a_step_gets_other_seeds():
    [prompt] = prompts(1)
    first, second = make_groups([prompt, prompt], samples_per_prompt=2, run_seed=0, step=0)
    assert first[0].seed != second[0].seed
    assert first[0].group_id != second[0].group_id


def test_samples_of_a_group_have_consecutive_seeds_and_own_metadata():
    [group] = groups_of(1, samples=3)
    assert [s.seed - group[0].seed for s in group] == [0, 1, 2]
    group[0].metadata["k"].append("changed by a reward")
    assert group[1].metadata == {"k": [0]}


def test_group_ids_do_not_repeat_over_steps():
    ids = [group[0].group_id for step in range(3) for group in groups_of(4, step=step)]
    assert len(set(ids)) == 12


def test_one_request_asks_for_all_samples_of_a_prompt():
    target = FakeTarget()
    samples = run(groups_of(3, samples=4), target)
    assert len(target.requests) == 3
    request = target.requests[0]
    assert (request.n, request.prompt_ids, request.sampling, request.seed) == (4, (2, 3), SAMPLING, samples[0].seed)
    assert {len(r.request_id) for r in target.requests} == {32}
    assert all(s.status is SampleStatus.COMPLETED and s.response_ids == [5, 1] and s.response_mask == [1, 1] for s in samples)


def test_least_loaded_target_is_taken_and_groups_stay_together():
    a, b = FakeTarget("http://a"), FakeTarget("http://b")
    run(groups_of(8), a, b)
    assert len(a.requests) == len(b.requests) == 4


def test_requests_in_flight_are_bounded():
    target = FakeTarget()
    run(groups_of(20), target, max_in_flight=3)
    assert target.most_running == 3


def test_new_targets_get_the_next_requests():
    async def main():
        old, new = FakeTarget("http://old"), FakeTarget("http://new")
        plane = DataPlane([old], max_in_flight=4)
        context = GenerateContext(plane.generate, SAMPLING, 10)
        await generate_groups(groups_of(2), context)
        plane.set_targets([new])
        await generate_groups(groups_of(3), context)
        return len(old.requests), len(new.requests)

    assert asyncio.run(main()) == (2, 3)


def test_no_target_is_an_error():
    with pytest.raises(EngineError, match="no engine serves"):
        DataPlane([], max_in_flight=1)


def abort_once(request, number):
    if number == 0:
        return [completion(4, 5, reason="abort", version="run:0:1"), completion(6, 1)]
    return [completion(7, 1, version="run:0:2")]


def test_aborted_response_is_continued_from_its_own_tokens():
    target = FakeTarget(reply=abort_once)
    cut, whole = run(groups_of(1), target)
    again = target.requests[1]
    assert again.prompt_ids == (2, 3, 4, 5)
    assert again.sampling.max_tokens == SAMPLING.max_tokens - 2
    assert again.n == 1 and again.seed not in (cut.seed, whole.seed)
    assert cut.response_ids == [4, 5, 7, 1]
    assert cut.response_logprobs == [-0.4, -0.5, -0.1 * 7, -0.1]
    assert cut.versions == [VersionSpan("run:0:1", 0, 2), VersionSpan("run:0:2", 2, 4)]
    assert cut.status is SampleStatus.COMPLETED
    assert whole.response_ids == [6, 1]


def test_response_aborted_at_its_last_token_is_truncated_without_another_request():
    target = FakeTarget(reply=lambda request, _: [completion(2, 2, 2, 2, 2, 2, reason="abort")])
    [sample] = run(groups_of(1, samples=1), target)
    assert sample.status is SampleStatus.TRUNCATED and len(target.requests) == 1


def test_continuation_is_bounded():
    target = FakeTarget(reply=lambda request, _: [completion(reason="abort")])
    [sample] = run(groups_of(1, samples=1), target)
    assert sample.status is SampleStatus.ABORTED
    assert len(target.requests) == 1 + module.MAX_CONTINUATIONS


def refuse(request, _):
    raise EngineRejected("POST http://a/generate answered 400: prompt too long", 400)


def test_a_4xx_names_the_prompt_and_quotes_the_engine():
    with pytest.raises(EngineRejected, match=r"prompt 0 \(2 tokens, 'p0'\) was refused: .*prompt too long") as caught:
        run(groups_of(1), FakeTarget(reply=refuse))
    assert caught.value.status == 400


def unreachable(request, _):
    raise EngineUnreachable("connection refused")


def test_other_engine_errors_keep_their_type():
    with pytest.raises(EngineUnreachable, match="prompt 0 .*connection refused"):
        run(groups_of(1), FakeTarget(reply=unreachable))


def test_the_first_error_cancels_the_other_groups():
    async def main():
        cancelled = asyncio.Event()

        async def fill(group, context):
            if group[0].prompt_index == 0:
                raise RltoolError("boom")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        with pytest.raises(RltoolError, match="boom"):
            await generate_groups(groups_of(2), GenerateContext(None, SAMPLING, 10), function=fill)
        return cancelled.is_set()

    assert asyncio.run(main())


def test_a_prompt_id_outside_the_vocabulary_is_not_sent():
    target = FakeTarget()
    with pytest.raises(UsageError, match="token id 10 is outside the model's vocabulary of 10"):
        run(groups_of(1, ids=(2, 10)), target)
    assert target.requests == []


def test_completion_without_weight_version_is_an_error_unless_allowed():
    def unversioned(request, _):
        return [Completion((5, 1), (-0.1, -0.2), "stop")]

    with pytest.raises(EngineError, match="no weight version at all"):
        run(groups_of(1, samples=1), FakeTarget(reply=unversioned))
    [sample] = run(groups_of(1, samples=1), FakeTarget(reply=unversioned), require_versions=False)
    assert sample.response_ids == [5, 1]


def test_version_spans_that_leave_tokens_uncovered_are_an_error():
    def partly(request, _):
        return [Completion((5, 1), (-0.1, -0.2), "stop", (VersionSpan("v", 0, 1),))]

    with pytest.raises(EngineError, match="versions for 1 of 2 tokens"):
        run(groups_of(1, samples=1), FakeTarget(reply=partly))


def test_too_few_completions_are_an_error():
    with pytest.raises(EngineError, match="asked for 2 samples, the engine returned 1"):
        run(groups_of(1), FakeTarget(reply=lambda request, _: [completion(1)]))


def test_custom_function_fills_multi_turn_samples():
    async def two_turns(group, context):
        for sample in group:
            await module.generate_group([sample], context)
            sample.append_environment_tokens([8, 8])
            await module.generate_group([sample], context)

    [sample] = run(groups_of(1, samples=1), FakeTarget(), function=two_turns)
    assert sample.response_ids == [5, 1, 8, 8, 5, 1]
    assert sample.response_mask == [1, 1, 0, 0, 1, 1]
    assert sample.versions == [VersionSpan("run:0:1", 0, 2), VersionSpan("run:0:1", 4, 6)]


def test_custom_function_that_leaves_a_sample_pending_is_an_error():
    async def nothing(group, context):
        pass

    with pytest.raises(RltoolError, match="without a response"):
        run(groups_of(1), FakeTarget(), function=nothing)


def test_progress_counts_groups():
    seen = []
    run(groups_of(3), FakeTarget(), on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
