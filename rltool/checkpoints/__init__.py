"""Checkpoints: torch_dist save and load, Hugging Face export, conversion between the two. Atomic, with a manifest."""

import rltool.megatron  # noqa: F401 (light; its warning filters have to stand before megatron.core is imported)
