"""Samples and groups: admission, generation, collection, snapshots, batches for training. Data, rewards, serving and
measures are sub-packages."""
