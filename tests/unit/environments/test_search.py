"""The tool search: an index of passages, BM25, queries that are no program."""

from __future__ import annotations

import asyncio
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rltool.environments.search import Passage, SearchIndex, build_index, main, make_search
from rltool.environments.tools import make_tools
from rltool.errors import UsageError

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "foxes are not dogs and a fox is no dog but a fox",
    "bees make honey",
    "honey honey honey in a jar that stands on a shelf in the kitchen of the house by the sea",
    "nothing of interest stands here at all",
    "a jar of clay",
    "seven ships at sea",
]


@pytest.fixture
def index(tmp_path) -> Path:
    path = tmp_path / "corpus.db"
    passages = (Passage(f"p{i}", f"title {i}" if i == 0 else "", text) for i, text in enumerate(TEXTS))
    assert build_index(passages, path, tokenizer="unicode61") == len(TEXTS)
    return path


def plain_bm25(query: str, title_and_text: list[str]) -> list[float]:
    """Robertson and Zaragoza 2009 with k1 = 1.2, b = 0.75, over all words of a passage."""
    documents = [re.findall(r"\w+", text) for text in title_and_text]
    average = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in re.findall(r"\w+", query):
        having = sum(word in document for document in documents)
        idf = max(math.log((len(documents) - having + 0.5) / (having + 0.5)), 1e-6)
        for i, document in enumerate(documents):
            often = document.count(word)
            scores[i] += idf * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * len(document) / average))
    return scores


@pytest.mark.parametrize("query", ["honey", "fox dog", "jar of honey", "the sea"])
def test_passages_come_in_the_order_of_bm25(index, query):
    found = SearchIndex(index).search(query, results=len(TEXTS))
    texts = [f"title {i} {text}" if i == 0 else text for i, text in enumerate(TEXTS)]
    scores = plain_bm25(query, texts)
    expected = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])
    assert [passage.id for passage in found] == [f"p{i}" for i in expected]
    assert [passage.score for passage in found] == pytest.approx([scores[i] for i in expected], rel=1e-6)


def test_english_stems_and_other_scripts(tmp_path):
    stems, characters = tmp_path / "stems.db", tmp_path / "characters.db"
    build_index([Passage("a", "", "running dogs")], stems)
    build_index([Passage("a", "", "蜂蜜は甘いです")], characters, tokenizer="trigram")
    assert len(SearchIndex(stems).search("dog runs", results=1)) == 1
    assert len(SearchIndex(characters).search("蜜は甘", results=1)) == 1


@pytest.mark.parametrize("query", ['"', "NOT fox", "title:fox", "fox AND", "fox*", "(", "fox -dog", "'; DROP TABLE x"])
def test_a_query_is_text_and_no_program(index, query):
    found = SearchIndex(index).search(query, results=9)
    assert bool(found) == ("fox" in query)


def test_the_tool_says_what_it_found(index):
    tool = make_tools({"make": "rltool.environments.search:make_search", "index": str(index), "results": 2})
    assert tool.schema["function"]["name"] == "search"
    assert tool.schema["function"]["parameters"]["properties"] == {
        "query": {"type": "string", "description": "words to look for"}
    }
    said = asyncio.run(tool.call({"query": "fox"}, seconds=5.0))
    assert said.startswith("[1] p1\nfoxes are not dogs") and "\n\n[2] title 0\nthe quick" in said
    assert asyncio.run(tool.call({"query": "zebra!"}, seconds=5.0)) == "nothing was found"


def test_long_passages_are_cut(tmp_path):
    build_index([Passage("a", "", "word " * 1000)], tmp_path / "i.db")
    assert make_search(index=str(tmp_path / "i.db"))("word").endswith(" ...")


def test_threads_search_side_by_side(index):
    opened = SearchIndex(index)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: opened.search("fox", results=2), range(64)))
    assert all(passages == found[0] for passages in found)


def test_what_is_no_index_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "text.db").write_text("no database")
    for name in ("missing.db", "text.db"):
        with pytest.raises(UsageError, match="is no index for search .* make one with"):
            make_search(index=str(tmp_path / name))
    with pytest.raises(UsageError, match="results = 0"):
        make_search(index=str(tmp_path / "missing.db"), results=0)


def test_an_index_is_made_of_json_lines(tmp_path, capsys):
    corpus, made = tmp_path / "corpus.jsonl", tmp_path / "made.db"
    corpus.write_text("".join(json.dumps({"text": text, "title": f"t{i}"}) + "\n" for i, text in enumerate(TEXTS)))
    main([str(corpus), str(made)])
    assert capsys.readouterr().out == f"{made}: 7 passages\n"
    assert SearchIndex(made).search("ships", results=1)[0].title == "t6"
    corpus.write_text('{"text": "fine"}\n{"title": "none"}\n')
    with pytest.raises(SystemExit, match="line 2: expected a JSON object with `text`"):
        main([str(corpus), str(made)])
    assert len(SearchIndex(made).search("ships", results=9)) == 1  # the old one is still there
