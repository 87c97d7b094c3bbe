"""The trainer's ranks: the Ray actor of each, the driver's handle to all, sharding, profiling.

Not here: models, losses and optimizers (megatron, algorithms).
"""
