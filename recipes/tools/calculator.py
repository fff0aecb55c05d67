"""A calculator as a tool of multi-turn recipes."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> int:
    """Compute a sum, difference or product.

    Args:
        expression: Whole numbers with +, -, * and parentheses.
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)} is not a sum, difference or product of whole numbers")
