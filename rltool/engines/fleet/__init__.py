"""Which engines exist, in which state, with which role, and which run leases them.

Pure state machines and one-shot requests; no task lives here (rollout/serving has those).
Not here: tasks (rollout/serving) and rules of a run.
"""
