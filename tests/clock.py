"""A clock in the hand of a test."""

from __future__ import annotations


class Clock:
    """now: what it shows, in seconds; only the test moves it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
