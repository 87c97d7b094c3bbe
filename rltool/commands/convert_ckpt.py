"""`rltool convert-ckpt`: Hugging Face directory -> torch_dist directory and back, verified."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rltool.terminal import Console


class Target(StrEnum):
    torch_dist = "torch_dist"
    hf = "hf"


def convert_ckpt(
    source: Annotated[Path, typer.Argument(help="Directory to read: Hugging Face, or torch_dist with --to hf.")],
    out_dir: Annotated[Path, typer.Argument(help="Directory to write; it must not exist.")],
    to: Annotated[Target, typer.Option(help="What to write.")] = Target.torch_dist,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; without it, the source's own.")] = None,
    family: Annotated[str | None, typer.Option(help="A family of your own (model.family): my_family:FAMILY.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor, and the logits with transformers'.")] = True,
) -> None:
    """Convert a checkpoint: Hugging Face <-> torch_dist, verified."""
    from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf
    from rltool.checkpoints.verify import LOGIT_TOLERANCE

    convert = torch_dist_to_hf if to is Target.hf else hf_to_torch_dist
    console = Console()
    with console.status("starting") as status:
        done = convert(source, out_dir, dtype=dtype, verify=verify, own=family, report=status.update)
    lines = [
        f"{done.architecture}, {done.dtype}: {done.tensors} tensors, {done.parameters:,} parameters, "
        f"{done.weight_bytes / 1e6:,.1f} MB in {done.seconds:.1f} s",
        f"carried along: {', '.join(done.carried)}",
    ]
    if done.carried_tensors:
        lines.append(
            f"carried along: {done.carried_tensors} tensors of multi-token-prediction layers, unchanged; "
            "they are not trained"
        )
    if done.tensors_equal is None:
        lines.append("not verified (--no-verify)")
    else:
        lines.append(
            f"verified: {done.tensors_equal} of {done.tensors} tensors bit-equal after a round trip; largest logit "
            f"difference to transformers {done.logit_difference:.1e} in fp32 (allowed: {LOGIT_TOLERANCE:g})"
        )
    lines.append(f"wrote {out_dir}")
    for line in lines:
        console.print(line)
