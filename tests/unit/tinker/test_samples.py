"""Sampling requests: what is asked for, which results are kept, and the answer to polls for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rltool.errors import UsageError
from rltool.tinker import samples as samples_module
from rltool.tinker.limits import Refused
from rltool.tinker.samples import SAMPLE, Samples
from rltool.tinker.sampling import SampleRequest, _of_prompt, parse_sample
from rltool.tinker.wire import SampledTokens, SampleOutput


class Engines:
    """Give as many tokens as are asked for."""

    max_model_len, at_once = 512, 16

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    async def sample(self, asked: SampleRequest, weights: Path | None) -> SampleOutput:
        if self.fault is not None:
            raise self.fault
        tokens = (1,) * asked.sampling.max_tokens
        return SampleOutput((SampledTokens(tokens, (-0.5,) * len(tokens), "length"),))


def request(seq: int, tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": "s", "seq_id": seq, "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": tokens}, **more,
    }  # fmt: skip


def base() -> Path | None:
    return None


def served(case: Callable[[Samples], Any], engines: Engines | None = None) -> None:
    async def run() -> None:
        samples = Samples(engines or Engines(), vocab_size=10, most=100)
        await case(samples)
        await samples.close()

    asyncio.run(run())


async def ended(samples: Samples, number: str) -> None:
    while not samples._asked[number].task.done():
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # its callbacks, too


def test_results_are_kept_up_to_a_size_and_those_that_were_fetched_go_first(monkeypatch):
    """A client whose result another's has pushed out asks again: 410 is what the released client does that for."""
    monkeypatch.setattr(samples_module, "KEPT_BYTES", 3000)

    async def case(samples: Samples) -> None:
        numbers: list[str] = []
        for seq in range(3):  # 800 bytes each, and what is around them
            numbers.append(samples.begin("a", request(seq, tokens=100), base))
            await ended(samples, numbers[-1])
        assert "proto" in (await samples.result("a", numbers[1], 5) or {})
        assert "proto" in (await samples.result("a", numbers[1], 5) or {}), "where the answer was lost"
        numbers.append(samples.begin("b", request(0, tokens=100), base))
        await ended(samples, numbers[-1])
        for number in (numbers[0], numbers[2]):
            assert "proto" in (await samples.result("a", number, 5) or {})
        with pytest.raises(Refused, match="its result is kept no more; ask once more") as refused:
            await samples.result("a", numbers[1], 5)
        assert refused.value.status == 410
        again = samples.begin("a", request(1, tokens=100), base)
        assert again not in numbers and "proto" in (await samples.result("a", again, 5) or {})
        for number in (numbers[3], f"{again}0", f"{again}x", f"{again}{'0' * 5000}"):
            with pytest.raises(Refused) as refused:
                await samples.result("a", number, 5)
            assert refused.value.status == 404
        with pytest.raises(Refused, match="the server was started again") as refused:
            await samples.result("a", f"{SAMPLE}0123456789ab-1", 5)
        assert refused.value.status == 410

    served(case)


def test_one_result_is_kept_however_large_and_no_more_than_so_many(monkeypatch):
    monkeypatch.setattr(samples_module, "KEPT_BYTES", 10)
    monkeypatch.setattr(samples_module, "KEPT_RESULTS", 2)

    async def case(samples: Samples) -> None:
        for seq in range(5):
            number = samples.begin("a", request(seq, tokens=100), base)
            assert "proto" in (await samples.result("a", number, 5) or {})
            await ended(samples, number)
        assert len(samples._asked) == len(samples._by_key) == 1
        monkeypatch.setattr(samples_module, "KEPT_BYTES", 10**6)
        for seq in range(5, 10):
            await ended(samples, samples.begin("a", request(seq), base))
        assert len(samples._asked) == len(samples._by_key) == 2 and samples.in_flight == {"a": 0}

    served(case)


def test_a_fault_of_the_server_is_the_requests_result_and_not_asked_for_for_ever(caplog):
    """A poll that is answered with 500 is repeated by the released client at once, without end."""

    async def case(samples: Samples) -> None:
        number = samples.begin("a", request(0), base)
        for _ in range(2):
            found = await samples.result("a", number, 5)
            assert found == {"error": "ValueError: of this server", "category": "server"}

    served(case, Engines(ValueError("of this server")))
    assert "of this server" in caplog.text


def test_a_repetition_is_answered_when_its_weights_have_gone():
    def gone() -> Path | None:
        raise Refused(404, "these weights are gone")

    async def case(samples: Samples) -> None:
        number = samples.begin("a", request(0), base)
        assert samples.begin("a", request(0), gone) == number
        with pytest.raises(Refused, match="are gone"):
            samples.begin("a", request(1), gone)
        assert samples.in_flight["a"] == 1
        assert "proto" in (await samples.result("a", number, 5) or {})

    served(case)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": {"chunks": [{"tokens": 5}]}}, "prompt has a picture"),
        ({"prompt": {"chunks": [{"tokens": "ab"}]}}, "prompt has a picture"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, "outside of the vocabulary"),
        ({"prompt": {"chunks": [{"tokens": [10**400]}]}}, "outside of the vocabulary"),
        ({"sampling_params": {"temperature": 10**400}}, "temperature is 1000"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature is nan"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n is 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_refused_by_name(given, message):
    with pytest.raises(UsageError, match=message):
        parse_sample(request(0) | given, vocab_size=10, max_model_len=8)


@pytest.mark.parametrize("topk", [0, 2])
def test_the_one_token_of_a_prompt_has_no_log_probability(topk):
    wanted = request(0) | {"prompt_logprobs": True, "topk_prompt_logprobs": topk}
    logprobs, table = _of_prompt(parse_sample(wanted, vocab_size=10, max_model_len=8), None)
    assert logprobs is not None and logprobs.shape == (1,) and np.isnan(logprobs).all()
    assert (None if table is None else table.ids.tolist()) == ([[-1, -1]] if topk else None)
    assert _of_prompt(parse_sample(request(0), vocab_size=10, max_model_len=8), None) == (None, None)
