"""One declaration carries a field from an engine's reply to the loss and back from disk."""

from __future__ import annotations

import pickle
import subprocess
import sys
from array import array
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rltool.algorithms import batch as batches
from rltool.algorithms.batch import TrainBatch, fetched
from rltool.algorithms.contracts import example_batch
from rltool.algorithms.fields import BatchFields, Held, LossFields, declare, fields_of, ragged, sample_columns, token
from rltool.algorithms.losses import LossTokens
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.parallel import ParallelLayout
from rltool.config.train import TrainConfig
from rltool.engines.types import Completion, VersionSpan
from rltool.megatron.loss import loss_rows, micro_batch_loss
from rltool.megatron.micro_batch import prepare
from rltool.megatron.runtime import Coordinates
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.measure.dump import read_dump, write_dump
from rltool.rollout.sample import Sample, SampleStatus
from rltool.training.ranks.sharding import Shards
from rltool.training.sources import RecordedRollouts
from tests.declared import OWN, Store, declare_surprise, sample, table_of_its_own


@pytest.fixture
def surprise():
    with table_of_its_own():
        declare_surprise()
        yield


@pytest.fixture
def store(monkeypatch):
    """For wide fields; a block has two samples or so."""
    monkeypatch.setattr(batches, "BLOCK_BYTES", 100)
    return Store()


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


def test_the_driver_has_references_to_a_wide_field_and_the_loss_its_values(store, tmp_path):
    with table_of_its_own():
        declare_surprise(wide=True)
        samples = [sample(i) for i in range(6)]
        whole = samples_to_batch(samples)
        write_dump(tmp_path, step=0, seed=0, samples=samples)
        config = TrainConfig.model_validate({"model": {"path": "m"}})
        given = RecordedRollouts(config, tmp_path, put=store.put).next_batch(0).batch
        marker = samples[3].surprise.tobytes()
        assert given.surprise is None and given.has("surprise") and not given.has("sampling_mask")
        assert marker in b"".join(store.blocks.values()) and marker in pickle.dumps(whole)
        assert marker not in pickle.dumps(given) and len(store.blocks) > 2

        ready, total = given.replace(old_logprobs=given.rollout_logprobs, advantages=given.loss_mask), 0.0
        shards = Shards(ready, [[[4, 1], []], [[0], [3, 2, 5]]])
        for rank in range(2):
            sent = shards.micro_batches(rank)
            assert marker not in pickle.dumps(sent)
            for micro in fetched(sent, store.get):
                assert torch.equal(micro.surprise, micro.tokens / 8 * (micro.tokens > 9)) and micro.wide == ()
                rows = loss_rows(micro)
                algorithm = AlgorithmConfig(objective=OWN)
                total += micro_batch_loss(micro, rows, torch.zeros(len(rows)), torch.zeros(len(rows)), algorithm)[0]
        assert total == pytest.approx(float(whole.surprise.sum()))
        first, second = store.asked
        assert len(set(first)) == len(first) < len(store.blocks), "each block once, and none of other ranks' samples"
        assert {*first, *second} == store.blocks.keys()
        assert fetched([whole], store.get) == [whole] and len(store.asked) == 2


def with_all_wide_fields(number: int) -> Sample:
    """A sample with every wide field of the table, of a length of its own; one without a response among them."""
    made = Sample(number // 2, number % 2, 0, [1, 2, 3][: 1 + number % 3], reward=float(number))
    made.status, ids = SampleStatus.COMPLETED, list(range(10, 10 + number % 4))
    made.response_ids, made.response_mask, made.response_logprobs = ids, [1] * len(ids), [-1.0] * len(ids)
    made.versions = [VersionSpan("v", 0, len(ids))]
    for token_id in ids:
        made.sampling_mask_ids.extend(range(token_id, token_id + token_id - 9))
        made.sampling_mask_counts.append(token_id - 9)
        made.teacher_topk_ids.extend([token_id, number])
        made.teacher_topk_logprobs.extend([-0.5, -1.5 - number])
    made.routed_experts = array("B", [(7 * number + i) % 251 for i in range(6 * made.num_tokens)])
    return made


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [6, 1, 3], [4]], ids=str)
def test_what_ranks_get_of_every_wide_field_is_what_the_batch_would_have(store, order):
    with table_of_its_own():
        declare("patches", ragged("int32", wide=True, held=Held("patches of pictures", "i")))
        samples = [with_all_wide_fields(i) for i in range(8)]
        for i in (0, 3, 6):
            samples[i].patches = array("i", range(i + 1))
        whole, given = samples_to_batch(samples), samples_to_batch(samples, put=store.put)
        names = {name for name, item in fields_of(TrainBatch).items() if item.wide and item.held}
        assert {name for wide in given.wide for name in wide.names} == names >= {"patches", "routed_experts"}
        assert all(getattr(given, name) is None for name in names)
        twice = given.select([7, *order, 5]).select(list(range(1, len(order) + 1)))
        for found in (given.micro_batch(order), twice):
            [found], expected = fetched([found], store.get), whole.select(order)
            for name in names - {"patches"}:
                own, full = getattr(found, name), getattr(expected, name)
                filler = fields_of(whole)[name].filler(full.dtype)
                assert own.dtype == full.dtype and torch.equal(own, full[:, : own.shape[1]])
                assert (full[:, own.shape[1] :] == filler).all(), "rows are as long as the longest of these samples"
            assert torch.equal(found.patches.values, expected.patches.values)
            assert torch.equal(found.patches.lengths, expected.patches.lengths)
        [filler] = fetched([given.micro_batch([])], store.get)
        assert not filler.loss_mask.any() and torch.equal(filler.routed_experts, whole.select([0]).routed_experts)


