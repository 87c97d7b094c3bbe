"""Samples, groups, admission, generation, rewards, the data plane, the fleet's monitor, dumps, metrics."""
