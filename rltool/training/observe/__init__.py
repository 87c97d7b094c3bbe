"""What people see of a run: metrics, loggers, samples, reports, the live endpoint's numbers.

Not here: anything that a step waits for or depends on.
"""
