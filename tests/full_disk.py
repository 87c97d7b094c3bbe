"""A file on a disk without room."""

from __future__ import annotations

import errno
import io
import os


class FullDisk(io.StringIO):
    """Takes what is written into its buffer, as files do, and fails where that is to go to the disk."""

    name = "on_a_full_disk"

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        super().close()
        self.flush()
