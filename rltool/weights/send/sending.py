"""One bucket on its way to one engine, as calls of its channel.

A transport whose engine waits for all buckets has the next one enqueued while the one before is on its way: between two
broadcasts lies nothing then. With the wait in between, the thread's way back to the GPU took some 0.3 ms a bucket (two
H200, buckets of 256 MiB, which travel for 0.7 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rltool.engines.types import Bucket
from rltool.weights.send.buffers import Taking
from rltool.weights.send.channel import Call, Channel
from rltool.weights.transport import SenderTransport, Work


class Sending:
    """One bucket to one engine, on its channel's thread: `whole`, or `begin` and, behind the next one's, `end`."""

    def __init__(self, to: SenderTransport, bucket: Bucket, flat: Tensor, seconds: float) -> None:
        self._to, self._bucket, self._seconds = to, bucket, seconds
        self._flat: Tensor | None = flat
        self._work: Work | None = None

    @property
    def is_pipelined(self) -> bool:
        return self._to.announced_ahead

    def begin(self) -> None:
        assert self._flat is not None, "once"
        self._work, self._flat = self._to.send(self._bucket, self._flat), None

    def end(self) -> None:
        assert self._work is not None, "begin comes first"
        self._work.wait(self._seconds)
        self._work = None

    def whole(self) -> None:
        self.begin()
        self.end()


def end_in_order(
    behind: Sequence[tuple[Channel, Sending, list[Taking]]],
    submit: Callable[[Channel, Callable[[], object]], Call],
) -> None:
    """Their buffers are free when they have ended. One whose channel has failed by now may still read its buffer, which
    is returned too."""
    for channel, sending, takers in behind:
        takers.append((channel, submit(channel, sending.end)))
