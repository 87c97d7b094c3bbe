"""A child of test_convert_memory.py: how much memory a conversion takes beyond what a conversion of a tiny model took.

Arguments: directory of the tiny model, of the large one, an empty directory. Prints one JSON object of bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def peak_of(convert, source: Path, target: Path) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    convert(source, target)
    return status("VmHWM") - before


def main() -> None:
    tiny, large, work = map(Path, sys.argv[1:])
    # Imports, thread pools and allocator arenas: the constant.
    hf_to_torch_dist(tiny, work / "tiny")
    torch_dist_to_hf(work / "tiny", work / "tiny_back")
    peaks = {"constant": status("VmHWM")}
    peaks["to_torch_dist"] = peak_of(hf_to_torch_dist, large, work / "dist")
    peaks["to_hf"] = peak_of(torch_dist_to_hf, work / "dist", work / "back")
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
