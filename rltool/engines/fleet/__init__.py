"""Which engines exist, in which state, with which role, and which run leases them.

Pure state machines and one-shot requests. Not here: tasks (rollout/serving) and rules of a run.
"""
