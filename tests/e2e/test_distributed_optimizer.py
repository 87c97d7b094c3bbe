"""The distributed optimizer with neither Transformer Engine nor Apex: state is restored bit by bit, in any layout."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader, load

from rltool.checkpoints.completion import STATE
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf
from tests.e2e.megatron_ranks import CaseFailed

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]


def options(distributed, dtype="float32", **layout):
    return {
        "dtype": dtype,
        "optimizer": {"eps": 1e-4, "weight_decay": 0.1, "warmup_steps": 2, "decay_style": "linear"},
        "trainer": {"distributed_optimizer": distributed},
        **layout,
    }


def steps(trainer, batch, count):
    samples = list(range(batch.num_samples))[trainer.coordinates.dp_rank :: trainer.coordinates.layout.dp]
    own = [batch.select(samples[i::2]) for i in range(2)]
    metrics = [trainer.train_step(own, global_loss_tokens=batch.num_loss_tokens) for _ in range(count)]
    return metrics, trainer.parameter_hash()


def case_save(place, path, settings, batch, directory):
    """Three steps, a checkpoint, two more steps."""
    from rltool.checkpoints.torch_dist import save_checkpoint

    with closing(make_trainer(place, path, **settings)) as trainer:
        steps(trainer, batch, 3)
        save_checkpoint(trainer, directory, {"step": 3})
        return steps(trainer, batch, 2)


def case_resume(place, path, settings, batch, directory, again=None):
    """The last two steps alone, from the checkpoint; again: where what was loaded is saved before them."""
    from rltool.checkpoints.torch_dist import load_checkpoint, save_checkpoint

    with closing(make_trainer(place, path, load=False, **settings)) as trainer:
        load_checkpoint(trainer, directory)
        if again is not None:
            save_checkpoint(trainer, again, {"step": 3})
        return steps(trainer, batch, 2)


def case_bytes_of_state(place, path, settings, batch):
    """Bytes of tensors in this rank's optimizer state for a checkpoint, and the bytes of its parameters in fp32."""
    with closing(make_trainer(place, path, **settings)) as trainer:
        steps(trainer, batch, 1)
        state = trainer.sharded_state(loading=False)["optimizer"]
        tensors = [
            entry.data for entry in nested_values(state) if isinstance(entry, ShardedTensor) and entry.data is not None
        ]
        return (
            sum(t.nbytes for t in tensors),
            sum(4 * p.numel() for p in trainer.gpt.parameters()),
            "param_state" in state,
        )


def test_one_rank_of_those_that_share_the_state_holds_it_for_a_checkpoint(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "model"), policy_batch(LENGTHS)
    (held, weights, described), (others, _, described_elsewhere) = ranks.run(
        case_bytes_of_state, 2, path, options(True), batch
    )
    assert held > weights and described  # some of it is in factories, which are not counted
    assert others == 0 and not described_elsewhere


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_steps_are_bit_equal_to_those_never_interrupted(ranks, tmp_path, dtype):
    path, batch = save_hf(tmp_path / "model"), policy_batch(LENGTHS)
    settings, directory = options(True, dtype), tmp_path / "step_3"
    whole = ranks.run(case_save, 2, path, settings, batch, directory)
    assert ranks.run(case_resume, 2, path, settings, batch, directory) == whole


@pytest.mark.parametrize("layout", [{}, {"ep": 2}], ids=["DP2", "EP2"])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_mixture_of_experts_resumes_bit_equal(ranks, tmp_path, distributed, layout):
    path, batch = save_hf(tmp_path / "model", "qwen3_moe"), policy_batch(LENGTHS)
    settings, directory = options(distributed, **layout), tmp_path / "step_3"
    whole = ranks.run(case_save, 2, path, settings, batch, directory)
    assert ranks.run(case_resume, 2, path, settings, batch, directory) == whole


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2})],
    ids=["one rank", "TP2", "PP2", "CP2"],
)
def test_a_checkpoint_of_two_shares_goes_on_under_another_layout(ranks, tmp_path, world, layout):
    path, batch, directory = save_hf(tmp_path / "model"), policy_batch(LENGTHS), tmp_path / "step_3"
    whole, _ = ranks.run(case_save, 2, path, options(True), batch, directory)[0]
    found, _ = ranks.run(case_resume, world, path, options(True, **layout), batch, directory)[0]
    for mine, expected in zip(found, whole, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


def moments(directory):
    """Adam's, whole, and the weights that it keeps."""
    reader = FileSystemReader(directory / STATE)
    entries = reader.read_metadata().state_dict_metadata
    names = [name for name in entries if name.startswith("optimizer.state.")]
    found = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
    load(found, storage_reader=reader, no_dist=True)
    return found


LONG = pytest.mark.long
OFTEN = [("deepseek_v3", "EP2", "one"), ("gpt_oss", "DP2", "EP2")]
PAIRS = [("EP2", "one"), ("DP2", "EP2"), ("EP2", "PP2"), ("TP2", "EP2")]
EXPERTS = [(kind, *pair) for pair in PAIRS for kind in ("deepseek_v3", "gpt_oss", "qwen3_moe")]


@pytest.mark.parametrize(
    ("kind", "source", "target"), [case if case in OFTEN else pytest.param(*case, marks=LONG) for case in EXPERTS]
)
def test_experts_go_on_under_another_layout_with_adams_moments(ranks, tmp_path, kind, source, target):
    layouts = {"one": {}, "DP2": {}, "EP2": {"ep": 2}, "PP2": {"pp": 2}, "TP2": {"tp": 2}}
    path, batch = save_hf(tmp_path / "model", kind, tied=False), policy_batch(LENGTHS)

    def run(case, layout, *more):
        settings = options(True, **layouts[layout])
        settings["trainer"]["sequence_parallel"] = layout == "TP2"
        world = 1 if layout == "one" else 2
        return ranks.run(case, world, path, settings, batch, tmp_path / "step_3", *more)[0][0]

    whole = run(case_save, source)
    found = run(case_resume, target, tmp_path / "again" / "step_3")
    before, after = moments(tmp_path / "step_3"), moments(tmp_path / "again" / "step_3")
    assert before.keys() == after.keys() and any("exp_avg_sq" in name and "experts" in name for name in before)
    for name, tensor in before.items():
        rows = min(len(tensor), len(after[name]))  # the vocabulary is padded under tensor parallelism
        assert torch.equal(tensor[:rows], after[name][:rows]), name
    for mine, expected in zip(found, whole, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_state_of_the_other_kind_of_optimizer_is_refused_with_what_to_do(ranks, tmp_path, distributed):
    path, batch, directory = save_hf(tmp_path / "model"), policy_batch(LENGTHS), tmp_path / "step_3"
    ranks.run(case_save, 1, path, options(distributed), batch, directory)
    with pytest.raises(CaseFailed, match="distributed_optimizer = .*start a new run from its weights"):
        ranks.run(case_resume, 1, path, options(not distributed), batch, directory)
