"""Policies and other models whose engines prefill and decode apart: what a run asks of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rltool.config.engine_rules import halves_fault
from rltool.config.serve import POLICY
from rltool.config.train import TrainConfig
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import HALVES
from rltool.errors import UsageError


def check_halves(
    roles: Collection[str], kinds: Collection[str | None], *, router: bool, pause_mode: str | None
) -> None:
    """roles, kinds: of the engines that the policy is sampled from. router: whether requests go through one.
    pause_mode: weights.pause_mode; None: they are not synced. UsageError for what a run cannot do with them; nothing
    where all are regular."""
    why = halves_fault(roles, kinds, pause_mode=pause_mode)
    if why is not None:
        raise UsageError(why)
    if set(roles) - {"regular"}:
        _check_router(kinds, router=router)


def check_groups(config: TrainConfig) -> None:
    """The same of the router, for engines that the run starts itself."""
    policy = [group for group in config.engines.groups if group.model == POLICY and group.role in HALVES]
    _check_router([group.engine for group in policy], router=config.engines.start_router)


def _check_router(kinds: Iterable[str | None], *, router: bool) -> None:
    in_turn = [dialect(kind).label for kind in kinds if kind is not None and dialect(kind).pairing == "in_turn"]
    if router and in_turn:
        raise UsageError(
            f"a router and {in_turn[0]}'s prefill and decode engines contradict each other: rltool makes both calls "
            "itself, at the engines; leave the router out"
        )


def check_regular(engines: Iterable[EngineEndpoint], what: str) -> None:
    """UsageError where one of these, which are asked alone, is not."""
    roles = sorted({engine.role for engine in engines} - {"regular"})
    if roles:
        raise UsageError(f"{what} has engines of role {', '.join(roles)}, and a run asks regular ones alone there")


def check_role(endpoint: EngineEndpoint, present: Sequence[EngineEndpoint]) -> None:
    """UsageError for an engine that would join a run whose engines have other roles."""
    roles = {engine.role for engine in present}
    if present and endpoint.role not in (roles if "regular" in roles else HALVES):
        raise UsageError(
            f"{endpoint.url} has the role {endpoint.role}, and this run's engines are {' and '.join(sorted(roles))}"
        )
