"""`rltool doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from rltool.doctor import collect, examine, versions_found
from rltool.terminal import Console, write_line

_STYLES = {"ok": "green", "missing": "yellow", "warning": "yellow", "broken": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False) -> None:
    """Check what this machine has, and what is missing for what. Fails only if the base is broken."""
    facts = collect()
    findings = examine(facts)
    if as_json:
        write_line(
            json.dumps(
                {"facts": facts.model_dump(mode="json"), "findings": [finding.model_dump() for finding in findings]},
                indent=2,
            )
        )
    else:
        console = Console()
        shared = f"{facts.shared_memory >> 20} MiB" if facts.shared_memory is not None else "none"
        console.print(f"{facts.platform}, {facts.cpus} CPUs, {facts.memory >> 30} GiB, /dev/shm {shared}")
        for finding in findings:
            level = f"{finding.level:>8}", _STYLES[finding.level]
            console.print(Text.assemble(level, f"  {finding.about}: {finding.text}"))
            if finding.fix:
                console.print(f"          fix: {finding.fix}")
        console.print(f"versions: {versions_found(facts.versions)}")
    raise typer.Exit(1 if any(finding.level == "broken" for finding in findings) else 0)
