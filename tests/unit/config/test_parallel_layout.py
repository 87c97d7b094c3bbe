"""One record of all parallel sizes: what follows from them, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rltool.config.algorithm import AlgorithmConfig
from rltool.config.parallel import ParallelLayout
from rltool.config.sections import ModelConfig, TrainerConfig
from rltool.config.train import TrainConfig


def test_data_parallel_is_what_the_model_parallel_sizes_leave():
    layout = ParallelLayout(32, tp=2, pp=2, cp=4, ep=8)
    assert (layout.dp, layout.replica_size) == (2, 8)
    assert (ParallelLayout().dp, ParallelLayout().replica_size) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (
            {"world_size": 3, "tp": 2},
            "world_size 3 is not a multiple of tensor_parallel 2 x context_parallel 1 x pipeline_parallel 1",
        ),
        (
            {"world_size": 4, "tp": 2, "cp": 2, "pp": 2},
            "world_size 4 is not a multiple of tensor_parallel 2 x context_parallel 2",
        ),
        (
            {"world_size": 8, "tp": 2, "cp": 2, "ep": 3},
            r"expert_parallel 3 does not divide the context- and data-parallel ranks \(2 x 2\)",
        ),
        ({"world_size": 2, "pp": 0}, "every parallel size is at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_the_words_of_the_configuration(sizes, named):
    with pytest.raises(ValueError, match=named):
        ParallelLayout(**sizes)


def test_every_rank_has_one_place_tensor_parallel_innermost_and_pipeline_outermost():
    layout = ParallelLayout(12, tp=2, pp=2, cp=3)
    ranks = [
        layout.global_rank(tp=tp, pp=pp, replica=replica)
        for pp in range(layout.pp)
        for replica in range(layout.replica_size)
        for tp in range(layout.tp)
    ]
    assert ranks == list(range(12))


def test_the_trainers_configuration_has_one_layout():
    config = TrainerConfig(world_size=16, tensor_parallel=2, pipeline_parallel=2, context_parallel=2, expert_parallel=4)
    assert config.layout == ParallelLayout(16, tp=2, pp=2, cp=2, ep=4)
    with pytest.raises(ValueError, match="expert_parallel 3 does not divide"):
        TrainerConfig(world_size=4, expert_parallel=3)


def test_shared_prefixes_refuse_what_cuts_a_sample_or_is_recorded_of_each():
    TrainerConfig(world_size=4, tensor_parallel=2, pipeline_parallel=2, shared_prefixes=True)
    with pytest.raises(ValueError, match="shared_prefixes computes a prefix once .* context_parallel"):
        TrainerConfig(world_size=2, context_parallel=2, shared_prefixes=True)
    with pytest.raises(ValueError, match=r"algorithm.routing_replay replays .* trainer.shared_prefixes"):
        TrainConfig(
            model=ModelConfig(path="model"),
            trainer=TrainerConfig(shared_prefixes=True, max_tokens_per_micro_batch=8192),
            algorithm=AlgorithmConfig(routing_replay=True),
        )


EXACT: dict[str, Any] = {
    "model": {"path": "model", "dtype": "bfloat16"}, "trainer": {"device": "cuda"}, "algorithm": {"exact": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "setting", "value", "named"),
    [
        ("trainer", "device", "cpu", "trainer.device"), ("model", "dtype", "float32", "model.dtype"),
        ("trainer", "tensor_parallel", 2, "trainer.tensor_parallel"), ("lora", "rank", 4, "lora.rank"),
        ("trainer", "context_parallel", 2, "trainer.context_parallel"),
        ("trainer", "pipeline_parallel", 2, "trainer.pipeline_parallel"),
        ("trainer", "residual", "float32", "trainer.residual"), ("trainer", "shared_prefixes", True, "trainer.shared"),
        ("rollout", "max_staleness", 1, "rollout.max_staleness"),
        ("engines", "quantization", "fp8", "engines.quantization"),
        ("algorithm", "old_logprobs", "rollout", "algorithm.old_logprobs"),
        ("trainer", "attention", "torch", "trainer.attention"),
    ],
)  # fmt: skip
def test_exact_names_what_it_is_not_implemented_for(section, setting, value, named):
    TrainConfig.model_validate(EXACT)
    values = {**EXACT, section: {**EXACT.get(section, {}), setting: value}}
    if setting.endswith("_parallel"):
        values["trainer"]["world_size"] = 2
    with pytest.raises(ValueError, match=f"algorithm.exact .* leave out: {named}"):
        TrainConfig.model_validate(values)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(6, tp=2), ParallelLayout(16, tp=2, pp=2, cp=2, ep=4)]
)
def test_json_reads_back(layout):
    assert ParallelLayout.from_json(layout.to_json()) == layout
