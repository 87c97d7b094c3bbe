"""Weight syncs of whole runs over links of a limited rate: every rank sends its part (weights.sharded), and rank 0 all.

    python -m benchmarks.sharded_sync --rates 1e9 2e8        root: hosts are namespaces of this machine (tests/hosts)

Two hosts with a tensor- or pipeline-parallel rank each (--layouts), and --engines hosts with a vLLM each, on the CPU
over gloo; each host's link carries --rates bits a second each way. `rltool train` trains random weights for --steps
steps with both senders. One line of JSON for each run: medians over its syncs but the first, seconds that the busiest
link must take for a sync's bytes (`least`), gigabytes that each host has sent by its interface's own count; and one for
each pair, how many times as fast the sharded syncs are. Buckets are small against the model, as those of large ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rltool.engines.endpoints import Endpoints, EngineEndpoint, ModelEndpoints
from tests.e2e.job import write_job
from tests.e2e.megatron_models import hf_model
from tests.e2e.several_hosts import Cluster, metrics, serve
from tests.hosts import Host, Hosts, missing
from tests.tiny_models import write_tiny_tokenizer

RANKS = 2
READY, SECONDS = 900.0, 1800.0
LAYOUTS = {"tp": "trainer.tensor_parallel=2", "pp": "trainer.pipeline_parallel=2"}
SETS = (
    "trainer.world_size=2", "trainer.cpus_per_rank=2", "optimizer_steps_per_rollout=1", "eval.sets={}",
    "rollout.dump=false", "checkpoint.save_at_end=false", "sampling.max_response_tokens=4",
)  # fmt: skip


def sent(host: Host) -> int:
    """Bytes that it has sent by its first interface."""
    [line] = [line for line in host.run(["cat", "/proc/net/dev"]).splitlines() if line.strip().startswith("eth0:")]
    return int(line.split()[9])


def median(records: list[dict[str, Any]], name: str) -> float:
    return statistics.median(record[f"weights/{name}"] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e9], help="bits a second")
    parser.add_argument("--layers", type=int, default=12, help="of 16 MB in float32")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bucket-bytes", type=int, default=16 << 20)
    parser.add_argument("--layouts", choices=sorted(LAYOUTS), nargs="+", default=["tp", "pp"])
    args = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(why)
    with TemporaryDirectory(prefix="sharded-sync-", dir="/var/tmp") as work:
        root = Path(work)
        model = root / "model"
        sizes = {"num_hidden_layers": args.layers, "hidden_size": 512, "intermediate_size": 2048}
        hf_model("qwen2", False, **sizes).save_pretrained(model)
        write_tiny_tokenizer(model)
        fleet = root / "endpoints.json"
        job = write_job(root / "job", model, f"@{fleet}")
        with Hosts(RANKS + args.engines, shared=[root]) as hosts:
            every = list(hosts)
            nodes = every[:RANKS]
            engines = [serve(h, model, root / f"{h.name}.out", "--max-model-len", "64") for h in every[RANKS:]]
            found: list[EngineEndpoint] = []
            for engine in engines:
                engine.wait(READY)
                key = root / f"{engine.host.name}.key"
                key.touch(mode=0o600)
                key.write_text(engine.key)
                found.append(EngineEndpoint(url=f"http://{engine.address}", key_file=key))
            Endpoints(models={"policy": ModelEndpoints(engines=tuple(found))}).save(fleet)
            cluster = Cluster(hosts, nodes, job.runs)
            for rate, layout in itertools.product(args.rates, args.layouts):
                hosts.rate(int(rate))
                seconds: dict[bool, float] = {}
                for sharded in (False, True):
                    name = f"{layout}2-{rate:.0f}-{'sharded' if sharded else 'broadcast'}"
                    before = [sent(host) for host in every]
                    sets = [*SETS, LAYOUTS[layout], f"steps={args.steps}", f"weights.bucket_bytes={args.bucket_bytes}"]
                    sets.append(f"weights.sharded={json.dumps(sharded)}")
                    words = job.words("train", name, "--ray-address", cluster.address, sets=sets)
                    cluster.run(nodes[0], *words, timeout=SECONDS)
                    out = [after - b for after, b in zip(map(sent, every), before, strict=True)]
                    records = metrics(job.runs, name)[1:]
                    seconds[sharded] = median(records, "transfer_seconds")
                    size, syncs = records[0]["weights/sync_bytes"], args.steps + 1
                    show = {
                        "rate": rate, "layout": layout, "sharded": sharded, "megabytes": round(size / 1e6, 1),
                        "transfer": round(seconds[sharded], 3), "sync": round(median(records, "sync_seconds"), 3),
                        "paused": round(median(records, "paused_seconds"), 3),
                        "all": [round(r["weights/transfer_seconds"], 3) for r in records],
                        "least": round(max(out) / syncs * 8 / rate, 3),
                        "sent": {host.name: round(count / 1e9, 3) for host, count in zip(every, out, strict=True)},
                    }  # fmt: skip
                    print(json.dumps(show), flush=True)
                times = round(seconds[False] / seconds[True], 2)
                print(json.dumps({"rate": rate, "layout": layout, "times": times}), flush=True)
            for engine in engines:
                engine.process.terminate()
                try:
                    engine.process.wait(20)
                except subprocess.TimeoutExpired:
                    engine.process.kill()


if __name__ == "__main__":
    main()
