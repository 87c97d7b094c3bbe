"""Data, rewards, stop strings and hooks of the first day, in whole rollouts against fake engines."""

from __future__ import annotations

import asyncio
import json

import pytest

from rltool.config.reward import RewardConfig
from rltool.errors import UsageError
from rltool.rollout.sample import SampleStatus
from tests.contract.fakes.vllm import FakeVllm
from tests.contract.test_rollout_service import (  # noqa: F401  # fixtures
    EOS,
    STOPS,
    data_file,
    generated,
    model_dir,
    save,
    serve,
    settings,
    spellers,
    stack,
    tokenizer,
    train,
)
from tests.unit.project.test_examples import TABLE


def run(serve, config, engines, steps=1):  # noqa: F811
    """The batches of so many steps."""

    async def scenario():
        async with serve(config, engines) as service:
            return await train(service, steps)

    return asyncio.run(scenario())


def numbers(rollout):
    return sorted({sample.prompt_index for sample in rollout.samples})


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_mixture_of_files_keeps_its_shares_in_every_batch(serve, settings, spellers, tmp_path):  # noqa: F811
    words = [{"prompt": f"{w}=", "label": w[::-1], "metadata": {"set": "words"}} for w in ("sun", "cat", "dog")]
    others = [{"prompt": f"{w}=", "label": "x", "metadata": {"set": "others"}} for w in ("owl", "neon")]
    files = [lines(tmp_path / "a.jsonl", *words), lines(tmp_path / "b.jsonl", *others, *others)]
    config = settings(data={"train": [str(files[0]), f"{files[1]}[:2]"], "weights": [3, 1]}, rollout={"dump": True})
    for rollout in run(serve, config, spellers, steps=3):
        sets = [sample.metadata["set"] for sample in rollout.samples]
        assert (sets.count("words"), sets.count("others")) == (12, 4)


def test_a_generated_task_is_scored_by_its_own_package(serve, settings, spellers):  # noqa: F811
    config = settings(
        data={"train": ["reasoning-gym:spell_backward?size=20&min_word_len=3&max_word_len=4"],
              "prompt_key": "metadata.word", "label_key": "label"},
        eval={"sets": {}}, reward={"function": "reasoning-gym"}, rollout={"dump": True},
    )  # fmt: skip
    [rollout] = run(serve, config, spellers)
    assert {sample.metadata["source_dataset"] for sample in rollout.samples} == {"spell_backward"}
    assert all(0 <= sample.reward <= 1 for sample in rollout.samples)


def test_a_source_of_ones_own_goes_on_where_its_checkpoint_was_taken(serve, settings, spellers, tmp_path):  # noqa: F811
    config = settings(data={"train": [], "source": "examples.data_source:growing_sums"}, rollout={"dump": True})

    async def scenario():
        async with serve(config, spellers) as service:
            before = await train(service, 2)
            state = save(await service.state_dict(1), tmp_path / "checkpoint")  # the second batch is not trained
            after = await train(service, 3, first=2)
        async with serve(config, spellers) as service:
            await service.load_state_dict(state, tmp_path / "checkpoint")
            again = await train(service, 3, first=1)
        return before, after, again

    before, after, again = asyncio.run(scenario())
    assert [numbers(rollout) for rollout in (*before, *after)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for ours, theirs in zip(again, (before[1], after[0]), strict=True):  # the untrained batch, and what came behind it
        assert [s.prompt_text for s in ours.samples] == [s.prompt_text for s in theirs.samples]


def test_rewards_of_several_parts_are_ranked_within_their_group(serve, settings, spellers):  # noqa: F811
    parts = [{"name": "right", "function": "exact"}, {"name": "spelled", "function": "f1", "weight": 0.5}]
    config = settings(rollout={"dump": True})
    reward = RewardConfig.model_validate({"parts": parts, "group": "rank"})
    config = config.model_copy(update={"reward": reward})
    [rollout] = run(serve, config, spellers)
    for sample in rollout.samples:
        right = float(sample.seed % 2)  # every second answer of these engines is right
        assert sample.reward_parts == {"right": right, "spelled": right}
        assert sample.raw_reward == 1.5 * right
        assert sample.reward == pytest.approx(1 / 6 + right * 4 / 6), "two are right and two wrong: ranks 2.5 and 0.5"
    assert rollout.metrics["rollout/reward_part_right"] == 0.5
    assert rollout.metrics["rollout/raw_reward_mean"] == 0.75 and rollout.metrics["rollout/reward_mean"] == 0.5


def test_responses_end_with_the_token_that_completes_a_stop_string(serve, settings, spellers, tokenizer):  # noqa: F811
    config = settings(sampling={"stop": ["x"]}, rollout={"dump": True})
    [rollout] = run(serve, config, spellers)
    asked = [body["sampling_params"] for engine in spellers for body in generated(engine)]
    assert [sampling["stop"] for sampling in asked if "stop" in sampling] == [["x"]] * 4, "an engine may stop by itself"
    for sample in rollout.samples:
        text = tokenizer.decode(sample.response_ids)
        assert sample.status is SampleStatus.COMPLETED
        if sample.seed % 2:  # the right answer holds no x
            assert sample.response_ids[-1] == EOS
        else:
            assert text.endswith("x") and EOS not in sample.response_ids
        assert len(sample.response_logprobs) == len(sample.response_ids)
        assert sum(span.end - span.start for span in sample.versions) == len(sample.response_ids)


def test_every_example_works_in_one_rollout(serve, settings, stack):  # noqa: F811
    paths, engine = dict(TABLE), stack.enter_context(FakeVllm())
    engine.vocab_size = 64
    config = settings(
        data={"train": [], "source": paths["data.source"]},
        reward={"function": paths["reward.function"], "group": paths["reward.group"]},
        rollout={
            "generate_function": paths["rollout.generate_function"], "group_filter": paths["rollout.group_filter"],
            "group_hook": paths["rollout.group_hook"], "dump": True,
        },
        monitor={"metrics": paths["monitor.metrics"]},
        sampling={"max_response_tokens": 24, "max_prompt_tokens": 24, "stop_token_ids": STOPS},
    )  # fmt: skip
    [rollout] = run(serve, config, [engine])
    assert len(rollout.samples) == 16
    assert all(0 in sample.response_mask and 1 in sample.response_mask for sample in rollout.samples)
    cut_off = [sample.status is SampleStatus.TRUNCATED for sample in rollout.samples]
    assert [sample.remove_sample for sample in rollout.samples] == cut_off and any(cut_off) and not all(cut_off)
    assert rollout.metrics["own/tokens_wrong"] > 0


def test_a_generate_function_that_changes_the_distribution_ends_the_run(serve, settings, spellers):  # noqa: F811
    config = settings(rollout={"generate_function": "tests.contract.rollout_functions:greedily"})
    with pytest.raises(UsageError, match="asks for temperature 0"):
        run(serve, config, spellers)


def test_metrics_that_fail_are_said_once_and_end_nothing(serve, settings, spellers):  # noqa: F811
    config = settings(monitor={"metrics": "tests.contract.rollout_functions:no_metrics"})

    async def scenario():
        async with serve(config, spellers) as service:
            return await train(service, 2), service.take_events()

    rollouts, said = asyncio.run(scenario())
    assert not any(name.startswith("own/") for rollout in rollouts for name in rollout.metrics)
    assert [line for line in said if "monitor.metrics" in line] == [
        "monitor.metrics failed, and its numbers are missing: ZeroDivisionError: division by zero"
    ]
