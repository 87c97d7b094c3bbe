"""Rows of tokens that begin alike, as a trie: which tokens they share, and which rows to keep together. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rltool.algorithms.ragged import as_array, numbers

WORTH = 20
"""Rows with less than this part of a row in common are packed without regard to it: the whole costs at most
1 / (WORTH - 1) more tokens."""


@dataclass(frozen=True)
class SortedRows:
    """order: rows by their tokens, so that rows of one branch of the trie are neighbours; common[k]: how many first
    tokens row order[k] has in common with row order[k - 1], 0 for the first; lengths: of the rows in this order."""

    order: list[int]
    common: list[int]
    lengths: list[int]


def sort_rows(tokens: Tensor, lengths: Tensor) -> SortedRows:
    """tokens: [T] of at least 0, on the CPU, row after row; lengths: [N]."""
    ends = numbers(lengths.cumsum(0))
    rows = np.split(as_array(tokens), ends[:-1])
    # Big-endian bytes are in the order of the numbers, and a row comes before those that it begins.
    keys = [row.astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * len(rows)
    for k in range(1, len(order)):
        before, row = rows[order[k - 1]], rows[order[k]]
        size = min(len(before), len(row))
        differs = before[:size] != row[:size]
        common[k] = int(differs.argmax()) if differs.any() else size
    return SortedRows(order, common, [len(rows[i]) for i in order])


@dataclass(frozen=True)
class Trie:
    """T distinct tokens of rows, parents first: two tokens of two rows are one where they and all before them are the
    same.

    tokens: [T] index in the given rows of one token that each is; place: [tokens of the rows] the inverse
    positions: [T] tokens before it in its rows
    blocks: (queries, keys) of each row that has tokens of its own: how many these are, and the length of the row
    keys: [sum of keys] index into T of the tokens of each of these rows, from the first, block after block
    """

    tokens: Tensor
    place: Tensor
    positions: Tensor
    blocks: list[tuple[int, int]]
    keys: Tensor


def trie_of(tokens: Tensor, lengths: Tensor) -> Trie:
    """Arguments as for `sort_rows`."""
    found = sort_rows(tokens, lengths)
    starts = numbers(lengths.cumsum(0) - lengths)
    place = torch.empty(len(tokens), dtype=torch.int64)
    path = torch.empty(0, dtype=torch.int64)
    used, held, positions, keys = 0, [path], [path], [path]
    blocks: list[tuple[int, int]] = []
    for i, common, length in zip(found.order, found.common, found.lengths, strict=True):
        own = length - common
        path = torch.cat([path[:common], torch.arange(used, used + own)])
        place[starts[i] : starts[i] + length] = path
        used += own
        if own:
            held.append(torch.arange(starts[i] + common, starts[i] + length))
            positions.append(torch.arange(common, length))
            blocks.append((own, length))
            keys.append(path)
    return Trie(torch.cat(held), place, torch.cat(positions), blocks, torch.cat(keys))


@dataclass(frozen=True)
class Run:
    """Rows to keep in one micro-batch. tokens: distinct ones; cost: what they cost, each computed once."""

    rows: list[int]
    tokens: int
    cost: int


def runs_of(
    tokens: Tensor, lengths: Tensor, *, max_tokens: int, least: int, cost_of: Callable[[int], int]
) -> list[Run]:
    """Rows in runs of at most max_tokens distinct tokens (a single row may have more), `least` of them or more where
    there are as many rows. Neighbours in the trie stay together; what is too long is cut where least is computed twice.

    Other arguments as for `sort_rows`; cost_of: a whole row's of this length.
    """
    found = sort_rows(tokens, lengths)
    own = [length - common for length, common in zip(found.lengths, found.common, strict=True)]
    before = [0, *accumulate(own)]

    def size(run: range) -> int:
        """Distinct tokens: the first row's are all computed."""
        return before[run.stop] - before[run.start] + found.common[run.start]

    def halves(run: range) -> list[range]:
        whole = size(run)
        cuts = run[1:]
        even = [k for k in cuts if 4 * min(size(range(run.start, k)), size(range(k, run.stop))) >= whole]
        cut = min(even or cuts, key=lambda k: (found.common[k], abs(2 * k - run.start - run.stop)))
        return [range(run.start, cut), range(cut, run.stop)]

    count = len(found.order)
    bounds = [k for k in range(1, count) if WORTH * found.common[k] <= found.lengths[k]]
    waiting = [range(a, b) for a, b in pairwise([0, *bounds, count])]
    runs: list[range] = []
    while waiting:
        run = waiting.pop()
        if size(run) > max_tokens and len(run) > 1:
            waiting += halves(run)
        else:
            runs.append(run)
    while len(runs) < min(least, count):
        longest = max((run for run in runs if len(run) > 1), key=size)
        runs.remove(longest)
        runs += halves(longest)
    return [
        Run(
            [found.order[k] for k in run],
            size(run),
            sum(cost_of(found.lengths[k]) - (cost_of(found.common[k]) if k > run.start else 0) for k in run),
        )
        for run in sorted(runs, key=lambda run: run.start)
    ]
