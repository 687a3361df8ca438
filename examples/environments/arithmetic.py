"""A calculator as a tool: `tools: [examples/environments/arithmetic.py:calculate]`.

It reads numbers, + - * / and parentheses, and runs nothing else that a policy may write.
"""

import ast
import operator
from collections.abc import Callable

_LONGEST = 200
_OPERATIONS: dict[type[ast.operator | ast.unaryop], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (3 + 4) * 2.5.

    Returns:
        Its value.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses")
