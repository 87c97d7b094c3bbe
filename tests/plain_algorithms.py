"""The algorithms a second time, as the papers print them: loops over samples and tokens, Python floats, no code of
rltool's.

Slow and plain on purpose: what the fast, ragged tensor functions are compared with.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

EXAMPLES = "examples.algorithms:"


def example(method) -> str:
    """Which function of examples/algorithms.py an advantage or an objective is."""
    return method.function.removeprefix(EXAMPLES) if method.kind == "own" else ""


def gmpo(clip_low: float, clip_high: float) -> dict:
    options = {"clip_low": clip_low, "clip_high": clip_high}
    return {"objective": {"kind": "own", "function": EXAMPLES + "gmpo", "options": options}}


def cut(values: Tensor | None, lengths: Tensor) -> list[Tensor]:
    """[T] -> one tensor per sample."""
    return [] if values is None else list(values.split(lengths.tolist()))


def loss_tokens(batch, i: int) -> list[int]:
    """Positions within sample i that have a loss."""
    return [t for t, m in enumerate(cut(batch.loss_mask, batch.lengths)[i].tolist()) if m > 0]


def sampled_tokens(batch, i: int) -> list[int]:
    """Positions within sample i that the policy sampled, with a loss or without."""
    mask = batch.loss_mask if batch.response_mask is None else batch.response_mask
    return [t for t, m in enumerate(cut(mask, batch.lengths)[i].tolist()) if m > 0]


def response_length(batch, i: int) -> int:
    own = sampled_tokens(batch, i)
    return int(batch.lengths[i]) - own[0] if own else 0


def overlong(length: int, limit: int, buffer: int) -> float:
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


def kl(p: Tensor, q: Tensor, estimator: str, *, limit: float | None = 10.0) -> Tensor:
    """p: log-probability of the policy; q: of the reference; limit: of k3."""
    if estimator == "k1":
        return p - q
    if estimator == "k2":
        return (p - q) ** 2 / 2
    k3 = torch.exp(q) / torch.exp(p) - 1 - (q - p)
    return k3 if limit is None or float(k3.detach()) <= limit else torch.full_like(k3, limit)


def advantages(batch, a, max_response_tokens: int) -> Tensor:
    """[T] of a whole rollout."""
    count = batch.num_samples
    rewards = [float(r) for r in batch.rewards]
    if a.reward_clip is not None:
        rewards = [min(max(r, a.reward_clip[0]), a.reward_clip[1]) for r in rewards]
    if a.overlong_buffer:
        for i in range(count):
            rewards[i] += a.overlong_penalty * overlong(
                response_length(batch, i), max_response_tokens, a.overlong_buffer
            )
    old = cut(batch.old_logprobs, batch.lengths)
    reference = cut(batch.ref_logprobs, batch.lengths)
    teacher = cut(batch.teacher_logprobs, batch.lengths)
    penalty = [[0.0] * int(n) for n in batch.lengths]
    if a.kl.kind == "reward":
        for i in range(count):
            for t in sampled_tokens(batch, i):
                penalty[i][t] = -a.kl.coef * float(kl(old[i][t], reference[i][t], a.kl.estimator))
    result = [[0.0] * int(n) for n in batch.lengths]
    values = cut(batch.values, batch.lengths) if a.advantage.kind == "gae" else None
    group = {i: [j for j in range(count) if batch.group_ids[j] == batch.group_ids[i]] for i in range(count)}
    whole = [rewards[i] + sum(penalty[i]) for i in range(count)]
    for i in range(count):
        members = group[i]
        for t in loss_tokens(batch, i):
            if a.advantage.kind == "grpo":
                others = [whole[j] for j in members]
                value = whole[i] - statistics.fmean(others) if len(others) > 1 else 0.0
                if a.advantage.normalize_std and len(others) > 1:
                    value /= statistics.stdev(whole if a.advantage.normalize_std_over == "batch" else others) + 1e-6
            elif a.advantage.kind == "remax":
                limits = a.reward_clip or (-1e9, 1e9)
                value = whole[i] - min(max(float(batch.baselines[i]), limits[0]), limits[1])
            elif a.advantage.kind == "gdpo":
                totals = [gdpo_total(batch, group[j], j) for j in range(count)]
                value = (totals[i] - statistics.fmean(totals)) / (statistics.stdev(totals) + 1e-6)
            elif example(a.advantage) == "gpg":
                useless = sum(len({whole[k] for k in group[j]}) == 1 for j in range(count))
                value = (whole[i] - statistics.fmean(whole[j] for j in members)) * count / (count - useless)
            elif example(a.advantage) == "opo":
                length = {j: len(sampled_tokens(batch, j)) for j in members}
                baseline = sum(length[j] * whole[j] for j in members) / sum(length.values())
                value = whole[i] - baseline if len(members) > 1 else 0.0
            elif a.advantage.kind == "rloo":
                others = [whole[j] for j in members if j != i]
                value = whole[i] - statistics.fmean(others) if others else 0.0
            elif a.advantage.kind in ("reinforce_pp", "reinforce_pp_baseline"):
                final = rewards[i]
                if a.advantage.kind == "reinforce_pp_baseline":
                    final -= statistics.fmean(
                        statistics.fmean(rewards[j] for j in own) for own in episodes_of(batch, members)
                    )
                later = [s for s in loss_tokens(batch, i) if s >= t]
                gamma = a.advantage.gamma
                value = sum(gamma**k * penalty[i][s] for k, s in enumerate(later)) + gamma ** (len(later) - 1) * final
            elif a.advantage.kind == "gae":
                own = loss_tokens(batch, i)
                given = [penalty[i][s] + (rewards[i] if s == own[-1] else 0.0) for s in own]
                known = [float(values[i][s]) for s in own]
                value = gae(given, known, a.advantage.gamma, a.advantage.gae_lambda)[own.index(t)]
            else:
                value = float(teacher[i][t] - old[i][t])
            result[i][t] = value
    whiten = (
        a.whiten_advantages
        if a.whiten_advantages is not None
        else a.advantage.kind.startswith("reinforce_pp") or a.advantage.kind == "gae"
    )
    if whiten:
        every = [result[i][t] for i in range(count) for t in loss_tokens(batch, i)]
        mean, std = statistics.fmean(every), statistics.stdev(every)
        for i in range(count):
            for t in loss_tokens(batch, i):
                result[i][t] = (result[i][t] - mean) / (std + 1e-8)
    if a.distill_coef:
        for i in range(count):
            for t in loss_tokens(batch, i):
                result[i][t] += a.distill_coef * float(teacher[i][t] - old[i][t])
    return torch.tensor([value for sample in result for value in sample])


def episodes_of(batch, members: list[int]) -> list[list[int]]:
    """These samples, those of one episode together."""
    if batch.episode_ids is None:
        return [[j] for j in members]
    found: dict[int, list[int]] = {}
    for j in members:
        found.setdefault(int(batch.episode_ids[j]), []).append(j)
    return list(found.values())


def gdpo_total(batch, members: list[int], i: int) -> float:
    """Weighted sum of sample i's parts, each normalised within its group."""
    total = 0.0
    for part in range(batch.reward_parts.shape[1]):
        values = [float(batch.reward_parts[j, part]) for j in members]
        if len(values) > 1:
            centred = float(batch.reward_parts[i, part]) - statistics.fmean(values)
            total += float(batch.part_weights[i, part]) * centred / (statistics.stdev(values) + 1e-6)
    return total


