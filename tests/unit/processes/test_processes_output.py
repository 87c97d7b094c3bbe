"""What a user's functions print is kept, and kept bounded."""

import os
import subprocess
import sys

from rltool.processes.output import BoundedLog

LIMIT = 1000


def append(log, data):
    with log.open("ab") as stream:
        stream.write(data)


def test_a_log_within_its_limit_is_left_alone(tmp_path):
    log = tmp_path / "x.log"
    append(log, b"x" * LIMIT)
    BoundedLog(log, limit=LIMIT).look()
    assert log.read_bytes() == b"x" * LIMIT and os.listdir(tmp_path) == ["x.log"]


def test_a_flooded_log_is_cut_and_says_how_much_is_gone_and_where_its_end_is(tmp_path):
    log = tmp_path / "x.log"
    bounded = BoundedLog(log, limit=LIMIT)
    append(log, b"a" * 500 + b"b" * LIMIT)
    bounded.look()
    assert log.read_text() == "[rltool: 1500 bytes were cut off here so far; the last 1000 are in x.log.1]\n"
    assert bounded.earlier.read_bytes() == b"b" * LIMIT
    assert bounded.earlier.stat().st_mode & 0o777 == 0o600
    first = log.stat().st_size
    append(log, b"c" * 2000)
    bounded.look()
    assert f"[rltool: {1500 + first + 2000} bytes" in log.read_text()
    assert bounded.earlier.read_bytes() == b"c" * LIMIT


def test_a_log_that_was_removed_is_no_error(tmp_path):
    BoundedLog(tmp_path / "none.log", limit=LIMIT).look()
    assert not os.listdir(tmp_path)


FLOOD = """
import subprocess, sys
from pathlib import Path
from rltool.processes import output
output.LOOK_SECONDS, output.LOG_BYTES = 0.001, 1000
log = Path(sys.argv[1])
output.redirect_output(log)
while "cut off" not in log.read_text():
    print("printed by a reward" * 5, flush=True)
    subprocess.run(["echo", "printed by its child"], check=True)
print("the last word", flush=True)
"""


def test_a_process_that_floods_its_log_is_bounded_and_its_last_word_is_there(tmp_path):
    log = tmp_path / "x.log"
    subprocess.run([sys.executable, "-c", FLOOD, str(log)], check=True, timeout=60)
    assert log.with_name("x.log.1").stat().st_size <= 1000
    assert log.read_text().startswith("[rltool: ") and log.read_text().endswith("the last word\n")
