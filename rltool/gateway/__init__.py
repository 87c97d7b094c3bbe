"""An HTTP server between an agent and the engines: it serves the APIs that agents are written for, and records each
session's exact tokens."""
