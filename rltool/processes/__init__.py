"""Run directory, spawning, readiness, state files, logs, stopping, tasks of the event loop."""
