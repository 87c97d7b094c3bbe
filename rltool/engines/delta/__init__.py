"""Weights as differences: written to a store by the trainer, rebuilt bit by bit beside an engine. Both sides import
this. Not here: the trainer's own end (weights/delta)."""