def test_references_that_do_not_fit_their_batch_are_refused(store):
    batch = samples_to_batch([with_all_wide_fields(i) for i in range(8)], put=store.put)
    with pytest.raises(ValueError, match="TrainBatch.wide is of 8 samples, expected 2"):
        batch.select([0, 1]).replace(wide=batch.wide)
    with pytest.raises(ValueError, match="TrainBatch.routed_experts is given twice"):
        batch.replace(routed_experts=torch.zeros(len(batch.tokens), 6, dtype=torch.uint8))
    with pytest.raises(ValueError, match="is given twice"):
        batch.replace(wide=2 * batch.wide)
    with pytest.raises(ValueError, match="wide are fields of tokens"):
        token(wide=True, cut="driver")


def test_a_large_batch_has_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr(batches, "BLOCK_BYTES", 1)
    monkeypatch.setattr(batches, "MOST_BLOCKS", 4)
    store = Store()
    wide = batches.Wide.of({"routed_experts": [np.zeros((2, 10), np.uint8)] * 16}, store.put)
    assert wide.blocks == tuple(store.blocks) and len(wide.blocks) == 4
    assert wide.select(torch.tensor([9, 4])).places.tolist() == [[1, 1], [0, 0]]
    assert wide.select(torch.tensor([9, 4])).blocks == ("block 1", "block 2")


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


@pytest.mark.parametrize("cp", [1, 2])
def test_a_ragged_field_is_cut_where_the_tokens_are_that_its_values_belong_to(store, cp):
    with table_of_its_own():
        held = Held("patches of pictures", "i")
        declare("patches", ragged("int32", cut="input", at="tokens", fill=-7, wide=True, held=held))
        declare("next_patches", ragged("int32", cut="target", at="response_mask", fill=-7, held=held))
        samples = [sample(i) for i in range(6)]
        for one in samples:
            one.patches = array("i", [1000 + t for t in one.prompt_ids + one.response_ids])
            one.next_patches = array("i", [2000 + t for t in one.response_ids if t > 9])
        whole = samples_to_batch(samples, put=store.put)
        [batch] = fetched([whole.micro_batch([5, 2, 3])], store.get)
        rows, seen = loss_rows(batch), []
        for rank in range(cp):
            at = Coordinates(rank, ParallelLayout(cp, cp=cp), 0, 0, rank, 0, 0)
            micro = prepare(batch, rows, at, torch.device("cpu"), sequence_parallel=False, inputs=("patches",))
            read = micro.packed.inputs["patches"]
            assert torch.equal(read[read > 0], 1000 + micro.tokens[read > 0]) and set(read[read < 0].tolist()) <= {-7}
            assert torch.equal(micro.at_targets["next_patches"], 2000 + micro.targets)
            seen += read[read > 0].tolist()
        assert sorted(seen) == sorted((1000 + batch.tokens).tolist())
        with pytest.raises(ValueError, match=r"next_patches has \[\d+, .* values a sample, and response_mask marks"):
            batch.replace(response_mask=torch.ones_like(batch.loss_mask)).at_tokens("next_patches")
        with pytest.raises(ValueError, match="need `at` to be cut at tokens"):
            ragged(cut="input")
        with pytest.raises(ValueError, match="no field of tokens has this name"):
            declare("thumbs", ragged(cut="input", at="rewards"))


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
    assert {item.name for item in fields(TrainBatch)} == {*fields_of(BatchFields), "metadata", "wide"}
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
