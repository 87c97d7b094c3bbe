"""`rltool convert-ckpt`: Hugging Face directory -> torch_dist directory and back, verified."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from rltool.errors import UsageError
from rltool.terminal import Console


class Target(StrEnum):
    torch_dist = "torch_dist"
    hf = "hf"
    peft = "peft"


def convert_ckpt(
    source: Annotated[Path, typer.Argument(help="Directory to read: Hugging Face; torch_dist with --to hf; adapters.")],
    out_dir: Annotated[Path, typer.Argument(help="Directory to write; it must not exist.")],
    to: Annotated[Target, typer.Option(help="What to write.")] = Target.torch_dist,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; without it, the source's own.")] = None,
    family: Annotated[str | None, typer.Option(help="A family of your own (model.family): my_family:FAMILY.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="With --to hf: adapters, merged into their model.")] = False,
    base: Annotated[Path | None, typer.Option(help="With --merge: the adapters' model, if it was moved.")] = None,
    quantization: Annotated[
        Literal["fp8"] | None,
        typer.Option(help="With --to hf: linear layers in FP8, blocks of 128 x 128, for engines to serve."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor, and the logits with transformers'.")] = True,
) -> None:
    """Convert a checkpoint: Hugging Face <-> torch_dist, adapters -> peft or merged; verified."""
    from rltool.checkpoints.convert import hf_to_torch_dist, to_fp8, torch_dist_to_hf
    from rltool.checkpoints.convert_adapters import adapters_to_peft, merge_to_hf
    from rltool.checkpoints.verify import LOGIT_TOLERANCE

    if merge and to is not Target.hf:
        raise UsageError("--merge writes a whole model: it goes with --to hf")
    if base is not None and not merge:
        raise UsageError("--base names the model that adapters are merged into: it goes with --to hf --merge")
    if to is Target.peft and not (dtype is None and verify):
        raise UsageError("--to peft writes float32 and always compares every tensor; leave out --dtype and --no-verify")
    if quantization is not None and (to is not Target.hf or merge or dtype is not None):
        raise UsageError("--quantization fp8 goes with --to hf, without --merge and --dtype")
    console = Console()
    with console.status("starting") as status:
        if to is Target.peft:
            done = adapters_to_peft(source, out_dir, own=family, report=status.update)
        elif quantization is not None:
            done = to_fp8(source, out_dir, verify=verify, own=family, report=status.update)
        elif merge:
            done = merge_to_hf(
                source, out_dir, base=base, dtype=dtype, verify=verify, own=family, report=status.update
            )
        else:
            convert = torch_dist_to_hf if to is Target.hf else hf_to_torch_dist
            done = convert(source, out_dir, dtype=dtype, verify=verify, own=family, report=status.update)
    lines = [
        f"{done.architecture}, {done.dtype}: {done.tensors} tensors, {done.parameters:,} parameters, "
        f"{done.weight_bytes / 1e6:,.1f} MB in {done.seconds:.1f} s",
    ]
    if done.carried:
        lines.append(f"carried along: {', '.join(done.carried)}")
    if done.carried_tensors:
        lines.append(
            f"carried along: {done.carried_tensors} tensors of multi-token-prediction layers or a vision tower, "
            "unchanged; they are not trained"
        )
    if done.tensors_equal is None:
        lines.append("not verified (--no-verify)")
    elif done.logit_difference is None:
        lines.append(f"verified: {done.tensors_equal} of {done.tensors} tensors bit-equal after a round trip")
    else:
        lines.append(
            f"verified: {done.tensors_equal} of {done.tensors} tensors bit-equal after a round trip; largest logit "
            f"difference to transformers {done.logit_difference:.1e} in fp32 (allowed: {LOGIT_TOLERANCE:g})"
        )
    lines.append(f"wrote {out_dir}")
    for line in lines:
        console.print(line)
