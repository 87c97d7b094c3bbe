"""rltool: reinforcement-learning post-training of language models from separately launched processes."""

__version__ = "0.1.0"
