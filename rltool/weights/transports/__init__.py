"""One file per way for weights to travel: the trainer's sender, and what the engine is asked to do."""
