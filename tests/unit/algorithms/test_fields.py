"""One declaration carries a field from an engine's reply to the loss and back from disk."""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import fields, replace

import pytest
import torch

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.contracts import example_batch
from rltool.algorithms.fields import BatchFields, Held, LossFields, declare, fields_of, ragged, sample_columns, token
from rltool.algorithms.losses import LossTokens
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.parallel import ParallelLayout
from rltool.config.train import TrainConfig
from rltool.engines.types import Completion
from rltool.megatron.loss import loss_rows, micro_batch_loss
from rltool.megatron.micro_batch import prepare
from rltool.megatron.runtime import Coordinates
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import Sample
from rltool.training.ranks.sharding import Shards
from rltool.training.sources import RecordedRollouts
from tests.declared import OWN, declare_surprise, sample, table_of_its_own


@pytest.fixture
def surprise():
    with table_of_its_own():
        declare_surprise()
        yield


def expected(batch):
    """Surprises where the policy sampled, 0 elsewhere."""
    return batch.tokens / 8 * batch.response_mask


def test_a_declared_field_comes_from_completions_through_a_dump_and_a_replay_into_the_loss(surprise, tmp_path):
    samples = [sample(i) for i in range(6)]
    batch = samples_to_batch(samples)
    assert torch.equal(batch.surprise, expected(batch)) and batch.surprise.any()
    write_dump(tmp_path, step=0, seed=0, samples=samples)
    assert read_dump(tmp_path, 0).samples == samples
    config = TrainConfig.model_validate({"model": {"path": "m"}})
    replayed = RecordedRollouts(config, tmp_path).next_batch(0).batch
    assert torch.equal(replayed.surprise, batch.surprise)

    ready = replayed.replace(old_logprobs=replayed.rollout_logprobs, advantages=replayed.loss_mask)
    shards, total = Shards(ready, [[[4, 1], []], [[0], [3, 2, 5]]]), 0.0
    for micro in (one for rank in range(2) for one in shards.micro_batches(rank)):
        assert torch.equal(micro.surprise, micro.tokens / 8 * (micro.tokens > 9))
        rows = loss_rows(micro)
        algorithm = AlgorithmConfig(objective=OWN)
        total += micro_batch_loss(micro, rows, torch.zeros(len(rows)), torch.zeros(len(rows)), algorithm)[0]
    assert total == pytest.approx(float(batch.surprise.sum()))


def test_what_only_the_driver_reads_stays_with_it():
    batch = example_batch()
    [micro] = Shards(batch, [[[2, 0]]]).micro_batches(0)
    assert batch.baselines is not None and batch.token_rewards is not None and batch.token_versions is not None
    assert micro.baselines is None and micro.token_rewards is None and micro.token_versions is None
    assert micro.ref_logprobs is not None and torch.equal(micro.rewards, batch.rewards[[2, 0]])


def test_a_stop_string_cuts_it_with_the_tokens():
    made = Completion((1, 2, 3), (-1.0,) * 3, "length", columns={"surprise": array("f", [1, 2, 3, 4, 5, 6])})
    assert made.first(2).columns["surprise"].tolist() == [1, 2, 3, 4]
    assert made.first(2).finish_reason == "stop"


def test_a_recording_from_before_the_field_was_declared_is_read(tmp_path):
    plain = [Sample(0, 0, 0, [1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0])]
    write_dump(tmp_path, step=0, seed=0, samples=plain)
    with table_of_its_own():
        declare_surprise()
        assert read_dump(tmp_path, 0).samples[0].surprise == array("f")
    assert read_dump(tmp_path, 0).samples == plain and "surprise" not in sample_columns()


def test_samples_of_which_one_lacks_it_are_no_batch(surprise):
    with pytest.raises(ValueError, match="surprises: 1 of 2 samples have it, sample 0/1 does not"):
        samples_to_batch([sample(0), replace(sample(1), surprise=array("f"))])


def test_a_completion_without_it_behind_one_with_it_is_an_error_and_so_is_the_reverse(surprise):
    one = sample(0)
    with pytest.raises(ValueError, match="9 tokens, 8 surprises"):
        one.append_response_tokens(Completion((7,), (-1.0,), "stop"))
    other = Sample(0, 0, 0, [1])
    other.append_response_tokens(Completion((7,), (-1.0,), "stop"))
    with pytest.raises(ValueError, match="2 tokens, 1 surprises"):
        other.append_response_tokens(Completion((8,), (-1.0,), "stop", columns={"surprise": array("f", [0.5])}))


