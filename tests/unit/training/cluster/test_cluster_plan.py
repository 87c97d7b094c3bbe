"""`rltool plan`: placements, memory, links and what limits them, from a config.json alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.trainer_speed import SHAPES
from rltool.cli import main
from rltool.config.parallel import ParallelLayout
from rltool.config.sections import TrainerConfig
from rltool.errors import UsageError
from rltool.megatron.export_plan import full_plan
from rltool.megatron.gathering import plan_gathers
from rltool.models.memory import GIB, parameters_of, rank_state, reduced_bytes, training_memory
from rltool.models.registry import family_for
from rltool.training.cluster.cluster_plan import RATES, Cluster, configured, gathered_bytes, plan_cluster, rates_of

MOE = {**SHAPES["30B-A3B"], "num_hidden_layers": 48, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
SMALL = {**SHAPES["small-experts"], "rms_norm_eps": 1e-6}
DENSE = {"architectures": ["Qwen2ForCausalLM"], **SHAPES["7B"]}


@cache
def family_of(shape: str):
    return family_for({"30B-A3B": MOE, "small-experts": SMALL, "7B": DENSE}[shape])


def plan_of(shape, *sets, hosts, gpu_gib=80, per_host=8, rates=(), trainer_hosts=None):
    cluster = Cluster(hosts, per_host, gpu_gib * GIB)
    loaded = configured([], sets, Path("."), cluster, trainer_hosts)
    return plan_cluster(loaded, family_of(shape), cluster, rates_of(rates), sample_tokens=4096)


@pytest.mark.parametrize("hosts", [2, 3, 64, 512])
def test_every_gpu_is_a_ranks_an_engines_or_idle(hosts):
    plan = plan_of("30B-A3B", hosts=hosts)
    assert not plan.problems
    engines = plan.engines
    assert plan.trainer.world_size + engines.count * engines.gpus + plan.idle == 8 * hosts
    assert plan.trainer.world_size == 8 * (hosts // 2)
    assert plan.memory == training_memory(family_of("30B-A3B"), plan.trainer, dtype="bfloat16")


def test_what_the_configuration_places_is_placed_so():
    groups = 'engines.groups=[{count = 3, tp = 4}, {name = "long", count = 1, tp = 16}]'
    plan = plan_of("7B", "trainer.world_size=12", groups, "trainer.tensor_parallel=2", hosts=6)
    assert plan.on_hosts == (
        ("0", "8 ranks"), ("1", "4 ranks and 1 engine"), ("2", "2 engines"),
        ("3-4", "1 of the 2 parts of an engine"), ("5", "nothing"),
    )  # fmt: skip
    assert (plan.trainer.layout.dp, plan.engines.count, plan.idle) == (6, 4, 8)


def test_engines_that_share_the_ranks_gpus_leave_none_idle():
    plan = plan_of("7B", 'engines.mode="colocate"', hosts=2)
    assert plan.on_hosts == (("0-1", "8 ranks and 8 engines"),)
    assert (plan.idle, plan.transport) == (0, "ipc")
    weights = 2 * parameters_of(family_of("7B")).total
    assert {link.carried for link in plan.sync} == {weights}, "a broadcast, whatever the number of engines"


def test_an_engine_that_no_host_holds_has_a_pipeline_stage_on_each_of_several():
    plan = plan_of("30B-A3B", hosts=65, per_host=1, gpu_gib=40, trainer_hosts=32)
    assert (plan.engines.gpus, plan.engines.count, plan.idle) == (2, 16, 1)
    assert plan.on_hosts[1:] == (("32-63", "1 of the 2 parts of an engine"), ("64", "nothing"))


@pytest.mark.parametrize(
    ("transport", "copies"),
    [("nccl", 4), ("gloo", 4 * 2), ("disk", 4)],  # gloo: a binomial tree over rank 0 and the two workers of each
)
def test_rank_0_sends_a_copy_to_each_engine(transport, copies):
    plan = plan_of("30B-A3B", "engines.groups=[{count = 4, tp = 2}]", f"weights.transport={transport}", hosts=2)
    weights = 2 * parameters_of(family_of("30B-A3B")).total
    out = next(link for link in plan.sync if f"{copies} copies" in link.what)
    assert out.carried == copies * weights
    name = {"nccl": "network", "gloo": "tcp", "disk": "disk"}[transport]
    assert out.seconds == pytest.approx(copies * weights / (RATES[name].value * 1e9))
    assert plan.sync_seconds == max(link.seconds for link in plan.sync)


def sharded_plan(transport):
    sets = "engines.groups=[{count = 4, tp = 2}]", "weights.sharded=true", "trainer.sequence_parallel=true"
    own = f"weights.transport={transport}", "trainer.tensor_parallel=2", "trainer.world_size=16"
    return plan_of("30B-A3B", *sets, *own, hosts=3, trainer_hosts=2)


def test_sharded_over_nccl_each_rank_sends_its_part_and_a_worker_gets_what_it_stores():
    weights, plan = 2 * parameters_of(family_of("30B-A3B")).total, sharded_plan("auto")
    out, into = plan.sync
    # What is not cut (norms, routers) any of the ranks sends.
    assert plan.transport == "nccl" and out.carried == pytest.approx(4 * weights / 16, rel=0.01)
    assert into.carried == weights / 2 and into.seconds == pytest.approx(weights / 2 / (RATES["network"].value * 1e9))


def test_sharded_over_disk_one_copy_is_written_and_nothing_gathered():
    weights, plan = 2 * parameters_of(family_of("30B-A3B")).total, sharded_plan("disk")
    assert [link.carried for link in plan.sync] == [weights, 4 * weights]


def test_sharded_engines_on_the_trainers_gpus_read_what_they_store_within_their_host():
    sets = 'engines.mode="colocate"', "engines.groups=[{count = 8, tp = 2}]", "weights.sharded=true"
    own = "trainer.world_size=16", "trainer.tensor_parallel=2", "trainer.sequence_parallel=true"
    plan = plan_of("30B-A3B", *sets, *own, hosts=2)
    [into] = plan.sync
    assert plan.transport == "ipc" and into.carried == parameters_of(family_of("30B-A3B")).total


STAGES = "trainer.tensor_parallel=2", "trainer.sequence_parallel=true", "trainer.pipeline_parallel=2"


@pytest.mark.parametrize(
    ("layout", "tp", "missing"),
    [
        (STAGES, 2, "8, 10, 12, 14"),  # the second stage lies on the second host alone
        (STAGES, 16, ""),  # an engine on both: its workers know what they need, at the join
        (("trainer.expert_parallel=8",), 2, ""),  # all experts are on each host
        (("trainer.expert_parallel=16",), 2, "8"),
    ],
)
def test_sharded_memory_of_another_host_is_a_problem_of_engines_that_need_it(layout, tp, missing):
    sets = 'engines.mode="colocate"', f"engines.groups=[{{count = 1, tp = {tp}}}]", "weights.sharded=true"
    sets += ("trainer.world_size=16", *layout)
    said = "\n".join(plan_of("30B-A3B", *sets, hosts=2).problems)
    assert (f"on host 0 need what rank {missing} holds" in said) if missing else "CUDA IPC" not in said
    assert "CUDA IPC" not in "\n".join(plan_of("30B-A3B", *sets, "weights.transport=gloo", hosts=2).problems)


def test_sharded_each_host_of_ranks_sends_its_part_and_a_host_of_engines_gets_one_copy_of_each():
    plan = sharded_plan("gloo")
    weights = 2 * parameters_of(family_of("30B-A3B")).total
    out, into = plan.sync
    # Two hosts of ranks that hold the same, or half of the experts each: half of four copies.
    assert out.carried == pytest.approx(4 * weights / 2, rel=0.01) and into.carried == 4 * weights
    assert plan.transport == "gloo" and out.seconds == pytest.approx(out.carried / (RATES["tcp"].value * 1e9))


def test_patches_are_a_share_of_that_and_a_given_rate_counts():
    sets = "engines.groups=[{count = 4, tp = 2}]", "weights.delta=true"
    whole, patches = plan_of("30B-A3B", sets[0], hosts=2), plan_of("30B-A3B", *sets, hosts=2)
    out = [next(link for link in plan.sync if "copies" in link.what) for plan in (whole, patches)]
    assert out[1].carried == pytest.approx(out[0].carried * RATES["changed"].value, rel=1e-6)
    slower = plan_of("30B-A3B", sets[0], hosts=2, rates=["network=10"])
    assert next(link for link in slower.sync if "copies" in link.what).seconds == pytest.approx(4 * out[0].seconds)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(16, tp=2, pp=2, ep=4),
        ParallelLayout(8, ep=8),
        ParallelLayout(32, tp=4, pp=4),
        ParallelLayout(8, tp=2, ep=2, cp=2),
        ParallelLayout(4),
    ],
)
@pytest.mark.parametrize("per_host", [1, 4, 8])
def test_what_rank_0_receives_is_what_the_sync_gathers(layout, per_host):
    """Against the plan that ranks carry out (rltool/megatron/gathering.py): what another rank sends, by its host; of
    what rank 0's own tensor-parallel group holds, the shards of the others."""
    family = family_of("small-experts")
    near = far = 0
    for gather in plan_gathers(full_plan(family, torch.bfloat16), layout):
        holder = layout.global_rank(tp=0, pp=gather.route.stage, replica=gather.route.replica)
        size = gather.dtype.itemsize * gather.elements
        if gather.route.travels:
            far, near = (far + size, near) if holder >= per_host else (far, near + size)
        else:
            shard = gather.dtype.itemsize * gather.cut_elements
            beyond = sum(rank >= per_host for rank in range(layout.tp))
            far, near = far + shard * beyond, near + shard * (layout.tp - 1 - beyond)
    assert gathered_bytes(family, layout, per_host, item=2) == (near, far)


