"""Frozen configuration models, one per process, and the loader."""
