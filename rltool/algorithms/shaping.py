"""From rewards and log-probabilities to what the loss needs, for a whole rollout at once. Pure: no rank takes part.

The driver holds the global batch, so means, whitening and weights are over all ranks by construction.
Token losses become one number as weights, so that ranks and micro-batches only ever add.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rltool.algorithms import advantages, corrections, gae, kl, turns
from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.ragged import (
    at_last_loss_token,
    broadcast_to_tokens,
    numbered,
    numbers,
    sample_of_token,
    sum_per_sample,
)
from rltool.algorithms.schedule import split_for_optimizer_steps
from rltool.algorithms.staleness import mask_older_than
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.import_path import load_callable
from rltool.config.methods import KLInReward
from rltool.config.own_functions import calling
from rltool.config.train import TrainConfig
from rltool.errors import ContractViolation

Measured = tuple[TrainBatch, dict[str, float]]
"""The batch with more of its fields filled in, and train/* metrics."""


def needs_old_logprobs_pass(config: TrainConfig, step: int) -> bool:
    """Whether the policy scores the batch in a forward pass of its own before the first optimizer step of training step
    `step`.

    algorithm.old_logprobs = "rollout" has them from the engines. With "trainer" the old policy is the one before the
    first optimizer step, whichever weights sampled: where that is the only step (in one epoch), and nothing that comes
    before it is made of the old log-probabilities, the training forward itself gives them, and is compared with the
    engines before the optimizer moves. While the critic warms up there is no other forward pass of the policy to
    compare the engines with.
    """
    algorithm = config.algorithm
    if algorithm.loss != "policy":
        return False
    if algorithm.uses_critic and step < config.critic.warmup_rollouts:
        return True
    if algorithm.old_logprobs == "rollout":
        return False
    return algorithm.needs_old_logprobs or config.updates_per_rollout > 1


def with_stale_tokens_masked(batch: TrainBatch, config: TrainConfig, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """The batch without a loss on tokens that are too old to be trained on at training step `step`, and how many there
    were.

    algorithm.mask_tokens_older_than, and with rollout.on_stale = "mask" rollout.max_staleness. Errors of
    `mask_older_than`.
    """
    limits = [
        config.algorithm.mask_tokens_older_than,
        config.rollout.max_staleness if config.rollout.on_stale == "mask" else None,
    ]
    given = [limit for limit in limits if limit is not None]
    return mask_older_than(batch, step, min(given)) if given else (batch, {})


def with_old_logprobs(batch: TrainBatch, algorithm: AlgorithmConfig, scored: Tensor | None) -> TrainBatch:
    """The batch with the configured old policy's log-probabilities, ValueError if it has none of the engines' but needs
    them.

    scored: [T] float32 of the pass that `needs_old_logprobs_pass` asks for, None without. Where old_logprobs stays
    None, the training forward of the single optimizer step gives them.
    """
    chosen = _present(batch, "rollout_logprobs") if algorithm.old_logprobs == "rollout" else scored
    return batch.replace(old_logprobs=chosen)


def with_advantages(batch: TrainBatch, algorithm: AlgorithmConfig, *, max_response_tokens: int) -> Measured:
    """Clipped and shaped rewards, KL penalty and advantages, whitened if so configured, and the teacher's part beside
    them. Needs old_logprobs, those of the reference or teacher, and the critic's values, where the configuration does;
    with a critic also fills in value_targets."""
    batch, metrics = _with_shaped_rewards(batch, algorithm, max_response_tokens)
    if algorithm.kl.kind == "reward":
        batch, measured = _with_kl_penalty(batch, algorithm.kl)
        metrics.update(measured)
    if algorithm.uses_critic:
        values, targets, measured = _critic_advantages(_with_rewards_by_turn(batch, algorithm), algorithm)
        batch = batch.replace(value_targets=targets)
        metrics.update(measured)
    else:
        values = estimate_advantages(batch, algorithm)
    if whitens(algorithm):
        values = advantages.whiten(values, batch.loss_mask)
    if algorithm.distill_coef > 0:
        values = values + algorithm.distill_coef * _distillation(batch)
    chosen = values[batch.loss_mask > 0]
    metrics["train/advantage_mean"] = _mean(chosen)
    metrics["train/advantage_std"] = float(chosen.std()) if len(chosen) > 1 else 0.0
    return batch.replace(advantages=values, turns=None, turn_rewards=None), metrics


def estimate_advantages(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """The configured estimator without a critic, before whitening: [T] float32, 0 where loss_mask is 0.

    A penalty per token (KL in the reward) becomes part of the return behind it in reinforce_pp and its baseline
    variant, and is summed into the sample's reward for all others that use one, whose advantages belong to whole
    samples.
    """
    lengths, mask = batch.lengths, batch.loss_mask
    chosen = algorithm.advantage
    if chosen.kind == "own":
        return _own_advantages(batch, algorithm, chosen.function)
    if chosen.kind == "distill":
        return _distillation(batch)
    if chosen.kind == "none":
        return torch.zeros_like(mask)
    if chosen.kind == "reinforce_pp":
        batch = _with_rewards_by_turn(batch, algorithm)
        return advantages.reinforce_pp_advantages(
            batch.rewards, batch.token_rewards, lengths, mask, gamma=chosen.gamma
        )
    if chosen.kind == "reinforce_pp_baseline":
        return advantages.reinforce_pp_baseline_advantages(
            batch.rewards, batch.group_ids, batch.token_rewards, lengths, mask, gamma=chosen.gamma,
            episode_ids=batch.episode_ids,
        )  # fmt: skip
    if chosen.kind == "grpo" and chosen.credit == "turn" and batch.turns is not None:
        found = _turn_returns(batch, batch.token_rewards, gamma=chosen.turn_gamma)
        return turns.turn_advantages(
            found, mask, normalize_std=chosen.normalize_std, std_over=chosen.normalize_std_over
        )
    return broadcast_to_tokens(_sample_advantages(batch, algorithm), lengths, mask)


def _turn_returns(batch: TrainBatch, token_rewards: Tensor | None, *, gamma: float) -> turns.TurnReturns:
    episodes = torch.arange(batch.num_samples) if batch.episode_ids is None else batch.episode_ids
    return turns.turn_returns(
        batch.rewards, batch.group_ids, episodes, batch.lengths, _present(batch, "turns"),
        _present(batch, "turn_rewards"), token_rewards, gamma=gamma,
    )  # fmt: skip


def _with_rewards_by_turn(batch: TrainBatch, algorithm: AlgorithmConfig) -> TrainBatch:
    """With credit per turn: the rewards at the ends of the turns that have earned them, as rewards of tokens."""
    if not algorithm.credits_turns or batch.turns is None:
        return batch
    earned = turns.returns_as_token_rewards(_turn_returns(batch, None, gamma=1.0), batch.lengths)
    penalty = 0.0 if batch.token_rewards is None else batch.token_rewards
    return batch.replace(rewards=torch.zeros_like(batch.rewards), token_rewards=earned + penalty)


def _sample_advantages(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tensor:
    """[N], of the estimators that give all tokens of a sample the same. An episode of several samples is one member of
    its group, with the mean of their rewards (which differ by token_rewards alone) and all their tokens."""
    if algorithm.uses_reward_parts:
        return _of_reward_parts(batch)
    if algorithm.advantage.kind == "remax":
        return advantages.remax_advantages(batch.sample_rewards(), _present(batch, "baselines"))
    rewards, groups = batch.sample_rewards(), batch.group_ids
    if batch.episode_ids is None:
        return _estimated(rewards, groups, algorithm)
    ids, episode, count = numbered(batch.episode_ids)
    total = torch.zeros(len(ids), dtype=rewards.dtype).index_add(0, episode, rewards)
    group = torch.zeros(len(ids), dtype=groups.dtype).index_put((episode,), groups)
    return _estimated(total / count, group, algorithm)[episode]


def _of_reward_parts(batch: TrainBatch) -> Tensor:
    """[N]. All samples of an episode have the same parts: it is taken by its first."""
    parts, weights, groups = _present(batch, "reward_parts"), _present(batch, "part_weights"), batch.group_ids
    if batch.episode_ids is None:
        return advantages.gdpo_advantages(parts, weights, groups)
    ids, episode, _ = numbered(batch.episode_ids)
    first = torch.full((len(ids),), len(episode)).scatter_reduce(0, episode, torch.arange(len(episode)), "amin")
    return advantages.gdpo_advantages(parts[first], weights[first], groups[first])[episode]


def _estimated(rewards: Tensor, groups: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """rewards, groups: [E], one entry an episode. Returns [E]."""
    chosen = algorithm.advantage
    match chosen.kind:
        case "grpo":
            return advantages.group_advantages(
                rewards, groups, normalize_std=chosen.normalize_std, std_over=chosen.normalize_std_over
            )
        case "rloo":
            return advantages.rloo_advantages(rewards, groups)
        case _:
            raise ValueError(f"no estimator of advantages named {chosen.kind!r}")


def _distillation(batch: TrainBatch) -> Tensor:
    return advantages.distillation_advantages(
        _present(batch, "old_logprobs"), _present(batch, "teacher_logprobs"), batch.loss_mask
    )


def _critic_advantages(batch: TrainBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and value targets, [T] each, before whitening. A penalty per token (KL in the reward) is that token's
    reward."""
    lengths, mask = batch.lengths, batch.loss_mask
    rewards = at_last_loss_token(batch.rewards, lengths, mask)
    if batch.token_rewards is not None:
        rewards = rewards + batch.token_rewards
    values, chosen = _present(batch, "values"), algorithm.advantage
    assert chosen.kind == "gae"
    estimated, targets = gae.gae(rewards, values, lengths, mask, gamma=chosen.gamma, lam=chosen.gae_lambda)
    metrics = {
        "train/value_mean": _mean(values[mask > 0]),
        "train/explained_variance": gae.explained_variance(values, targets, mask),
    }
    return estimated, targets, metrics


def whitens(algorithm: AlgorithmConfig) -> bool:
    """whiten_advantages, with None resolved to what the estimator's paper does."""
    if algorithm.whiten_advantages is not None:
        return algorithm.whiten_advantages
    return algorithm.advantage.kind in ("reinforce_pp", "reinforce_pp_baseline", "gae")


def with_corrections(batch: TrainBatch, algorithm: AlgorithmConfig) -> Measured:
    """`corrections.mismatch_factors` as is_weights. Without old_logprobs the training forward makes them itself."""
    if not algorithm.corrects_mismatch or batch.old_logprobs is None:
        return batch, {}
    engine = _present(batch, "rollout_logprobs")
    factors, values = corrections.mismatch_factors(
        batch.old_logprobs, engine, batch.lengths, batch.loss_mask, algorithm
    )
    chosen = batch.loss_mask > 0
    metrics = {f"train/{name}": _mean(value[chosen]) for name, value in values.items()} if bool(chosen.any()) else {}
    return batch.replace(is_weights=factors), metrics


def with_loss_weights(batch: TrainBatch, algorithm: AlgorithmConfig, *, max_response_tokens: int) -> TrainBatch:
    """The configured reduction over this batch: that of one optimizer step, all ranks together."""
    length = (algorithm.loss_length or max_response_tokens) if algorithm.loss_reduction == "constant" else None
    weights = token_loss_weights(
        batch.lengths, batch.loss_mask, algorithm.loss_reduction, group_ids=batch.group_ids, constant_length=length
    )
    return batch.replace(loss_weights=weights)


def optimizer_step_samples(batch: TrainBatch, steps: int) -> list[list[int]]:
    """Samples of each optimizer step, whole prompt groups together, every step with at least one loss token.

    Rewards that failed and masks may leave fewer groups than `steps`: then there are fewer steps, not empty ones.
    """
    has_loss = numbers(sum_per_sample(batch.loss_mask, batch.lengths, batch.loss_mask) > 0)
    groups = numbers(batch.group_ids)
    trained = {group for group, loss in zip(groups, has_loss, strict=True) if loss}
    return split_for_optimizer_steps(groups, min(steps, len(trained)), has_loss=has_loss)


def _with_shaped_rewards(batch: TrainBatch, algorithm: AlgorithmConfig, max_response_tokens: int) -> Measured:
    """reward_clip, then the length penalty, which is not clipped."""
    metrics: dict[str, float] = {}
    if algorithm.reward_clip is not None:
        low, high = algorithm.reward_clip
        clipped = batch.rewards.clamp(low, high)
        metrics["train/reward_clipped_fraction"] = _mean((clipped != batch.rewards).float())
        batch = batch.replace(rewards=clipped)
        if batch.baselines is not None:
            batch = batch.replace(baselines=batch.baselines.clamp(low, high))
    if not algorithm.overlong_buffer:
        return batch, metrics
    response = response_lengths(batch.lengths, batch.sampled)
    shaping = overlong_reward(response, max_length=max_response_tokens, buffer=algorithm.overlong_buffer)
    metrics["train/overlong_fraction"] = _mean((shaping < 0).float())
    return batch.replace(rewards=batch.rewards + algorithm.overlong_penalty * shaping), metrics


def _with_kl_penalty(batch: TrainBatch, chosen: KLInReward) -> Measured:
    sampled = batch.sampled > 0
    estimate = kl.ESTIMATORS[chosen.estimator](
        _present(batch, "old_logprobs")[sampled], _present(batch, "ref_logprobs")[sampled]
    )
    penalty = torch.zeros_like(batch.loss_mask)
    penalty[sampled] = -chosen.coef * estimate
    return batch.replace(token_rewards=penalty), {"train/kl": _mean(estimate)}


def _own_advantages(batch: TrainBatch, algorithm: AlgorithmConfig, path: str) -> Tensor:
    function = load_callable(path, setting="algorithm.advantage")
    with calling(f"algorithm.advantage = {path!r}", function):
        values = function(batch, algorithm)
    shapes = ((batch.num_samples,), tuple(batch.tokens.shape))
    if not isinstance(values, Tensor) or tuple(values.shape) not in shapes:
        found = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ContractViolation(
            f"algorithm.advantage = {path!r} returned {found}, expected one value per sample "
            f"{shapes[0]} or per token {shapes[1]}"
        )
    if tuple(values.shape) == shapes[0]:
        return broadcast_to_tokens(values, batch.lengths, batch.loss_mask)
    return torch.where(batch.loss_mask > 0, values.float(), torch.zeros_like(batch.loss_mask))


def _present(batch: TrainBatch, name: str) -> Tensor:
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"TrainBatch.{name} is None, but the configured algorithm needs it")
    return value


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def response_lengths(lengths: Tensor, response_mask: Tensor) -> Tensor:
    """[N] int64: tokens from each sample's first sampled token to its end, with what an environment inserted; 0 without
    any.

    response_mask: [T], TrainBatch.sampled and not loss_mask: a masked response is as long as it was.
    """
    sample = sample_of_token(lengths)
    position = torch.arange(len(response_mask))
    ends = lengths.cumsum(0)
    first = ends.scatter_reduce(0, sample[response_mask > 0], position[response_mask > 0], reduce="amin")
    return ends - first


def overlong_reward(response: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment, [N] float32 in [-1, 0], to be added to the reward (Yu et al. 2025, "DAPO", eq. 13).

    response: [N] tokens; max_length: L_max, at which generation is cut; buffer: L_cache. 0 up to L_max - L_cache, then
    (L_max - L_cache - |y|) / L_cache, -1 from L_max on. ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must lie above 0 and within max_length {max_length}")
    return ((max_length - buffer - response).float() / buffer).clamp(-1.0, 0.0)


def token_loss_weights(
    lengths: Tensor,
    loss_mask: Tensor,
    reduction: str,
    *,
    group_ids: Tensor | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """Weight of each token's loss, so that sum(weight * loss) / (number of loss tokens) is the configured reduction.

    lengths, group_ids: [N]; loss_mask: [T], all of one *global* batch of an optimizer step. Returns [T] float32, 0
    where loss_mask is 0.
    "token": mean over all loss tokens (DAPO's implementation; Yu et al. 2025, section 3.3). "sample": mean over samples
    of each sample's token mean (GRPO; Shao et al. 2024, eq. 3). "group": mean over prompt groups of each group's token
    mean (DAPO as written; Yu et al. 2025, eq. 8). These ignore samples and groups without loss tokens, and sum to the
    number of loss tokens. "constant": sum over loss tokens / (samples * constant_length) (Dr. GRPO; Liu et al. 2025).
    ValueError for another reduction, or if what it needs is None.
    """
    if reduction == "token":
        return loss_mask.clone()
    tokens = loss_mask.double().sum()
    if reduction == "constant":
        if constant_length is None:
            raise ValueError('loss reduction "constant" needs constant_length')
        return (loss_mask * (tokens / (len(lengths) * constant_length))).float()
    if reduction == "sample":
        part = sample_of_token(lengths)
    elif reduction == "group":
        if group_ids is None:
            raise ValueError('loss reduction "group" needs group_ids')
        part = numbered(group_ids)[1][sample_of_token(lengths)]
    else:
        raise ValueError(f"unknown loss reduction {reduction!r}; known: token, sample, group, constant")
    per_part = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, part, loss_mask.double())
    with_loss = (per_part > 0).sum().clamp(min=1)
    return (loss_mask * (tokens / with_loss / per_part.clamp(min=1))[part]).float()
