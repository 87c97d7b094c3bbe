"""Checkpoints: torch_dist save and load, Hugging Face export, conversion between the two. Atomic, with a manifest."""
