"""Losses of tinker's client against plain formulas, by value and gradient; what is refused, by name."""

from __future__ import annotations

import math

import pytest
import torch

from rltool.algorithms.named_losses import LOSSES, check_loss, named_token_losses
from rltool.errors import UsageError

SAMPLE = torch.tensor([0, 0, 0, 1, 1, 2])
SETTINGS = {"gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "ppo": {"clip_high_threshold": 1.3}}


def case(seed=3):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(6, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs = -2 + 0.7 * draw()
    inputs = {"weights": draw().abs(), "logprobs": -2 + 0.7 * draw(), "advantages": draw()}
    inputs["sequence_ratio_mask"] = torch.tensor([0.0, 1, 2, 1, 0, 1], dtype=torch.float64)
    return logprobs.requires_grad_(), inputs


def plain(loss, p, inputs, settings):
    """Token by token, in Python's numbers: (loss, its derivative by each log-probability)."""
    w, q, a = (inputs.get(name, torch.zeros(6)).tolist() for name in ("weights", "logprobs", "advantages"))
    mask = inputs["sequence_ratio_mask"].tolist() if "sequence_ratio_mask" in inputs else [1] * 6
    p, losses, slopes = p.tolist(), [], []
    for i in range(6):
        r = math.exp(p[i] - q[i])
        if loss == "gspo":
            own = [j for j in range(6) if SAMPLE[j] == SAMPLE[i] and mask[j]]
            r = math.exp(sum(p[j] - q[j] for j in own) / len(own))
        low, high = settings.get("clip_low_threshold", 0), settings.get("clip_high_threshold", math.inf)
        clipped = min(max(r, low), high)
        if loss == "cross_entropy":
            found = (-p[i], -1.0)
        elif loss == "importance_sampling":
            found = (-r * a[i], -r * a[i])
        elif loss == "cispo":
            found = (-clipped * a[i] * p[i], -clipped * a[i])
        elif loss == "dro":
            beta, d = settings["beta"], p[i] - q[i]
            found = (-(a[i] * p[i] - beta / 2 * d * d), -(a[i] - beta * d))
        else:
            decided = r * a[i] <= clipped * a[i]
            found = (-r * a[i], -r * a[i]) if decided else (-clipped * a[i], 0.0)
        losses.append(w[i] * found[0])
        slopes.append(w[i] * found[1])
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(slopes, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_each_loss_is_its_formula_by_value_and_gradient(loss, seed):
    logprobs, inputs = case(seed)
    known = {name: value for name, value in inputs.items() if name in LOSSES[loss].known_inputs}
    settings = check_loss(loss, known, SETTINGS.get(loss, {}))
    found = named_token_losses(loss, logprobs, known, SAMPLE, 3, settings)
    expected, slopes = plain(loss, logprobs, known, settings)
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    torch.testing.assert_close(logprobs.grad, slopes)


@pytest.mark.parametrize(
    ("loss", "given", "settings", "words"),
    [
        ("stable_reinforce", [], {}, "'stable_reinforce' is not supported: it is in alpha, and its formula"),
        ("custom", [], {}, "'custom' is not supported: it would be a client's code, which its client runs itself"),
        ("other", [], {}, "'other' is not supported; choose cross_entropy"),
        ("ppo", ["logprobs"], {}, "lacks advantages"),
        ("ppo", ["logprobs", "advantages", "clip_low_threshold"], {}, "has clip_low_threshold"),
        ("cross_entropy", ["weights", "mask"], {}, "has mask"),
        ("dro", ["logprobs", "advantages"], {"clip_low_threshold": 0.8}, "reads beta"),
        ("ppo", ["logprobs", "advantages"], {"clip_low_threshold": "0.8"}, "expected a number"),
        ("ppo", ["logprobs", "advantages"], {"clip_high_threshold": 0.2}, "limits of the ratio"),
        ("gspo", ["logprobs", "advantages"], SETTINGS["gspo"], "lacks sequence_ratio_mask"),
        ("gspo", LOSSES["gspo"].inputs, {"clip_low_threshold": 0.8}, "lacks clip_high_threshold"),
    ],
)
def test_what_a_loss_does_not_read_is_refused_by_name(loss, given, settings, words):
    with pytest.raises(UsageError, match=words):
        check_loss(loss, given, settings)
