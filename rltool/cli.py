"""The `rltool` command: which verbs there are, and how a failure of any of them ends.

A verb's module is imported only when that verb runs, so `rltool --help` stays fast and needs none of the heavy
packages.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperGroup

from rltool import __version__
from rltool.errors import RltoolError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verb(NamedTuple):
    """`target` is module:attribute, a plain function or a Typer app; `help` is its line in `rltool --help`."""

    target: str
    help: str


VERBS: dict[str, Verb] = {
    "quickstart": Verb(
        "rltool.commands.quickstart:quickstart", "Train a tiny model end to end on this machine, and see it learn."
    ),
    "init": Verb("rltool.commands.init:init", "Write a commented run template (TOML) to edit."),
    "serve-engines": Verb(
        "rltool.commands.serve_engines:serve_engines", "Start inference engines and write their addresses."
    ),
    "router": Verb(
        "rltool.commands.router:app", "Start a router in front of engines; add, remove or list its workers."
    ),
    "gateway": Verb(
        "rltool.commands.gateway:gateway", "Serve agents in the API that they are written for, and record their tokens."
    ),
    "agents": Verb(
        "rltool.commands.agents:agents", "Run agents on this host for a run elsewhere, through its gateway."
    ),
    "convert-ckpt": Verb(
        "rltool.commands.convert_ckpt:convert_ckpt", "Convert a checkpoint: Hugging Face <-> torch_dist, verified."
    ),
    "models": Verb(
        "rltool.commands.models:app", "List model families; of a checkpoint, whether it is supported, and its memory."
    ),
    "plan": Verb("rltool.commands.plan:plan", "Plan a run for a cluster that is not there: layout, memory, links."),
    "train": Verb("rltool.commands.train:train", "Train against running engines."),
    "serve-trainer": Verb(
        "rltool.commands.serve_trainer:serve_trainer", "Serve the trainer to loops of your own, in Tinker's API."
    ),
    "eval": Verb("rltool.commands.evaluate:evaluate", "Evaluate engines that run, or a checkpoint; no trainer."),
    "debug": Verb(
        "rltool.commands.debug:app", "Only roll out (no trainer), only train (no engine), or compare weights."
    ),
    "engines": Verb("rltool.commands.engines:app", "List, add or remove engines of a living run; resume paused ones."),
    "status": Verb("rltool.commands.status:status", "Show what a run's processes are doing."),
    "top": Verb("rltool.commands.top:top", "Watch a run that is training: engines, queue, throughput, rewards."),
    "samples": Verb("rltool.commands.samples:samples", "Show samples of a step: prompts, answers, rewards, tokens."),
    "report": Verb("rltool.commands.report:report", "Write the curves of one or several runs into one HTML page."),
    "diff-dumps": Verb("rltool.commands.diff_dumps:diff_dumps", "Compare two recordings of rollouts, token by token."),
    "logs": Verb("rltool.commands.logs:logs", "Show or follow the logs of a run."),
    "stop": Verb("rltool.commands.stop:stop", "Stop processes that rltool started."),
    "doctor": Verb("rltool.commands.doctor:doctor", "Check what this machine has, and what is missing for what."),
}

EXTRA_OF_PACKAGE = {
    "jinja2": "train",
    "megatron": "train",
    "mlflow": "mlflow",
    "numpy": "train",
    "pyarrow": "train",
    "ray": "train",
    "reasoning_gym": "quickstart",
    "safetensors": "train",
    "sglang": "sglang",
    "sglang_router": "router",
    "tensorboard": "train",
    "torch": "train",
    "transformers": "train",
    "vllm": "vllm",
    "wandb": "wandb",
}
"""Which optional dependency of rltool brings a package, for the message when it is missing."""

INTERRUPTED = 130

EXIT_CODES: dict[str, str] = {
    "0": "done; a run or a service that SIGTERM or `rltool stop` ended in order",
    "1": "failure; or the answer is no: `models PATH` (not supported), `models check`, `debug weights` and `diff-dumps`"
    " (something differs), `doctor` (something is broken), `plan` (does not fit), `engines` (one of them failed)",
    "2": "wrong usage or configuration; nothing was started",
    "3": "only of an attempt, the child of `train --restarts`: another one would not help. The command itself"
    " ends with 1 then",
    "4": "a host of ranks, or that of Ray's head, was lost: go on with `train --resume` on those that are left",
    "130": "Ctrl-C",
    "128 + N": "ended by signal N before it could end in order: `debug rollout-only` after SIGTERM (143), `train "
    "--restarts` whose last attempt was killed (137 by SIGKILL, often for memory)",
}
"""What the command line can end with; docs/cli.md shows this table, a test compares it with the code."""


def load_command(name: str) -> Any:
    """The real click command behind a verb; imports its module."""
    module_name, attribute = VERBS[name].target.split(":")
    target = getattr(importlib.import_module(module_name), attribute)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(target)
        target = single
    command = typer.main.get_command(target)
    command.name = name
    _escape_help(command)
    return command


def _escape_help(command: Any) -> None:
    """Typer prints help as rich markup, in which `[eval]` would be the name of a style, and vanish. Ours has none."""
    from rich.markup import escape

    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = escape(part.help)
    for inner in getattr(command, "commands", {}).values():
        _escape_help(inner)


class LazyVerbs(TyperGroup):
    """Help and suggestions come from the table; only the verb that is run is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in VERBS:
            return args[0], load_command(args[0]), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyVerbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models: engines, router and trainer, each its own process.",
)


def _print_version(wanted: bool) -> None:
    """rltool's version on the first line, for scripts, and those of its parts as they are installed here."""
    if not wanted:
        return
    from rltool.report.page import installed_versions
    from rltool.terminal import write_line

    parts = {"rltool": __version__} | {name: v for name, v in installed_versions().items() if name != "rltool"}
    for name, version in parts.items():
        write_line(f"{name} {version}")
    raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the versions of rltool and its parts."
    ),
) -> None:
    pass


for _name, _verb in VERBS.items():
    app.command(_name, help=_verb.help)(lambda: None)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits as in EXIT_CODES."""
    code: list[int] = []
    if argv is None:  # the process is ours; registered first, it runs after what libraries have registered
        atexit.register(_leave, code)
    try:
        _run(argv)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code.append(end.code or 0)
        raise


def _leave(code: Sequence[int]) -> None:
    """The end of the process without the interpreter's last collections, which take all apart that torch and Ray have
    made, one or two seconds long, more on a busy host: a person waits for the prompt."""
    if not code:  # something unexpected was raised
        return
    with suppress(OSError, ValueError):  # closed, or without a reader
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code[0])


def _run(argv: Sequence[str] | None) -> None:
    try:
        app(args=None if argv is None else list(argv), prog_name="rltool")
    except RltoolError as error:
        _fail(error, error.exit_code)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF_PACKAGE.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        _fail(
            RltoolError(
                f"this needs the package {error.name!r}, which is not installed here: pip install 'rltool[{extra}]'"
            ),
            1,
        )
    except PermissionError as error:
        _fail(
            UsageError(
                f"no permission: {error.filename or error}; rltool runs here as user id {os.geteuid()}, who may not "
                "read or write that"
            ),
            UsageError.exit_code,
        )
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fail(error: RltoolError, exit_code: int) -> None:
    """One message on stderr; the traceback only for who asks for it with RLTOOL_TRACEBACK=1."""
    if os.environ.get("RLTOOL_TRACEBACK") == "1":
        raise error
    from rich.text import Text

    from rltool.terminal import Console, visible

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), (visible(str(error)), "red")))
    sys.exit(exit_code)