def test_what_replicas_reduce_is_their_gradients_and_weights_without_experts_that_one_replica_has():
    family = family_of("small-experts")
    layout = ParallelLayout(8)
    state = rank_state(family, layout, 0, dtype="bfloat16", distributed=True)
    whole = reduced_bytes(family, layout, dtype="bfloat16")
    assert whole == pytest.approx((state.gradients + state.weights) * 7 / 8, rel=1e-6)
    spread = ParallelLayout(8, ep=8)
    dense = sum(math.prod(p.merged_shape) for p in family.parameters if p.expert is None)
    assert reduced_bytes(family, spread, dtype="bfloat16") == pytest.approx(6 * dense * 7 / 8, rel=1e-6)


def test_experts_over_more_gpus_than_a_host_has_load_the_network():
    near = plan_of("30B-A3B", "trainer.expert_parallel=8", 'trainer.recompute="selective"', hosts=4)
    far = plan_of("30B-A3B", "trainer.expert_parallel=16", 'trainer.recompute="selective"', hosts=4)
    assert not any("experts' tokens" in link.what for link in near.step)
    [link] = [link for link in far.step if "experts' tokens" in link.what]
    tokens = 32 * 8 * 4096 / 16  # of a rank
    # Half of the experts are on the other host; 48 layers, 8 experts a token, there and back, forward and backward.
    assert link.carried == tokens * 48 * 8 * 2048 * 4 * 2 / 2
    assert any("cross the network" in note for note in far.notes)


