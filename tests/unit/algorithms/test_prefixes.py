"""The trie of rows against sets of their prefixes, written out; which rows stay together."""

import random

import pytest
import torch

from rltool.algorithms.prefixes import runs_of, trie_of


def packed(rows):
    return torch.tensor([token for row in rows for token in row]), torch.tensor([len(row) for row in rows])


def random_rows(seed):
    """Branches of branches, rows that end where others go on, the same row twice."""
    draw = random.Random(seed)
    rows = [[draw.randrange(300)]]
    while len(rows) < 12:
        start = draw.choice(rows)
        rows.append(start[: draw.randint(0, len(start))] + [draw.randrange(300) for _ in range(draw.randint(1, 6))])
    rows += [rows[3], rows[5][:1]]
    draw.shuffle(rows)
    return rows


def prefixes(rows):
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


@pytest.mark.parametrize("seed", range(20))
def test_each_distinct_prefix_is_one_token_that_sees_its_own_path(seed):
    rows = random_rows(seed)
    tokens, lengths = packed(rows)
    trie = trie_of(tokens, lengths)
    assert len(trie.tokens) == len(prefixes(rows))
    # What each place stands for: the tokens of the keys that a causal block lets it see.
    seen, at, key = [], 0, 0
    for queries, keys in trie.blocks:
        path = tokens[trie.tokens[trie.keys[key : key + keys]]].tolist()
        seen += [tuple(path[: keys - queries + n + 1]) for n in range(queries)]
        assert trie.keys[key + keys - queries : key + keys].tolist() == list(range(at, at + queries))
        at, key = at + queries, key + keys
    assert trie.positions.tolist() == [len(path) - 1 for path in seen]
    wanted = [tuple(row[: n + 1]) for row in rows for n in range(len(row))]
    assert [seen[place] for place in trie.place.tolist()] == wanted


def runs(rows, max_tokens, least=1):
    return runs_of(*packed(rows), max_tokens=max_tokens, least=least, cost_of=int)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("least", [1, 3])
def test_runs_have_every_row_once_and_their_distinct_tokens(seed, least):
    rows = random_rows(seed)
    found = runs(rows, 20, least)
    assert sorted(i for run in found for i in run.rows) == list(range(len(rows)))
    assert len(found) >= least
    for run in found:
        assert run.tokens == run.cost == len(prefixes([rows[i] for i in run.rows])) <= 20


def groups(count, samples, prompt, response):
    """Samples of each prompt, mixed."""
    rows = [[p] * prompt + [100 + s] * response for s in range(samples) for p in range(count)]
    return rows, [i % count for i in range(len(rows))]


def test_samples_of_one_prompt_stay_together():
    rows, prompt_of = groups(5, 8, prompt=40, response=5)
    found = runs(rows, 100)
    assert [{prompt_of[i] for i in run.rows} for run in found] == [{p} for p in range(5)]
    assert {run.tokens for run in found} == {40 + 8 * 5}


def test_what_is_too_long_is_cut_where_the_least_is_computed_twice():
    template = [7] * 30
    rows, prompt_of = groups(4, 4, prompt=40, response=5)
    found = runs([template + row for row in rows], 150)
    assert [sorted({prompt_of[i] for i in run.rows}) for run in found] == [[0, 1], [2, 3]]
    assert [run.tokens for run in found] == [30 + 2 * (40 + 4 * 5)] * 2


def test_each_data_parallel_rank_gets_rows_of_a_single_prompt():
    rows, _ = groups(1, 8, prompt=40, response=5)
    assert [len(run.rows) for run in runs(rows, 1000, least=2)] == [4, 4]
