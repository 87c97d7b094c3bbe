import weakref

import pytest
import torch

from rltool.engines.transfer.wire import bucket_bytes, plan_buckets
from rltool.engines.types import TensorMeta
from rltool.weights.send.stream import WeightStreamError, fill_buckets


def meta(name: str, *shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(name, dtype, shape)


METADATA = [meta("a", 4), meta("b", 2, 3, dtype="bfloat16"), meta("c", 100), meta("d", 1, dtype="uint8"), meta("e", 3)]


def memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def tensors():
    generator = torch.Generator().manual_seed(0)
    for item in METADATA:
        dtype = getattr(torch, item.dtype)
        yield item, torch.randint(0, 100, item.shape, generator=generator).to(dtype)


def test_a_bucket_is_closed_after_the_tensor_that_makes_it_larger_than_the_limit():
    same = [meta("a", 4), meta("b", 6), meta("c", 100), meta("d", 15), meta("e", 1), meta("f", 1)]
    buckets = plan_buckets(same, 64)
    assert [[m.name for m in bucket] for bucket in buckets] == [["a", "b", "c"], ["d", "e", "f"]]
    assert [bucket_bytes(b) for b in buckets] == [440, 68]


def test_a_bucket_has_one_dtype_so_that_its_tensors_are_aligned():
    buckets = plan_buckets(METADATA, 10**6)
    assert [[m.name for m in bucket] for bucket in buckets] == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_bytes_travel_back_to_back_and_come_out_as_they_went_in():
    wanted = dict(tensors())
    for bucket, flat in fill_buckets(tensors(), plan_buckets(METADATA, 64), memory):
        at = 0
        for item in bucket:
            raw = wanted[item].reshape(-1).view(torch.uint8)
            assert torch.equal(flat[at : at + raw.numel()], raw)
            at += raw.numel()
        assert at == flat.numel()


def test_nothing_is_kept_of_a_tensor_when_the_next_one_is_asked_for():
    """It may be a view of all that was gathered with it."""
    kept: list[weakref.ref] = []

    def stream():
        for item in METADATA:
            assert all(reference() is None for reference in kept)
            tensor = torch.zeros(item.shape, dtype=getattr(torch, item.dtype))
            kept.append(weakref.ref(tensor))
            pair = item, tensor
            del tensor
            yield pair
            del pair

    assert len(list(fill_buckets(stream(), plan_buckets(METADATA, 64), memory))) == len(kept) == len(METADATA)


def test_ranks_that_do_not_send_drain_the_stream_and_get_nothing():
    stream = iter([(item, None) for item in METADATA])
    assert [flat for _, flat in fill_buckets(stream, plan_buckets(METADATA, 64), memory)] == [None] * 5
    assert next(stream, "drained") == "drained"


@pytest.mark.parametrize(
    "broken",
    [
        METADATA[:-1],  # one too few
        [*METADATA, meta("f", 1)],  # one too many
        [METADATA[1], METADATA[0], *METADATA[2:]],  # another order
    ],
)
def test_a_stream_that_is_not_what_was_announced_is_an_error(broken):
    values = {item.name: (item, torch.zeros(item.shape, dtype=getattr(torch, item.dtype))) for item in broken}
    with pytest.raises(WeightStreamError):
        list(fill_buckets([values[item.name] for item in broken], plan_buckets(METADATA, 64), memory))


def test_a_tensor_of_another_shape_or_dtype_than_announced_is_an_error():
    for wrong in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(WeightStreamError, match="the tensor is"):
            list(fill_buckets([(METADATA[0], wrong)], [(METADATA[0],)], memory))
