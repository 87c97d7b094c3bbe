"""The GPUs of this host, found without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltool.processes.run_directory import list_runs
from rltool.processes.state import is_alive, read_states

_PROC = Path("/proc/driver/nvidia/gpus")
_QUERY_SECONDS = 30.0


@dataclass(frozen=True)
class Gpu:
    """`memory_mib` and `capability` (CUDA's compute capability, such as (9, 0)) are None where nvidia-smi is missing or
    does not know them. uuid: as CUDA writes it, without "GPU-"; "" where it is not known."""

    index: int
    name: str
    memory_mib: int | None = None
    uuid: str = ""
    capability: tuple[int, int] | None = None


def visible_gpus() -> list[Gpu]:
    """NVIDIA GPUs of this host, less those that CUDA_VISIBLE_DEVICES hides, with the host's own indices."""
    return hide_gpus(_all_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_uuids(indices: Sequence[int]) -> tuple[str, ...]:
    """The UUIDs of these GPUs of the host, regardless of CUDA_VISIBLE_DEVICES; () where one is not known."""
    known = {gpu.index: gpu.uuid for gpu in _all_gpus()} if indices else {}
    found = tuple(known.get(index, "") for index in indices)
    return found if all(found) else ()


def _all_gpus() -> list[Gpu]:
    return _from_nvidia_smi() or _from_proc(_PROC)


def hide_gpus(gpus: list[Gpu], cuda_visible_devices: str | None) -> list[Gpu]:
    """Keep those that the variable lists. UUIDs in it are not understood: then nothing is hidden here, and CUDA
    decides."""
    if cuda_visible_devices is None:
        return gpus
    named = [part.strip() for part in cuda_visible_devices.split(",") if part.strip()]
    if not all(part.isdigit() for part in named):
        return gpus
    return [gpu for gpu in gpus if str(gpu.index) in named]


def restricts_by_uuid() -> bool:
    """CUDA_VISIBLE_DEVICES names GPUs otherwise than by index: which are hidden is not known here."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return not all(part.strip().isdigit() for part in named.split(",") if part.strip())


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Lines of `index, name, memory.total, uuid` in MiB without header and units; `compute_cap` may follow."""
    gpus = []
    for line in text.strip().splitlines():
        index, name, memory, uuid, *rest = (part.strip() for part in line.split(","))
        mib = int(memory) if memory.isdigit() else None
        gpus.append(Gpu(int(index), name, mib, uuid.removeprefix("GPU-"), _capability(rest[0] if rest else "")))
    return gpus


def _capability(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def gpus_in_use(root: Path | None = None) -> dict[int, str]:
    """GPU index -> "run NAME, ROLE" for every GPU that a living process of some run on this host holds."""
    held: dict[int, str] = {}
    for run in list_runs(root):
        for state in read_states(run):
            if state.gpus and is_alive(state):
                held.update(dict.fromkeys(state.gpus, f"run {run.name}, {state.role}"))
    return held


def _from_nvidia_smi() -> list[Gpu]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for fields in ("index,name,memory.total,uuid,compute_cap", "index,name,memory.total,uuid"):
        argv = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            reply = subprocess.run(argv, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
        except subprocess.CalledProcessError:  # drivers before 510 refuse compute_cap, and then all of it
            continue
        except (OSError, subprocess.SubprocessError):  # a driver that does not answer: /proc may still have them
            return []
        return parse_nvidia_smi(reply.stdout)
    return []


def _from_proc(directory: Path) -> list[Gpu]:
    if not directory.is_dir():
        return []
    return [Gpu(index, entry.name, uuid=_uuid(entry)) for index, entry in enumerate(sorted(directory.iterdir()))]


def _uuid(entry: Path) -> str:
    try:
        text = (entry / "information").read_text()
    except OSError:
        return ""
    found = re.search(r"^GPU UUID:\s*GPU-(\S+)", text, re.MULTILINE)
    return found[1] if found else ""
