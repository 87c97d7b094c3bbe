"""How long the ranks take to gather a sharded model for a weight sync: many parameters in each collective, and one.

    python -m benchmarks.gather

Two ranks on this machine's CPU over gloo; models of many small tensors, where collectives and not bytes take the time.
Both ways take turns for --rounds rounds. One line of JSON for each layout: medians in seconds, to rank 0 and to every
rank (everywhere), and how many times as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from rltool.megatron.gathering import GATHER_BYTES
from rltool.megatron.hf_weights import export_weights
from tests.e2e.megatron_models import hf_model, make_trainer
from tests.e2e.megatron_ranks import RankPool

BOUNDS = {"one": 1, "together": GATHER_BYTES}
RANKS = 2
DENSE = ("qwen2", {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512})
EXPERTS = ("qwen3_moe", {"num_hidden_layers": 8, "num_experts": 32, "hidden_size": 128, "moe_intermediate_size": 64})
CASES: list[tuple[str, tuple[str, dict[str, int]], dict[str, Any]]] = [
    ("dense, TP 2", DENSE, {"tp": 2}),
    ("dense, PP 2", DENSE, {"pp": 2}),
    ("experts, TP 2", EXPERTS, {"tp": 2, "trainer": {"sequence_parallel": True}}),
    ("experts, EP 2", EXPERTS, {"ep": 2}),
]


def measure(place: Any, path: Path, layout: dict[str, Any], rounds: int) -> tuple[int, dict[tuple[bool, str], float]]:
    """Runs in each rank. (tensors, median seconds by (everywhere, name of the bound))"""
    seconds: dict[tuple[bool, str], list[float]] = {}
    tensors = 0
    with closing(make_trainer(place, path, dtype="bfloat16", **layout)) as trainer:
        for number in range(1 + rounds):
            for everywhere in (False, True):
                for name, bound in BOUNDS.items():
                    dist.barrier()
                    began = time.perf_counter()
                    stream = export_weights(
                        trainer.gpt, trainer.export_plan, trainer.runtime, everywhere=everywhere, bound=bound
                    )
                    tensors = sum(1 for _ in stream)
                    dist.barrier()
                    if number:
                        seconds.setdefault((everywhere, name), []).append(time.perf_counter() - began)
    return tensors, {key: statistics.median(found) for key, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with closing(RankPool(RANKS)) as pool, TemporaryDirectory(prefix="gather-") as work:
        for label, (kind, sizes), layout in CASES:
            path = Path(work) / kind
            if not path.exists():
                hf_model(kind, False, **sizes).save_pretrained(path)
            tensors, seconds = pool.run(measure, RANKS, path, layout, args.rounds)[0]
            row: dict[str, Any] = {"case": label, "tensors": tensors}
            for everywhere, name in ((False, "rank 0"), (True, "everywhere")):
                one, together = seconds[everywhere, "one"], seconds[everywhere, "together"]
                row[name] = {"one": round(one, 4), "together": round(together, 4), "times": round(one / together, 2)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
