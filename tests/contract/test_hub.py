"""Models and data sets of the Hugging Face hub: the real huggingface_hub against a hub on loopback, and offline."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_server import Quiet, answering

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"architectures": []}', "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}
MODEL = "from pathlib import Path; from rltool.models.hub import local_model; print(local_model(Path({name!r})))"
DATA = "from rltool.rollout.data.load import read_rows; from rltool.rollout.data.spec import parse_spec; " \
       "print(list(read_rows(parse_spec({name!r}))))"  # fmt: skip


class Hub(Quiet):
    """One repository, acme/tiny, as the hub serves it."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in FILES.items()
        ]
        if path.startswith("/api/models/acme/tiny/tree/"):
            self._reply(json.dumps(entries).encode(), body)
        elif path.startswith("/api/models/acme/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            self._reply(json.dumps({"id": "acme/tiny", "sha": SHA, "siblings": siblings}).encode(), body)
        elif path.startswith("/acme/tiny/resolve/") and path.rpartition("/")[2] in FILES:
            self._reply(FILES[path.rpartition("/")[2]], body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _reply(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    with answering(type("OwnHub", (Hub,), {"asked": asked})) as url:
        yield url, asked


def ask(code: str, name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that has an empty home of Hugging Face; its errors end with the exception."""
    own = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code.format(name=name)], env={**os.environ, **own}, cwd=home, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


def test_a_model_is_fetched_once_without_formats_that_nobody_reads(hub, tmp_path):
    url, asked = hub
    first = ask(MODEL, "acme/tiny", tmp_path, HF_ENDPOINT=url)
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert directory.name == SHA
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert (directory / "config.json").read_bytes() == FILES["config.json"]
    downloads = [path for path in asked if "/resolve/" in path]
    again = ask(MODEL, "acme/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout, "from the cache, without the hub"
    assert [path for path in asked if "/resolve/" in path] == downloads


def test_a_model_that_the_hub_does_not_have_is_named(hub, tmp_path):
    said = ask(MODEL, "acme/other", tmp_path, HF_ENDPOINT=hub[0]).stderr
    assert "UsageError: model.path: acme/other is neither a directory here nor a model of the Hugging Face hub" in said


def test_offline_it_is_said_what_is_missing_and_where(tmp_path):
    said = ask(MODEL, "acme/tiny", tmp_path, HF_HUB_OFFLINE="1").stderr
    assert "model.path: acme/tiny is not (or not completely) in the cache of the Hugging Face hub" in said
    assert str(tmp_path) in said and "`hf download acme/tiny`" in said
    said = ask(DATA, "acme/rows", tmp_path, HF_HUB_OFFLINE="1").stderr
    assert "data set 'acme/rows' is not in the cache of the Hugging Face hub, and HF_HUB_OFFLINE forbids" in said


def test_a_misspelt_directory_is_not_looked_for_on_the_hub(hub, tmp_path):
    (tmp_path / "models").mkdir()
    assert ask(MODEL, "models/tiny", tmp_path, HF_ENDPOINT=hub[0]).stdout.strip() == "models/tiny"
    assert hub[1] == []
