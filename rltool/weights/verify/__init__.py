"""Do engines hold the trainer's weights: log-probabilities, checksums, digests, tolerances.

Not here: what is done about a difference.
"""
