"""What reaches a terminal: foreign text is shown, whatever stands in it, and none of it is obeyed."""

from __future__ import annotations

import io

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rltool.cli import main
from rltool.errors import RltoolError
from rltool.terminal import Console, visible, write_line
from rltool.training.console import LoggedConsole
from tests.hostile import HOSTILE, SHOWN


def screen(**options):
    return Console(file=io.StringIO(), force_terminal=True, width=200, **options)


def test_control_characters_and_turned_text_are_written_out_and_words_of_all_languages_stay():
    assert visible("a\x1b]0;x\x07\r\u202eb\x9b31m\u2028") == "a\\x1b]0;x\\x07\\r\\u202eb\\x9b31m\\u2028"
    plain = "ta\tb\nc \u00a0\u3000 \u65e5\u672c na\u00efve \U0001f600 [/INST]"
    assert visible(plain) == plain
    assert visible("\ud800") == "\\ud800", "or it could not be written at all"


def table(cell, title):
    made = Table("name", title=title)
    made.add_row(cell)
    return made


@pytest.mark.parametrize(
    "put",
    [
        lambda console, text: console.print(text),
        lambda console, text: console.print(text, style="yellow"),
        lambda console, text: console.print(Text(text)),
        lambda console, text: console.print(Text.assemble(("error: ", "bold red"), text)),
        lambda console, text: console.print(Group(Text(text), text)),
        lambda console, text: console.print(table(text, "t")),
        lambda console, text: console.print(table(Text(text, "red"), text)),
        lambda console, text: console.print("before", text, {text: text}),
    ],
)
def test_no_way_of_printing_sends_an_escape_or_loses_a_bracket(put):
    console = screen(color_system=None)
    put(console, HOSTILE)
    shown = console.file.getvalue()
    assert "\x1b" not in shown and "\x07" not in shown
    assert all(part in shown for part in SHOWN)


def test_a_spinner_shows_what_it_is_given():
    console = screen(color_system=None)
    with console.status(HOSTILE) as status:
        status.update(HOSTILE)
        frames = "".join(segment.text for segment in console.render(status.renderable))
    assert all(part in frames for part in SHOWN) and "\x1b" not in frames


def test_colours_are_ours_alone():
    console = screen(color_system="standard")
    console.print("\x1b[31mred[/]", style="yellow")
    assert console.file.getvalue() == "\x1b[33m\\x1b[31mred[/]\x1b[0m\n"


def test_a_line_of_text_is_never_wrapped():
    console = screen(color_system=None)
    console.print("word " * 100)
    assert console.file.getvalue() == "word " * 100 + "\n"


def test_the_log_of_a_run_gets_what_the_screen_gets(tmp_path):
    console = LoggedConsole(screen(color_system=None), tmp_path / "train.log")
    console.print(HOSTILE, style="yellow")
    logged = (tmp_path / "train.log").read_text()
    assert "\x1b" not in logged and all(part in logged for part in SHOWN)


def test_lines_without_a_console_are_shown_too(capsys):
    write_line(HOSTILE)
    out = capsys.readouterr().out
    assert "\x1b" not in out and all(part in out for part in SHOWN)


def test_an_error_that_quotes_others_is_shown_and_not_obeyed(monkeypatch, capsys):
    def fails(*_, **__):
        raise RltoolError(f"reward my:f raised ValueError: {HOSTILE}")

    monkeypatch.setattr("rltool.cli.app", fails)
    with pytest.raises(SystemExit):
        main(["status"])
    error = capsys.readouterr().err
    assert "\x1b" not in error and "\x07" not in error and all(part in error for part in SHOWN)
