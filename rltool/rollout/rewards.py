"""Reward functions that ship with rltool. Any reward function is run by rltool.rollout.reward_pool.

A reward function is `f(sample: Sample, text: str) -> float`, plain or async; `text` is the decoded response without
special tokens. It is named by import path in reward.function. Check your own with
`rltool.rollout.contracts.check_reward_function`.
"""

from __future__ import annotations

import re

from rltool.rollout.sample import Sample


def exact_match(sample: Sample, text: str) -> float:
    """1.0 if the response equals the label, both stripped of surrounding white space, else 0.0."""
    return float(text.strip() == _label(sample).strip())


def math_answer(sample: Sample, text: str) -> float:
    r"""1.0 if the last `\boxed{...}` or `#### ...` of the response equals that of the label (or the label itself), else
    0.0.

    Numbers are compared by value, so "1,000", "1000.0" and "$1000" are equal.
    """
    found = final_answer(text)
    wanted = final_answer(_label(sample)) or _label(sample)
    return float(found is not None and _normalize_answer(found) == _normalize_answer(wanted))


def reasoning_gym_score(sample: Sample, text: str) -> float:
    """The score of the reasoning-gym task named in metadata["source_dataset"]. Note that many tasks pay for near
    misses."""
    import reasoning_gym

    entry = {"question": sample.prompt_text, "answer": _label(sample), "metadata": sample.metadata}
    score = reasoning_gym.get_score_answer_fn(sample.metadata["source_dataset"])
    return float(score(text.strip(), entry))  # pyright: ignore[reportCallIssue]  # declared without its two parameters


def final_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (braces may nest), else behind the last `####` on its line; None if there
    is neither."""
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
