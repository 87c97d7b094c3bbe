"""Seeds from names: the same on every machine and in every process, unlike hash()."""

from __future__ import annotations

import hashlib


def hash31(*parts: object) -> int:
    """An integer in [0, 2**31) that depends on the parts alone."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31
