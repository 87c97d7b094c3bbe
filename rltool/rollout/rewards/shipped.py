"""Rewards that compare a response with its label. Any reward function is run by rltool.rollout.rewards.pool.

A reward function is `f(sample: Sample, text: str) -> float`, plain or async; `text` is the decoded response without
special tokens. reward.function names it, by one of the names in rltool.config.reward or by import path; reward.options
are its keyword arguments. Check your own with `rltool.rollout.contracts.check_reward_function`.

All take time in proportion to the text's length: a policy that collapses writes one character without end, and
that has to be scored 0, not to time out. So what a pattern repeats it does not give back (`*+`), and it never tries the
same run of characters from each of its places.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter

from rltool.rollout.sample import Sample

_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)")
_CHOICE_STATED = re.compile(r"(?i:\b(?:answer|option|choice)(?:\s++is)?)\s*+(?:[:=]\s*+)?\**+\(?([A-Z])\b")
_CHOICE_ALONE = re.compile(r"^[^\w\n]*+([A-Z])[^\w\n]*+$|^\(?([A-Z])[).:]\s", re.MULTILINE)


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


def numeric(sample: Sample, text: str, *, tolerance: float = 0.0) -> float:
    """1.0 if the last number in the response equals the label's last number, to a relative `tolerance`, else 0.0.

    "1,000", "$1000." and "1e3" are the same number; units and words around it do not matter.
    """
    label = _label(sample)
    wanted = last_number(final_answer(label) or label)
    if wanted is None:
        raise ValueError(f"the label {label[:40]!r} holds no number")
    found = last_number(text)
    return float(found is not None and math.isclose(found, wanted, rel_tol=tolerance))


def math_verified(sample: Sample, text: str) -> float:
    """1.0 if package math-verify finds the answer mathematically equal to the label, else 0.0.

    Fractions, sets, intervals and expressions count as equal in any form. The answer is what math-verify extracts, a
    `\\boxed{}` first. The package sets alarms for its own time limits, so this runs in a process's main thread.
    """
    from math_verify import parse, verify

    label = final_answer(_label(sample)) or _label(sample)
    wanted = parse(f"${label}$") or parse(label)
    if not wanted:
        raise ValueError(f"math-verify cannot read the label {label[:40]!r}")
    return float(bool(verify(wanted, parse(text))))


def multiple_choice(sample: Sample, text: str) -> float:
    """1.0 if the response chooses the label's letter, else 0.0.

    The choice is the letter in the last `\\boxed{}`, else behind the last "answer", "option" or "choice", else the
    last letter that stands alone on a line or begins one as in "B)".
    """
    label = re.search(r"[A-Za-z]", _label(sample))
    if label is None:
        raise ValueError(f"the label {_label(sample)[:40]!r} holds no letter")
    return float(chosen_letter(text) == label[0].upper())


def chosen_letter(text: str) -> str | None:
    """See multiple_choice; None where nothing is chosen."""
    boxed = re.search(r"[A-Z]", final_answer(text) or "")
    if boxed is not None:
        return boxed[0]
    for pattern in (_CHOICE_STATED, _CHOICE_ALONE):
        found = [letter for groups in pattern.findall(text) for letter in groups if letter]
        if found:
            return found[-1]
    return None


def f1(sample: Sample, text: str) -> float:
    """F1 of the words that response and label share (SQuAD's, Rajpurkar et al. 2016, arXiv 1606.05250).

    Case, punctuation and English articles do not count. Both without a word: 1.0; one of them: 0.0.
    """
    found, wanted = _words(text), _words(_label(sample))
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def regex(sample: Sample, text: str, *, pattern: str) -> float:
    """1.0 if `pattern` is found in the response (Python's syntax, `.` matches no line end), else 0.0.

    With a group called `answer`, what it holds in the last match must be the label besides, without the white space
    around it.
    """
    compiled = re.compile(pattern)
    matches = list(compiled.finditer(text))
    if not matches:
        return 0.0
    if "answer" not in compiled.groupindex:
        return 1.0
    return float((matches[-1]["answer"] or "").strip() == _label(sample).strip())


def last_number(text: str) -> float | None:
    """The last number in a text, commas between thousands left out; None without one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reasoning_gym_score(sample: Sample, text: str) -> float:
    """The score of the reasoning-gym task named in metadata["source_dataset"]. Note that many tasks pay for near
    misses."""
    import reasoning_gym

    # Some tasks have no one answer: there the label is missing, and the metadata has what is right.
    entry = {"question": sample.prompt_text, "answer": sample.label, "metadata": sample.metadata}
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


def _words(text: str) -> list[str]:
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _label(sample: Sample) -> str:
    if sample.label is None:
        raise ValueError(f"prompt {sample.prompt_index} has no label to compare with")
    return sample.label
