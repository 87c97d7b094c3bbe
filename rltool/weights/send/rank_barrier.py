"""One answer out of those of all ranks, each of which sends to some of the engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rltool.weights.memory import most
from rltool.weights.send.sender import SendReport
from rltool.weights.sync_report import Failures
from rltool.weights.transport import Rendezvous


def one_meeting(meetings: Sequence[Mapping[str, Rendezvous]]) -> dict[str, Rendezvous]:
    """URL -> where the engine meets the ranks; meetings: what each rank has hosted. An engine that several ranks send
    to has the handles, or the stores, of all of them."""
    found: dict[str, Rendezvous] = {}
    for meeting in meetings:
        for url, rendezvous in meeting.items():
            before = found.get(url, rendezvous)
            handles = {gpu: handle or before.handles[gpu] for gpu, handle in rendezvous.handles.items()}
            found[url] = replace(before, handles=handles, stores=before.stores | rendezvous.stores)
    return found


def one_report(reports: Sequence[SendReport]) -> SendReport:
    """bytes: of one copy, as in each of them; a failure of one rank is the engine's; memory: of the rank that held
    most."""
    failures = one_answer([report.failures for report in reports])
    seconds = max(report.seconds for report in reports)
    memory = most(report.memory for report in reports)
    sent = tuple(size for report in reports for size in report.sent_bytes)
    return SendReport(reports[0].bytes, seconds, failures, reports[0].patch_bytes, memory, sent)


def one_answer(failures: Sequence[Failures]) -> Failures:
    """The first rank's that has a reason counts."""
    return {url: reason for each in reversed(failures) for url, reason in each.items()}
