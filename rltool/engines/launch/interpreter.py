"""The Python interpreter that an engine runs in: rltool's own, or one of another environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rltool import __version__
from rltool.engines.dialects.table import dialect, launches
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


def check_engine_python(python: Path, engine: str) -> None:
    """Raises UsageError, with the pip command that fixes it, unless `python` has the engine and, where that loads
    rltool's plugin and middleware, this very rltool: their wire format is this version's.
    """
    needed = launches(engine).installation
    # From "/" and with -P, so that nothing counts as installed because it lies in the current directory.
    argv = [str(python.absolute()), "-P", "-c", _QUESTION, needed.module]
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
        wanted = f"'rltool[{needed.extra}]=={__version__}'" if needed.extra else needed.packages[0]
        raise UsageError(
            f"{python} has no package {needed.module!r}: {python} -m pip install {wanted}, "
            "or name an environment that has it with --engine-python"
        )
    if needed.loads_rltool and found["rltool"] != __version__:
        has = f"rltool {found['rltool']}" if found["rltool"] else "no rltool"
        raise UsageError(
            f"{python} has {has}, {dialect(engine).label} needs {__version__} there for its plugin: "
            f"{python} -m pip install rltool=={__version__}"
        )
