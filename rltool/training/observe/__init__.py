"""What people see of a run: metrics, loggers, samples, reports, the live endpoint's numbers."""
