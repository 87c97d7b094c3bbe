"""How packed rows are cut over context-parallel ranks, against the definition written out."""

import pytest
import torch

from rltool.megatron.packing import pack

CPU = torch.device("cpu")
LENGTHS = [5, 17, 2, 1, 12]


def everyone(lengths, size, multiple_of=1):
    return [
        pack(torch.tensor(lengths), CPU, cp_rank=rank, cp_size=size, multiple_of=multiple_of) for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("multiple_of", [1, 2, 4])
def test_every_token_is_held_by_exactly_one_rank_at_its_own_position(size, multiple_of):
    ranks = everyone(LENGTHS, size, multiple_of)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    held = torch.stack([packed.place for packed in ranks])
    assert ((held >= 0).sum(0) == 1).all()
    for packed in ranks:
        assert len(packed.positions) % multiple_of == 0
        own = packed.place >= 0
        assert torch.equal(packed.tokens[packed.place[own]], own.nonzero().squeeze(-1))
        assert torch.equal(packed.positions[packed.place[own]], positions[own])
    assert len({len(packed.positions) for packed in ranks}) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_each_block_of_queries_sees_the_keys_of_its_sequence_up_to_its_last_query(size):
    ranks = everyone(LENGTHS, size)
    # (sequence, position) of every key once the ranks' tokens stand one after the other.
    gathered = []
    for packed in ranks:
        sequence = torch.arange(packed.num_sequences).repeat_interleave(packed.cu_seqlens_q.diff().long()) // 2
        gathered += list(zip(sequence.tolist(), packed.positions.tolist(), strict=True))
    for packed in ranks:
        q, k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_kv.tolist()
        for block in range(packed.num_sequences):
            last = packed.positions[q[block + 1] - 1].item()
            seen = [gathered[i] for i in packed.keys[k[block] : k[block + 1]].tolist()]
            assert seen == [(block // 2, position) for position in range(last + 1)]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_equal_work(size):
    def work(packed):
        return int((packed.cu_seqlens_q.diff().long() * packed.cu_seqlens_kv.diff().long()).sum())

    works = [work(packed) for packed in everyone([64, 160, 32], size)]
    assert max(works) - min(works) <= 0.3 * max(works)
    assert len({int(packed.cu_seqlens_kv[-1]) for packed in everyone([64, 160, 32], size)}) == 1


def test_padding_for_sequence_parallelism_is_a_sequence_of_its_own():
    packed = pack(torch.tensor([3, 4]), CPU, multiple_of=4)
    assert len(packed.positions) == 8
    assert packed.cu_seqlens_q.tolist() == [0, 3, 7, 8]
    assert packed.take(torch.arange(10, 17)).tolist() == [10, 11, 12, 13, 14, 15, 16, 10]


def test_a_row_that_needs_no_padding_is_taken_as_it_is():
    row = torch.arange(7)
    assert pack(torch.tensor([3, 4]), CPU).take(row) is row


@pytest.mark.parametrize(("lengths", "padded"), [([4, 4, 4], False), ([4, 3, 4], True)])
def test_sequences_of_one_length_lie_as_the_padded_layout_has_them(lengths, padded):
    packed = pack(torch.tensor(lengths), CPU)
    assert (packed.gather is not None, packed.slots is not None) == (padded, padded)
    if packed.gather is not None and packed.slots is not None:
        assert packed.gather[packed.slots].tolist() == list(range(sum(lengths)))
        assert packed.slots.tolist() == [i * max(lengths) + k for i, n in enumerate(lengths) for k in range(n)]
