"""An objective: truncated importance weights, without PPO's clip from below."""

import torch

from rltool.api import AlgorithmConfig, LossTokens


def one_sided(logprobs: torch.Tensor, tokens: LossTokens, algorithm: AlgorithmConfig) -> torch.Tensor:
    """algorithm.objective = "examples.objective:one_sided"; algorithm.objective.options.cap = 1.2, or another cap."""
    ratio = (logprobs - tokens.old_logprobs).clamp(-20, 20).exp().detach()
    return -ratio.clamp(max=algorithm.objective.options.get("cap", 1.2)) * tokens.advantages * logprobs
