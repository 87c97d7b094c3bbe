"""Advantages and losses as users write them, sound and broken: for the tests of the extension points."""

from __future__ import annotations

import torch


def centred(batch, algorithm):
    return batch.rewards - batch.rewards.mean()


def per_token(batch, algorithm):
    return (batch.ref_logprobs - batch.old_logprobs) * algorithm.advantage.options.get("scale", 1.0)


def by_reshape(batch, algorithm):
    return batch.rewards - batch.rewards[0]


def in_place(batch, algorithm):
    batch.rewards.sub_(1.0)
    return batch.rewards.clone()


def as_list(batch, algorithm):
    return batch.rewards.tolist()


def one_number(batch, algorithm):
    return batch.rewards.mean()


def not_finite(batch, algorithm):
    return batch.rewards / 0.0


def raises(*_):
    raise RuntimeError("this function is broken")


def reinforce(logprobs, tokens, algorithm):
    return -tokens.advantages * logprobs


def squared(logprobs, tokens, algorithm):
    pull = algorithm.objective.options.get("pull", 0.2)
    return (logprobs - tokens.old_logprobs - pull * tokens.advantages).square()


def summed(logprobs, tokens, algorithm):
    return (-tokens.advantages * logprobs).sum()


def detached(logprobs, tokens, algorithm):
    return -tokens.advantages * logprobs.detach()


def unbounded(logprobs, tokens, algorithm):
    return -tokens.advantages * (10 * (logprobs - tokens.old_logprobs)).exp()


def over_the_micro_batch(logprobs, tokens, algorithm):
    return -(tokens.advantages - tokens.advantages.mean()) * logprobs


def no_pull(logprobs, tokens, algorithm):
    return 0.0 * torch.relu(logprobs)


def weighted_by_trust(batch, algorithm):
    """Reads train_metadata["trust"]."""
    return (batch.rewards - batch.rewards.mean()) * batch.metadata["trust"]


def reinforce_by_trust(logprobs, tokens, algorithm):
    """Reads train_metadata["trust"]."""
    return -tokens.metadata["trust"] * tokens.advantages * logprobs


def changes_metadata(batch, algorithm):
    batch.metadata["trust"].mul_(0.5)
    return batch.rewards - batch.rewards.mean()


def over_everybodys_trust(logprobs, tokens, algorithm):
    return -(tokens.metadata["trust"] - tokens.metadata["trust"].mean()) * logprobs
