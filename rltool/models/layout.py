"""Whether a model can be cut over a layout's ranks. Pure, so that it is known before anything is started."""

from __future__ import annotations

from rltool.config.parallel import ParallelLayout
from rltool.errors import UsageError
from rltool.models.base import EMBEDDING, FINAL_NORM, HEAD, Family, Parameter


def check_layout(
    family: Family, layout: ParallelLayout, *, sequence_parallel: bool = False, shared_prefixes: bool = False
) -> None:
    """UsageError, naming flag and number, when this model cannot be cut that way."""
    if family.num_experts and layout.tp > 1 and not sequence_parallel:
        raise UsageError(
            f"trainer.tensor_parallel = {layout.tp} of a mixture of experts needs trainer.sequence_parallel = true"
        )
    if layout.ep > 1 and (family.num_experts == 0 or family.num_experts % layout.ep):
        raise UsageError(
            f"trainer.expert_parallel = {layout.ep} does not divide the model's {family.num_experts} experts per layer"
        )
    if family.attention.delta is not None and layout.cp > 1:
        raise UsageError(
            f"trainer.context_parallel = {layout.cp} is not implemented for a gated delta net, which "
            f"{family.architecture} has: its state goes from token to token; leave it at 1"
        )
    if family.attention.delta is not None and shared_prefixes:
        raise UsageError(
            f"trainer.shared_prefixes is not implemented for a gated delta net, which {family.architecture} has: its "
            "state goes from token to token along one row; leave it out"
        )
    delta = {} if family.attention.delta is None else {"linear_num_key_heads": family.attention.delta.key_heads}
    for what, flag, size in (
        ("num_attention_heads", "tensor_parallel", layout.tp),
        ("num_query_groups", "tensor_parallel", layout.tp),
        ("linear_num_key_heads", "tensor_parallel", layout.tp),
        ("ffn_hidden_size", "tensor_parallel", layout.tp),
        ("moe_ffn_hidden_size", "tensor_parallel", layout.tp),
        ("moe_shared_expert_intermediate_size", "tensor_parallel", layout.tp),
        ("num_layers", "pipeline_parallel", layout.pp),
    ):
        found = (family.transformer | delta).get(what) or 0
        if found % size:
            raise UsageError(
                f"trainer.{flag} = {size} does not divide the model's {what} = {found}; choose a divisor of {found}"
            )


def owner_stage(parameter: Parameter, num_layers: int, stages: int) -> int:
    """The pipeline stage that holds this parameter; layers are cut evenly."""
    if parameter.layer is not None:
        return parameter.layer * stages // num_layers
    return {EMBEDDING: 0, FINAL_NORM: stages - 1, HEAD: stages - 1}[parameter.name]
