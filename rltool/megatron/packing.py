"""Several sequences of different lengths in one row, as the model and its attention see them; this rank's part."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rltool.algorithms.prefixes import trie_of
from rltool.megatron.runtime import to_device

CHUNK = 64
"""Tokens of a sequence that a gated delta net in plain torch computes at once."""


@dataclass(frozen=True)
class Chunks:
    """Sequences cut into chunks of `size` tokens, the last one of each filled up: the first chunks of all sequences,
    then the second ones of all that have one, and so on, longer sequences first.

    slots: [T], on the device, where each token lies; counts: sequences that have a first, second, ... chunk
    """

    size: int
    slots: Tensor
    counts: tuple[int, ...]

    def spread(self, x: Tensor) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, size, ...], zeros where there is no token."""
        filled = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:]).index_copy(0, self.slots, x)
        return filled.unflatten(0, (-1, self.size)).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


def cut(lengths: Tensor, device: torch.device, size: int = CHUNK) -> Chunks:
    """lengths: [N] int64 on the CPU, none is 0."""
    chunks = -(-lengths // size)
    rank = torch.empty_like(lengths)
    rank[chunks.argsort(descending=True, stable=True)] = torch.arange(len(lengths))
    counts = (chunks[:, None] > torch.arange(int(chunks.max()))).sum(0)
    before = counts.cumsum(0) - counts
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = _ragged(lengths)
    slots = (before[position // size] + rank[sequence]) * size + position % size
    return Chunks(size, to_device(slots, device), tuple(counts.tolist()))


@dataclass(frozen=True)
class PlacedFeatures:
    """rows: [P] int64, tokens of this rank's part of the row (under sequence parallelism of its part of that) that are
    of pictures; features: [P, hidden] each, on the device: in the place of the embedding, then what the first layers
    add."""

    rows: Tensor
    features: tuple[Tensor, ...]

    def placed(self, embedded: Tensor) -> Tensor:
        """embedded: [T, 1, hidden]. The embedding of a placeholder gets no gradient."""
        return embedded.index_copy(0, self.rows, self.features[0].unsqueeze(1).to(embedded.dtype))

    def added(self, hidden: Tensor, layer: int) -> Tensor:
        """hidden: [T, 1, hidden], of this layer."""
        return hidden.index_add(0, self.rows, self.features[1 + layer].unsqueeze(1).to(hidden.dtype))


@dataclass
class PackedSequences(PackedSeqParams):
    """The layout of the T packed tokens that this rank holds; travels through Megatron as its `packed_seq_params`.

    positions: [T] position of each token in its sequence; [T, 3] of a row with pictures (models/pictures.py)
    gather: [blocks * longest] token index of each slot of the padded layout (padding points at token 0); None when all
        blocks have one length, where packed and padded are the same memory
    slots: [T] slot of each token; None likewise
    num_sequences: blocks of queries: one per sequence, or two with context parallelism
    tokens: [T] index in the given row of the token that each place holds, any where it is padding; None: the row as is
    place: [tokens of the row] the inverse, on the CPU, -1 for tokens of other ranks; None likewise
    keys: with context parallelism, index into the keys of all ranks, [ranks * T] of them, of those that each block of
        queries sees, block after block; `cu_seqlens_kv` are its boundaries. None without
    key_gather: [blocks * longest keys] index into `keys`' rows for the padded layout
    blocks: (queries, keys) of each block where sequences share what they begin with; None where they do not. `keys`
        are then indices into the T, and `place` has one place for several tokens of the row
    chunks, starts: what a gated delta net derives of `cu_seqlens_q`, once for all layers (`delta_net`)
    pictures: features in the places of pictures, on ranks that read them
    inputs: [T, ...] by name, on the device, what the model reads of each token beside it: fields of the batch that are
        cut so (algorithms/fields.py)

    The format is "sbhd", not Megatron's "thd": its thd path splits queries and keys into single sequences in every
    layer to rotate them, which costs more than the attention on short samples. `RotaryPositions` rotates by
    `positions`.
    """

    positions: Tensor = field(kw_only=True)
    num_sequences: int = 0
    gather: Tensor | None = None
    slots: Tensor | None = None
    tokens: Tensor | None = None
    place: Tensor | None = None
    keys: Tensor | None = None
    key_gather: Tensor | None = None
    blocks: list[tuple[int, int]] | None = None
    chunks: Chunks | None = None
    starts: Tensor | None = None
    pictures: PlacedFeatures | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def take(self, row: Tensor) -> Tensor:
        """Of a row [tokens of the row] what this rank holds, [T]."""
        return row if self.tokens is None else row[self.tokens]

    def place_row(self, row: Tensor, fill: float) -> Tensor:
        """Of a row [tokens of the row, ...] on the CPU what this rank holds, [T, ...], `fill` where that is padding."""
        if self.place is None or self.tokens is None:
            return row
        here = self.place >= 0
        held = row.new_full((len(self.tokens), *row.shape[1:]), fill)
        held[self.place[here]] = row[here]
        return held


def pack(
    lengths: Tensor, device: torch.device, *, cp_rank: int = 0, cp_size: int = 1, multiple_of: int = 1
) -> PackedSequences:
    """lengths: [N] int64 on the CPU, tokens per sequence, in the order in which they lie in the row.

    cp_size: ranks that share each sequence. It is padded to a multiple of 2 * cp_size and cut into that many chunks, of
    which rank r holds numbers r and 2 * cp_size - 1 - r: under a causal mask every rank then has the same work.
    multiple_of: this rank's number of tokens is made divisible by it (for sequence parallelism) by a sequence of
        padding.
    """
    chunk = -(-lengths // (2 * cp_size)) if cp_size > 1 else lengths
    held = int(chunk.sum()) * (2 if cp_size > 1 else 1)
    step = 2 if cp_size > 1 else 1
    padding = next(n for n in range(0, multiple_of * step + 1) if (held + n * step) % multiple_of == 0)
    padded = padding > 0 or cp_size > 1
    real = torch.cat([lengths, lengths.new_zeros(1)]) if padding else lengths
    chunk = torch.cat([chunk, chunk.new_tensor([padding])]) if padding else chunk
    if cp_size > 1:
        packed, tokens, place = _zigzag(real, chunk, device, cp_rank, cp_size)
    else:
        packed = _whole(chunk, device)
        tokens, place = _index(real, _ragged(chunk), torch.arange(len(chunk)).repeat_interleave(chunk))
    if padded:
        packed.tokens, packed.place = to_device(tokens, device), place
    return packed


def pack_shared(tokens: Tensor, lengths: Tensor, device: torch.device, *, multiple_of: int = 1) -> PackedSequences:
    """As `pack` without context parallelism, each distinct token once: sequences share what they begin with.

    tokens: [tokens of the row] int64 on the CPU. A sequence's own tokens are a block of queries, which sees the keys of
    its whole path: what variable-length kernels take as it is, so that no mask over the row is needed. The price are
    keys and values repeated for each path.
    """
    trie = trie_of(tokens, lengths)
    count = len(trie.tokens)
    if count == len(tokens):
        return pack(lengths, device, multiple_of=multiple_of)
    padding = -count % multiple_of
    beside = torch.arange(padding)
    blocks = trie.blocks + [(padding, padding)] * (padding > 0)
    queries, keys = torch.tensor(blocks).unbind(1)
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=_boundaries(queries, device),
        cu_seqlens_kv=_boundaries(keys, device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
        positions=to_device(torch.cat([trie.positions, beside]), device),
        num_sequences=len(blocks),
        tokens=to_device(torch.cat([trie.tokens, torch.zeros_like(beside)]), device),
        place=trie.place,
        keys=to_device(torch.cat([trie.keys, count + beside]), device),
        blocks=blocks,
    )


def _ragged(lengths: Tensor) -> Tensor:
    """0 .. n - 1 for each n, one after the other."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def _index(lengths: Tensor, positions: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Token of the row at each place, place of each token, for tokens at `positions` of their `sequence`, both [T]."""
    starts = lengths.cumsum(0) - lengths
    genuine = positions < lengths[sequence]
    tokens = torch.where(genuine, starts[sequence] + positions, 0)
    place = torch.full((int(lengths.sum()),), -1)
    place[tokens[genuine]] = genuine.nonzero().squeeze(-1)
    return tokens, place


def _boundaries(lengths: Tensor, device: torch.device) -> Tensor:
    return to_device(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32), device)


def _padded_layout(lengths: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(gather, slots) of `PackedSequences` for blocks of these lengths."""
    longest, total = int(lengths.max()), int(lengths.sum())
    if longest * len(lengths) == total:
        return None, None
    slots = _ragged(lengths) + (torch.arange(len(lengths)) * longest).repeat_interleave(lengths)
    gather = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    gather[slots] = torch.arange(total)
    return gather, slots


def _on(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else to_device(tensor, device)


def _whole(lengths: Tensor, device: torch.device) -> PackedSequences:
    longest, boundaries = int(lengths.max()), _boundaries(lengths, device)
    # Only the padded layout of the CPU needs these.
    gather, slots = _padded_layout(lengths)
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=to_device(_ragged(lengths), device),
        num_sequences=len(lengths),
        gather=_on(device, gather),
        slots=_on(device, slots),
    )


def _zigzag(
    lengths: Tensor, chunk: Tensor, device: torch.device, rank: int, size: int
) -> tuple[PackedSequences, Tensor, Tensor]:
    """chunk: [N] tokens per chunk of each sequence. Two blocks of queries per sequence: one per chunk held."""
    sequence = torch.arange(len(chunk)).repeat_interleave(2)
    number = torch.tensor([rank, 2 * size - 1 - rank]).repeat(len(chunk))
    queries = chunk[sequence]
    keys = (number + 1) * queries
    positions = (number * queries).repeat_interleave(queries) + _ragged(queries)
    tokens, place = _index(lengths, positions, sequence.repeat_interleave(queries))

    # Where the key at this position of this sequence lies once the ranks' tokens stand one after the other.
    key_position, key_sequence = _ragged(keys), sequence.repeat_interleave(keys)
    width = chunk[key_sequence]
    key_chunk = key_position // width.clamp(min=1)
    late = key_chunk >= size
    owner = torch.where(late, 2 * size - 1 - key_chunk, key_chunk)
    starts = 2 * (chunk.cumsum(0) - chunk)
    lies = owner * int(queries.sum()) + starts[key_sequence] + late * width + key_position % width.clamp(min=1)

    gather, slots = _padded_layout(queries)
    key_gather, _ = _padded_layout(keys)
    packed = PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=_boundaries(queries, device),
        cu_seqlens_kv=_boundaries(keys, device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
        positions=to_device(positions, device),
        num_sequences=len(queries),
        gather=_on(device, gather),
        slots=_on(device, slots),
        keys=to_device(lies, device),
        key_gather=_on(device, key_gather),
    )
    return packed, tokens, place
