"""The task, and a model that is ready to learn it: what things cost, of which the agent alone knows the prices.

    python -m recipes.shop.task runs/shop --model MODEL

writes into runs/shop

- `model`: MODEL (SmolLM2-135M-Instruct) with a chat template that has tools,
- `train.jsonl`, `held_out.jsonl`: questions, their answers, and the prices in `metadata` (no question of the second is
  in the first with the same prices),
- `warm_start.jsonl`: turns of a careless clerk, who guesses in place of asking, mixes numbers up, or copies an answer
  wrongly. The model has no habit of tools; from these it gets the form, and is mostly wrong over a whole question.

A question is three or four turns: `price` of a thing, `multiply`, perhaps `subtract` or another `price` and `add`, then
the number alone. No model of this size computes these numbers, and none can know the prices.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

THINGS = (
    "lamp", "cup", "chair", "table", "pen", "book", "hat", "shirt", "coat", "boot", "ball", "drum", "bell", "clock",
    "plate", "bowl", "spoon", "fork", "pot", "pan", "rug", "mirror", "candle", "basket", "ladder", "hammer", "saw",
    "rope", "tent", "map", "kite", "doll", "puzzle", "camera", "radio", "guitar", "helmet", "towel", "pillow",
    "blanket",
)  # fmt: skip
COSTS = ("What do {n} {a}s cost?", "I take {n} {a}s. What do I pay?", "How much are {n} {a}s?")
CHANGE = (
    "I have {m} and buy {n} {a}s. How much is left?", "What remains of {m} after {n} {a}s?",
    "{n} {a}s, please. I pay with {m}: what do I get back?",
)  # fmt: skip
TOGETHER = (
    "What do a {a} and a {b} cost together?", "One {a} and one {b}: how much is that?",
    "I take a {a} and a {b}. What do I pay?",
)  # fmt: skip

TEMPLATE = r"""{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}
{{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
{%- endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""ChatML with calls in Hermes' form. Of a tool it writes the name and the arguments': every token costs time."""
ASKS = "<|im_start|>assistant\n"
SYSTEM = "Tools: price(item) add(a, b) subtract(a, b) multiply(a, b)"
"""What it makes of agent.py's tools."""

GUESSES, WRONG_CALLS, WRONG_ANSWERS = 0.15, 0.15, 0.15
"""Shares of the clerk's turns: 0.44 of its questions with two calls end well and 0.32 of those with three; the model,
which imitates it imperfectly, is below."""

Call = tuple[str, dict[str, Any], str]
"""Tool, arguments, result."""


def question_of(rng: random.Random) -> tuple[str, dict[str, int], list[Call]]:
    """(question, prices, the calls that answer it): the last result is the answer."""
    a, b = rng.sample(THINGS, 2)
    n, price, other = rng.randint(12, 98), rng.randint(101, 998), rng.randint(101, 998)
    total = n * price
    asked = ("price", {"item": a}, str(price))
    times = ("multiply", {"a": n, "b": price}, str(total))
    kind = rng.choice((COSTS, CHANGE, TOGETHER))
    if kind is TOGETHER:
        calls = [asked, ("price", {"item": b}, str(other)), ("add", {"a": price, "b": other}, str(price + other))]
        return rng.choice(kind).format(a=a, b=b), {a: price, b: other}, calls
    if kind is COSTS:
        return rng.choice(kind).format(n=n, a=a), {a: price}, [asked, times]
    paid = total + rng.randint(101, 9998)
    calls = [asked, times, ("subtract", {"a": paid, "b": total}, str(paid - total))]
    return rng.choice(kind).format(n=n, a=a, m=paid), {a: price}, calls


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def turns_of(question: str, calls: list[Call]) -> Iterator[tuple[str, str]]:
    """(what the model reads, the right reply), turn by turn."""
    read = turn("system", SYSTEM) + turn("user", question)
    for name, arguments, result in calls:
        yield read + ASKS, (said := call_text(name, arguments))
        read += turn("assistant", said) + turn("tool", result)
    yield read + ASKS, calls[-1][2]


def careless_turns(question: str, calls: list[Call], rng: random.Random) -> Iterator[dict[str, str]]:
    """A row for each turn: all before it is right, and it may be wrong."""
    for (read, right), call in zip_longest(turns_of(question, calls), calls):
        if call is None:
            said = _slipped(right, rng) if rng.random() < WRONG_ANSWERS else right
        elif rng.random() < GUESSES:
            said = str(rng.randint(101, 99_999))
        elif rng.random() < WRONG_CALLS:
            said = call_text(call[0], _mixed_up(call[1], rng))
        else:
            said = right
        yield {"prompt": read, "response": said}


def _mixed_up(arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One of them is another thing, or has another digit."""
    key = rng.choice(list(arguments))
    right = arguments[key]
    if isinstance(right, str):
        return {key: rng.choice([thing for thing in THINGS if thing != right])}
    return arguments | {key: int(_slipped(str(right), rng))}


def _slipped(number: str, rng: random.Random) -> str:
    """One of its digits is another; it begins with no 0."""
    place = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "123456789" if digit != number[place]])
    return number[:place] + digit + number[place + 1 :]


def make_data(directory: Path, *, seed: int = 0, num_train: int = 6000, num_held_out: int = 500) -> None:
    """See this module. The warm start is of questions of its own."""
    rng = random.Random(f"shop {seed}")
    seen: set[str] = set()

    def fresh(count: int) -> Iterator[tuple[str, dict[str, int], list[Call]]]:
        while count:
            question, prices, calls = question_of(rng)
            if (known := f"{question} {prices}") not in seen:
                seen.add(known)
                count -= 1
                yield question, prices, calls

    def rows(count: int) -> Iterator[dict[str, Any]]:
        for question, prices, calls in fresh(count):
            yield {"prompt": question, "label": calls[-1][2], "metadata": {"prices": prices}}

    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "held_out.jsonl", rows(num_held_out))
    _write(directory / "train.jsonl", rows(num_train))
    _write(
        directory / "warm_start.jsonl",
        (row for question, _, calls in fresh(num_train // 2) for row in careless_turns(question, calls, rng)),
    )


def make_model(source: Path, target: Path) -> Path:
    """Links to the files of `source`, and another chat template."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("chat_template"):
            (target / file.name).unlink(missing_ok=True)
            (target / file.name).symlink_to(file.absolute())
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return target


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    make_data(chosen.directory, seed=chosen.seed)
    make_model(chosen.model, chosen.directory / "model")


if __name__ == "__main__":
    main()
