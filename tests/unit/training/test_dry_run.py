"""What `train --dry-run` says of placement, word by word: 8 GPUs of one host and 4 hosts of 8, in each mode."""

from __future__ import annotations

import io
from pathlib import Path

from rltool.config.loader import Loaded
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint, ModelEndpoints
from rltool.engines.launch.plan import Host
from rltool.engines.types import EngineInfo
from rltool.processes.run_directory import RunDirectory
from rltool.terminal import Console
from rltool.training.checks.preflight import ProbedFleet
from rltool.training.cluster.managed import expected_plan
from rltool.training.cluster.placement import plan_placement
from rltool.training.observe.report import print_plan
from rltool.training.prepare import Prepared

ONE = [Host("h0", gpus=tuple(range(8)))]
FOUR = [Host(f"h{n}", f"10.0.0.{n}", tuple(range(8))) for n in range(4)]


def test_what_was_set_is_shown_and_the_rest_is_counted():
    config = TrainConfig(model={"path": "/m"}, eval={"sets": {"held": "h.jsonl"}})
    loaded = Loaded(config=config, origins={"model.path": "--set", "eval.sets.held": "run.toml"})
    plan = plan_placement(config, gpu=False, gpus_per_host=8)
    prepared = Prepared(loaded, RunDirectory(Path("/runs/a")), plan, "cpu", None, None, data="data: 7 prompts, [3] out")
    out = io.StringIO()
    print_plan(prepared, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert len(lines) < 15 and "data: 7 prompts, [3] out" in lines
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["model.path", "eval.sets.held"]
    [others] = [line for line in lines if line.endswith("other settings have their defaults (docs/configuration.md)")]
    assert int(others.split()[0]) > 100


def test_the_transport_of_each_engine_is_shown_and_a_section_that_decides_for_none():
    sections = [{"match": "10.8.*", "transport": "disk"}, {"match": "*[x]:1", "staged": True}]
    config = TrainConfig(model={"path": "/m"}, weights={"engines": sections})
    engines = [EngineEndpoint(url=f"http://{host}:8101", dialect="vllm") for host in ("10.9.0.1", "10.8.0.1")]
    info = EngineInfo(
        dialect="vllm", engine_version="0.32.0", model_id="policy", world_size=1, max_model_len=4096, vocab_size=128,
        dtype="float32", weight_backend="rltool", weight_version=None, boot_id="b", plugin=True, device="cpu",
    )  # fmt: skip
    fleet = ProbedFleet(ModelEndpoints(engines=tuple(engines)), {engine.url: info for engine in engines})
    plan = plan_placement(config, gpu=False, gpus_per_host=8)
    loaded = Loaded(config=config, origins={"weights.engines": "run.toml"})
    out = io.StringIO()
    print_plan(Prepared(loaded, RunDirectory(Path("/runs/a")), plan, "cpu", fleet, None), Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert "weights over gloo: http://10.9.0.1:8101; disk: http://10.8.0.1:8101" in lines
    [told] = [line for line in lines if "decides for none" in line]
    assert told.startswith('[[weights.engines]] with match = "*[x]:1" decides for none of the run\'s engines')


def dry_run(hosts: list[Host], *, ranks: int, **engines) -> list[str]:
    """The lines behind the table of settings, without the bundles."""
    config = TrainConfig(
        model={"path": "/m"}, trainer={"world_size": ranks}, engines=engines,
        ray={"address": "10.0.0.0:6379" if len(hosts) > 1 else None},
    )  # fmt: skip
    run = RunDirectory(Path("/runs/golden"))
    plan = plan_placement(config, gpu=True, gpus_per_host=8)
    expected = expected_plan(config, plan, run, hosts) if config.engines.started_by_train else None
    gpus = tuple(range(int(plan.total("GPU")))) if len(hosts) == 1 else ()
    loaded = Loaded(config=config, origins={})
    prepared = Prepared(loaded, run, plan, "cuda", None, None, gpus=gpus, expected=expected)
    out = io.StringIO()
    print_plan(prepared, Console(file=out, width=200))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return [line for line in lines[lines.index("device: cuda") + 1 :] if not line.startswith("  bundle")]


GROUPS = ({"count": 2, "tp": 2},)


def test_one_host_external():
    assert dry_run(ONE, ranks=4) == [
        "placement: 4 Ray bundles (4 trainer, 0 engine), 4 GPUs: engines are external: the trainer's world size and "
        "nothing more",
        "GPUs of this host: 0,1,2,3 for the trainer",
    ]


def test_one_host_managed():
    assert dry_run(ONE, ranks=4, mode="managed", groups=GROUPS) == [
        "placement: 6 Ray bundles (4 trainer, 2 engine), 8 GPUs: managed engines have their own bundles",
        "GPUs of this host: 0,1,2,3 for the trainer, 4,5,6,7 for engines",
        "engines that train starts (ports are found then):",
        "  engine-0: vllm regular, group default, GPUs 4,5, http://127.0.0.1:20000",
        "  engine-1: vllm regular, group default, GPUs 6,7, http://127.0.0.1:20001",
    ]


def test_one_host_colocate():
    assert dry_run(ONE, ranks=8, mode="colocate", groups=GROUPS) == [
        "placement: 8 Ray bundles (8 trainer, 0 engine), 8 GPUs: "
        "colocated engines share the trainer's bundles, in turns",
        "GPUs of this host: 0,1,2,3,4,5,6,7 for the trainer",
        "engines that train starts (ports are found then):",
        "  engine-0: vllm regular, group default, GPUs 0,1, http://127.0.0.1:20000",
        "  engine-1: vllm regular, group default, GPUs 2,3, http://127.0.0.1:20001",
        "  group default: on the trainer's GPUs, asleep while it trains; awake --gpu-memory-utilization 0.600 "
        "(engines.groups: flags), beside the trainer's parameters",
    ]


def test_four_hosts_external():
    assert dry_run(FOUR, ranks=32) == [
        "placement: 32 Ray bundles (32 trainer, 0 engine), 32 GPUs: engines are external: the trainer's world size and "
        "nothing more"
    ]


def test_four_hosts_managed():
    assert dry_run(FOUR, ranks=16, mode="managed", groups=({"engine": "sglang", "tp": 16},)) == [
        "placement: 18 Ray bundles (16 trainer, 2 engine), 32 GPUs: managed engines have their own bundles",
        "engines that train starts (ports are found then):",
        "  engine-0: sglang regular, group default, host 10.0.0.2, GPUs 0,1,2,3,4,5,6,7, http://10.0.0.2:20000, "
        "node 0 of 2, dist-init 10.0.0.2:20001",
        "  engine-0-node1: sglang regular, group default, host 10.0.0.3, GPUs 0,1,2,3,4,5,6,7, no server of its own, "
        "node 1 of 2, dist-init 10.0.0.2:20001",
    ]


def test_four_hosts_colocate():
    assert dry_run(FOUR, ranks=32, mode="colocate", groups=({"count": 4, "tp": 8},)) == [
        "placement: 32 Ray bundles (32 trainer, 0 engine), 32 GPUs: colocated engines share the trainer's bundles, in "
        "turns",
        "engines that train starts (ports are found then):",
        *(
            f"  engine-{n}: vllm regular, group default, host 10.0.0.{n}, GPUs 0,1,2,3,4,5,6,7, http://10.0.0.{n}:20000"
            for n in range(4)
        ),
        "  group default: on the trainer's GPUs, asleep while it trains; awake --gpu-memory-utilization 0.600 "
        "(engines.groups: flags), beside the trainer's parameters",
    ]


def test_two_engines_on_the_trainers_gpu():
    lines = dry_run(ONE, ranks=1, mode="colocate", groups=({"count": 2, "engines_per_gpu": 2},))
    assert lines[-3:] == [
        "  engine-0: vllm regular, group default, GPUs 0, http://127.0.0.1:20000",
        "  engine-1: vllm regular, group default, GPUs 0, http://127.0.0.1:20001",
        "  group default: on the trainer's GPUs, asleep while it trains; awake --gpu-memory-utilization 0.300 "
        "(engines.groups: flags), beside the trainer's parameters; 2 engines on each GPU",
    ]


def test_managed_engines_that_share_gpus_of_their_own():
    lines = dry_run(ONE, ranks=1, mode="managed", groups=({"count": 3, "engines_per_gpu": 2},))
    assert [line.split(", ")[2] for line in lines if line.startswith("  engine-")] == ["GPUs 1", "GPUs 1", "GPUs 2"]
