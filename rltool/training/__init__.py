"""The loop of `train`: sessions, sources of rollouts, checkpointing, evaluation. Ranks, the rollout manager, placement,
checks and what people see are sub-packages."""
