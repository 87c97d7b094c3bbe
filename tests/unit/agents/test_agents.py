"""Records of sessions as samples; episodes with agents that fail, gateways that go away, weights that are foreign."""

from __future__ import annotations

import asyncio
import re
import select
import signal
import subprocess
import sys
from array import array
from typing import Any

import psutil
import pytest
import torch

from rltool.agents import pool
from rltool.agents.episodes import AgentEpisodes, AgentLimits
from rltool.agents.outcome import AgentFailed
from rltool.agents.pool import CommandAgents, FunctionAgents, check_agent, load_agents
from rltool.agents.recorded import Rules, count_turns, samples_of, seconds_between_turns
from rltool.agents.sessions import OpenSession
from rltool.agents.task import AgentTask, row_of
from rltool.algorithms.shaping import estimate_advantages
from rltool.config.algorithm import AlgorithmConfig
from rltool.engines.types import SamplingParams, VersionSpan
from rltool.errors import EngineUnreachable, UsageError
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.data import Prompt
from rltool.rollout.generate import GenerateContext, fill_group
from rltool.rollout.measure.metrics import eval_metrics
from rltool.rollout.rewards.scoring import Scorer
from rltool.rollout.sample import Sample, SampleStatus

PLACE = "tests.contract.agents"


def trajectory(mask: str, *, first: int = 10, finish: str = "stop", version: str = "run:0:1") -> dict[str, Any]:
    """mask: such as "0011011"; token ids count from `first`."""
    loss_mask = [int(character) for character in mask]
    return {
        "token_ids": list(range(first, first + len(mask))),
        "loss_mask": loss_mask,
        "logprobs": [-0.25 * m for m in loss_mask],
        "versions": [{"version": version, "start": i, "end": i + 1} for i, m in enumerate(loss_mask) if m],
        "finish_reasons": [finish],
    }


def pending(index: int = 0, group: int = 4) -> Sample:
    return Sample(group, index, 2, [1, 2], prompt_text="question", label="x", metadata={"a": 1}, seed=9)


def test_a_trajectory_is_a_sample_from_its_first_sampled_token_on():
    [sample] = samples_of({"trajectories": [trajectory("0011011")]}, pending(), result=0.5, max_tokens=7)
    assert (sample.prompt_ids, sample.response_ids) == ([10, 11], [12, 13, 14, 15, 16])
    assert sample.response_mask == [1, 1, 0, 1, 1] and sample.response_logprobs == [-0.25, -0.25, 0, -0.25, -0.25]
    assert sample.versions == [VersionSpan("run:0:1", i, i + 1) for i in (0, 1, 3, 4)]
    assert (sample.status, sample.episode_reward, sample.turns) == (SampleStatus.COMPLETED, 0.5, 2)
    assert (sample.group_id, sample.index, sample.label, sample.metadata) == (4, 0, "x", {"a": 1})


def test_an_agents_tools_have_the_time_in_which_nothing_was_asked_of_the_model():
    """Two turns that overlap, as of sub-agents, and one after them."""
    turns = [
        {"trajectory": i, "end": 1, "time": end, "seconds": seconds}
        for i, (end, seconds) in enumerate([(10.0, 4.0), (13.0, 2.0), (12.5, 1.0), (18.0, 1.0)])
    ]
    assert seconds_between_turns(turns) == 1.0 + 4.0
    record = {"trajectories": [trajectory("1")] * 4, "turns": turns}
    found = [s.tool_seconds for s in samples_of(record, pending(), result=1.0, max_tokens=9)]
    assert found == [5.0, None, None, None]
    assert seconds_between_turns([*turns, {"time": 20.0, "seconds": None}]) is None, "of an earlier rltool"
    assert seconds_between_turns([]) is None


def test_every_trajectory_is_one_and_what_was_not_sampled_is_none():
    record = {"trajectories": [trajectory("01"), trajectory("00"), trajectory("001", finish="length")]}
    first, second = samples_of(record, pending(), result=None, max_tokens=9)
    assert (first.trajectory, second.trajectory) == (0, 1)
    assert second.status is SampleStatus.TRUNCATED and second.prompt_ids == [10, 11]
    assert samples_of({"trajectories": []}, pending(), result=1.0, max_tokens=9) == []


