"""What a checkpoint of a trainer consists of, as Megatron's sharded state dict: model, optimizer, schedule, RNG."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from rltool.megatron.model import LAYERS_DIFFER
from rltool.megatron.optimizer import parts
from rltool.megatron.runtime import Runtime

REFERENCE_PREFIX = "reference."
"""Before the names of the reference's tensors in a checkpoint, where the policy's stand beside them."""


def sharding_metadata() -> dict[str, Any]:
    """Passed both when saving and when loading; with it a checkpoint loads under another layout of ranks."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(model: GPTModel) -> dict[str, Any]:
    """The weights alone. `model` is the unwrapped GPTModel: the data-parallel wrapper would change the keys."""
    # Else Megatron takes the same parameter of all layers for one tensor.
    differ = {"non_homogeneous_layers": True} if getattr(model, LAYERS_DIFFER, False) else {}
    return model.sharded_state_dict(metadata=sharding_metadata() | differ)


def copied(model: dict[str, Any], *, prefix: str) -> dict[str, Any]:
    """The state of `model_state` under names that begin with prefix, with tensors of its own on the CPU: those of the
    model may change while these are saved, and stay as they are when these are loaded."""
    for entry in model.values():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            assert entry.data is not None  # of a model that is there
            entry.data = entry.data.detach().to("cpu", copy=True)
    add_prefix_for_sharding(model, prefix)
    return model


def optimizer_state(optimizer: MegatronOptimizer, model: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    metadata = sharding_metadata()
    if not loading:
        # Otherwise every rank of a host would hold the whole model's state: 12 bytes a parameter, times its ranks.
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    for part in parts(state):
        if part.get("param_state", ...) is None:
            del part["param_state"]  # not the rank that writes: Megatron would warn that ranks differ
    return state


def _rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None  # the call initialises it
    return tracker


def rng_state(runtime: Runtime) -> ShardedObject:
    """This rank's generators, keyed by its coordinates; restorable only under the same layout of ranks."""
    at = runtime.coordinates
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": dict(_rng_tracker().get_states())}
    if runtime.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    shape = (at.layout.pp, at.layout.tp, at.layout.replica_size)
    return ShardedObject("rng_state", states, shape, (at.pp_rank, at.tp_rank, at.replica_rank), replica_id=0)


def restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    _rng_tracker().set_states(states["tracker"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
