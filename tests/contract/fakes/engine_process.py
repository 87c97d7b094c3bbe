"""The fake vLLM as a process of its own, started with the command line of the real one.

    write_python(DIRECTORY) -> a file that stands for the interpreter of an engine's environment
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rltool import __version__

REPOSITORY = Path(__file__).parents[3]


def write_python(directory: Path) -> Path:
    """In it vLLM and this rltool seem to be installed; whatever module it is to run, it runs this fake."""
    program = directory / "python"
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$2" = -c ] && {{ echo \'{{"engine": true, "rltool": "{__version__}"}}\'; exit; }}\n'
        f'export PYTHONPATH="{REPOSITORY}"\n'
        f'exec "{sys.executable}" -m tests.contract.fakes.engine_process "$@"\n'
    )
    program.chmod(0o755)
    return program


class Names(type):
    """Of a class that has all names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (Nothing,), {})


class Nothing(metaclass=Names):
    """What stands for a class, a dtype or a decorator of torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, function: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        return Nothing()


class NoTorch:
    """Finds in the place of torch what has all names and does nothing: to import torch is two thirds of the start of
    this process, which is sent no weights."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Nothing, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    sys.meta_path.insert(0, NoTorch())
    from tests.contract.fakes.vllm import FakeVllm

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--runner", choices=["auto", "generate", "pooling"], default="auto")
    parser.add_argument("--fail", action="store_true", help="end at once, as an engine does that runs out of memory")
    arguments, _ = parser.parse_known_args(sys.argv[3:])  # after -m MODULE
    print("this is the fake engine", flush=True)
    if arguments.fail:
        sys.exit("out of memory")
    server = FakeVllm(key=Path(os.environ["RLTOOL_KEY_FILE"]).read_text().strip())
    server.port, server.model_id = arguments.port, arguments.served_model_name
    server.task = "classify" if arguments.runner == "pooling" else "generate"
    server.boot_id = os.environ["RLTOOL_BOOT_ID"]
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
