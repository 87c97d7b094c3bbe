"""Keys of earlier releases, each with the key that took its place, or with why there is none: the loader refuses them
and says so."""

from __future__ import annotations

RENAMED: dict[str, str] = {
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
    "reward.timeout": "deadlines.reward",
    "eval.temperature": "eval.sampling.temperature",
    "weights.timeout": "deadlines.sync_step",
    "monitor.logprob_gap_limit": "monitor.logprob_difference_limit",
    "ray.placement_timeout": "deadlines.placement",
}
"""Old dotted key -> new dotted key."""

REMOVED: dict[str, str] = {
    "trainer.virtual_pipeline_parallel": "it took only 1, for Megatron-core's interleaved schedule gave silently wrong "
    "gradients here: use trainer.pipeline_parallel alone",
}
"""Old dotted key -> why it is gone."""