@pytest.mark.parametrize("cp", [1, 2])
def test_fields_are_cut_over_context_parallel_ranks_as_the_tokens_are(cp):
    with table_of_its_own():
        declare("read", token("int64", cut="input", fill=-7))
        declare("predicted", token("int64", row="one", cut="target"))
        batch = example_batch()
        batch = batch.replace(read=batch.tokens.clone(), predicted=batch.tokens[:, None].clone())
        rows, seen = loss_rows(batch), []
        for rank in range(cp):
            at = Coordinates(rank, ParallelLayout(cp, cp=cp), 0, 0, rank, 0, 0)
            micro = prepare(batch, rows, at, torch.device("cpu"), sequence_parallel=False, inputs=("read",))
            assert torch.equal(micro.at_targets["predicted"][:, 0], micro.targets)
            read = micro.packed.inputs["read"]
            assert torch.equal(read[read >= 0], micro.tokens[read >= 0]) and set(read[read < 0].tolist()) <= {-7}
            seen += read[read >= 0].tolist()
            assert not prepare(batch, rows, at, torch.device("cpu"), sequence_parallel=False).packed.inputs
        assert sorted(seen) == batch.tokens.tolist()


def test_a_ragged_field_is_of_samples_whatever_their_tokens(tmp_path):
    with table_of_its_own():
        declare("patches", ragged("int32", held=Held("patches of pictures", "i")))
        samples = [sample(i) for i in range(3)]
        assert samples_to_batch(samples).patches is None
        samples[0].patches, samples[2].patches = array("i", [5, 6, 7]), array("i", [8])
        write_dump(tmp_path, step=0, seed=0, samples=samples)
        batch = samples_to_batch(read_dump(tmp_path, 0).samples)
        assert batch.patches.values.tolist() == [5, 6, 7, 8] and batch.patches.lengths.tolist() == [3, 0, 1]
        [micro] = Shards(batch, [[[2, 1, 0]]]).micro_batches(0)
        assert micro.patches.values.tolist() == [8, 5, 6, 7] and micro.patches.lengths.tolist() == [1, 0, 3]
        with pytest.raises(ValueError, match="patches is of 3 samples, expected 2"):
            batch.select([0, 1]).replace(patches=batch.patches)
        with pytest.raises(ValueError, match="patches is torch.int64, expected torch.int32"):
            batch.replace(patches=replace(batch.patches, values=batch.patches.values.long()))
        with pytest.raises(ValueError, match="thumbs is ragged by sample"):
            declare("thumbs", ragged(), in_loss=True)


def test_a_process_that_has_samples_alone_does_not_import_torch():
    code = "import sys, rltool.rollout.sample; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_table_is_what_the_records_have():
    assert {item.name for item in fields(TrainBatch)} == {*fields_of(BatchFields), "metadata"}
    assert fields_of(LossFields).keys() == fields_of(LossTokens).keys() < fields_of(BatchFields).keys()
    assert sample_columns().keys() < {item.name for item in fields(Sample)}


def test_records_refuse_what_they_do_not_know_and_what_contradicts_the_table():
    batch = example_batch()
    with pytest.raises(TypeError, match="TrainBatch: unknown, or given twice: reward"):
        TrainBatch(**vars(batch) | {"reward": batch.rewards})
    with pytest.raises(TypeError, match="TrainBatch lacks lengths"):
        TrainBatch(**{name: value for name, value in vars(batch).items() if name != "lengths"})
    with pytest.raises(TypeError, match="Sample lacks prompt_ids"):
        Sample(0, 0, 0)
    with pytest.raises(AttributeError):
        batch.rewards = batch.rewards * 2
    with pytest.raises(ValueError, match="part_weights has shape"):
        batch.replace(part_weights=batch.part_weights[:, :1])
    with pytest.raises(ValueError, match="has a field rewards already"):
        declare("rewards", token())
    with pytest.raises(ValueError, match="surprises: what is appended is of the response"):
        Held("surprises", over="sequence", comes="appended")
