"""A store as a directory, and as a bucket of an S3-compatible server (moto's, in this process)."""

from __future__ import annotations

import os
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from rltool.engines.delta.store import DirectoryStore, KeyMissing, S3Store, Store, StoreError, open_store, s3_client
from rltool.errors import UsageError


@pytest.fixture(params=["directory", "s3", "s3 at the bucket's root"])
def store(request, tmp_path, monkeypatch):
    if request.param == "directory":
        yield open_store(str(tmp_path / "store"))
        return
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="weights")
        yield open_store("s3://weights" if "root" in request.param else "s3://weights/runs/a/")


def test_what_is_put_is_found_until_it_is_deleted(store: Store):
    store.put("a-1/x.bin", b"one")
    store.put("a-1/y.bin", b"")
    store.put("a-2/x.bin", b"two")
    store.put("head.json", b"{}")
    assert store.get("a-1/x.bin") == b"one"
    assert store.sizes() == {"a-1/x.bin": 3, "a-1/y.bin": 0, "a-2/x.bin": 3, "head.json": 2}
    assert store.sizes("a-1") == {"a-1/x.bin": 3, "a-1/y.bin": 0}
    store.put("a-1/x.bin", b"other")
    assert store.get("a-1/x.bin") == b"other"
    store.delete(["a-1/x.bin", "a-1/y.bin", "never/there"])
    assert store.sizes() == {"a-2/x.bin": 3, "head.json": 2}


def test_a_missing_key_is_named(store: Store):
    with pytest.raises(KeyMissing, match=r"a-1/x\.bin"):
        store.get("a-1/x.bin")
    assert store.sizes() == {}
    store.delete([])


def test_more_keys_than_one_request_may_delete(store: Store, monkeypatch):
    monkeypatch.setattr("rltool.engines.delta.store.S3_DELETE_LIMIT", 3)
    for number in range(8):
        store.put(f"a/{number}", b"")
    assert len(store.sizes("a/")) == 8
    store.delete(list(store.sizes("a/")))
    assert store.sizes() == {}


def test_a_key_that_leads_elsewhere_is_refused(store: Store):
    for key in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".hidden", "a/.partial"):
        for use in (store.get, lambda k: store.put(k, b""), lambda k: store.delete([k])):
            with pytest.raises(StoreError, match="no key of a store"):
                use(key)


def test_a_large_object_comes_back_whole(store: Store):
    data = os.urandom(20 << 20)  # above the size at which boto3 sends an object in parts
    store.put("a/large", data)
    assert store.get("a/large") == data


def test_a_directory_that_cannot_be_written_is_an_error_of_the_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        DirectoryStore(tmp_path / "file").put("a/x", b"")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    store.put("a/x", b"old")

    def full(_source, _target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        store.put("a/x", b"new")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"] and store.get("a/x") == b"old"


def test_a_bucket_that_is_not_there_is_an_error_of_the_store(monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        store = S3Store(s3_client(), "absent")
        for use in (lambda: store.put("x", b""), store.sizes, lambda: store.delete(["x"])):
            with pytest.raises(StoreError, match="s3://absent"):
                use()


@pytest.mark.parametrize("address", ["relative/path", "s3://", "gs://bucket/x", "http://host/x"])
def test_an_address_that_is_no_store_is_refused(address):
    with pytest.raises(UsageError, match=address.split("/")[0]):
        open_store(address)


def test_what_is_put_into_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    root, done = tmp_path / "store", []
    sync, replace = os.fsync, os.replace

    def synced(descriptor):
        found = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("sync data" if found.is_file() else f"sync {found.relative_to(tmp_path)}")
        sync(descriptor)

    def replaced(source, target):
        done.append(f"name {Path(target).relative_to(tmp_path)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    store = DirectoryStore(root)
    store.put("a/x.bin", b"one")
    store.put("head.json", b"{}")
    assert done == [
        "sync store", "sync .", "sync data", "name store/a/x.bin", "sync store/a",
        "sync data", "name store/head.json", "sync store",
    ]  # fmt: skip
