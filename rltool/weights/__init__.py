"""From the trainer's parameters to the engines: the stream of tensors, sending, a weight sync, the value check."""
