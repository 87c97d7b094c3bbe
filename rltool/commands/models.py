"""`rltool models`: which families there are, and what a checkpoint takes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from rltool.engines.dialects.table import dialect
from rltool.errors import RltoolError
from rltool.processes.gpus import visible_gpus
from rltool.terminal import Console, write_line

if TYPE_CHECKING:
    from rltool.models.base import FamilyDefinition

CUTS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


class ModelsDiffer(RltoolError):
    """A family's model is not that of transformers, or not the same in another layout."""


class ShowByDefault(TyperGroup):
    """`rltool models PATH` is `rltool models show PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    add_completion=False,
    cls=ShowByDefault,
    help="Model families; of a checkpoint, whether it is supported and what it takes (its options: rltool models show "
    "--help).",
)


Own = Annotated[
    str | None, typer.Option("--family", help="A family of your own (model.family): my_family:FAMILY.")
]


@app.command()
def show(
    path: Annotated[
        Path | None,
        typer.Argument(help="Directory with a config.json, or a name of the Hugging Face hub; without it, list all."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Of the trainer; default: those of this host, or 1.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of each; default: of the smallest here, or 80.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="trainer.max_tokens_per_micro_batch.")] = 16384,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="trainer.KEY=VALUE of a layout of yours (tensor_parallel, recompute, ...)."),
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of trainer and engines.")] = "bfloat16",
    lora_rank: Annotated[int, typer.Option(min=0, help="lora.rank: adapters are trained, not the weights.")] = 0,
    family: Own = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """List the model families; of a checkpoint say whether it is supported and why not, its parameters, memory for
    training and serving, and a layout that fits. Exit code 1: not supported."""
    from rltool.models.registry import FAMILIES

    if path is None:
        if as_json:
            write_line(json.dumps({"families": [facts(family) for family in FAMILIES]}, indent=2))
        else:
            Console().print(families_table(FAMILIES))
        return
    from rltool.models.estimate import Asked, estimate

    here = visible_gpus()
    smallest = min((gpu.memory_mib for gpu in here if gpu.memory_mib), default=80 * 1024)
    gpu_bytes = int((gpu_memory or smallest / 1024) * 1024**3)
    asked = Asked(gpus or len(here) or 1, gpu_bytes, tokens, dtype, tuple(sets or ()), lora_rank)
    found = estimate(path, asked, own=family)
    if as_json:
        write_line(json.dumps(found.as_json(), indent=2))
    else:
        console = Console()
        for line in found.lines():
            console.print(line)
    raise typer.Exit(0 if found.refused is None else 1)


@app.command()
def check(
    family: Annotated[str, typer.Argument(help="Import path of a FamilyDefinition: my_family:FAMILY.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose config.json is taken, with small sizes; else transformers' defaults."),
    ] = None,
) -> None:
    """Compare a family of your own with transformers on tiny random weights: log-probabilities, gradients, packing, the
    export, tensor parallelism. Exit code 1 if something differs."""
    from rltool.checkpoints.family_check import check_family

    console = Console()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rltool-models-") as work:
        for finding in check_family(family, model, Path(work)):
            mark, style = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("not compared", "yellow")}[
                finding.ok
            ]
            failed += finding.ok is False
            console.print(Text.assemble((f"{mark:>12}", style), f"  {finding.what}: {finding.detail}"))
    if failed:
        raise ModelsDiffer(
            f"{family}: {failed} comparison{'s' * (failed > 1)} failed: this is not the model of transformers; "
            "docs/extending.md, \"Adding a model family\", has what a family states"
        )
    console.print(f"{family} is right as far as this shows; train it with --set model.family={family}")


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
        "engines": [dialect(engine).label for engine in family.engines],
        "no_sglang": family.no_sglang,
    }


def families_table(families: tuple[FamilyDefinition, ...]) -> Table:
    table = Table(
        title="Model families (docs/models.md), and the layouts and engines that each is compared in",
        title_justify="left",
    )
    # Names of architectures are to be found, and are not broken.
    table.add_column("family", min_width=max(len(name) for family in families for name in family.architectures))
    for name, width in (("layouts", 11), ("engines", None), ("refused", None)):
        table.add_column(name, width=width)
    for family in families:
        opens = Text(f"{family.opens}\n").append("\n".join(family.architectures), style="dim")
        layouts = " ".join(cut.upper() for cut in family.layouts)
        table.add_row(opens, layouts, "\n".join(facts(family)["engines"]), family.refuses or "-")
    return table
