"""A calculator as a tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
MAX_DIGITS = 400
"""Of any number on the way: a few characters of exponents would keep a core busy for years."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return str(_value(tree.body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _combined(type(op), _value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is neither a number nor + - * / // % **")


def _combined(op: type[ast.operator], left: int | float, right: int | float) -> int | float:
    is_power = op is ast.Pow and isinstance(left, int) and isinstance(right, int) and abs(left) > 1
    if is_power and right * int(abs(left)).bit_length() > MAX_DIGITS * 3:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    result = _BINARY[op](left, right)
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    if isinstance(result, int) and result.bit_length() > MAX_DIGITS * 4:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return result