def test_a_sample_has_the_pictures_of_its_trajectory_and_none_of_its_row_s():
    places = [1, 1, 2, 9, 4, 1, 2, 8, 8, 1, 1, 9]
    seen = trajectory("0001001001") | {"pictures": ["a", "b", "a"], "picture_places": places}
    record = {"trajectories": [seen, trajectory("01")], "pictures": {"a": "data:A", "b": "data:B"}}
    record["turns"] = [
        {"trajectory": i, "start": at, "end": at + 1, "left_out": why}
        for i, at, why in ((0, 3, ""), (0, 6, ""), (0, 9, "asked"), (1, 1, ""))
    ]
    sample = pending()
    sample.multimodal_inputs, sample.picture_places = {"image": ["row.png"], "video": ["v"]}, array("q", [0, 1, 1, 5])
    first, second = samples_of(record, sample, result=1.0, max_tokens=99)
    assert first.multimodal_inputs == {"image": ["data:A", "data:B"], "video": ["v"]}
    assert list(first.picture_places) == [1, 1, 2, 9, 4, 1, 2, 8] and len(first.prompt_ids) == 3
    assert second.multimodal_inputs == {"video": ["v"]} and not second.picture_places
    assert sample.multimodal_inputs["image"] == ["row.png"]


def test_a_trajectory_that_the_trainer_cannot_take_fails():
    [sample] = samples_of({"trajectories": [trajectory("0011")]}, pending(), result=1.0, max_tokens=3)
    assert sample.status is SampleStatus.FAILED and "4 tokens is longer" in sample.failure


def session_of(*turns: tuple[int, int, int, str, float | None], parents: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """turns: (trajectory, start, end, left_out, reward); parents: trajectory -> (parent, shared)."""
    trajectories = []
    for index in range(1 + max(turn[0] for turn in turns)):
        parent, shared = parents.get(index, (None, 0))
        end = max(turn[2] for turn in turns if turn[0] == index)
        mask = [int(any(t == index and a <= i < b for t, a, b, *_ in turns)) for i in range(end)]
        made = trajectory("".join(map(str, mask)), first=100 * index)
        if parent is not None:
            made["token_ids"][:shared] = trajectories[parent]["token_ids"][:shared]
        trajectories.append(made | {"parent": parent, "shared": shared})
    names = ("trajectory", "start", "end", "left_out", "reward")
    rows = [dict(zip(names, turn, strict=True)) | {"finish_reason": "stop"} for turn in turns]
    return {"trajectories": trajectories, "turns": rows}


def rows_of(record: dict[str, Any], **rules: Any) -> tuple[list[tuple[int, str]], dict[str, int], int]:
    """(first token, mask of the whole) of each row, tokens left out, tokens repeated."""
    counted = count_turns(record, 1.0, Rules(**rules))
    samples = samples_of(record, pending(), result=1.0, max_tokens=99, counted=counted)
    for sample in samples:
        given = [p != 0.0 for p in sample.response_logprobs]
        assert given == [bool(m) for m in sample.response_mask]
        covered = [i for span in sample.versions for i in range(span.start, span.end)]
        assert covered == [i for i, m in enumerate(sample.response_mask) if m]
    masks = ["0" * len(s.prompt_ids) + "".join(map(str, s.response_mask)) for s in samples]
    return [(s.prompt_ids[0], mask) for s, mask in zip(samples, masks, strict=True)], counted.left_out, counted.repeated


def test_replies_that_do_not_count_are_context_and_cut_off_at_the_end():
    """A probe, then an episode whose second reply was thrown away and whose last one nobody received."""
    record = session_of(
        (0, 1, 3, "asked", None), (1, 2, 4, "", None), (1, 5, 7, "discarded", None), (2, 6, 8, "", None),
        (2, 9, 10, "unreceived", None), parents={2: (1, 5)},
    )  # fmt: skip
    left_out = {"asked": 2, "discarded": 2, "unreceived": 1}
    # What the first row has left stands in the second one as well: it is trained there.
    assert rows_of(record) == ([(100, "00110011")], left_out, 0)
    first, second = rows_of(record, train_discarded=True)[0]
    assert (first, second) == ((100, "0011011"), (100, "00000011"))
    assert rows_of(record, train_discarded=True)[1:] == ({"asked": 2, "unreceived": 1}, 5)


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        ("all", [(0, "011"), (100, "001100011"), (100, "00000000011")]),
        ("longest", [(100, "00110000011")]),
        ("last", [(0, "011")]),
        ("rewarded", [(100, "001100011")]),
        (lambda record: [0, 2], [(0, "011"), (100, "00110000011")]),
    ],
)
def test_which_trajectories_are_trained_and_what_they_share_goes_with_them(selection, rows):
    """A side question, a conversation, and a branch of it behind its first reply."""
    record = session_of(
        (1, 2, 4, "", None), (1, 7, 9, "", 0.5), (2, 9, 11, "", None), (0, 1, 3, "", None), parents={2: (1, 5)}
    )
    found, left_out, _ = rows_of(record, selection=selection)
    assert found == rows
    trained = sum(mask.count("1") for _, mask in rows)
    assert left_out.get("selection", 0) == 8 - trained


