"""Plans of engines as golden text: 8 GPUs on one host, 4 hosts of 8, prefill and decode, placeholders, more models."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from rltool.config.loader import load_config
from rltool.config.serve import EngineGroup
from rltool.config.train import TrainConfig
from rltool.engines.dialects.table import dialect
from rltool.engines.launch.plan import (
    EVERYWHERE,
    LOOPBACK,
    EnginePlan,
    Host,
    Model,
    Settings,
    describe_plan,
    engine_slots,
    handed_out,
    is_router,
    plan_engines,
    port_needs,
    router_role,
    seat_slots,
    start_order,
)
from rltool.engines.launch.start import held_ports, order_of_file
from rltool.errors import UsageError
from rltool.processes.ports import FREE_RANGE, reserve_ports
from rltool.processes.run_directory import RunDirectory
from rltool.training.cluster.managed import expected_plan
from rltool.training.cluster.placement import plan_placement

ONE_HOST = [Host("h0", gpus=tuple(range(8)))]
FOUR_HOSTS = [Host(f"h{n}", f"10.0.0.{n}", tuple(range(8))) for n in range(4)]
MODELS = {
    "policy": Model(Path("/m/policy")),
    "judge": Model(Path("/m/judge"), update_weights=False, start_router=True),
}


class Counter:
    """Ports of each host from 20000."""

    def __init__(self) -> None:
        self.next = {}

    def __call__(self, node: str, address: str) -> int:
        return next(self.next.setdefault(node, itertools.count(20_000)))


def plan(groups, hosts, **settings) -> EnginePlan:
    made = [EngineGroup(**group) for group in groups]
    slots = engine_slots(made, device=settings.get("device", "cuda"), gpus_per_host=max(len(h.gpus) for h in hosts))
    where = Settings(MODELS, Path("/run/key"), Path("/run/state"), spread=len(hosts) > 1, **settings)
    return plan_engines(slots, seat_slots(slots, hosts), where, Counter())


def lines(groups, hosts, **settings) -> list[str]:
    return describe_plan(plan(groups, hosts, **settings), name_hosts=len(hosts) > 1)


def test_one_host_of_eight_gpus_with_two_models_and_a_placeholder():
    groups = [
        {"name": "trainer", "role": "placeholder", "tp": 4},
        {"name": "main", "count": 2, "tp": 1},
        {"name": "judges", "model": "judge", "engine": "sglang", "tp": 2, "port": 9000},
    ]
    assert lines(groups, ONE_HOST) == [
        "engine-0: vllm regular, group main, GPUs 4, http://127.0.0.1:20000",
        "engine-1: vllm regular, group main, GPUs 5, http://127.0.0.1:20001",
        "engine-2: sglang regular, group judges, model judge (weights not updated), GPUs 6,7, http://127.0.0.1:9000",
        "placeholder: group trainer, GPUs 0,1,2,3",
        "router-judge: model judge, all engines in one pool, a free port",
    ]


def test_four_hosts_of_eight_with_an_engine_over_two_of_them():
    groups = [
        {"name": "big", "engine": "sglang", "tp": 16},
        {"name": "mid", "engine": "vllm", "count": 3, "tp": 4},
        {"name": "deep", "engine": "vllm", "tp": 2, "flags": ["--pipeline-parallel-size", "2"]},
    ]
    assert lines(groups, FOUR_HOSTS) == [
        "engine-0: sglang regular, group big, host 10.0.0.0, GPUs 0,1,2,3,4,5,6,7, http://10.0.0.0:20000, "
        "node 0 of 2, dist-init 10.0.0.0:20001",
        "engine-0-node1: sglang regular, group big, host 10.0.0.1, GPUs 0,1,2,3,4,5,6,7, no server of its own, "
        "node 1 of 2, dist-init 10.0.0.0:20001",
        "engine-1: vllm regular, group mid, host 10.0.0.2, GPUs 0,1,2,3, http://10.0.0.2:20000",
        "engine-2: vllm regular, group mid, host 10.0.0.2, GPUs 4,5,6,7, http://10.0.0.2:20001",
        "engine-3: vllm regular, group mid, host 10.0.0.3, GPUs 0,1,2,3, http://10.0.0.3:20000",
        "engine-4: vllm regular, group deep, host 10.0.0.3, GPUs 4,5,6,7, http://10.0.0.3:20001",
    ]


PAIR = [
    {"name": "p", "engine": "sglang", "role": "prefill", "count": 2, "tp": 2},
    {"name": "d", "engine": "sglang", "role": "decode", "tp": 4},
]


def test_prefill_and_decode_have_bootstrap_ports_and_a_router_that_knows_them():
    assert lines(PAIR, ONE_HOST) == [
        "engine-0: sglang prefill, group p, GPUs 0,1, http://127.0.0.1:20000, bootstrap port 20001",
        "engine-1: sglang prefill, group p, GPUs 2,3, http://127.0.0.1:20003, bootstrap port 20004",
        "engine-2: sglang decode, group d, GPUs 4,5,6,7, http://127.0.0.1:20006",
        "router: model policy, prefill and decode, a free port",
    ]


def argv(launch) -> str:
    return " ".join(dialect(launch.engine).argv(launch))


def test_the_flags_of_prefill_and_decode_are_sglangs():
    prefill, other, decode = plan(PAIR, ONE_HOST_OF_TEN).launches
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 20001" in argv(prefill)
    assert "--disaggregation-bootstrap-port 20004" in argv(other)
    assert "--disaggregation-mode decode" in argv(decode) and "bootstrap" not in argv(decode)


ONE_HOST_OF_TEN = [Host("h0", gpus=tuple(range(10)))]


@pytest.mark.parametrize(
    ("engine", "first", "second"),
    [
        ("sglang", "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.0:20001", "--node-rank 1 --dist-init-addr"),
        ("vllm", "--nnodes 2 --node-rank 0 --master-addr 10.0.0.0 --master-port 20001", "serve /m/policy --headless"),
    ],
)
def test_the_parts_of_an_engine_on_two_hosts_meet_at_the_first(engine, first, second):
    one, two = plan([{"engine": engine, "tp": 16}], FOUR_HOSTS).launches
    assert first in argv(one) and second in argv(two)
    assert "--headless" not in argv(one)
    assert one.boot_id == two.boot_id and one.index == two.index and one.work_dir != two.work_dir
    assert one.host == "10.0.0.0" and one.gpus == two.gpus == tuple(range(8))


def test_an_engine_that_fits_on_one_host_is_never_spread_over_two():
    made = plan([{"count": 3, "tp": 5}], FOUR_HOSTS)
    assert [launch.node for launch in made.launches] == ["h0", "h1", "h2"]
    assert {launch.nodes for launch in made.launches} == {1}


def test_the_parts_of_an_engine_are_on_different_hosts_even_where_two_would_fit_on_one():
    made = plan([{"engine": "sglang", "tp": 9}], FOUR_HOSTS)
    assert [(launch.node, len(launch.gpus)) for launch in made.launches] == [("h0", 3), ("h1", 3), ("h2", 3)]


def test_what_does_not_fit_is_refused_with_what_is_left():
    with pytest.raises(UsageError, match=r"engine 1 of group 'default', which takes 5 GPUs: left are h0: 5,6,7"):
        plan([{"count": 2, "tp": 5}], ONE_HOST)
    with pytest.raises(UsageError, match="placeholder 0 of group 'keep'"):
        plan([{"tp": 8}, {"name": "keep", "role": "placeholder"}], ONE_HOST)
    with pytest.raises(UsageError, match="8 GPUs on each of 5 hosts"):
        plan([{"tp": 40}], FOUR_HOSTS)


def test_named_gpus_are_taken_from_the_others():
    made = plan([{"count": 2}, {"name": "b", "count": 2, "gpus": [0, 3]}], ONE_HOST)
    assert [launch.gpus for launch in made.launches] == [(1,), (2,), (0,), (3,)]
    with pytest.raises(UsageError, match="GPU 3 twice"):
        plan([{"name": "a", "gpus": [3]}, {"name": "b", "gpus": [3]}], ONE_HOST)
    with pytest.raises(UsageError, match=r"group 'a': 2 x 2 takes 4 GPUs, --gpus names 3 \(0,1,2\): name more"):
        plan([{"name": "a", "count": 2, "tp": 2, "gpus": [0, 1, 2]}], ONE_HOST)
    with pytest.raises(UsageError, match="--device cpu"):
        plan([{"device": "cpu", "gpus": [0]}], ONE_HOST)


def test_engines_share_gpus_where_it_is_asked_for_and_start_one_after_the_other():
    made = plan([{"count": 3, "tp": 2, "engines_per_gpu": 2}, {"name": "b"}], ONE_HOST)
    assert [launch.gpus for launch in made.launches] == [(0, 1), (0, 1), (2, 3), (4,)]
    assert [[launch.index for launch in batch] for batch in start_order(made.launches)] == [[0, 2, 3], [1]]
    flags = [launch.extra_args for launch in made.launches]
    assert flags == [("--gpu-memory-utilization", "0.440")] * 3 + [()]
    own = ["--gpu-memory-utilization=0.3"]
    named = plan([{"count": 4, "engines_per_gpu": 2, "gpus": [6, 7], "flags": own}], ONE_HOST)
    assert [launch.gpus for launch in named.launches] == [(6,), (6,), (7,), (7,)]
    assert {launch.extra_args for launch in named.launches} == {tuple(own)}
    sglang = plan([{"engine": "sglang", "count": 3, "engines_per_gpu": 3}], ONE_HOST)
    assert [launch.extra_args[1] for launch in sglang.launches] == ["0.293", "0.415", "0.710"], "of what is free then"
    with pytest.raises(ValueError, match="GPU memory would be left unused"):
        plan([{"engines_per_gpu": 2}], ONE_HOST)
    with pytest.raises(UsageError, match=r"'default': 4 x 1, 2 on the same GPUs, takes 2 GPUs, --gpus names 4"):
        plan([{"count": 4, "engines_per_gpu": 2, "gpus": [4, 5, 6, 7]}], ONE_HOST)
    with pytest.raises(UsageError, match="--engines-per-gpu with --device cpu"):
        plan([{"device": "cpu", "count": 2, "engines_per_gpu": 2}], ONE_HOST)


@pytest.mark.parametrize(
    ("engine", "flags", "together"),
    [
        ("vllm", ["--kv-cache-memory-bytes", "8589934592"], True),
        ("vllm", ["--kv_cache_memory_bytes=8589934592"], True),
        ("vllm", ["--gpu-memory-utilization=0.3"], False),
        ("sglang", ["--kv-cache-memory-bytes", "8589934592"], False),
    ],
    ids=str,
)
def test_engines_that_need_not_measure_memory_start_together(engine, flags, together):
    made = plan([{"engine": engine, "count": 2, "engines_per_gpu": 2, "flags": flags}], ONE_HOST)
    assert [len(batch) for batch in start_order(made.launches)] == ([2] if together else [1, 1])


def test_an_engine_that_measures_memory_starts_apart_from_one_that_need_not():
    told, measures = plan([{"count": 2, "engines_per_gpu": 2}], ONE_HOST).launches
    told = told.model_copy(update={"extra_args": ("--kv-cache-memory-bytes=1",)})
    assert [len(batch) for batch in start_order([told, measures])] == [1, 1]


def test_on_the_cpu_all_start_at_once():
    made = plan([{"count": 3}], ONE_HOST, device="cpu")
    assert [len(batch) for batch in start_order(made.launches)] == [3]


def test_on_the_cpu_engines_take_no_gpu_and_hosts_share_them():
    made = plan([{"count": 3}, {"name": "keep", "role": "placeholder"}], FOUR_HOSTS, device="cpu")
    assert [(launch.node, launch.gpus) for launch in made.launches] == [("h0", ()), ("h1", ()), ("h2", ())]
    assert made.kept == ()


def test_replicas_of_all_groups_have_numbers_seeds_and_boot_ids_of_their_own():
    made = plan([{"count": 2}, {"name": "b", "count": 2, "seed": 7}], ONE_HOST, first=3).launches
    assert [launch.index for launch in made] == [3, 4, 5, 6]
    assert [launch.seed for launch in made] == [3, 4, 12, 13]
    assert len({launch.boot_id for launch in made}) == 4


def test_a_half_of_prefill_and_decode_is_refused():
    with pytest.raises(UsageError, match="role prefill: prefill and decode go together"):
        plan(PAIR[:1], ONE_HOST)
    with pytest.raises(UsageError, match="decode and prefill and regular"):
        plan([*PAIR, {"name": "r"}], ONE_HOST_OF_TEN)


def test_halves_of_vllm_meet_over_nixl_and_need_no_router():
    groups = [{"name": "p", "role": "prefill", "tp": 2}, {"name": "d", "role": "decode", "count": 2}]
    assert lines(groups, ONE_HOST) == [
        "engine-0: vllm prefill, group p, GPUs 0,1, http://127.0.0.1:20000, bootstrap port 20001",
        "engine-1: vllm decode, group d, GPUs 2, http://127.0.0.1:20002, bootstrap port 20003",
        "engine-2: vllm decode, group d, GPUs 3, http://127.0.0.1:20004, bootstrap port 20005",
    ]
    for launch in plan(groups, ONE_HOST).launches:
        assert '--kv-transfer-config {"kv_connector": "NixlConnector", "kv_role": "kv_both",' in argv(launch)
        found = dialect("vllm").environment(launch)
        where = found["VLLM_NIXL_SIDE_CHANNEL_HOST"], found["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        assert where == ("127.0.0.1", str(launch.bootstrap_port))
    [alone] = plan([{}], ONE_HOST).launches
    assert "kv-transfer" not in argv(alone) and "VLLM_NIXL_SIDE_CHANNEL_HOST" not in dialect("vllm").environment(alone)


def test_halves_are_of_one_kind():
    with pytest.raises(UsageError, match="all vLLM's or all SGLang's"):
        plan([PAIR[0], {"name": "d", "role": "decode"}], ONE_HOST)


def test_the_role_of_an_earlier_release_is_refused_by_name():
    with pytest.raises(ValueError, match='role = "encoder" is no longer there: .*leave the group out'):
        EngineGroup(engine="sglang", role="encoder")


def test_the_ports_that_a_plan_needs_are_those_that_it_takes():
    groups = [EngineGroup(**PAIR[0]), EngineGroup(**PAIR[1], port=9100, host="10.1.1.1")]
    slots = engine_slots(groups)
    seats, settings = seat_slots(slots, ONE_HOST), Settings(MODELS, Path("/k"), Path("/s"))
    needs = port_needs(slots, seats, settings)
    assert needs.free == {("h0", "127.0.0.1"): 4, ("h0", EVERYWHERE): 3}
    assert needs.fixed == (("h0", "10.1.1.1", 9100),)
    found = {("h0", "127.0.0.1"): (1, 2, 3, 4), ("h0", EVERYWHERE): (5, 6, 7)}
    taken = plan_engines(slots, seats, settings, handed_out(found)).launches
    assert [(x.port, x.bootstrap_port, x.rendezvous_port) for x in taken] == [(1, 2, 5), (3, 4, 6), (9100, None, 7)]


def values(launch, *flags: str) -> list[int]:
    words = dialect(launch.engine).argv(launch)
    return [int(words[at + 1]) for at, word in enumerate(words) if word in flags]


def test_engines_that_start_at_once_have_ports_of_their_own_until_they_start(monkeypatch):
    """SGLang by itself takes an ephemeral one for torch's store, and binds it when another may have it."""
    monkeypatch.setattr("rltool.engines.launch.plan.EVERYWHERE", LOOPBACK)  # tests listen nowhere else
    groups = [EngineGroup(engine="sglang", count=40), EngineGroup(name="b", count=10)]
    slots = engine_slots(groups, device="cpu")
    seats, settings = seat_slots(slots, [Host("h0")]), Settings(MODELS, Path("/k"), Path("/s"), device="cpu")
    with held_ports(port_needs(slots, seats, settings)) as (ports, release):
        made = plan_engines(slots, seats, settings, ports).launches
        found = [values(launch, "--port", "--nccl-port") for launch in made]
        assert [len(each) for each in found] == [2] * 40 + [1] * 10
        every = [port for each in found for port in each]
        assert len(set(every)) == 90 and set(every) <= set(FREE_RANGE)
        release(made[1:])
        with pytest.raises(UsageError, match="cannot be used"):
            reserve_ports(1, first=found[0][1])
        for port in every[2:]:
            reserve_ports(1, first=port).release()


