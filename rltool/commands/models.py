"""`rltool models`: which model families there are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from rltool.terminal import Console, write_line

if TYPE_CHECKING:
    from rltool.models.base import FamilyDefinition

CUTS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


class ShowByDefault(TyperGroup):
    """`rltool models PATH` is `rltool models show PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    add_completion=False,
    cls=ShowByDefault,
    help="Model families (its options: rltool models show --help).",
)


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False) -> None:
    """List the model families: what each opens, what it was checked with, what is refused."""
    from rltool.models.registry import FAMILIES

    if as_json:
        write_line(json.dumps({"families": [facts(family) for family in FAMILIES]}, indent=2))
    else:
        Console().print(families_table(FAMILIES))


@app.callback()
def _group() -> None:
    pass


def facts(family: FamilyDefinition) -> dict[str, Any]:
    return {
        "architectures": family.architectures,
        "opens": family.opens,
        "special": family.special,
        "refuses": family.refuses,
        "layouts": [CUTS[cut] for cut in family.layouts],
        "engines": [ENGINES[engine] for engine in family.engines],
    }


def families_table(families: tuple[FamilyDefinition, ...]) -> Table:
    table = Table(title="Model families (docs/models.md)", title_justify="left")
    for name in ("opens", "architecture", "refused", "compared in parallel", "and in"):
        table.add_column(name, overflow="fold")
    for family in families:
        told = facts(family)
        table.add_row(
            family.opens, "\n".join(family.architectures), family.refuses or "-", ", ".join(told["layouts"]),
            ", ".join(told["engines"]),
        )  # fmt: skip
    return table
