"""The Python interpreter that an engine runs in: rltool's own, or one of another environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rltool import __version__
from rltool.config.serve import EngineKind
from rltool.errors import UsageError

_SECONDS = 60.0
_QUESTION = """
import importlib.util, json, sys
found = {"engine": importlib.util.find_spec(sys.argv[1]) is not None, "rltool": None}
if importlib.util.find_spec("rltool") is not None:
    import rltool
    found["rltool"] = rltool.__version__
print(json.dumps(found))
"""


def default_engine_python() -> Path:
    """This interpreter. Not resolved: a virtual environment's python is a link,
    and following it leaves the environment."""
    return Path(sys.executable)


def check_engine_python(python: Path, engine: EngineKind) -> None:
    """Raises UsageError, with the pip command that mends it, unless `python` has the engine and, for vLLM, this very
    rltool.

    vLLM loads rltool's plugin and middleware, whose wire format is this version's; SGLang is served as it comes.
    """
    # From "/" and with -P, so that nothing counts as installed because it lies in the current directory.
    argv = [str(python.absolute()), "-P", "-c", _QUESTION, engine]
    try:
        reply = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, cwd="/", check=True)
    except FileNotFoundError as error:
        raise UsageError(f"--engine-python {python}: no such file") from error
    except subprocess.CalledProcessError as error:
        raise UsageError(
            f"--engine-python {python}: it cannot run Python 3.11 or newer: {error.stderr.strip()[-500:]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--engine-python {python}: it cannot be run: {error}") from error
    found = json.loads(reply.stdout.strip().splitlines()[-1])
    if not found["engine"]:
        raise UsageError(
            f"{python} has no package {engine!r}: {python} -m pip install 'rltool[{engine}]=={__version__}', "
            "or name an environment that has it with --engine-python"
        )
    if engine == "vllm" and found["rltool"] != __version__:
        has = f"rltool {found['rltool']}" if found["rltool"] else "no rltool"
        raise UsageError(
            f"{python} has {has}, vLLM needs {__version__} there for its plugin: "
            f"{python} -m pip install rltool=={__version__}"
        )