@pytest.mark.parametrize(
    ("group", "ports"),
    [
        ({}, [20_001]),
        ({"tp": 2, "flags": ["--pp-size", "2"]}, [20_001]),
        ({"tp": 2, "flags": ["--dp-size", "2", "--enable-dp-attention"]}, [20_001]),
        ({"flags": ["--dp-size", "2"]}, []),  # each replica takes one of its own, and a second cannot have this one
        ({"flags": ["--nccl-port", "7"]}, [7]),
        ({"flags": ["--nccl-port=7"]}, []),
        ({"flags": ["--dist-init-addr", "127.0.0.1:7"]}, []),
        ({"tp": 16}, []),  # over two hosts: --dist-init-addr
        ({"engine": "vllm"}, []),
    ],
)
def test_sglang_is_told_where_its_ranks_meet_unless_its_flags_say_so_or_it_takes_several(group, ports):
    first, *_ = plan([{"engine": "sglang", **group}], FOUR_HOSTS).launches
    assert values(first, "--nccl-port") == ports
    assert first.rendezvous_port == (20_001 if ports == [20_001] else None)


@pytest.mark.parametrize(
    ("engine", "flags", "gpus"),
    [
        ("vllm", [], 2),
        ("vllm", ["--pipeline-parallel-size=2", "--data-parallel-size", "3"], 12),
        ("vllm", ["-dp", "2", "--enable-expert-parallel"], 4),
        ("sglang", ["--pp-size", "2"], 4),
        ("sglang", ["--dp-size", "4"], 8),
        ("sglang", ["--dp-size", "2", "--enable-dp-attention"], 2),
    ],
)
def test_gpus_follow_from_tp_and_the_engines_own_flags(engine, flags, gpus):
    (slot,) = engine_slots([EngineGroup(engine=engine, tp=2, flags=flags)])
    assert slot.shares == (gpus,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "4"], "set tp in place of --tensor-parallel-size"),
        (["--data-parallel-size", "many"], "--data-parallel-size 'many': expected a number"),
        (["--pipeline-parallel-size"], "--pipeline-parallel-size '': expected a number"),
    ],
)
def test_a_size_that_cannot_be_planned_by_is_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        engine_slots([EngineGroup(flags=flags)])


