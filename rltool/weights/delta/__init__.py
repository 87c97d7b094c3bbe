"""The trainer's end of delta transfers: what changed, and the store that it is written to.

Not here: what both ends share (engines/delta).
"""
