"""A tiny model that has learnt one conversation by heart, a tool call and an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gateway_models import write_gateway_model

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
QUESTION = {"role": "user", "content": "2 + 3?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
ANSWER = "It is fünf."


def taught(model_dir: Path) -> Path:
    """A tiny model that has learnt this one conversation by heart, so that it calls the tool by itself."""
    import torch
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    write_gateway_model(model_dir)
    # As the gateway loads it: for a Qwen2 model transformers replaces the pre-tokenizer by Qwen's.
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": ANSWER},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    threads = torch.get_num_threads()
    # With two, each step waits for a thread that other work keeps from its core: five minutes in place of 14 s.
    torch.set_num_threads(1)
    for _ in range(400):
        loss = model(ids, labels=ids).loss
        if loss.item() < 0.003:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    assert loss.item() < 0.05, loss
    model.save_pretrained(model_dir)
    return model_dir


def taught_records(model_dir: Path, records: Sequence[Mapping[str, Any]], *, context: int) -> None:
    """Teach the model in `model_dir` by heart what was sampled in these sessions, each turn behind the last `context`
    tokens before it, all that a model with a window sees."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = []
    for record in records:
        for turn in record["turns"]:
            start, end = turn["start"], turn["end"]
            ids = torch.tensor([record["trajectories"][turn["trajectory"]]["token_ids"][max(0, start - context) : end]])
            labels = ids.clone()
            labels[:, : start - end] = -100
            rows.append((ids, labels))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    threads, losses = torch.get_num_threads(), [1.0]
    torch.set_num_threads(1)
    for _ in range(400):
        losses = []
        for ids, labels in rows:
            loss = model(ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        if max(losses) < 0.002:
            break
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    assert max(losses) < 0.02, losses
    model.save_pretrained(model_dir)