def test_routers_are_told_from_other_processes_by_their_role():
    assert is_router(router_role("policy")) and is_router(router_role("judge"))
    assert not any(map(is_router, ("router-command", "router-command-2", "engine-0", "train")))


# -- managed: behind the trainer's ranks; colocate: on their GPUs


def managed(
    hosts: list[Host], *, ray: str | None, ranks: int, groups, mode: str = "managed"
) -> tuple[list[str], list[float]]:
    config = TrainConfig(
        model={"path": "/m/policy"}, trainer={"world_size": ranks}, ray={"address": ray},
        engines={"mode": mode, "groups": groups}, models={"judge": {"path": "/m/judge"}},
    )  # fmt: skip
    made = plan_placement(config, gpu=True, gpus_per_host=max(len(host.gpus) for host in hosts))
    found = expected_plan(config, made, RunDirectory(Path("/run")), hosts)
    return describe_plan(found, name_hosts=len(hosts) > 1), [bundle["GPU"] for bundle in made.engines]


def test_managed_engines_come_behind_the_ranks_on_one_host():
    lines, bundles = managed(ONE_HOST, ray=None, ranks=4, groups=[{"count": 2, "tp": 2}])
    assert lines == [
        "engine-0: vllm regular, group default, GPUs 4,5, http://127.0.0.1:20000",
        "engine-1: vllm regular, group default, GPUs 6,7, http://127.0.0.1:20001",
    ]
    assert bundles == [2, 2]


