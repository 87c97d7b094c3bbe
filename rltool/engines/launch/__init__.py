"""Starting engines on a host: the plan of their processes, the start, readiness, restarts."""
