"""The trainer's end of delta transfers: what changed, and the store that it is written to. (engines/delta has what both
ends share.)"""
