"""How weights reach single engines of a run, where that differs from [weights]."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, model_validator

from rltool.config.base import Config

TransportName = Literal["auto", "ipc", "nccl", "gloo", "disk", "delta"]
WhereItCan = bool | Literal["auto"]
"""auto: at the engines that can."""


def contradiction(transport: TransportName, *, staged: WhereItCan, delta: WhereItCan) -> str | None:
    """Why these do not go together for one engine; None: they do."""
    if staged and transport in ("disk", "delta"):
        return f'staged has no effect with transport = "{transport}", which loads what lies there already'
    if delta and transport not in ("auto", "nccl", "gloo"):
        return (
            f'delta and transport = "{transport}" contradict each other: it sends patches over nccl or '
            'gloo; leave transport at "auto", or leave delta out (transport = "delta" sends them through a store)'
        )
    if delta and staged:
        return "staged has no effect with delta, whose patches arrive while the engine generates"
    return None


class EngineWeights(Config):
    """Engines that get their weights another way than the rest, in the same syncs. Of several such sections the first
    that fits an engine decides; what it leaves out is as in [weights]. docs/weights.md has an example."""

    match: str | None = Field(default=None, min_length=1)
    """Shell pattern (`*`, `?`, `[...]`) of engines' addresses, with http:// or without it: `10.8.*`, `*:8102`; or an
    address as it is: `[::1]:8000`. Names are not looked up: localhost is another address than 127.0.0.1."""
    group: str | None = Field(default=None, min_length=1)
    """Name of the engines' group (engines.groups, endpoints.json); engines that are given as host:port are in group
    default. One of match and group is needed; with both, both must fit."""
    transport: TransportName | None = None
    """As in [weights]."""
    staged: WhereItCan | None = None
    """As in [weights]."""
    delta: WhereItCan | None = None
    """As in [weights]."""

    @model_validator(mode="after")
    def _selects_and_sets(self) -> EngineWeights:
        if self.match is None and self.group is None:
            raise ValueError('selects no engine: give match = "10.8.*" or group = "NAME"')
        if not self.settings:
            raise ValueError(f"{self.whom}: sets nothing: give transport, staged or delta, or leave it out")
        return self

    @property
    def whom(self) -> str:
        """The engines that it is for, as it is written."""
        chosen = {"match": self.match, "group": self.group}
        return " and ".join(f'{key} = "{value}"' for key, value in chosen.items() if value is not None)

    @property
    def settings(self) -> dict[str, Any]:
        """Of [weights], those that it replaces."""
        chosen = {"transport": self.transport, "staged": self.staged, "delta": self.delta}
        return {key: value for key, value in chosen.items() if value is not None}

    def fits(self, url: str, group: str) -> bool:
        """url, group: of an engine's EngineEndpoint."""
        if self.group is not None and self.group != group:
            return False
        if self.match is None:
            return True
        pattern, address = self.match.lower(), url.lower()  # which addresses are, as far as rltool has parsed them
        # Equal, too: as a pattern the [...] of an IPv6 address is one character.
        return any(text == pattern or fnmatchcase(text, pattern) for text in (address, address.partition("://")[2]))

    def fits_all_of(self, other: EngineWeights) -> bool:
        """Whether it surely fits every engine that the other one fits. Of patterns, `*` is known to, and the same."""
        if self.group is not None and self.group != other.group:
            return False
        if self.match is None or not self.match.strip("*"):
            return True
        return other.match is not None and self.match.lower() == other.match.lower()
