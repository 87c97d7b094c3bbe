"""Do engines hold the trainer's weights: log-probabilities, checksums, digests, tolerances."""
