"""Agents in training: they are run against a gateway, and what their sessions recorded becomes samples."""
