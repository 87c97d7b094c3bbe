"""Keys of earlier releases, each with the key that took its place, or with why there is none: the loader refuses them
with an error that names the new one."""

from __future__ import annotations

from rltool.config.methods import in_examples

RENAMED: dict[str, str] = {
    "algorithm.credit": "algorithm.advantage.credit",
    "algorithm.turn_gamma": "algorithm.advantage.turn_gamma",
    "algorithm.normalize_std": "algorithm.advantage.normalize_std",
    "algorithm.normalize_std_over": "algorithm.advantage.normalize_std_over",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.value_clip": "algorithm.advantage.value_clip",
    "algorithm.is_cap": "algorithm.is_weights.cap",
    "algorithm.is_floor": "algorithm.is_weights.floor",
    "algorithm.is_normalize": "algorithm.is_weights.normalize",
    "algorithm.is_mask_low": "algorithm.is_mask.low",
    "algorithm.is_mask_high": "algorithm.is_mask.high",
    "algorithm.ratio": "algorithm.objective.ratio",
    "algorithm.clip_low": "algorithm.objective.clip_low",
    "algorithm.clip_high": "algorithm.objective.clip_high",
    "algorithm.dual_clip": "algorithm.objective.dual_clip",
    "algorithm.sapo_temperature_pos": "algorithm.objective.temperature_pos",
    "algorithm.sapo_temperature_neg": "algorithm.objective.temperature_neg",
    "algorithm.kl_in": "algorithm.kl.kind",
    "algorithm.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_target": "algorithm.kl.target",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
    "algorithm.kl_unbiased": "algorithm.kl.unbiased",
    "algorithm.reference_update_steps": "algorithm.kl.reference_update_steps",
    "algorithm.entropy_coef": "algorithm.entropy.coef",
    "algorithm.entropy_target": "algorithm.entropy.target",
    "algorithm.top_entropy_fraction": "algorithm.entropy.fraction",
    "algorithm.kl_cov_fraction": "algorithm.entropy.fraction",
    "algorithm.kl_cov_coef": "algorithm.entropy.coef",
    "rollout.mode": "engines.mode",
    "rollout.external": "engines.external",
    "rollout.router": "engines.router",
    "rollout.api_key_file": "engines.api_key_file",
    "rollout.num_engines": "engines.groups",
    "rollout.gpus_per_engine": "engines.groups",
    "rollout.temperature": "sampling.temperature",
    "rollout.top_p": "sampling.top_p",
    "rollout.top_k": "sampling.top_k",
    "rollout.max_prompt_tokens": "sampling.max_prompt_tokens",
    "rollout.max_response_tokens": "sampling.max_response_tokens",
    "rollout.stop_token_ids": "sampling.stop_token_ids",
    "rollout.request_timeout": "deadlines.generate",
    "rollout.preflight_timeout": "deadlines.preflight",
    "reward.timeout": "deadlines.call",
    "eval.temperature": "eval.sampling.temperature",
    "weights.timeout": "deadlines.sync",
    "monitor.logprob_gap_limit": "monitor.logprob_difference_limit",
    "ray.placement_timeout": "deadlines.start",
    "deadlines.ray_start": "deadlines.start",
    "deadlines.placement": "deadlines.start",
    "deadlines.bucket": "deadlines.sync",
    "deadlines.sync_step": "deadlines.sync",
    "deadlines.drain": "deadlines.close",
    "deadlines.environment": "deadlines.call",
    "deadlines.reward": "deadlines.call",
    "deadlines.batch": "deadlines.step",
    "deadlines.evaluate": "deadlines.step",
    "deadlines.trainer_call": "deadlines.step",
}
"""Old dotted key -> new dotted key."""

REMOVED: dict[str, str] = {
    **{f"algorithm.clip_cov_{key}": in_examples("clip_cov") for key in ("fraction", "low", "high")},
    "algorithm.entropy_coef_step": "the step is 0.005, as in Skywork-OR1: use algorithm.entropy.target",
    "algorithm.kl_gain": "the gain is 0.1, as in Ziegler et al. 2019: use algorithm.kl.target",
    "engines.restart_forget": "an engine that has served for 10 minutes has all restarts again: use "
    "engines.max_restarts and engines.restart_backoff",
    "reward.simulate_seconds": "name a reward.function of your own that sleeps",
    "rollout.simulate_step_seconds": "name a rollout.environment of your own whose step sleeps",
    "trainer.virtual_pipeline_parallel": "it took only 1, for Megatron-core's interleaved schedule gave silently wrong "
    "gradients here: use trainer.pipeline_parallel alone",
}
"""Old dotted key -> why it is gone."""
