"""Metrics of samples, evaluations, and rollouts on disk: dumps, their comparison, replays."""
