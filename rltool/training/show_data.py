"""What a run would read, for people: `rltool debug data`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rltool.config.train import TrainConfig
from rltool.rollout.data import Prompt, data_summary, load_prompts
from rltool.training.checks.modalities import run_tokenizer
from rltool.training.manager.inputs import load_train_prompts


def describe_data(config: TrainConfig, *, show: int) -> Iterator[str]:
    """Lines: what was read and left out, then the first `show` prompts in the order in which a run draws them.
    UsageError for what is wrong with the data."""
    tokenizer = run_tokenizer(config)
    train, source = load_train_prompts(config, tokenizer)
    evals = {
        name: load_prompts([held_out], tokenizer, config.data, max_prompt_tokens=config.sampling.max_prompt_tokens)
        for name, held_out in config.eval.sets.items()
    }
    yield data_summary(train, evals)
    if train is not None and len(train.parts) > 1:
        for number, (name, kept) in enumerate(zip(config.data.train, train.parts, strict=True)):
            weight = f", weight {config.data.weights[number]:g}" if config.data.weights else ""
            yield f"  {name}: {kept} prompts{weight}"
    for prompt in source.next(show):
        yield from _describe(prompt)


def _describe(prompt: Prompt) -> Iterator[str]:
    yield f"row {prompt.index}, {len(prompt.prompt_ids)} tokens, label {prompt.label!r}"
    if prompt.metadata:
        yield f"  metadata {json.dumps(prompt.metadata, ensure_ascii=False)[:200]}"
    if prompt.multimodal_inputs:
        counts = ", ".join(f"{len(values)} x {kind}" for kind, values in prompt.multimodal_inputs.items())
        yield f"  multimodal inputs {counts}: kept in the sample, not read by the policy"
    yield from (f"  | {line}" for line in prompt.text.splitlines())
