"""Room for copies: every tensor has its own part, and small ones share a block."""

import pytest
import torch

from rltool.megatron.host_memory import room_for


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_keep_every_value_apart(pinned):
    tensors = {f"w{i}": torch.randn(i, 3) for i in range(1, 9)} | {
        "half": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.0),
    }
    room = room_for(tensors, pinned=pinned, slab=4 * 20)
    assert room.keys() == tensors.keys()
    for name, tensor in tensors.items():
        room[name].copy_(tensor)
    for name, tensor in tensors.items():
        assert room[name].dtype is tensor.dtype and room[name].is_contiguous() and torch.equal(room[name], tensor)


def test_blocks_hold_a_slab_each_and_larger_tensors_have_their_own():
    sizes = [6, 9, 5, 50, 1, 19, 20]
    room = room_for({str(i): torch.zeros(size) for i, size in enumerate(sizes)}, pinned=True, slab=4 * 20)
    blocks = [room[str(i)].untyped_storage().nbytes() // 4 for i in range(len(sizes))]
    assert blocks == [20, 20, 20, 50, 20, 20, 20]
    assert len({room[str(i)].untyped_storage().data_ptr() for i in range(len(sizes))}) == 4
