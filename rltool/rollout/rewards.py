"""Reward functions that ship with rltool, and the machinery that runs any reward function over a step's samples.

A reward function is `f(sample: Sample, text: str) -> float`, plain or async; `text` is the decoded response without special
tokens. It is named by import path in reward.function. Check your own with `rltool.rollout.contracts.check_reward_function`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltool.errors import UsageError
from rltool.rollout.sample import Sample, SampleStatus

RewardFunction = Callable[[Sample, str], Any]


def exact_match(sample: Sample, text: str) -> float:
    """1.0 if the response equals the label, both stripped of surrounding white space, else 0.0."""
    return float(text.strip() == _label(sample).strip())


def math_answer(sample: Sample, text: str) -> float:
    r"""1.0 if the last `\boxed{...}` or `#### ...` of the response equals that of the label (or the label itself), else 0.0.

    Numbers are compared by value, so "1,000", "1000.0" and "$1000" are equal.
    """
    found = final_answer(text)
    wanted = final_answer(_label(sample)) or _label(sample)
    return float(found is not None and _normalize_answer(found) == _normalize_answer(wanted))


def reasoning_gym_score(sample: Sample, text: str) -> float:
    """The score of the reasoning-gym task named in metadata["source_dataset"]. Note that many tasks pay for near misses."""
    import reasoning_gym

    entry = {"question": sample.prompt_text, "answer": _label(sample), "metadata": sample.metadata}
    return float(reasoning_gym.get_score_answer_fn(sample.metadata["source_dataset"])(text.strip(), entry))


def final_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (braces may nest), else behind the last `####` on its line; None if there is neither."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        begin = start + len("\\boxed{")
        depth = 1
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position].strip()
    marked = re.findall(r"####[ \t]*([^\n]+)", text)
    return marked[-1].strip() if marked else None


def _normalize_answer(text: str) -> str:
    stripped = text.strip().rstrip(".").replace("$", "").replace("%", "").strip()
    number = stripped.replace(",", "")
    if re.fullmatch(r"[-+]?\d+(\.\d*)?|[-+]?\.\d+", number):
        whole, _, fraction = number.lstrip("+").partition(".")
        sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
        digits, fraction = digits.lstrip("0") or "0", fraction.rstrip("0")
        sign = "" if digits == "0" and not fraction else sign
        return f"{sign}{digits}.{fraction}" if fraction else f"{sign}{digits}"
    return stripped


def _label(sample: Sample) -> str:
    if sample.label is None:
        raise ValueError(f"prompt {sample.prompt_index} has no label to compare with")
    return sample.label


@dataclass(frozen=True)
class RewardStats:
    """num_failed of num_samples have no reward; reasons: message -> how often, most frequent first."""

    num_samples: int
    num_failed: int
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def failed_fraction(self) -> float:
        return self.num_failed / self.num_samples if self.num_samples else 0.0

    def describe(self) -> str:
        """One line for an error message or a log."""
        shown = "; ".join(f"{count} x {reason}" for reason, count in list(self.reasons.items())[:3])
        return f"the reward function failed on {self.num_failed} of {self.num_samples} samples: {shown}"


async def score_samples(
    samples: Sequence[Sample], function: RewardFunction, decode: Callable[[Sequence[int]], str], *, workers: int, timeout: float
) -> RewardStats:
    """Set the reward of each sample, at most `workers` at a time, each within `timeout` seconds.

    A function that raises, is too slow, or returns anything but a finite number leaves the sample FAILED and without a reward.
    The whole response is decoded, environment tokens included.
    """
    slots = asyncio.Semaphore(workers)
    reasons: Counter[str] = Counter()

    async def score(sample: Sample) -> None:
        async with slots:
            try:
                sample.reward = _finite(await _call(function, sample, decode(sample.response_ids), timeout))
            except TimeoutError:
                reasons[f"no answer within {timeout:g} s"] += 1
            except Exception as error:  # whatever a user's function raises is that sample's failure, counted and reported
                reasons[f"{type(error).__name__}: {error}"] += 1
            else:
                return
            sample.reward = None
            sample.status = SampleStatus.FAILED

    await asyncio.gather(*(score(sample) for sample in samples))
    return RewardStats(len(samples), sum(reasons.values()), dict(reasons.most_common()))


async def _call(function: RewardFunction, sample: Sample, text: str, timeout: float) -> Any:
    if is_async(function):
        return await asyncio.wait_for(function(sample, text), timeout)
    return await asyncio.wait_for(_in_daemon_thread(function, sample, text), timeout)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; callable objects with an async __call__ count."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _in_daemon_thread(function: RewardFunction, sample: Sample, text: str) -> Any:
    # not a ThreadPoolExecutor: a reward that hangs would keep its worker for ever, and the interpreter from exiting
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():  # timed out meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(sample, text)
        except StopIteration as stop:  # a future refuses to carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run ended while this reward hung
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future


def _finite(value: Any) -> float:
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise UsageError("the reward function returned an awaitable; declare it `async def`")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {type(value).__name__}, expected a number") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number
