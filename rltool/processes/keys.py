"""Bearer keys in files: reading one, and making a new one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rltool.errors import UsageError

_KEY_BYTES = 32


def make_key(file: Path) -> Path:
    """`file` (0600), with a new random key at the first call; one that is there is left as it is."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_urlsafe(_KEY_BYTES))
    return file


def read_key(file: Path, whose: str) -> str:
    """The key in `file`, without white space around it; `whose`: for the error message, such as a URL.

    Raises UsageError for a file that cannot be read or that holds anything but one word of printable ASCII: a key
    travels in a header of HTTP, which ends at a line's end. The message never quotes the content.
    """
    name = f"the key file {file} of {whose}"
    try:
        key = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not text (UTF-8): write the key alone into it, on one line") from None
    if not key:
        raise UsageError(f"{name} is empty")
    lines = len(key.splitlines())
    if lines > 1:
        raise UsageError(f"{name} has {lines} lines: write the key alone into it, on one line")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{name} holds a space or a character that a header of HTTP cannot carry: a key is one word of printable "
            "ASCII"
        )
    return key
