"""Calculator: exact arithmetic on what the model writes, which is parsed and never evaluated.

Numbers are fractions, so 0.1 + 0.2 is 0.3. Length, depth, exponents and the size of every
intermediate result are bounded: an answer, good or bad, takes milliseconds.
"""

from __future__ import annotations

import ast
import decimal
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from fsm_rollout.errors import ToolError
from fsm_rollout.tools.base import Tool

MAX_CHARS = 1_000
MAX_DEPTH = 300
MAX_BITS = 2_048
"""of a numerator and a denominator"""
MAX_DIGITS = 15
"""significant digits of a result that is not an integer"""

_TOO_LARGE = "a number in the expression is too large"
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})
_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(Tool):
    """Evaluate an arithmetic expression."""

    name = "calculator"
    blocking = False

    def execute(self, expression: str) -> str:
        """expression: numbers, + - * / // % ** and parentheses, such as (3 + 4) * 5"""
        return str_number(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression. Raises ToolError with what is wrong with it."""
    if len(expression) > MAX_CHARS:
        raise ToolError(
            f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed"
        )
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", " ".join(expression.translate(_SIGNS).split()))
    if "^" in text:
        raise ToolError("write ** for powers, not ^")
    if not re.fullmatch(r"[0-9.eE+\-*/%() ]+", text):
        raise ToolError("the expression may contain numbers, + - * / // % ** and parentheses only")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("the expression is not valid arithmetic") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def str_number(value: Fraction) -> str:
    """A number as people write it: 6/2 is 3, 7/2 is 3.5, 1/3 has MAX_DIGITS digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with decimal.localcontext(decimal.Context(prec=MAX_DIGITS)):
        number = (decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)).normalize()
    return format(number, "f") if -10 <= number.adjusted() < MAX_DIGITS else str(number)


def _value(node: ast.expr, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number):
            value = _literal(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            value = Fraction(_BINARY[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case _:
            raise ToolError("the expression is not valid arithmetic")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return value


def _literal(number: int | float) -> Fraction:
    if math.isinf(number):
        raise ToolError(_TOO_LARGE)
    return Fraction(repr(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ToolError("a negative number has no fractional power")
        try:
            return Fraction(repr(float(base) ** float(exponent)))
        except OverflowError:
            raise ToolError(_TOO_LARGE) from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent.numerator) > MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return base**exponent.numerator
