"""Starting engines on a host: the plan of their processes, the start, readiness, restarts.

Not here: flags of an engine (engines/dialects), GPUs of a run's own engines (training/cluster).
"""
