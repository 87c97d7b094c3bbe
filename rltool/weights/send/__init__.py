"""A trainer rank's end of a weight transfer: the stream of tensors, buffers, a channel for each engine.

Not here: the engine's end (engines/transfer, engines/plugin), the order of a sync.
"""
