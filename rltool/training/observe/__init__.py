"""What people see of a run: metrics, loggers, samples, the console, the live endpoint's numbers."""