def gae(token_rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one sample's loss tokens: the double sum of Schulman et al. 2016, eq. 16."""
    n = len(values)
    delta = [token_rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


def mismatch_ratios(batch, level: str) -> list[dict[int, float]]:
    """Per sample: position -> trainer's old probability / engine's."""
    old, engine = cut(batch.old_logprobs, batch.lengths), cut(batch.rollout_logprobs, batch.lengths)
    result = []
    for i in range(batch.num_samples):
        own = loss_tokens(batch, i)
        single = {t: math.exp(float(old[i][t]) - float(engine[i][t])) for t in own}
        product = math.prod(single.values())
        if level == "sequence":
            single = dict.fromkeys(own, product)
        elif level == "geometric":
            single = dict.fromkeys(own, product ** (1 / max(1, len(own))))
        result.append(single)
    return result


def is_weight(batch, a) -> list[dict[int, float]]:
    """Per sample: position -> factor of the policy loss."""
    factors = [dict.fromkeys(loss_tokens(batch, i), 1.0) for i in range(batch.num_samples)]
    if a.is_weights.kind != "none":
        for own, ratios in zip(factors, mismatch_ratios(batch, a.is_weights.kind), strict=True):
            for t, ratio in ratios.items():
                own[t] *= min(max(ratio, a.is_weights.floor), a.is_weights.cap)
        if a.is_weights.normalize:
            every = [list(own.values()) for own in factors if own]
            if a.is_weights.kind == "token":
                mean = statistics.fmean(weight for own in every for weight in own)
            else:
                mean = statistics.fmean(own[0] for own in every)
            factors = [{t: weight / mean for t, weight in own.items()} for own in factors]
    if a.is_veto is not None:
        for own, ratios in zip(factors, mismatch_ratios(batch, "token"), strict=True):
            if any(ratio < a.is_veto for ratio in ratios.values()):
                own.update(dict.fromkeys(own, 0.0))
    if a.is_mask.kind != "none":
        for own, ratios in zip(factors, mismatch_ratios(batch, a.is_mask.kind), strict=True):
            for t, ratio in ratios.items():
                own[t] *= 1.0 if a.is_mask.low <= ratio <= a.is_mask.high else 0.0
    return factors


def surrogate(new: Tensor, ratio: Tensor, advantage: float, a) -> Tensor:
    if a.objective.kind == "reinforce":
        return -advantage * new
    if a.objective.kind == "sapo":
        tau = a.objective.temperature_pos if advantage > 0 else a.objective.temperature_neg
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if example(a.objective) == "gmpo":
        return -ratio * advantage
    low, high = 1 - a.objective.clip_low, 1 + a.objective.clip_high
    if a.objective.kind == "cispo":
        return -min(max(float(ratio.detach()), low), high) * advantage * new
    objective = torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
    if a.objective.kind == "ppo" and a.objective.dual_clip is not None and advantage < 0:
        objective = torch.maximum(objective, torch.tensor(a.objective.dual_clip * advantage, dtype=objective.dtype))
    return -objective


def geometric_mean_of_clipped(new: list[Tensor], old: list[Tensor], advantages: list[float], a) -> Tensor:
    """GMPO's ratio of one sample: the n-th root of the product of its tokens' clipped ratios, in the graph."""
    product = torch.ones((), dtype=new[0].dtype)
    for p, q, advantage in zip(new, old, advantages, strict=True):
        ratio = torch.exp(p) / torch.exp(q)
        limit = 1 - a.objective.options["clip_low"] if advantage < 0 else 1 + a.objective.options["clip_high"]
        beyond = float(ratio.detach()) < limit if advantage < 0 else float(ratio.detach()) > limit
        product = product * (torch.full_like(product, limit) if beyond else ratio)
    return product ** (1 / len(new))


def off_policy_masks(batch, advantage: Tensor, logprobs: Tensor, a) -> list[dict[int, float]]:
    """Per sample: position -> DeepSeek-V3.2's M."""
    new, engine = cut(logprobs.detach(), batch.lengths), cut(batch.rollout_logprobs, batch.lengths)
    advantage_of, result = cut(advantage, batch.lengths), []
    for i in range(batch.num_samples):
        own = loss_tokens(batch, i)
        divergence = sum(float(engine[i][t] - new[i][t]) for t in own) / max(1, len(own))
        bad = {t: float(advantage_of[i][t]) < 0 and divergence > a.off_policy_mask_threshold for t in own}
        result.append({t: 0.0 if bad[t] else 1.0 for t in own})
    return result


def covariances(batch, advantage: Tensor) -> dict[int, float]:
    """Position in the batch -> (log p - mean) (A - mean) over all loss tokens."""
    every = [t for t, m in enumerate(batch.loss_mask.tolist()) if m > 0]
    p = statistics.fmean(float(batch.old_logprobs[t]) for t in every)
    mean = statistics.fmean(float(advantage[t]) for t in every)
    return {t: (float(batch.old_logprobs[t]) - p) * (float(advantage[t]) - mean) for t in every}


def decoupled_ppo_loss(batch, proximal: Tensor, advantage: Tensor, logprobs: Tensor, clip: float) -> Tensor:
    """Minus the objective of Fu et al. 2025 ("AReaL"), eq. 5, as a mean over the loss tokens of the batch.

    proximal, advantage: [T]; logprobs: [T] of pi_theta, in the graph; the behaviour policy's are the engines'.
    """
    total, count, at = torch.zeros(()), 0, 0
    for i in range(batch.num_samples):
        for t in loss_tokens(batch, i):
            behaviour_probability = math.exp(float(batch.rollout_logprobs[at + t]))
            proximal_probability = math.exp(float(proximal[at + t]))
            u = torch.exp(logprobs[at + t]) / proximal_probability
            a = float(advantage[at + t])
            limited = min(max(float(u.detach()), 1 - clip), 1 + clip) * a
            inner = u * a if float(u.detach()) * a <= limited else torch.tensor(limited)
            total = total + proximal_probability / behaviour_probability * inner
            count += 1
        at += int(batch.lengths[i])
    return -total / count


def loss(batch, advantage: Tensor, logprobs: Tensor, entropy: Tensor, a, max_response_tokens: int) -> Tensor:
    """The loss of a global batch, reduced as the papers write it. logprobs, entropy: [T], in the graph."""
    new, bonus = cut(logprobs, batch.lengths), cut(entropy, batch.lengths)
    old, reference = cut(batch.old_logprobs, batch.lengths), cut(batch.ref_logprobs, batch.lengths)
    weights, advantage_of = is_weight(batch, a) if a.loss == "policy" else None, cut(advantage, batch.lengths)
    masks = off_policy_masks(batch, advantage, logprobs, a) if a.off_policy_mask_threshold is not None else None
    samples: list[list[Tensor]] = []
    for i in range(batch.num_samples):
        own = loss_tokens(batch, i)
        samples.append([])
        for t in own:
            if a.loss == "sft":
                samples[-1].append(-new[i][t])
                continue
            if getattr(a.objective, "ratio", "token") == "sequence":
                ratio = torch.exp(sum(new[i][s] - old[i][s] for s in own) / len(own))
            elif example(a.objective) == "gmpo":
                given = [float(advantage_of[i][s]) for s in own]
                ratio = geometric_mean_of_clipped([new[i][s] for s in own], [old[i][s] for s in own], given, a)
            else:
                ratio = torch.exp(new[i][t] - old[i][t])
            value = weights[i][t] * surrogate(new[i][t], ratio, float(advantage_of[i][t]), a)
            if masks is not None:
                value = value * masks[i][t]
            if a.kl.kind == "loss":
                estimate = kl(new[i][t], reference[i][t], a.kl.estimator, limit=None if a.kl.unbiased else 10.0)
                value = value + a.kl.coef * (torch.exp(new[i][t] - old[i][t]) * estimate if a.kl.unbiased else estimate)
            samples[-1].append(value - a.entropy.coef * bonus[i][t] if a.entropy.kind == "bonus" else value)
    if a.loss_reduction == "constant":
        return sum(sum(sample) for sample in samples) / (len(samples) * (a.loss_length or max_response_tokens))
    if a.loss_reduction == "token":
        parts = [[value for sample in samples for value in sample]]
    elif a.loss_reduction == "sample":
        parts = samples
    else:
        ids = list(dict.fromkeys(batch.group_ids.tolist()))
        parts = [[v for i, sample in enumerate(samples) if batch.group_ids[i] == g for v in sample] for g in ids]
    means = [sum(part) / len(part) for part in parts if part]
    return sum(means) / len(means)
