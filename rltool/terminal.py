"""What people read: one console for every verb, which shows foreign text and obeys none of it.

Prompts, responses, labels, what an agent, a reward or an engine answered, names of files: each may hold a terminal's
escape sequences, or brackets that rich takes for its markup and removes (`http://[fe80::1]:8000`, `[/INST]`). So markup
is off, and colours are given as styles; control characters are written out where text becomes what is sent to the
terminal, behind which there is no other way. A test over all sources sees to it that nothing prints past this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
import rich.status
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


def visible(text: str) -> str:
    """The text with control characters, such as a terminal's escape, and those that turn the direction of writing,
    written out (`\\x1b`, `\\u202e`). Line ends, tabs and spaces of all widths stay."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    shown = character.isprintable() or character in "\n\t" or (character.isspace() and character > "\x85")
    return character if shown and character not in "\u2028\u2029" else character.encode("unicode_escape").decode()


def write_line(line: str) -> None:
    """A line on stdout, for who has no console; at once, also into a file or a pipe."""
    print(visible(line), flush=True)


class Console(rich.console.Console):
    """rich's, for text as it is. What consists of text alone is never wrapped: a path or a command in it must survive
    copying."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; no markup, and the soft wrap of text is the terminal's."""
        options.setdefault("soft_wrap", all(isinstance(one, str | Text) for one in objects))
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # here too, so that columns are as wide as what they show

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def status(self, status: RenderableType, **options: Any) -> rich.status.Status:
        return _Status(_plain(status), console=self, **options)


class _Status(rich.status.Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        super().update(_plain(status), **options)


def _plain(text: Any) -> Any:
    """A spinner would read markup in a str."""
    return Text(visible(text)) if isinstance(text, str) else text
