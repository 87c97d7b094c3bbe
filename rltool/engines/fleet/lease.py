"""The client's side of an engine's lease: requests, replies, and the text of a refusal."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict

import psutil

from rltool.engines.client import HEALTH_SECONDS, EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.plugin.lease import LEASE_PATH, Action, Answer
from rltool.engines.replies import making_sense_of
from rltool.engines.types import Holder, HttpRequest, Lease
from rltool.errors import EngineRejected
from rltool.processes.state import boot, pid_namespace


def holder_of_this_process(run: str, name: str) -> Holder:
    return Holder(run, name, socket.gethostname(), os.getpid(), this_machine())


def this_machine() -> str:
    """This boot of this host, and the pid namespace: within it a pid names one process. "" where that is not known."""
    return f"{boot()} {pid_namespace()}" if boot() and pid_namespace() else ""


def has_died(holder: Holder) -> bool:
    """Its driver was a process of this machine and is none any more. False where that cannot be known from here: then
    its lease has to expire."""
    if not holder.machine or holder.machine != this_machine():
        return False
    try:
        return psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def ask_lease(
    client: EngineClient,
    engine: EngineEndpoint,
    action: Action,
    holder: Holder,
    seconds: float,
    *,
    only_from: str | None = None,
) -> Answer | None:
    """One request about the lease of one engine with rltool's plugin; each may be repeated.

    None: the plugin there is of an earlier version, which knows no leases. only_from: whom "steal" may take it from.
    """
    body = {"action": action, "holder": asdict(holder), "seconds": seconds, "only_from": only_from}
    try:
        reply = await client.request(
            engine.url,
            HttpRequest("POST", LEASE_PATH, body),
            key=engine.present_key(),
            timeout=HEALTH_SECONDS,
            retry=True,
        )
    except EngineRejected as error:
        if error.status == 404:
            return None
        raise
    with making_sense_of(f"POST {engine.url}{LEASE_PATH}"):
        taker = reply["taken_by"]
        return Answer(reply["granted"], Lease.from_json(reply["lease"]), Holder(**taker) if taker else None)


def leased_to_another(lease: Lease | None, run: str | None) -> str | None:
    """Why `run` (None: one that has no id yet) may not control an engine with this lease, as the end of a sentence.

    None: it may, or may take the lease of a run that has died.
    """
    if lease is None or lease.holder.run == run or has_died(lease.holder):
        return None
    return (
        f"is leased by {lease.holder}, which controls it; the lease expires in {lease.expires_in:.0f} s unless that "
        "run renews it. Wait until it has ended, or take the engine away from it with --steal"
    )
