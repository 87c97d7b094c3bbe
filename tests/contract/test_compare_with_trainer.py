"""What engines hold against what the trainer's ranks hold at this moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltool.config.rollout import WeightsConfig
from rltool.engines.fleet.fleet import Member
from rltool.weights.verify.comparison import Comparison
from rltool.weights.verify.values import ValueCheck
from tests import fleets
from tests.contract import sync_rig
from tests.contract.fakes.sglang import VOCAB_SIZE, FakeSglang
from tests.contract.sync_rig import Rig, version
from tests.ranks import SenderRanks

DEADLINE = 3.0
NAMES = [f"layers.{index}.norm" for index in range(6)]


class Ranks(SenderRanks):
    """shift: by how much its log-probabilities differ from the engines'."""

    shift = 0.0
    gathers = 0

    def weights(self, step):
        return {name: torch.full((3,), float(step + index)) for index, name in enumerate(NAMES)}

    async def weight_checksums(self, layout):
        self.gathers += 1
        return await super().weight_checksums(layout)

    async def logprobs(self, batch):
        return batch.rollout_logprobs + self.shift


def members(r: Rig[Ranks], *engines: Any) -> list[Member]:
    return [r.fleet.member(engine.url) for engine in engines]


def compared(
    engines: list[Any], directory: Path, scenario: Callable[[Rig[Ranks], Comparison], Awaitable[None]]
) -> None:
    """After a sync of step 1 to these engines."""

    async def run() -> None:
        ranks = partial(Ranks, deadline=DEADLINE)
        config = WeightsConfig(bucket_bytes=20, transport="disk")
        async with sync_rig.rig(engines, ranks, config, directory, deadline=DEADLINE) as r:
            await r.sync.sync(version(1))
            check = ValueCheck(VOCAB_SIZE, 1.0, 1e-3, 256)
            await scenario(r, Comparison(r.set, r.ranks, check, deadline=DEADLINE))

    asyncio.run(run())


def test_engines_that_hold_what_the_ranks_hold_are_equal_by_one_gather(two, tmp_path):
    async def scenario(r, comparison):
        urls = [engine.url for engine in two]
        found = await comparison.compare(members(r, *two))
        assert list(found) == urls and all(verdict.equal for verdict in found.values())
        assert "6 of 6 parameters are bit-equal" in found[urls[0]].lines[0]
        assert "log-probabilities of 64 sampled tokens agree" in found[urls[0]].lines[1]
        assert r.ranks.gathers == 1

    compared(two, tmp_path, scenario)


def test_the_first_parameter_that_differs_is_named_and_of_that_engine_alone(two, tmp_path):
    async def scenario(r, comparison):
        for name in (NAMES[4], NAMES[2]):
            two[1].tensors[name] = two[1].tensors[name] + 1e-6
        found = await comparison.compare(members(r, *two))
        assert found[two[0].url].equal and not found[two[1].url].equal
        assert found[two[1].url].lines[1] == f"the first parameter that differs: {NAMES[2]}; then {NAMES[4]}"

    compared(two, tmp_path, scenario)


def test_an_engine_that_missed_the_last_step_differs(two, tmp_path):
    async def scenario(r, comparison):
        r.ranks.sent = 2
        found = await comparison.compare(members(r, two[0]))
        assert f"the first parameter that differs: {NAMES[0]}" in found[two[0].url].lines[1]

    compared(two, tmp_path, scenario)


def test_values_that_differ_are_a_difference_where_the_bits_are_equal(two, tmp_path):
    async def scenario(r, comparison):
        r.ranks.shift = 0.5
        verdict = (await comparison.compare(members(r, two[0])))[two[0].url]
        assert not verdict.equal and "mean difference 5.00e-01" in verdict.lines[1]

    compared(two, tmp_path, scenario)


def test_an_engine_that_does_not_answer_is_not_equal_and_the_others_are_compared(two, tmp_path):
    async def scenario(r, comparison):
        two[0].die()
        found = await comparison.compare(members(r, *two))
        assert not found[two[0].url].equal and two[0].url in found[two[0].url].lines[0]
        assert found[two[1].url].equal

    compared(two, tmp_path, scenario)


def test_without_any_engine_that_answers_the_ranks_are_left_alone(two, tmp_path):
    async def scenario(r, comparison):
        two[0].die()
        await comparison.compare(members(r, two[0]))
        assert r.ranks.gathers == 0

    compared(two, tmp_path, scenario)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_of_several_ranks_and_of_both_kinds_are_compared_by_a_gather_for_each_layout(
    two, stack, tmp_path, device
):
    sglang = stack.enter_context(FakeSglang())
    two[0].of_ranks, two[1].of_ranks, sglang.tp, sglang.device = [{}, {}], [{}, {}], 2, device

    async def scenario(r, comparison):
        wrong = r.ranks.weights(1)[NAMES[3]] * 2
        two[1].of_ranks[1] = {NAMES[3]: wrong}
        sglang.weights[NAMES[5]] = bytes(12)
        found = await comparison.compare(members(r, *two, sglang))
        assert [verdict.equal for verdict in found.values()] == [True, False, False]
        assert "6 of 6 parameters are bit-equal (over 2 ranks)" in found[two[0].url].lines[0]
        assert found[two[1].url].lines[1] == f"the first parameter that differs: {NAMES[3]} (of dp0:pp0:pcp0:tp1)"
        assert found[sglang.url].lines[1] == f"the first parameter that differs: {NAMES[5]}"
        assert r.ranks.gathers == 2

    compared([*two, sglang], tmp_path, scenario)


def test_an_sglang_whose_dtype_nobody_knows_is_compared_by_values_alone(stack, tmp_path):
    sglang = stack.enter_context(FakeSglang())

    async def scenario(r, comparison):
        fleets.describe(r.fleet, sglang.url, info={"dtype": None})
        for shift in (0.0, 0.5):
            r.ranks.shift = shift
            [verdict] = (await comparison.compare(members(r, sglang))).values()
            assert verdict.equal is (shift == 0.0) and "start it with --dtype" in verdict.lines[0]
        assert r.ranks.gathers == 0

    compared([sglang], tmp_path, scenario)
