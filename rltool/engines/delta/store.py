"""Where versions of the weights lie: a directory, or a bucket of an S3-compatible store.

All that is asked of a store: what is put is there as a whole or not at all, and a key that was put is found.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rltool.errors import RltoolError, UsageError
from rltool.processes.files import sync_directory, write_bytes_atomic

_KEY = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]*(/[A-Za-z0-9_%-][A-Za-z0-9_.%-]*)*")
"""No part of a key begins with a dot: so none leads out of the store, and none is a file that is being written."""

S3_DELETE_LIMIT = 1000
"""Keys that one DeleteObjects request may name."""


class StoreError(RltoolError):
    """The store cannot be read or written now."""


class KeyMissing(StoreError):
    """Nothing was put under this key, or it was deleted."""


class Store(Protocol):
    """Keys are relative paths with "/"."""

    def put(self, key: str, data: bytes) -> None:
        """Readers find the old bytes or the new ones, never a part. Raises StoreError."""
        ...

    def get(self, key: str) -> bytes:
        """Raises KeyMissing, StoreError."""
        ...

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Key -> bytes, of all keys that begin with `prefix`. Raises StoreError."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """In this order; keys that are not there are passed over. Raises StoreError."""
        ...


def open_store(address: str) -> Store:
    """address: an absolute directory, or s3://BUCKET/PREFIX. Nothing is read or written yet. Raises UsageError."""
    if address.startswith("s3://"):
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        if not bucket:
            raise UsageError(f"{address} names no bucket: write s3://BUCKET/PREFIX")
        return S3Store(s3_client(), bucket, prefix.strip("/"))
    if "://" in address:
        raise UsageError(f"{address}: a store of weights is a directory or s3://BUCKET/PREFIX")
    if not Path(address).is_absolute():
        raise UsageError(f"{address}: a store's directory must be absolute, for several processes use it")
    return DirectoryStore(Path(address))


class DirectoryStore:
    """A directory that trainer and engines share. See Store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key: str, data: bytes) -> None:
        """On the disk when this returns: what names other keys, as a manifest does, is there only if they are."""
        path = self._path(key)
        try:
            new = [directory for directory in path.parents if not directory.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            for directory in new:
                sync_directory(directory.parent)
            write_bytes_atomic(path, data)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise KeyMissing(f"{path} is not there") from error
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self.root.rglob("*"):
            key = path.relative_to(self.root).as_posix()
            if not key.startswith(prefix) or not _KEY.fullmatch(key):
                continue
            try:
                if path.is_file():
                    found[key] = path.stat().st_size
            except FileNotFoundError:
                continue  # deleted meanwhile
            except OSError as error:
                raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        return found

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
                if path.parent != self.root and not any(path.parent.iterdir()):
                    path.parent.rmdir()
            except FileNotFoundError:
                continue  # its directory went with an earlier key, or another process deletes as well
            except OSError as error:
                raise StoreError(f"cannot delete {path}: {error.strerror or error}") from error

    def _path(self, key: str) -> Path:
        return self.root / _checked(key)


class S3Store:
    """Objects under PREFIX/ of a bucket. client: boto3's S3 client, which retries by itself. See Store."""

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self.client, self.bucket = client, bucket
        self.prefix = f"{prefix}/" if prefix else ""

    def put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            # Managed: large objects go up in parts, side by side, and appear when the last one is there.
            self.client.upload_fileobj(io.BytesIO(data), self.bucket, self._name(key))

    def get(self, key: str) -> bytes:
        data = io.BytesIO()
        with self._errors(key):
            self.client.download_fileobj(self.bucket, self._name(key), data)
        return data.getvalue()

    def sizes(self, prefix: str = "") -> dict[str, int]:
        with self._errors(prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            entries = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Key"].removeprefix(self.prefix): entry["Size"] for entry in entries}

    def delete(self, keys: Iterable[str]) -> None:
        names = [{"Key": self._name(key)} for key in keys]
        for start in range(0, len(names), S3_DELETE_LIMIT):
            part = names[start : start + S3_DELETE_LIMIT]
            with self._errors(""):
                reply = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": part, "Quiet": True})
            for failed in reply.get("Errors", ()):
                raise StoreError(f"s3://{self.bucket}/{failed['Key']} cannot be deleted: {failed['Message']}")

    def _name(self, key: str) -> str:
        return self.prefix + _checked(key)

    def _errors(self, key: str) -> _S3Errors:
        return _S3Errors(f"s3://{self.bucket}/{self.prefix}{key}")


class _S3Errors:
    """Turns boto3's exceptions into the store's."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
            raise KeyMissing(f"{self.where} is not there") from error
        if isinstance(error, (Boto3Error, BotoCoreError, ClientError)):
            raise StoreError(f"{self.where}: {error}") from error


def s3_client() -> Any:
    """boto3's, configured by its own environment and files: AWS_ENDPOINT_URL_S3 names another server than Amazon's."""
    try:
        import boto3.session
        from botocore.config import Config
    except ImportError as error:
        raise UsageError("a store under s3:// needs boto3 in this environment: pip install 'rltool[s3]'") from error
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 5},
        # Not every S3-compatible server knows the checksums that boto3 adds; every file of ours has a sha256 anyway.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client("s3", config=config)


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise StoreError(f"{key!r} is no key of a store")
    return key
