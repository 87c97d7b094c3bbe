"""Rollouts on disk come back exactly, or not at all."""

import dataclasses
import hashlib
import json
import random
import struct
from array import array

import pytest
from safetensors.numpy import load, save

from rltool.engines.types import Drafts, VersionSpan
from rltool.rollout.measure.dump import DumpError, dump_paths, dumped_steps, read_dump, tensor_fields, write_dump
from rltool.rollout.sample import Sample, SampleStatus


def random_samples(count, seed=0):
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        n = rng.choice([0, 1, 5, 17])
        mask = [rng.randint(0, 1) for _ in range(n)]
        samples.append(
            Sample(
                group_id=rng.randrange(2**40),
                index=i,
                prompt_index=rng.randrange(1000),
                prompt_ids=[rng.randrange(150_000) for _ in range(rng.randint(1, 9))],
                prompt_text='ünï\u2028 🙂 "quoted"\n',
                label=rng.choice([None, "", "x"]),
                metadata={"a": [1, {"b": None}], "pi": 0.1 + 0.2},
                seed=rng.choice([None, 2**31 - 1]),
                response_ids=[rng.randrange(150_000) for _ in range(n)],
                response_mask=mask,
                response_logprobs=[rng.gauss(-2, 3) if m else 0.0 for m in mask],
                versions=[VersionSpan("run:0:1", 0, n // 2), VersionSpan("run:0:2", n // 2, n)] if n else [],
                status=rng.choice(list(SampleStatus)),
                reward=rng.choice([None, 0.1 + 0.2, -1e-300]),
                remove_sample=rng.random() < 0.5,
                cached_tokens=rng.choice([None, 0, 64]),
                drafts=rng.choice([None, Drafts(3, 4)]),
                tool_seconds=rng.choice([None, 0.1 + 0.2]),
                teacher_logprobs=[rng.gauss(-2, 3) if m else 0.0 for m in mask] if i % 2 else [],
                teacher_topk_ids=array("i", [rng.randrange(-1, 150_000) for _ in range(3 * n if i % 2 else 0)]),
                teacher_topk_logprobs=array("f", [rng.gauss(-2, 3) for _ in range(3 * n if i % 2 else 0)]),
            )
        )
    return samples


def test_every_field_of_every_sample_comes_back(tmp_path):
    samples = random_samples(40)
    write_dump(tmp_path, step=12, seed=5, samples=samples, info={"model": "m"})
    dump = read_dump(tmp_path, 12)
    assert dump.samples == samples
    assert (dump.step, dump.seed, dump.info, dump.weight_versions) == (12, 5, {"model": "m"}, ["run:0:1", "run:0:2"])
    for before, after in zip(samples, dump.samples, strict=True):
        assert all(type(getattr(before, f.name)) is type(getattr(after, f.name)) for f in dataclasses.fields(Sample))


def test_a_dump_of_an_earlier_release_says_nothing_of_removed_samples_and_is_read(tmp_path):
    samples = random_samples(3)
    path = write_dump(tmp_path, step=3, seed=0, samples=samples)
    entries = json.loads(path.read_text())["samples"]
    change(tmp_path, samples=[{k: v for k, v in entry.items() if k != "remove_sample"} for entry in entries])
    assert read_dump(tmp_path, 3).samples == [dataclasses.replace(sample, remove_sample=False) for sample in samples]


def test_a_dump_of_an_earlier_release_has_no_teacher_and_is_read(tmp_path):
    samples = random_samples(3)
    tensors_file, _ = dump_paths(tmp_path, 3)
    entry = json.loads(write_dump(tmp_path, step=3, seed=0, samples=samples).read_text())["tensors"]
    kept = {name: value for name, value in load(tensors_file.read_bytes()).items() if "teacher" not in name}
    data = save(kept)
    tensors_file.write_bytes(data)
    change(tmp_path, tensors={**entry, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    lacking = dict(teacher_logprobs=[], teacher_topk_ids=array("i"), teacher_topk_logprobs=array("f"))
    assert read_dump(tmp_path, 3).samples == [dataclasses.replace(sample, **lacking) for sample in samples]


def test_logprobs_are_bit_equal(tmp_path):
    values = [-0.1, -1e-45, -0.0, -3.4028234663852886e38, -2.2250738585072014e-308]
    sample = Sample(0, 0, 0, [1], response_ids=[1] * 5, response_mask=[1] * 5, response_logprobs=values)
    write_dump(tmp_path, step=0, seed=0, samples=[sample])
    again = read_dump(tmp_path, 0).samples[0].response_logprobs
    assert [struct.pack("d", v) for v in again] == [struct.pack("d", v) for v in values]


def test_list_fields_of_sample_are_all_in_the_tensor_file():
    numbers = ("list[int]", "list[float]", "array[")
    lists = {f.name for f in dataclasses.fields(Sample) if str(f.type).startswith(numbers)}
    assert lists == set(tensor_fields())


def test_no_samples_is_a_dump_too(tmp_path):
    write_dump(tmp_path, step=1, seed=0, samples=[])
    assert read_dump(tmp_path, 1).samples == []


def test_steps_are_listed_in_order_and_leave_nothing_behind(tmp_path):
    for step in (10, 2, 1_000_000):
        write_dump(tmp_path, step=step, seed=0, samples=random_samples(2))
    assert dumped_steps(tmp_path) == [2, 10, 1_000_000]
    assert len(list(tmp_path.iterdir())) == 6
    assert dump_paths(tmp_path, 12)[0].name == "step_000012.safetensors"


def test_a_step_is_replaced_by_a_new_dump(tmp_path):
    write_dump(tmp_path, step=1, seed=0, samples=random_samples(3))
    write_dump(tmp_path, step=1, seed=0, samples=random_samples(2, seed=1))
    assert read_dump(tmp_path, 1).samples == random_samples(2, seed=1)


def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    sample = Sample(0, 0, 0, [1], metadata={"k": {1, 2}})
    with pytest.raises(DumpError, match="keep `metadata` and `train_metadata` to text"):
        write_dump(tmp_path / "new", step=1, seed=0, samples=[sample])
    assert not (tmp_path / "new").exists()


@pytest.fixture
def dumped(tmp_path):
    write_dump(tmp_path, step=3, seed=0, samples=random_samples(4))
    return tmp_path


def test_missing_step_names_the_steps_that_are_there(dumped):
    with pytest.raises(DumpError, match="it has steps 3 to 3"):
        read_dump(dumped, 4)


def test_truncated_tensor_file(dumped):
    path = dump_paths(dumped, 3)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DumpError, match="the copy is incomplete"):
        read_dump(dumped, 3)


def test_altered_tensor_file(dumped):
    path = dump_paths(dumped, 3)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DumpError, match="SHA-256 differs"):
        read_dump(dumped, 3)


def test_missing_tensor_file(dumped):
    dump_paths(dumped, 3)[0].unlink()
    with pytest.raises(DumpError, match="cannot read"):
        read_dump(dumped, 3)


def test_truncated_json_file(dumped):
    path = dump_paths(dumped, 3)[1]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DumpError, match="truncated or not JSON"):
        read_dump(dumped, 3)


def change(dumped, **changes):
    path = dump_paths(dumped, 3)[1]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_format_version(dumped):
    change(dumped, format_version=99)
    with pytest.raises(DumpError, match="format version 99; this rltool reads 1"):
        read_dump(dumped, 3)


def test_renamed_file(dumped):
    change(dumped, step=4)
    with pytest.raises(DumpError, match="was the file renamed"):
        read_dump(dumped, 3)


def test_json_and_tensors_of_different_sample_counts(dumped):
    document = json.loads(dump_paths(dumped, 3)[1].read_text())
    change(dumped, samples=document["samples"][:-1])
    with pytest.raises(DumpError, match="covers 4 samples, the JSON file 3"):
        read_dump(dumped, 3)