def test_managed_engines_come_behind_the_ranks_on_four_hosts():
    lines, bundles = managed(
        FOUR_HOSTS, ray="10.0.0.0:6379", ranks=12, groups=[{"tp": 16, "engine": "sglang"}, {"name": "b", "tp": 4}]
    )
    assert lines == [
        "engine-0: sglang regular, group default, host 10.0.0.2, GPUs 0,1,2,3,4,5,6,7, http://10.0.0.2:20000, "
        "node 0 of 2, dist-init 10.0.0.2:20001",
        "engine-0-node1: sglang regular, group default, host 10.0.0.3, GPUs 0,1,2,3,4,5,6,7, no server of its own, "
        "node 1 of 2, dist-init 10.0.0.2:20001",
        "engine-1: vllm regular, group b, host 10.0.0.1, GPUs 4,5,6,7, http://10.0.0.1:20000",
    ]
    assert bundles == [8, 8, 4]


def test_colocated_engines_are_on_the_gpus_of_the_ranks_of_one_host():
    groups = [{"count": 2, "tp": 2}, {"name": "judges", "model": "judge", "engine": "sglang", "tp": 4}]
    lines, bundles = managed(ONE_HOST, ray=None, ranks=8, groups=groups, mode="colocate")
    assert lines == [
        "engine-0: vllm regular, group default, GPUs 0,1, http://127.0.0.1:20000",
        "engine-1: vllm regular, group default, GPUs 2,3, http://127.0.0.1:20001",
        "engine-2: sglang regular, group judges, model judge (weights not updated), GPUs 4,5,6,7, "
        "http://127.0.0.1:20002",
    ]
    assert bundles == []


