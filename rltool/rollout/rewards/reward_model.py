"""The reward of a model with a classification head, served beside the policy ([models.NAME] with task = "classify").

It reads a conversation as its own chat template writes it: the prompt as the user's message, or the messages of the
row, then the response as the assistant's.
"""

from __future__ import annotations

from typing import Any

from rltool.rollout.sample import Sample
from rltool.rollout.serving.model_clients import RewardContext


async def reward_model(
    sample: Sample, text: str, context: RewardContext, *, model: str = "reward", label: int | None = None,
    use_activation: bool = False, prompt_key: str | None = None,
) -> float:  # fmt: skip
    """The model's raw logit for the conversation; with use_activation what its sigmoid or softmax makes of it.

    label: number of the one that counts, from 0, for a model of several. prompt_key: field of the metadata that holds
    the prompt, text or messages, as it was before the policy's chat template (data.metadata_keys); None: the policy
    reads it without one. ValueError, which fails the sample, for metadata without it and a label that is not there.
    """
    prompt: Any = sample.prompt_text if prompt_key is None else sample.metadata.get(prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise ValueError(f"metadata[{prompt_key!r}] holds no prompt: copy it there with data.metadata_keys")
    conversation = [*prompt, {"role": "assistant", "content": text}]
    scores = await context.model(model).classify(conversation, use_activation=use_activation)
    if label is None and len(scores) != 1:
        raise ValueError(f"model {model!r} gave {len(scores)} scores: set `label` to the one that is the reward")
    if not 0 <= (label or 0) < len(scores):
        raise ValueError(f"model {model!r} gave {len(scores)} scores, so there is no label {label}")
    return scores[label or 0]
