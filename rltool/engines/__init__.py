"""Engines: the client, requests and replies, endpoints, a run's status and driver's address."""
