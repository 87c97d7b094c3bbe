"""A trainer rank's end of a weight transfer: the stream of tensors, buffers, a channel for each engine."""
