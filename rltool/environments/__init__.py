"""Multi-turn tasks: the environment protocol, episodes that become samples, tools for the model."""
