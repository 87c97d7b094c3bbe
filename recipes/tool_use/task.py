"""The task, and a model that is ready to learn it: a sum, difference or product of two numbers of two digits.

No model of this size computes one, but it can copy: the numbers into a call of the calculator, and its result into the
answer. The warm start imitates a careless user of the tool, who guesses in place of calling it, or copies a digit
wrongly. Calls and answers of it are right often enough to be found, and mostly wrong together.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from rltool.quickstart.tiny_model import make_tiny_model

PAD, STOP, UNKNOWN, USER, ASSISTANT, TOOL = "<pad>", "<end>", "<unk>", "<user>", "<assistant>", "<tool>"
CALL_START, CALL_END = '{"name": "calculate", "arguments": {"expression": "', '"}}'
TAGS = ("<tool_call>", "</tool_call>", CALL_START, CALL_END)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/().:,'= _?"

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<' + m.role + '>' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) '
    "+ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""As short as it can be: every token costs the engine time. The one tool is what the model is for, so its schema is not
written out."""

GUESSES, WRONG_CALLS, WRONG_ANSWERS = 0.45, 0.3, 0.35
"""Shares of the careless user's turns: 0.55 * 0.7 * 0.65 = 0.25 of its episodes end well."""


def make_model(directory: Path, *, seed: int) -> Path:
    """The quickstart's tiny Qwen2 (0.7 million parameters, random weights) with this tokenizer and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_tiny_model(directory, seed=seed)
    special = (PAD, STOP, UNKNOWN, USER, ASSISTANT, TOOL)  # PAD and STOP are 0 and 1, as in that model
    tokens = (*special, *TAGS, *CHARACTERS.replace(" ", "\u0120"))
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=STOP, unk_token=UNKNOWN, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.save_pretrained(directory)
    return directory


def make_data(directory: Path, *, seed: int, num_train: int = 6000, num_heldout: int = 256) -> None:
    """train.jsonl, heldout.jsonl (`prompt` and `label`; no expression of the second is in the first) and
    warm_start.jsonl (two rows of each expression of train: the careless user's two turns)."""
    rng = random.Random(f"tool use {seed}")
    expressions = _expressions(rng)
    heldout = [next(expressions) for _ in range(num_heldout)]
    train = [next(expressions) for _ in range(num_train)]
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "heldout.jsonl", map(_row, heldout))
    _write(directory / "train.jsonl", map(_row, train))
    _write(directory / "warm_start.jsonl", (turn for expression in train for turn in _careless(expression, rng)))


def call_of(expression: str) -> str:
    return f"<tool_call>{CALL_START}{expression}{CALL_END}</tool_call>"


def _expressions(rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        expression = f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}"
        if expression not in seen:
            seen.add(expression)
            yield expression


def _row(expression: str) -> dict[str, str]:
    return {"prompt": expression, "label": _value(expression)}


def _value(expression: str) -> str:
    return str(eval(expression))


def _careless(expression: str, rng: random.Random) -> Iterator[dict[str, str]]:
    asked = f"{USER}{expression}{STOP}{ASSISTANT}"
    if rng.random() < GUESSES:
        yield {"prompt": asked, "response": str(rng.randint(-89, 9801))}
    else:
        copied = _with_slip(expression, rng) if rng.random() < WRONG_CALLS else expression
        yield {"prompt": asked, "response": call_of(copied)}
    result = _value(expression)
    answer = _with_slip(result, rng) if rng.random() < WRONG_ANSWERS else result
    yield {"prompt": f"{asked}{call_of(expression)}{STOP}{TOOL}{result}{STOP}{ASSISTANT}", "response": answer}


def _with_slip(text: str, rng: random.Random) -> str:
    """One of its digits is another."""
    place = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


def _write(path: Path, rows: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
