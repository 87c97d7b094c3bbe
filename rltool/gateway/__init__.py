"""An HTTP server between an agent and the engines: it speaks the APIs that agents are written for, and records each
session's exact tokens."""
