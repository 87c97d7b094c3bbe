"""Weights gathered over real process groups: bit by bit what lies on disk, in each layout, with buffers of any size."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from unittest.mock import patch

import pytest
import torch

from rltool.megatron import gathering
from rltool.megatron.hf_weights import export_weights
from tests.e2e.megatron_models import make_trainer, save_hf
from tests.e2e.megatron_ranks import RankPool
from tests.e2e.test_model_families import on_disk

pytestmark = pytest.mark.e2e

ALONE, SOME = 1, 120_000
"""Bytes: every parameter by itself; a few in each buffer."""

SEQUENCE = {"trainer": {"sequence_parallel": True}}
LAYOUTS = [
    ("qwen2", False, 2, {"tp": 2}),
    ("qwen2", True, 2, {"pp": 2}),
    ("qwen2", True, 4, {"tp": 2, "pp": 2}),
    ("qwen3", False, 4, {"tp": 2}),
    ("qwen3_moe", False, 2, {"ep": 2}),
    ("qwen3_moe", True, 4, {"tp": 2, "ep": 2, **SEQUENCE}),
    ("mixtral", False, 4, {"pp": 2, "ep": 2}),
]


@pytest.fixture(scope="module")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


def case_export(place, path, dtype, layout):
    """(bound, everywhere) -> the weights, and how many collectives rank 0 has made for them."""
    results = {}
    with closing(make_trainer(place, path, dtype=dtype, **layout)) as trainer:
        for bound in (ALONE, SOME, gathering.GATHER_BYTES):
            for everywhere in (False, True):
                made = Counter()

                def counted(name, made=made):
                    act = getattr(torch.distributed, name)
                    return patch.object(torch.distributed, name, lambda *a, **k: (made.update([name]), act(*a, **k)))

                with counted("all_gather_into_tensor"), counted("recv"), counted("broadcast"):
                    stream = export_weights(
                        trainer.gpt, trainer.export_plan, trainer.runtime, everywhere=everywhere, bound=bound
                    )
                    found = {meta: None if tensor is None else tensor.clone() for meta, tensor in stream}
                assert list(found) == trainer.export_plan.tensors
                results[bound, everywhere] = {meta.name: tensor for meta, tensor in found.items()}, made.total()
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "tied", "world", "layout"), LAYOUTS, ids=str)
def test_every_bit_arrives_and_parameters_share_collectives(four_ranks, tmp_path, kind, tied, world, layout, dtype):
    path = save_hf(tmp_path, kind, tied)
    original = {name: tensor.to(getattr(torch, dtype)) for name, tensor in on_disk(path).items()}
    for rank, results in enumerate(four_ranks.run(case_export, world, path, dtype, layout)):
        for (bound, everywhere), (found, _) in results.items():
            assert found.keys() == original.keys()
            for name, tensor in original.items():
                if rank == 0 or everywhere:
                    assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (bound, name)
                else:
                    assert found[name] is None
        if rank == 0:
            for everywhere in (False, True):
                alone, some, together = (results[b, everywhere][1] for b in (ALONE, SOME, gathering.GATHER_BYTES))
                assert alone > some >= together > 0
                assert alone >= 2 * together
