"""Metrics of samples, evaluations, and rollouts on disk: dumps, their comparison, replays.

Not here: metrics of training steps (training/observe).
"""
