import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rltool import __version__
from rltool.cli import EXTRA_OF_PACKAGE, VERBS, load_command, main
from rltool.errors import RltoolError, UsageError

HEAVY = (
    "torch", "ray", "vllm", "sglang_router", "megatron", "transformers", "pydantic", "aiohttp", "requests", "numpy",
)  # fmt: skip


def run_main(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


def test_help_imports_none_of_the_heavy_packages():
    code = (
        "import sys\n"
        "from rltool.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in VERBS)


@pytest.mark.parametrize("name", ["status", "logs", "stop", "doctor", "init", "engines", "router", "serve-engines"])
def test_a_command_of_the_base_installation_needs_no_heavy_package(name):
    code = (
        f"import sys\nfrom rltool.cli import load_command\nload_command({name!r})\n"
        "heavy = ('torch', 'ray', 'vllm', 'sglang_router', 'megatron', 'transformers')\n"
        "found = [n for n in heavy if n in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", list(VERBS))
def test_every_verb_exists_and_has_help(name, capsys):
    assert load_command(name).name == name
    code, output = run_main([name, "--help"], capsys)
    assert code == 0
    assert "Usage" in output


def described(command, *path):
    """(words of the command line, help text) of a verb, of its subcommands, and of all options."""
    for part in (command, *command.params):
        if getattr(part, "help", None):
            yield path, part.help
    for name, inner in getattr(command, "commands", {}).items():
        yield from described(inner, *path, name)


@pytest.mark.parametrize("name", list(VERBS))
def test_no_help_loses_what_stands_in_brackets(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    with monkeypatch.context() as as_written:
        as_written.setattr("rltool.cli._escape_help", lambda _: None)
        texts = list(described(load_command(name), name))
    shown = {}
    for path, text in texts:
        if path not in shown:
            shown[path] = run_main([*path, "--help"], capsys)[1]
        for bracketed in re.findall(r"\[+[^\]]+\]+", text):
            assert bracketed in shown[path], f"{' '.join(path)}: {bracketed}"


def test_the_help_that_names_tables_of_the_configuration_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert "start its [[engines.groups]], of all its models" in run_main(["serve-engines", "--help"], capsys)[1]
    assert "Evaluate the sets of [eval] with engines" in run_main(["eval", "--help"], capsys)[1]


def test_an_unknown_command_or_option_is_wrong_usage(capsys):
    code, output = run_main(["trian"], capsys)
    assert code == 2
    assert "train" in output
    assert run_main(["status", "--no-such-option"], capsys)[0] == 2


@pytest.fixture
def behind_status(monkeypatch):
    def put(function):
        import rltool.commands.status as module

        monkeypatch.setattr(module, "status", function)

    return put


@pytest.mark.parametrize(("error", "code"), [(RltoolError("it broke"), 1), (UsageError("wrong flag"), 2)])
def test_an_error_of_ours_is_one_message_without_traceback(behind_status, capsys, monkeypatch, error, code):
    monkeypatch.delenv("RLTOOL_TRACEBACK", raising=False)

    def failing() -> None:
        raise error

    behind_status(failing)
    found, output = run_main(["status"], capsys)
    assert found == code
    assert output.strip() == f"error: {error}"


def test_the_traceback_is_there_for_who_asks(behind_status, monkeypatch):
    monkeypatch.setenv("RLTOOL_TRACEBACK", "1")

    def failing() -> None:
        raise UsageError("wrong flag")

    behind_status(failing)
    with pytest.raises(UsageError):
        main(["status"])


def test_an_interrupt_ends_with_130(behind_status, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    behind_status(interrupted)
    assert run_main(["status"], capsys)[0] == 130


def test_a_missing_optional_package_names_the_extra_that_brings_it(behind_status, capsys):
    def needs_ray() -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray.util")

    behind_status(needs_ray)
    code, output = run_main(["status"], capsys)
    assert code == 1
    assert "pip install 'rltool[train]'" in output


def test_a_missing_module_of_our_own_is_a_bug_and_not_hidden(behind_status):
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'rltool.gone'", name="rltool.gone")

    behind_status(broken)
    with pytest.raises(ModuleNotFoundError):
        main(["status"])


def test_every_extra_that_an_error_names_is_declared():
    import tomllib
    from pathlib import Path

    import rltool

    project = tomllib.loads((Path(rltool.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert set(EXTRA_OF_PACKAGE.values()) <= set(project["optional-dependencies"])


def test_main_is_what_python_dash_m_runs():
    assert importlib.util.find_spec("rltool.__main__") is not None
    done = subprocess.run([sys.executable, "-m", "rltool", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip()


def test_a_file_that_this_user_may_not_read_is_one_line_and_wrong_usage(monkeypatch, capsys):
    def refuse(**_):
        raise PermissionError(13, "Permission denied", "/secret/config.json")

    monkeypatch.setattr("rltool.cli.app", refuse)
    code, output = run_main([], capsys)
    assert code == 2 and "no permission: /secret/config.json" in output and "Traceback" not in output


def test_the_version_names_all_parts_that_are_installed(capsys):
    code, output = run_main(["--version"], capsys)
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    assert code == 0 and output.startswith(f"rltool {__version__}\n")
    assert lines["torch"] == importlib.metadata.version("torch") and lines["python"] == platform.python_version()


def test_the_version_stands_in_one_place():
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rltool.__version__"}
    assert f"## {__version__}" in (root / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], "train"),
        (["train", "--resu"], "--resume"),
        (["debug", "rollout-"], "rollout-only"),
        (["samples", "--so"], "--sort"),
    ],
)
def test_the_shell_completes_verbs_and_their_options(words, expected):
    environment = {
        **os.environ, "_RLTOOL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["rltool", *words]),
        "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "rltool"], capture_output=True, text=True, timeout=60, env=environment)
    assert expected in done.stdout.split(), done.stderr


ENDS = """
import atexit, sys

class Cycle:
    def __del__(self):
        print("collected")

cycle = Cycle()
cycle.itself = cycle
from rltool.cli import main
try:
    main()
finally:
    atexit.register(print, "a library's end")
"""


@pytest.mark.parametrize(("words", "code", "says"), [(["--help"], 0, "Usage"), (["no-such-verb"], 2, "No such")])
def test_a_command_ends_with_its_code_and_all_it_said_but_not_with_the_interpreters_last_collections(words, code, says):
    """After a training they would take 240,000 objects of torch and Ray apart."""
    done = subprocess.run([sys.executable, "-c", ENDS, *words], capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert "a library's end" in done.stdout and "collected" not in done.stdout