def test_an_agent_s_list_has_a_reward_for_each_turn_that_it_received():
    record = session_of(
        (0, 1, 2, "", None), (0, 3, 4, "discarded", None), (0, 5, 6, "unreceived", None), (0, 7, 8, "", 1.0), parents={}
    )
    [sample] = samples_of(record, pending(), result=[1.0, 5.0, 2.0], max_tokens=99)
    assert [(reward.turn, reward.reward) for reward in sample.turn_rewards] == [(0, 1.0), (3, 3.0)]
    with pytest.raises(AgentFailed, match="returned 4 rewards, one for each turn, but its session has 3 turns"):
        samples_of(record, pending(), result=[1.0] * 4, max_tokens=99)


def test_the_row_is_what_the_data_set_has():
    assert row_of(pending(), None)["prompt"] == "question"
    messages = ({"role": "user", "content": "hi"},)
    row = row_of(pending(), Prompt(2, (1,), "rendered", response="r", messages=messages))
    assert (row["prompt"], row["messages"], row["response"], row["index"]) == (None, list(messages), "r", 2)


class Gateway:
    """Records what the script says, one session after another; `broken`: calls that fail first."""

    def __init__(self, *records: dict[str, Any] | Exception) -> None:
        self.records, self.opened, self.ended = list(records), 0, []

    async def open(self, metadata: Any) -> OpenSession:
        self.opened += 1
        return OpenSession(str(self.opened), "key", "policy", "http://g/v1", "http://g")

    async def end(self, session_id: str) -> dict[str, Any]:
        self.ended.append(session_id)
        record = self.records[int(session_id) - 1]
        if isinstance(record, Exception):
            raise record
        return record


