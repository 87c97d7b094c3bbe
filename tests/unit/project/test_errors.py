"""What crosses rooms keeps what it carries; every exit code is documented."""

import ast
import copy
import pickle
from pathlib import Path

import pytest

from rltool.cli import EXIT_CODES
from rltool.errors import EngineRejected, MissingLogprobs, RltoolError, UsageError


class Timed(RltoolError):
    """An error whose constructor takes more than a message."""

    def __init__(self, seconds: float, *, url: str) -> None:
        super().__init__(f"{url} took {seconds:g} s")
        self.url = url


def test_context_goes_around_the_message_and_the_class_stays():
    again = MissingLogprobs("two tokens, one value").with_context(before="sample 3/1: ", after=" (gave up)")
    assert type(again) is MissingLogprobs
    assert str(again) == "sample 3/1: two tokens, one value (gave up)"


@pytest.mark.parametrize("transport", [lambda error: error, copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_the_status_of_a_rejection_survives_context_and_transport(transport):
    again = transport(EngineRejected("no such route", 404).with_context(before="http://a:1: "))
    assert (type(again), again.status, str(again)) == (EngineRejected, 404, "http://a:1: no such route")


def test_a_constructor_with_other_parameters_is_not_called_again():
    again = Timed(2.5, url="http://a:1").with_context(before="step 4: ")
    assert (again.url, str(again)) == ("http://a:1", "step 4: http://a:1 took 2.5 s")


def test_the_original_is_left_as_it_was():
    error = UsageError("wrong flag")
    error.with_context(before="--x: ")
    assert str(error) == "wrong flag"


# -- exit codes

PACKAGE = Path(__file__).resolve().parents[3] / "rltool"
NOT_THE_COMMAND_LINE = {"environments/sandbox_child.py"}
"""Programs of their own, whose codes are read by rltool: the sandbox reports them beside a program's output."""
EXITS = {"sys.exit", "os._exit", "typer.Exit", "SystemExit", "Exit"}


def numbers(node: ast.AST, constants: dict[str, int]) -> set[int]:
    """Those an expression can have: numbers, constants by name, and classes' `exit_code`, which are found as such."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, int) else {1}  # sys.exit("text")
    if isinstance(node, ast.Name):
        return {constants[node.id]} if node.id in constants else set()
    if isinstance(node, ast.IfExp):
        return numbers(node.body, constants) | numbers(node.orelse, constants)
    if isinstance(node, ast.BoolOp):
        return set().union(*(numbers(value, constants) for value in node.values))
    return set()


def exit_codes() -> dict[int, str]:
    """Code -> a file of the package that ends with it: arguments of exits, and what is assigned or returned as
    `exit_code`."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    constants = {
        target.id: node.value.value
        for tree in trees.values() for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int)
    }  # fmt: skip
    found: dict[int, str] = {}
    for file, tree in trees.items():
        name = file.relative_to(PACKAGE).as_posix()
        if name in NOT_THE_COMMAND_LINE:
            continue
        for node in ast.walk(tree):
            values: list[ast.AST] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in EXITS:
                values = list(node.args) or [ast.Constant(0)]
            elif isinstance(node, ast.Assign) and any(ast.unparse(t).endswith("exit_code") for t in node.targets):
                values = [node.value]
            elif isinstance(node, ast.FunctionDef) and node.name == "exit_code":
                values = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
            found |= dict.fromkeys(set().union(*(numbers(value, constants) for value in values)), name)
    return found


def test_every_exit_code_is_documented_and_the_documented_ones_are_used():
    documented = {int(code) for code in EXIT_CODES if code.isdigit()}
    used = exit_codes()
    assert used.keys() == documented, {code: used.get(code, "nowhere") for code in used.keys() ^ documented}


@pytest.mark.parametrize(
    ("source", "code"),
    [("sys.exit(4)", 4), ("raise typer.Exit(0 if ok else 5)", 5), ("error.exit_code = 6", 6), ("os._exit(7)", 7)],
)
def test_a_new_exit_code_is_found(tmp_path, monkeypatch, source, code):
    (tmp_path / "new.py").write_text(source)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    assert code in exit_codes()
