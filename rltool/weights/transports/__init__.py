"""One file per way for weights to travel: the trainer's sender, and what the engine is asked to do.

Not here: the order of a sync, which is the same for all (weights/engine_update.py).
"""