class Scripted:
    """Agents that end as told: a reward, or an error."""

    def __init__(self, *outcomes: float | Exception | None) -> None:
        self.outcomes, self.tasks = list(outcomes), []
        self.hang = asyncio.Event()

    async def run(self, task: AgentTask) -> float | None:
        self.tasks.append(task)
        outcome = self.outcomes[len(self.tasks) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None: ...


def episodes_of(gateway: Any, agents: Any, *, retries: int = 1, refusal=lambda _: None) -> AgentEpisodes:
    return AgentEpisodes(agents, lambda: gateway, AgentLimits(2, 60.0, retries, 100), refusal)


def fill(group: list[Sample], episodes: AgentEpisodes) -> list[Sample]:
    async def no_engine(request):
        raise AssertionError("agents go through the gateway")

    asyncio.run(fill_group(group, GenerateContext(no_engine, SamplingParams(max_tokens=9), 100), episodes))
    return group


def test_an_episode_replaces_its_sample_by_its_trajectories():
    gateway = Gateway({"trajectories": [trajectory("01"), trajectory("0101")]}, {"trajectories": [trajectory("01")]})
    agents = Scripted(0.5, None)
    group = fill([pending(0), pending(1)], episodes_of(gateway, agents))
    assert [(s.index, s.trajectory, s.episode_reward) for s in group] == [(0, 0, 0.5), (0, 1, 0.5), (1, 0, None)]
    assert agents.tasks[0].base_url == "http://g/v1" and agents.tasks[0].row["label"] == "x"
    assert gateway.ended == ["1", "2"]


def test_a_failed_episode_is_tried_again_in_a_new_session():
    gateway = Gateway({"trajectories": []}, {"trajectories": [trajectory("01")]})
    episodes = episodes_of(gateway, Scripted(AgentFailed("boom"), 1.0))
    [sample] = fill([pending()], episodes)
    assert sample.status is SampleStatus.COMPLETED and gateway.opened == 2 and "1" in gateway.ended
    assert episodes.counts["agent_retries"] == 1 and episodes.counts["agent_failures"] == 0


@pytest.mark.parametrize(
    ("record", "outcome", "said"),
    [
        ({"trajectories": []}, AgentFailed("boom"), "boom"),
        ({"trajectories": []}, 1.0, "without asking the model"),
        (session_of((0, 1, 3, "unreceived", None), parents={}), 1.0, "none of its turns counts: .* are 2 unreceived"),
        (EngineUnreachable("gateway: no answer"), 1.0, "no answer"),
        ({"trajectories": [trajectory("01", version="other:0:1")]}, 1.0, "'other:0:1', which are foreign"),
    ],
)
def test_an_episode_that_fails_to_the_end_is_a_failed_sample_with_its_reason(record, outcome, said):
    def refusal(version: str) -> str | None:
        return "foreign" if version.startswith("other") else None

    episodes = episodes_of(Gateway(record, record), Scripted(outcome, outcome), refusal=refusal)
    [sample] = fill([pending()], episodes)
    assert sample.status is SampleStatus.FAILED and re.search(said, sample.failure)
    assert episodes.counts["agent_failures"] == 1


def test_the_session_of_an_agent_that_is_cancelled_is_ended():
    class Hanging(Scripted):
        async def run(self, task):
            self.tasks.append(task)
            self.hang.set()
            await asyncio.Event().wait()

    async def go() -> Gateway:
        gateway, agents = Gateway({"trajectories": []}), Hanging()
        episodes = episodes_of(gateway, agents)
        context = GenerateContext(lambda request: asyncio.sleep(0), SamplingParams(max_tokens=9), 100)
        running = asyncio.ensure_future(episodes([pending()], context))
        await agents.hang.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return gateway

    assert asyncio.run(go()).ended == ["1"]


def test_no_more_agents_run_at_once_than_allowed():
    class Counting(Scripted):
        now = most = 0

        async def run(self, task):
            Counting.now += 1
            Counting.most = max(Counting.most, Counting.now)
            await asyncio.sleep(0)
            Counting.now -= 1
            return 1.0

    records = [{"trajectories": [trajectory("01")]}] * 6
    fill([pending(i) for i in range(6)], episodes_of(Gateway(*records), Counting()))
    assert Counting.most == 2


# -- several trajectories of one episode


def scored(*samples: tuple[int, int, float | None]) -> list[Sample]:
    """(index, trajectory, episode's reward) of one group."""
    made = []
    for index, number, reward in samples:
        [sample] = samples_of({"trajectories": [trajectory("0011")]}, pending(index), result=reward, max_tokens=9)
        sample.trajectory, sample.reward = number, reward
        made.append(sample)
    return made


def test_a_group_s_baseline_counts_episodes_and_not_their_trajectories():
    samples = scored((0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 0, 0.0))
    batch = samples_to_batch(samples)
    assert batch.episode_ids is not None and batch.episode_ids.tolist() == [0, 0, 0, 1]
    values = estimate_advantages(batch, AlgorithmConfig(advantage={"kind": "grpo", "normalize_std": False}))
    sampled = values[batch.loss_mask > 0]
    assert torch.allclose(sampled, torch.tensor([0.5] * 6 + [-0.5] * 2))  # a mean over samples would give 0.25, -0.75


def test_without_branches_nothing_changes():
    assert samples_to_batch(scored((0, 0, 1.0), (1, 0, 0.0))).episode_ids is None


def test_an_evaluation_counts_each_episode_once():
    metrics = eval_metrics("a", scored((0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 0, 0.0)))
    assert (metrics["eval/a/accuracy"], metrics["eval/a/samples"]) == (0.5, 2.0)


def test_the_lengths_of_an_evaluation_are_of_all_trajectories():
    samples = scored((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0))
    samples[1].append_environment_tokens([1] * 3)
    samples[1].status = SampleStatus.TRUNCATED
    metrics = eval_metrics("a", samples)
    assert (metrics["eval/a/response_length_mean"], metrics["eval/a/response_length_max"]) == (3.0, 5.0)
    assert metrics["eval/a/truncated_fraction"] == pytest.approx(1 / 3)


class Rewards:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def score(self, samples, texts):
        self.asked += texts
        return [float(len(text)) for text in texts]


def test_what_is_left_to_the_reward_function_is_asked_of_the_last_trajectory():
    samples = scored((0, 0, None), (0, 1, None), (1, 0, 0.5))
    samples[1].append_environment_tokens([1, 1])
    rewards = Rewards()
    scorer = Scorer(rewards, lambda ids: "x" * len(ids))
    assert asyncio.run(scorer.finish(samples)) is None
    assert rewards.asked == ["xxxx"] and [sample.reward for sample in samples] == [4.0, 4.0, 0.5]


def test_failed_episodes_are_counted_with_their_reason():
    samples = scored((0, 0, 1.0), (1, 0, 1.0))
    samples[0].fail("agent: boom")
    scorer = Scorer(Rewards(), lambda ids: "")
    assert asyncio.run(scorer.finish(samples)) is None
    assert len(samples) == 1 and scorer.stats.failed == 1 and "1 x agent: boom" in scorer.stats.describe()


# -- what is no agent


@pytest.mark.parametrize(
    ("path", "said"), [(f"{PLACE}:not_async", "must be `async def`"), (f"{PLACE}:talk_", "has no 'talk_'")]
)
def test_what_is_no_agent_is_found_before_anything_starts(path, said):
    with pytest.raises(UsageError, match=said):
        check_agent(path)


def hello(prompt: str, deadline: float = 60.0) -> AgentTask:
    return AgentTask("http://g/v1", "http://g", "key", "policy", {"prompt": prompt}, deadline, 5)


def test_an_agent_that_blocks_its_event_loop_loses_its_worker_and_the_next_one_gets_another(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.0)

    async def run() -> tuple[str, str, Any]:
        agents = FunctionAgents(f"{PLACE}:misbehaves", workers=1)
        try:
            other = asyncio.ensure_future(agents.run(hello("hangs")))
            with pytest.raises(AgentFailed) as blocking:
                await agents.run(hello("blocks", deadline=1.0))
            with pytest.raises(AgentFailed) as beside:
                await other
            return str(blocking.value), str(beside.value), await agents.run(hello("is fine"))
        finally:
            await agents.close()

    blocking, beside, fine = asyncio.run(run())
    assert "blocked its event loop" in blocking and "blocked its event loop" in beside and fine == 1.0


def test_what_a_worker_answered_before_it_ended_counts_also_where_its_end_is_seen_first():
    async def run() -> list[Any]:
        agents = FunctionAgents(f"{PLACE}:misbehaves", workers=1)
        try:
            assert await agents.run(hello("is fine")) == 1.0
            worker = agents._pool.workers[0]
            assert worker is not None
            worker.process.send_signal(signal.SIGSTOP)  # it is given an episode; the loop must not read its answer yet
            answered = asyncio.ensure_future(agents.run(hello("is fine")))
            await asyncio.sleep(0.2)
            worker.process.send_signal(signal.SIGCONT)
            assert select.select([worker._socket], [], [], 60.0)[0]
            worker.process.kill()
            worker.process.wait()
            return await asyncio.gather(agents.run(hello("is fine")), answered)
        finally:
            await agents.close()

    assert asyncio.run(run()) == [1.0, 1.0]


def test_a_worker_whose_event_loop_is_blocked_ends_with_its_parent():
    code = (
        "import asyncio, os, sys; from rltool.agents.pool import FunctionAgents; from rltool.agents.task import *\n"
        "async def run():\n"
        f"    agents = FunctionAgents({PLACE + ':misbehaves'!r}, workers=1)\n"
        "    task = AgentTask('', '', '', '', {'prompt': 'blocks'}, 60.0, 5)\n"
        "    running = asyncio.ensure_future(agents.run(task))\n"
        "    await asyncio.sleep(0)\n"
        "    await agents._pool.ready()\n"
        "    print(agents._pool.workers[0].process.pid, flush=True)\n"
        "    await asyncio.sleep(1)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(run())"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    pid = int(parent.stdout)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not alive


def test_a_list_is_a_command_line():
    assert isinstance(load_agents(["python", "agent.py"], workers=1), CommandAgents)
