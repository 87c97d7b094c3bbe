"""A reward over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from rltool.engines.replies import decode, quote, read_body
from rltool.errors import EngineError
from rltool.rollout.sample import Sample

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before the first repetition, doubled with each that follows."""
REPLY_BYTES = 1024 * 1024
"""Of a reply, which is a number and what the server adds to it."""
REPEATED = {408, 425, 429}
"""Statuses below 500 after which the same request may succeed."""


async def remote(
    sample: Sample, text: str, *, url: str, retries: int = 3, timeout: float = 20.0, key: str = "reward",
    pause: float = FIRST_PAUSE,
) -> float:  # fmt: skip
    """POSTs {"prompt", "response", "label", "metadata"} as JSON to `url`; the reply is a number, or an object whose
    `key` holds one.

    timeout: seconds for one attempt; all attempts share deadlines.call. Connections that fail, 5xx, 408, 425 and 429
    are tried `retries` times again; any other status fails the sample at once, as does a reply of another
    form. Raises EngineError with the last reason.
    """
    body = {"prompt": sample.prompt_text, "response": text, "label": sample.label, "metadata": sample.metadata}
    limit, reason = aiohttp.ClientTimeout(total=timeout), ""
    async with aiohttp.ClientSession(timeout=limit) as session:
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(min(pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                async with session.post(url, json=body) as response:
                    reply = (await read_body(response, f"POST {url}", REPLY_BYTES)).decode("utf-8", "replace")
                    if response.status < 400:
                        return _number(decode(reply), key)
                    reason = f"HTTP {response.status}: {quote(reply, 200)}"
                    if response.status < 500 and response.status not in REPEATED:
                        raise EngineError(f"{url} refuses the sample: {reason}")
            except (aiohttp.ClientError, TimeoutError) as error:
                message = f"{type(error).__name__}: {quote(str(error), 200)}"
                reason = message if str(error) else f"no answer within {timeout:g} s"
    raise EngineError(f"{url} gave no reward in {retries + 1} attempts: {reason}")


def _number(reply: Any, key: str) -> float:
    value = reply.get(key) if isinstance(reply, dict) else reply
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = quote(str(reply), 200)
        raise EngineError(f"the reply {message} is neither a number nor an object with a number in {key!r}")
    return float(value)
