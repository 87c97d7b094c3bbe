"""Drops vLLM's prefix cache without looking at every block of the KV cache.

BlockPool.reset_prefix_cache (v1/core/block_pool.py of 0.32) sets the hash of each block anew, cached or not, in a
Python loop: 6 ms for 100,000 blocks, twice in every weight sync, while the engine stands still. A GPU of 141 GB has six
times as many beside a model of 0.5B. Blocks that hold a hash all stand in the pool's table of hashes, and what runs
holds a few hundred.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from rltool.engines.plugin.guard import KEY_FILE_VARIABLE


def reset_hashed_blocks(environment: Mapping[str, str] = os.environ) -> None:
    """Let the block pools of this process reset the blocks that hold a hash alone. Idempotent. Servers without the
    guard keep vLLM's own way."""
    if KEY_FILE_VARIABLE not in environment:
        return
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:  # another vLLM: its own way is slower, not wrong
        return
    reset_all = BlockPool.reset_prefix_cache
    if getattr(reset_all, "rltool", False):
        return

    def reset_prefix_cache(pool: Any) -> bool:
        hashed = _hashed_blocks(pool)
        if hashed is None:
            return reset_all(pool)
        every, pool.blocks = pool.blocks, hashed
        try:
            return reset_all(pool)
        finally:
            pool.blocks = every

    patched = cast(Any, reset_prefix_cache)
    patched.rltool = True
    BlockPool.reset_prefix_cache = patched


def _hashed_blocks(pool: Any) -> list[Any] | None:
    """None: this pool keeps its blocks in another way, or looks some of them up by their numbers while it resets."""
    table = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    if not isinstance(table, dict) or getattr(pool, "_reuse_watchers", None):
        return None
    found: list[Any] = []
    for blocks in table.values():  # one, or several with equal contents by their numbers
        found.extend(blocks.values() if isinstance(blocks, dict) else (blocks,))
    return found
