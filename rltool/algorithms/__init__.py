"""Advantages, losses, KL, the batch and its schedule: pure tensor functions."""