def test_colocated_engines_are_on_the_gpus_of_the_ranks_of_four_hosts():
    groups = [{"count": 6, "tp": 4}]
    lines, bundles = managed(FOUR_HOSTS, ray="10.0.0.0:6379", ranks=28, groups=groups, mode="colocate")
    assert lines == [
        "engine-0: vllm regular, group default, host 10.0.0.0, GPUs 0,1,2,3, http://10.0.0.0:20000",
        "engine-1: vllm regular, group default, host 10.0.0.0, GPUs 4,5,6,7, http://10.0.0.0:20001",
        "engine-2: vllm regular, group default, host 10.0.0.1, GPUs 0,1,2,3, http://10.0.0.1:20000",
        "engine-3: vllm regular, group default, host 10.0.0.1, GPUs 4,5,6,7, http://10.0.0.1:20001",
        "engine-4: vllm regular, group default, host 10.0.0.2, GPUs 0,1,2,3, http://10.0.0.2:20000",
        "engine-5: vllm regular, group default, host 10.0.0.2, GPUs 4,5,6,7, http://10.0.0.2:20001",
    ]
    assert bundles == []
    where = [Host("n0", "10.0.0.0", tuple(range(8))), Host("n1", "10.0.0.1", (0, 1))]
    with pytest.raises(UsageError, match=r"group 'default', which takes 5 GPUs: left are n0: 5,6,7"):
        managed(where, ray="x:1", ranks=10, groups=[{"count": 2, "tp": 5}], mode="colocate")


