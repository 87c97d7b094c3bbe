"""Search over a local index as a tool: full text, ranked by BM25, in one file of SQLite (its FTS5).

    python -m rltool.environments.search corpus.jsonl corpus.db

makes the index of JSON lines with `text`, and perhaps `title` and `id`. Each line is a passage, which is found and
shown as a whole: cut long documents before.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from rltool.errors import UsageError
from rltool.terminal import write_line

Stemming = Literal["porter unicode61", "unicode61", "trigram"]
"""FTS5's tokenizers: English word stems; words as they are; any three characters, for scripts without spaces between
words."""
MAX_QUERY_WORDS = 64
MAX_PASSAGE_CHARACTERS = 2000
"""Of one passage, as the model reads it."""


@dataclass(frozen=True)
class Passage:
    """score: BM25 (k1 = 1.2, b = 0.75, as FTS5 has it), larger is better; 0 in what was not found by a search."""

    id: str
    title: str
    text: str
    score: float = 0.0


def build_index(passages: Iterable[Passage], path: Path, *, tokenizer: Stemming = "porter unicode61") -> int:
    """Write the index, in place of an earlier one there. Returns the number of passages. UsageError for none."""
    made = path.with_name(f"{path.name}.new")
    made.unlink(missing_ok=True)
    with closing(sqlite3.connect(made)) as database:
        columns = f"id UNINDEXED, title, text, tokenize = '{tokenizer}'"
        database.execute(f"CREATE VIRTUAL TABLE passages USING fts5({columns})")
        rows = ((passage.id, passage.title, passage.text) for passage in passages)
        database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
        database.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        database.commit()
        [count] = database.execute("SELECT count(*) FROM passages").fetchone()
    if not count:
        made.unlink()
        raise UsageError(f"{path}: there is no passage to make an index of")
    made.replace(path)
    return count


class SearchIndex:
    """An index that `build_index` has written, for any number of threads. UsageError for what is none."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._local = threading.local()
        try:
            self._database().execute("SELECT id, title, text FROM passages LIMIT 1")
        except sqlite3.Error as error:
            raise UsageError(
                f"{path} is no index for search ({error}); make one with `python -m rltool.environments.search "
                "CORPUS.jsonl INDEX.db`"
            ) from None

    def search(self, query: str, *, results: int) -> list[Passage]:
        """The best passages that have any word of the query. Words are all that counts: FTS5's operators are none
        here, for a model's query is text and not a program."""
        words = re.findall(r"\w+", query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)
        found = self._database().execute(
            "SELECT id, title, text, -rank FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
            (wanted, results),
        )
        return [Passage(*row) for row in found]

    def _database(self) -> sqlite3.Connection:
        """A connection of this thread's own. immutable: the file is never written, so not locked."""
        if not hasattr(self._local, "database"):
            self._local.database = sqlite3.connect(f"{self._path.as_uri()}?mode=ro&immutable=1", uri=True)
        return self._local.database


@functools.cache
def _opened(path: Path) -> SearchIndex:
    return SearchIndex(path)


def make_search(*, index: str, results: int = 3) -> Callable[..., str]:
    """A tool of the index at this path, for `ToolUse`, or for any agent that takes Python functions. results: passages
    that are shown for each query. UsageError for a path without an index."""
    if results < 1:
        raise UsageError(f"search: results = {results}: at least one passage must be shown")
    opened = _opened(Path(index).resolve())

    def search(query: Annotated[str, "words to look for"]) -> str:
        """Search the collection of texts. Gives the passages that fit best."""
        found = opened.search(query, results=results)
        return "\n\n".join(_shown(number, passage) for number, passage in enumerate(found, 1)) or "nothing was found"

    return search


def _shown(number: int, passage: Passage) -> str:
    text = passage.text[:MAX_PASSAGE_CHARACTERS]
    cut = " ..." if len(text) < len(passage.text) else ""
    return f"[{number}] {passage.title or passage.id}\n{text}{cut}"


def read_passages(path: Path) -> Iterator[Passage]:
    """Of JSON lines. UsageError for a line without a text."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                text = row["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path}, line {number}: expected a JSON object with `text`") from None
            yield Passage(str(row.get("id", number)), str(row.get("title", "")), text)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Make an index for the tool search.")
    parser.add_argument("corpus", type=Path, help="JSON lines with `text`, and perhaps `title` and `id`")
    parser.add_argument("index", type=Path, help="the file to write")
    parser.add_argument("--tokenizer", choices=get_args(Stemming), default="porter unicode61")
    given = parser.parse_args(argv)
    try:
        count = build_index(read_passages(given.corpus), given.index, tokenizer=given.tokenizer)
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")
    write_line(f"{given.index}: {count} passages")


if __name__ == "__main__":
    main(sys.argv[1:])
