"""Rewards of benchmarks that both sides of a comparison compute, which import nothing; and `python -m
benchmarks.rewards`: how long the rewards that ship with rltool take for what a policy that has collapsed writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CHARACTERS = (*map(chr, range(32, 127)), *"\n\r\t\x0b\x1c\x85\u00a0\u2003\u2028\u00e9\u4e2d")
MIXES = (
    "answer ", "answer\n", "answer:", "answer is", " \n", "\n ", "\n\n*", "* ", "*\n", "- \n", "***", " ***", "A) ",
    "A\n", "[a", "[[", "[1,", "<<a", "<<aaa\n", "1,", "1,000,", "1e+", "####\n", "\\boxed{", "\\boxed{a}{", "```",
    "{\"a\":", ". \n", "! ",
)  # fmt: skip
BEGINNINGS = ("answer", "answer =", "<<", "<<a", "[", "####", "\\boxed{", "- ", "```", "A")
"""What stands once, before one of `CHARACTERS` without end."""


def collapsed(length: int, *, plain: bool = False) -> list[str]:
    """Texts of so many characters and a few: one character, or a few, again and again. plain: from the first one on."""
    texts = [character * length for character in CHARACTERS]
    texts += [mix * (length // len(mix)) for mix in MIXES]
    if plain:
        return texts
    blank = [character for character in CHARACTERS if character.isspace()]
    return texts + [first + again * length for first in BEGINNINGS for again in (*blank, *"*a[<-1")]


def slowest(reward: Callable[[str], float], texts: list[str]) -> tuple[float, str, float]:
    """(CPU seconds, the text, the highest reward of any of them) of the one that takes longest."""
    worst, which, highest = 0.0, "", 0.0
    for text in texts:
        began = time.process_time()
        highest = max(highest, reward(text))
        seconds = time.process_time() - began
        if seconds >= worst:
            worst, which = seconds, text
    return worst, which, highest


def share_of_letters(text: str, tokens: int) -> float:
    """Letters in `text` for each of the answer's `tokens`: 0 to 1, also where tokens decode to nothing."""
    return sum(map(str.isalpha, text)) / max(tokens, 1)


def letter_share(sample: Any, text: str) -> float:
    """share_of_letters as a reward function of rltool."""
    return share_of_letters(text, len(sample.response_ids))


def shipped() -> dict[str, Callable[[str], float]]:
    """Rewards by name, of a text alone: those that need neither a model nor another package than math-verify."""
    from rltool.rollout.rewards import shipped as rewards
    from rltool.rollout.rewards.instructions import CHECKS, instructions_followed
    from rltool.rollout.sample import Sample

    def of(**facts: Any) -> Sample:
        return Sample(prompt_ids=[1], prompt_text="", prompt_index=0, group_id=0, index=0, **facts)

    number, letter = of(label="42"), of(label="Q")
    arguments: dict[str, dict[str, Any]] = {
        "keywords:existence": {"keywords": ["sun"]}, "keywords:forbidden_words": {"forbidden_words": ["sun"]},
        "keywords:frequency": {"keyword": "aa", "frequency": 10**9, "relation": "at least"},
        "length_constraints:number_words": {"num_words": 10**9, "relation": "at least"},
        "length_constraints:number_sentences": {"num_sentences": 10**9, "relation": "at least"},
        "length_constraints:number_paragraphs": {"num_paragraphs": 10**9},
        "startend:end_checker": {"end_phrase": "the end"},
        "detectable_format:number_bullet_lists": {"num_bullets": 10**9},
        "detectable_content:number_placeholders": {"num_placeholders": 10**9},
        "detectable_content:postscript": {"postscript_marker": "P.S."},
    }  # fmt: skip
    told = of(metadata={"instruction_id_list": list(CHECKS), "kwargs": [arguments.get(name, {}) for name in CHECKS]})
    return {
        "exact": lambda text: rewards.exact_match(number, text),
        "final-answer": lambda text: rewards.math_answer(number, text),
        "numeric": lambda text: rewards.numeric(number, text),
        "math": lambda text: rewards.math_verified(number, text),
        "choice": lambda text: rewards.multiple_choice(letter, text),
        "f1": lambda text: rewards.f1(number, text),
        "regex": lambda text: rewards.regex(number, text, pattern=r"<answer>(?P<answer>[^<]*+)</answer>"),
        "instructions": lambda text: instructions_followed(told, text, all_or_nothing=True),
    }


def main() -> None:
    print("| reward | " + " | ".join(f"{length:,} characters" for length in (25_000, 50_000, 100_000)) + " | of |")
    print("|---|---|---|---|---|")
    for name, reward in shipped().items():
        reward("x")  # what is imported at the first call
        found = [slowest(reward, collapsed(length, plain=name == "math")) for length in (25_000, 50_000, 100_000)]
        cells = " | ".join(f"{seconds:.3f} s" for seconds, _, _ in found)
        print(f"| {name} | {cells} | `{found[-1][1][:12]!r}` ... |", flush=True)


if __name__ == "__main__":
    main()