def test_the_bottleneck_is_what_takes_longest_or_what_does_not_fit():
    assert "rank 0's network adapter, 64 copies" in plan_of("30B-A3B", hosts=16).bottleneck
    assert "floating-point" in plan_of("30B-A3B", "rollout.prompts_per_step=8192", hosts=2).bottleneck
    broken = plan_of("30B-A3B", hosts=2, gpu_gib=40)
    assert broken.bottleneck == broken.problems[0]
    assert "no layout of 8 ranks fits GPUs of 40 GiB" in broken.bottleneck and broken.bottleneck.endswith("16 do")
    assert "where nothing is trained" not in broken.bottleneck
    larger = plan_of("30B-A3B", "trainer.logprob_tokens_per_micro_batch=9000000", hosts=2)
    assert "tokens a micro-batch (9,000,000 where nothing is trained); up to 8192 do not" in larger.bottleneck
    given = plan_of("30B-A3B", "trainer.expert_parallel=2", hosts=2)
    assert "do not fit 80 GiB" in given.bottleneck and "most are" in given.bottleneck


def test_micro_batches_that_are_too_few_are_named():
    plan = plan_of("7B", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", hosts=4)
    assert any("ranks idle" in note for note in plan.notes)
    deep = plan_of("7B", "trainer.pipeline_parallel=4", hosts=4)
    flat = plan_of("7B", "trainer.pipeline_parallel=1", hosts=4)
    batches = 32 * 8 * 4096 / 4 / TrainerConfig().max_tokens_per_micro_batch
    assert deep.training == pytest.approx(flat.training * (1 + 3 / batches))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("trainer.tensor_parallel=3",), "world_size 8 is not a multiple of tensor_parallel 3"),
        (("trainer.pipeline_parallel=8",), "does not divide the model's num_layers = 28"),
        (("trainer.tensor_parallel=8",), "does not divide the model's num_attention_heads = 28"),
        (("trainer.world_size=16",), "leave none for engines"),
        (("engines.groups=[{tp = 3}]",), "tp = 3 does not divide the model's 28 attention heads"),
        (("engines.groups=[{count = 9}]",), "no room for engine 8"),
    ],
)
def test_what_does_not_divide_or_has_no_room_is_refused(sets, words):
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        plan_of("7B", *sets, hosts=2)


@pytest.mark.parametrize("rate", ["nvlnk=3", "network=fast", "network=0", "network"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(UsageError, match="--rate"):
        rates_of([rate])


def test_the_command_needs_a_config_json_and_none_of_the_heavy_packages(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    script = (
        "import sys; from rltool.cli import main\n"
        f"try: main(['plan', {str(tmp_path)!r}, '--hosts', '4', '--json'])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, sorted({'ray', 'vllm', 'sglang', 'megatron', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    found, end = done.stdout.splitlines()
    assert end == "0 []"
    plan = json.loads(found)
    assert (plan["hosts"], plan["ranks"], plan["fits"], plan["layout"]["data_parallel"]) == (4, 16, True, 8)
    assert plan["rates"] == {name: rate.value for name, rate in RATES.items()}


def test_several_numbers_of_hosts_are_compared_and_one_that_does_not_fit_is_the_exit_code(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    for hosts, memory, code in (("2,4", "80", 0), ("2,4", "40", 1)):
        with pytest.raises(SystemExit) as end:
            main(["plan", str(tmp_path), "--hosts", hosts, "--gpu-memory", memory])
        assert end.value.code == code
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 hosts: out of rank 0's network adapter, 16 copies" in printed
    assert "2 hosts: no layout of 8 ranks fits" in printed


def test_the_plan_of_one_cluster_says_what_its_seconds_rest_on(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--hosts", "4", "--rate", "tcp=9"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "host 0-1 8 ranks host 2-3 8 engines layout tp" in printed
    assert all(f"rate {name} = " in printed for name in RATES)
    assert "tcp = 9 GB/s (given; else 1.4)" in printed
