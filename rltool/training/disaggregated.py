"""Policies and other models whose engines prefill and decode apart: what a run asks of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rltool.engines.dialects import dialect
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import HALVES
from rltool.errors import UsageError


def check_halves(
    roles: Collection[str], kinds: Collection[str | None], *, router: bool, pause_mode: str | None
) -> None:
    """roles, kinds: of the engines that the policy is sampled from. router: whether requests go through one.
    pause_mode: weights.pause_mode; None: they are not synced. UsageError for what a run cannot do with them; nothing
    where all are regular."""
    if not set(roles) - {"regular"}:
        return
    if set(roles) != HALVES:
        raise UsageError(
            f"engines of role {' and '.join(sorted(set(roles)))}: prefill and decode go together, without regular ones"
        )
    if len(set(kinds)) > 1:
        raise UsageError("prefill and decode engines are all vLLM's or all SGLang's: their caches are not alike")
    in_turn = [dialect(kind).label for kind in kinds if kind is not None and dialect(kind).pairing == "in_turn"]
    if router and in_turn:
        raise UsageError(
            f"a router and {in_turn[0]}'s prefill and decode engines contradict each other: rltool makes both calls "
            "itself, at the engines; leave the router out"
        )
    if pause_mode not in (None, "auto", "abort"):
        raise UsageError(
            f'weights.pause_mode = "{pause_mode}" with prefill and decode engines: a KV cache of old weights would be '
            'used after a sync; set weights.pause_mode = "abort", with which the tokens so far are kept, and their '
            'cache is computed anew, or leave it at "auto"'
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