# -- the examples of docs/engines.md

EXAMPLES = re.findall(r"```toml\n(.*?)```", (Path(__file__).parents[4] / "docs/engines.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0][:60])
def test_the_examples_of_the_docs_can_be_planned_on_one_host_of_eight(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text if "[model]" in text else f'{text}\n[model]\npath = "models/policy"\n')
    config = load_config(TrainConfig, [file]).config
    order = order_of_file(config)
    slots = engine_slots(order.groups)
    check_plan = plan_placement(config, gpu=True) if config.engines.started_by_train else None
    assert check_plan is None or check_plan.total("GPU") <= 8
    ranks = config.trainer.world_size if config.engines.mode == "managed" else 0
    hosts = [Host("h0", gpus=tuple(range(ranks, 8)))]
    settings = Settings(order.models, Path("/k"), Path("/s"))
    made = plan_engines(slots, seat_slots(slots, hosts), settings, Counter())
    assert len(made.launches) == sum(group.count for group in order.groups if group.role != "placeholder") > 0
    assert len({gpu for launch in made.launches for gpu in launch.gpus}) == sum(len(x.gpus) for x in made.launches)


def test_the_docs_have_examples_of_every_role_and_of_a_managed_run():
    every = "".join(EXAMPLES)
    assert all(f'role = "{role}"' in every for role in ("prefill", "decode", "placeholder"))
    assert 'mode = "managed"' in every and "update_weights = false" in every
    assert 'mode = "colocate"' in every


@pytest.mark.parametrize(
    ("engine", "device", "head", "why"),
    [
        ("sglang", "cuda", 128, "SGLang was to compute exactly (algorithm.exact): that is implemented for vLLM"),
        ("vllm", "cpu", 128, "vLLM was to compute exactly (algorithm.exact): its batch-invariant kernels are for GPUs"),
        ("vllm", "cuda", 96, "of other heads than those of 64 and 128"),
        ("vllm", "cuda", 64, None),
        ("vllm", "cuda", 128, None),
    ],
)
def test_engines_that_cannot_compute_exactly_are_refused_by_group(tmp_path, monkeypatch, engine, device, head, why):
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": head}))
    monkeypatch.setitem(MODELS, "policy", Model(tmp_path, exact=True))
    groups = [{"name": "main", "engine": engine, "tp": 1}]
    if why is not None:
        with pytest.raises(UsageError, match=re.escape(why)) as error:
            plan(groups, ONE_HOST, device=device)
        assert "group 'main'" in str(error.value)
        return
    [launch] = plan(groups, ONE_HOST, device=device).launches
    assert launch.exact
