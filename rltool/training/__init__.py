"""The loop, its data sources, the rollout manager, the Ray actors, placement, preflight, the run's endpoint."""
