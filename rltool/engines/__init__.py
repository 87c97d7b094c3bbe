"""Engines: what they are asked, what they answer, where they are, and the fleet that they form."""
