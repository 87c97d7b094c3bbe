import pytest

from rltool.processes.logs import follow, last_lines


@pytest.mark.parametrize("count", [1, 3, 10_000, 30_000])
def test_last_lines_are_those_of_the_whole_file(tmp_path, count):
    lines = [f"line {i} " + "x" * (i % 90) for i in range(20_000)]
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n")
    assert last_lines(log, count) == lines[-count:]


def test_last_lines_keep_an_unfinished_line_and_odd_bytes(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"one\n\xff two")
    assert last_lines(log, 2) == ["one", "\N{REPLACEMENT CHARACTER} two"]


def test_last_lines_of_a_missing_or_empty_file_are_none(tmp_path):
    assert last_lines(tmp_path / "missing", 5) == []
    (tmp_path / "empty").touch()
    assert last_lines(tmp_path / "empty", 5) == []


def test_follow_yields_whole_lines_of_every_file_with_their_role(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("old\n")
    steps = iter(
        [
            lambda: a.open("a").write("first half"),
            lambda: (a.open("a").write(" second half\n"), b.write_text("born late\n")),
            lambda: b.open("a").write("cut off"),
        ]
    )
    rounds = iter([True, True, True, False])
    got = list(follow({"a": a, "b": b}, lines=1, sleep=lambda _: next(steps)(), go_on=lambda: next(rounds)))
    assert got == [("a", "old"), ("a", "first half second half"), ("b", "born late"), ("b", "cut off")]


def test_follow_goes_on_at_the_beginning_of_a_log_that_was_cut(tmp_path):
    log = tmp_path / "a"
    log.write_text("a long line that was there before\n")
    steps = iter([lambda: log.write_text("cut\n"), lambda: log.open("a").write("on\n")])
    rounds = iter([True, True, False])
    got = list(follow({"a": log}, sleep=lambda _: next(steps)(), go_on=lambda: next(rounds)))
    assert got == [("a", "cut"), ("a", "on")]
