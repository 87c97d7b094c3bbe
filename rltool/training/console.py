"""What train prints, on the screen and in its log, so that `rltool logs train` shows it from any shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rltool.terminal import Console

LOG_WIDTH = 200


class LoggedConsole(Console):
    """Prints like `screen`, and the same lines, without colours and spinners, into `log`."""

    def __init__(self, screen: Console, log: Path) -> None:
        super().__init__(file=screen.file, width=screen.width, force_terminal=screen.is_terminal)
        self._file_console = Console(file=log.open("a", encoding="utf-8"), width=LOG_WIDTH, no_color=True)
        self._path, self._failed = log, False

    def log_line(self, line: str) -> None:
        """`print` of one line."""
        self.print(line)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        try:
            self._file_console.print(*objects, **options)
            self._file_console.file.flush()
        except OSError as error:  # no run ends for its log; once there is room, it has what follows
            if not self._failed:
                super().print(f"{self._path} cannot be written: {error.strerror or error}")
            self._failed = True
