"""Contract tests that users run on their own advantages and losses, in their own test suites.

    from rltool.algorithms.contracts import check_advantage_function, check_loss_function
    def test_my_algorithm():
        check_advantage_function("my_package.algorithm:advantages")
        check_loss_function("my_package.algorithm:loss")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.losses import LossTokens
from rltool.algorithms.ragged import numbers
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.import_path import load_callable
from rltool.errors import ContractViolation

TOLERANCE = 1e-5


def check_advantage_function(
    path: str, *, algorithm: AlgorithmConfig | None = None, batch: TrainBatch | None = None
) -> None:
    """ContractViolation unless f(batch, algorithm) at `package.module:function` keeps the contract of
    algorithm.advantage.

    f gets the whole rollout and returns a float tensor, [N] per sample or [T] per token, finite, without changing the
    batch. What a sample gets must not depend on where it stands: dropped samples leave groups of unequal size, so an
    advantage that is found by reshape is wrong. batch: your own, when the function needs particular rewards; else
    `example_batch`, and for one that reads train_metadata `example_batch().replace(metadata=...)`.
    """
    function = load_callable(path, setting="path")
    algorithm = algorithm or AlgorithmConfig.model_validate({"advantage": path})
    batch = batch or example_batch()
    problems: list[str] = []
    found = _called(path, lambda: function(batch, algorithm), _tensors(batch), problems)
    if _is_tensor(found, [(batch.num_samples,), tuple(batch.tokens.shape)], problems):
        # Rotated by one, a function that takes groups by position instead of by id gives other values.
        order = [*range(1, batch.num_samples), 0]
        turned = batch.select(order)
        if not _close(
            _per_token(function(turned, algorithm), turned), _per_token(_select(found, batch, order), turned)
        ):
            problems.append(
                "the same samples in another order get other advantages; find groups by batch.group_ids, never by "
                "position"
            )
    _raise_if_any(path, problems)


def check_loss_function(
    path: str, *, algorithm: AlgorithmConfig | None = None, example: tuple[Tensor, LossTokens] | None = None
) -> None:
    """ContractViolation unless f(logprobs, tokens, algorithm) at `package.module:function` keeps that of
    algorithm.objective.

    f returns one loss per token, [R], finite also for tokens whose probability changed wildly, with a finite gradient
    in logprobs that is not 0 everywhere. A sample's losses must not depend on the other samples of the micro-batch: how
    samples are sharded over micro-batches and ranks is not part of the algorithm. Weights, reduction and masks are not
    the function's. example: log-probabilities (a leaf that needs a gradient) and tokens of your own, for a function
    that reads `tokens.metadata`; else `example_tokens`.
    """
    function = load_callable(path, setting="path")
    algorithm = algorithm or AlgorithmConfig.model_validate({"objective": path})
    problems: list[str] = []
    logprobs, tokens = example or example_tokens()
    found = _called(path, lambda: function(logprobs, tokens, algorithm), _tensors(tokens), problems)
    if _is_tensor(found, [tuple(logprobs.shape)], problems):
        if not found.requires_grad:
            problems.append(
                "the loss has no gradient: it must be made of logprobs (or tokens.entropy) without .detach() or .item()"
            )
        else:
            found.sum().backward()
            gradient = logprobs.grad
            if gradient is None or not bool(gradient.any()):
                problems.append("the gradient in logprobs is 0 everywhere")
            elif not bool(torch.isfinite(gradient).all()):
                problems.append(
                    "the gradient in logprobs is not finite where a log-probability moved by 60; limit log-ratios "
                    "before exp"
                )
        for sample in range(tokens.num_samples):
            own = tokens.sample == sample
            alone = function(logprobs[own].detach().requires_grad_(), _one_sample(tokens, sample), algorithm)
            if not isinstance(alone, Tensor) or not _close(alone, found[own]):
                problems.append(
                    "a sample alone has another loss than among others; reduce over tokens.sample, never over the "
                    "whole micro-batch"
                )
                break
    _raise_if_any(path, problems)


def example_batch() -> TrainBatch:
    """Seven samples in groups of 3, 1, 2 and 1, shuffled, with an environment's tokens inside a response and one empty
    response; all sampled by the weights of training step 0."""
    generator = torch.Generator().manual_seed(7)
    masks = [[0, 1, 1], [0, 0, 1, 0, 0, 1, 1], [0, 1], [0, 0, 1, 1, 1, 1], [0, 0], [0, 1, 1, 1], [0, 0, 0, 1]]
    mask = torch.tensor([m for sample in masks for m in sample], dtype=torch.float32)
    noise = lambda: torch.randn(len(mask), generator=generator)  # noqa: E731
    old = -1.5 + 0.5 * noise()
    return TrainBatch(
        tokens=torch.arange(len(mask)),
        lengths=torch.tensor([len(sample) for sample in masks]),
        loss_mask=mask,
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, -1.0, 0.0]),
        baselines=torch.tensor([0.5, 0.0, 0.5, 0.75, 0.75, 0.5, 1.0]),
        reward_parts=torch.tensor([[1, 0], [0, 0], [0, 1], [0, 0.5], [1, 0], [-1, 0], [0, 0]], dtype=torch.float32),
        part_weights=torch.tensor([1.0, 0.5]).repeat(7, 1),
        group_ids=torch.tensor([4, 9, 4, 2, 2, 4, 7]),
        loss_weights=mask,
        rollout_logprobs=(old + 0.1 * noise()) * mask,
        token_versions=mask.long() - 1,
        old_logprobs=old,
        ref_logprobs=old + 0.3 * noise(),
        teacher_logprobs=old + 0.3 * noise(),
        token_rewards=-0.1 * noise().abs() * mask,
    )


def example_tokens() -> tuple[Tensor, LossTokens]:
    """(log-probabilities, a leaf that needs a gradient; the other facts of these tokens) of four samples; one token
    moved by 60."""
    generator = torch.Generator().manual_seed(8)
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    noise = lambda: torch.randn(len(sample), generator=generator)  # noqa: E731
    old = -1.5 + 0.5 * noise()
    logprobs = old + 0.2 * noise()
    old[4] = logprobs[4] - 60.0
    tokens = LossTokens(
        old_logprobs=old,
        advantages=noise(),
        sample=sample,
        num_samples=4,
        entropy=noise().abs(),
        rollout_logprobs=old + 0.1 * noise(),
        ref_logprobs=old + 0.3 * noise(),
        teacher_logprobs=old + 0.3 * noise(),
    )
    return logprobs.requires_grad_(), tokens


def _called(path: str, call: Callable[[], Any], inputs: dict[str, Tensor], problems: list[str]) -> Any:
    before = {name: value.detach().clone() for name, value in inputs.items()}
    try:
        result = call()
    except Exception as error:
        raise ContractViolation(f"{path}: raised {type(error).__name__}: {error}") from error
    changed = [name for name, value in inputs.items() if not torch.equal(value, before[name])]
    if changed:
        problems.append(f"the function changed its inputs: {', '.join(changed)}")
    return result


def _is_tensor(found: Any, shapes: list[tuple[int, ...]], problems: list[str]) -> bool:
    expected = " or ".join(str(shape) for shape in shapes)
    if not isinstance(found, Tensor):
        problems.append(f"returned {type(found).__name__}, expected a tensor of shape {expected}")
    elif tuple(found.shape) not in shapes:
        problems.append(f"returned shape {tuple(found.shape)}, expected {expected}")
    elif not found.is_floating_point():
        problems.append(f"returned {found.dtype}, expected a floating-point tensor")
    elif not bool(torch.isfinite(found).all()):
        problems.append("returned values that are not finite")
    else:
        return True
    return False


def _tensors(inputs: Any) -> dict[str, Tensor]:
    values = {item.name: getattr(inputs, item.name) for item in dataclasses.fields(inputs)}
    numbers = {f"metadata[{name!r}]": value for name, value in inputs.metadata.items()}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)} | numbers


def _select(values: Tensor, batch: TrainBatch, order: list[int]) -> Tensor:
    if len(values) == batch.num_samples:
        return values[order]
    return torch.cat([torch.split(values, numbers(batch.lengths))[i] for i in order])


def _per_token(values: Tensor, batch: TrainBatch) -> Tensor:
    """What counts: the values at loss tokens."""
    tokens = values.repeat_interleave(batch.lengths) if len(values) == batch.num_samples else values
    return tokens[batch.loss_mask > 0]


def _one_sample(tokens: LossTokens, sample: int) -> LossTokens:
    own = tokens.sample == sample
    values = {item.name: getattr(tokens, item.name) for item in dataclasses.fields(tokens)}
    parts: dict[str, Any] = {name: value[own] for name, value in values.items() if isinstance(value, Tensor)}
    parts["sample"] = torch.zeros(int(own.sum()), dtype=torch.int64)
    numbers = {name: value[own] for name, value in tokens.metadata.items()}
    return dataclasses.replace(tokens, **parts, num_samples=1, metadata=numbers)


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.detach(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE
    )


def _raise_if_any(path: str, problems: list[str]) -> None:
    if problems:
        raise ContractViolation(f"{path} breaks its contract:\n" + "\n".join(f"  - {problem}" for problem in problems))
