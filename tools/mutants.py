"""Mutants of a module for ``tools/mutate.py``, made from its source.

A mutant is the module with one change: a sign, a mask, a denominator, a comparison, a constant, a
bound, a detach, an order of arguments. Text for people (docstrings, error messages, annotations) is
not changed. Reading order: mutants, then one function per kind of node."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
RENAMED = {
    **{"min": "max", "max": "min", "maximum": "minimum", "minimum": "maximum"},
    **{"amin": "amax", "amax": "amin", "any": "all", "all": "any"},
    **{"sum": "mean", "mean": "sum", "exp": "expm1", "expm1": "exp", "log": "log1p"},
    **{"sqrt": "square", "square": "abs", "row_mean": "row_sum", "row_sum": "row_mean"},
    **{"masked_sum": "masked_max", "masked_max": "masked_sum", "logsigmoid": "sigmoid"},
    **{"zeros_like": "ones_like", "ones_like": "zeros_like", "k3": "k2", "k2": "k1"},
}
"""Function -> another one that takes the same arguments."""

NOT_LEFT_OUT = {
    *("dim", "numel", "item", "items", "update", "expand_as", "index_add", "new_zeros"),
    *("scatter_reduce", "view"),
}
"""Methods that nothing runs without; their removal is detected without a test."""
SYMMETRIC = {"maximum", "minimum", "max", "min", "index_add", "isinstance", "masked_sum"}

CONFUSED = (
    *(("num_tokens", "num_sequences"), ("num_sequences", "max_len"), ("low", "high")),
    *(("chosen", "rejected"), ("policy", "ref"), ("logprobs", "old_logprobs")),
    *(("logprobs", "ref_logprobs"), ("old_logprobs", "sampler_logprobs"), ("liked", "disliked")),
    *(
        ("clip_low", "clip_high"),
        ("rewards", "values"),
        ("plain", "clipped"),
        ("values", "returns"),
    ),
    *(("policy_chosen", "policy_rejected"), ("ref_chosen", "ref_rejected"), ("gamma", "lam")),
    *(("mean_chosen", "mean_rejected"), ("desirable_weight", "undesirable_weight")),
    *(("trainer", "sampler"), ("values", "old_values"), ("ratio", "mean"), ("raw", "bounded")),
)
"""Names that are easily confused, replaced in functions in which both are known."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One changed module."""

    where: str
    """``file.py:function``, or ``file.py:module``."""
    change: str
    """``before -> after``, followed by ``#2`` for the second of the kind in this place."""
    line: int
    source: str
    """Source of the entire module."""

    @property
    def name(self) -> str:
        return f"{self.where}: {self.change}"


def mutants(name: str, source: str) -> list[Mutant]:
    """Return all mutants of the module ``name`` (a file's name), without duplicates and without
    mutants that compile to the same code."""
    tree = ast.parse(source)
    unchanged = ast.unparse(tree)
    found: list[Mutant] = []
    seen = {unchanged}
    times: Counter[tuple[str, str]] = Counter()
    for site in _sites(tree):
        for changed in _changes(site):
            text = _with(tree, site, changed)
            if text in seen:
                continue
            seen.add(text)
            where = f"{name}:{site.function}"
            change = f"{_short(site.node)} -> {_short(changed)}"
            times[where, change] += 1
            count = times[where, change]
            label = change if count == 1 else f"{change} #{count}"
            found.append(Mutant(where, label, site.node.lineno, text))
    return found


@dataclass(frozen=True)
class _Site:
    node: ast.expr | ast.stmt
    parent: ast.AST
    field: str
    index: int | None
    function: str
    names: frozenset[str]
    """Names known in the function: its arguments and the names it assigns."""


def _sites(tree: ast.Module) -> Iterator[_Site]:
    """Yield every expression and statement with an effect on execution."""

    def walk(node: ast.AST, function: str, names: frozenset[str]) -> Iterator[_Site]:
        for field, child, index in _children(node):
            if isinstance(child, ast.expr | ast.stmt):
                yield _Site(child, node, field, index, function, names)
            if isinstance(child, Function):
                _forget_unread_defaults(child)
                yield from walk(child, child.name, names | _names(child))
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, child.name, names)
            else:
                yield from walk(child, function, names)

    yield from walk(tree, "module", frozenset())


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST, int | None]]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if _is_type(node) and field in ("value", "targets"):
            continue
        many = value if isinstance(value, list) else [value]
        for i, child in enumerate(many):
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield field, child, i if isinstance(value, list) else None


def _forget_unread_defaults(function: Function) -> None:
    """Replace the defaults of keywords that the body never reads (a shared signature) with None,
    because they have no effect."""
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    args = function.args
    for i, arg in enumerate(args.kwonlyargs):
        if arg.arg not in read and args.kw_defaults[i] is not None:
            args.kw_defaults[i] = ast.Constant(None)


def _is_type(node: ast.AST) -> bool:
    """Return whether the node is an alias such as ``Mode = Literal[...]``, or ``__all__``."""
    if not isinstance(node, ast.Assign):
        return False
    target, value = node.targets[0], node.value
    alias = isinstance(value, ast.Subscript) and ast.unparse(value.value) in ("Literal", "Callable")
    return alias or (isinstance(target, ast.Name) and target.id == "__all__")


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and (isinstance(node.value.value, str) or node.value.value is ...)
    )


def _names(function: Function) -> frozenset[str]:
    args = function.args
    known = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    stored = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return frozenset(known | stored)


def _with(tree: ast.Module, site: _Site, changed: ast.AST) -> str:
    """Return the module's source with the site's node replaced by ``changed``."""
    value = getattr(site.parent, site.field)  # house: ok any field of any ast node
    before = value[site.index] if site.index is not None else value

    def put(node: ast.AST) -> None:
        if site.index is not None:
            value[site.index] = node
        else:
            setattr(site.parent, site.field, node)

    put(changed)
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    finally:
        put(before)


def _short(node: ast.AST, limit: int = 90) -> str:
    text = " ".join(ast.unparse(node).split()) or "pass"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _changes(site: _Site) -> Iterator[ast.AST]:
    node = site.node
    if isinstance(node, ast.stmt):
        yield from _statement(site, node)
        return
    for kind, change in _EXPRESSIONS:
        if isinstance(node, kind):
            yield from change(copy.deepcopy(node))
    if isinstance(node, ast.Constant) and node.value == 0 and isinstance(site.parent, ast.Compare):
        yield ast.Constant(-1)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from _confused(node, site.names)


def _statement(site: _Site, node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the removal of a statement if the rest still runs, and a return with another sign or
    order."""
    if isinstance(node, ast.Raise | ast.AugAssign | ast.Expr):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        reads = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        if name in reads:
            yield ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None:
        value = copy.deepcopy(node.value)
        if isinstance(value, ast.Tuple) and len(value.elts) == 2:
            yield ast.Return(ast.Tuple(value.elts[::-1], ast.Load()))
        elif isinstance(value, ast.BinOp | ast.Call):
            yield ast.Return(ast.UnaryOp(ast.USub(), value))


def _binary(node: ast.BinOp) -> Iterator[ast.AST]:
    for other in OPERATORS.get(type(node.op), ()):
        yield ast.BinOp(node.left, other(), node.right)
    if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield node.left
        if not isinstance(node.op, ast.Div):
            yield node.right


def _unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand


def _compare(node: ast.Compare) -> Iterator[ast.AST]:
    for other in COMPARISONS[type(node.ops[0])]:
        yield ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)


def _boolean(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    yield from node.values


def _choice(node: ast.IfExp) -> Iterator[ast.AST]:
    yield node.body
    yield node.orelse


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if value:
            yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(2 * value if value else 1.0)
        if value:
            yield ast.Constant(value / 2)
    elif isinstance(value, str) and value:
        yield ast.Constant(RENAMED.get(value, f"not_{value}"))


def _call(node: ast.Call) -> Iterator[ast.AST]:
    """Yield another function, a removed step, two exchanged arguments, and a removed mask or
    bound."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    name = node.func.id if isinstance(node.func, ast.Name) else name
    if name in RENAMED:
        other = copy.deepcopy(node)
        if isinstance(other.func, ast.Attribute):
            other.func.attr = RENAMED[name]
        elif isinstance(other.func, ast.Name):
            other.func.id = RENAMED[name]
        yield other
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        if name not in NOT_LEFT_OUT:
            yield node.func.value  # x.clamp(min=1) -> x, x.detach() -> x
    elif len(node.args) == 1 or name in ("maximum", "minimum", "max", "min", "pad"):
        wrong = ast.Constant | ast.Tuple | ast.Starred
        yield from (a for a in node.args if not isinstance(a, wrong))
    first = 1 if name == "where" else 0
    for i in range(first, len(node.args) - 1):
        args = list(node.args)
        args[i], args[i + 1] = args[i + 1], args[i]
        if name not in SYMMETRIC and not any(isinstance(a, ast.Constant) for a in args[i : i + 2]):
            yield ast.Call(node.func, args, node.keywords)
    if name == "where":
        yield from (a for a in node.args[1:] if not isinstance(a, ast.Constant))
    if name in ("masked_sum", "masked_max") and isinstance(node.func, ast.Name):
        every = ast.parse(f"torch.ones_like({ast.unparse(node.args[1])})", mode="eval").body
        yield ast.Call(node.func, [node.args[0], every], node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in ("min", "max", "dim", "keepdim"):
            yield ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
        if keyword.arg in ("min", "max"):
            other = copy.deepcopy(node)
            other.keywords[i].arg = RENAMED[keyword.arg]
            yield other


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math", "F")


def _confused(node: ast.Name, names: frozenset[str]) -> Iterator[ast.AST]:
    for pair in CONFUSED:
        if node.id in pair and names.issuperset(pair):
            yield ast.Name(pair[1] if node.id == pair[0] else pair[0], ast.Load())


_EXPRESSIONS: tuple[tuple[type[ast.expr], Callable[..., Iterator[ast.AST]]], ...] = (
    (ast.BinOp, _binary),
    (ast.UnaryOp, _unary),
    (ast.Compare, _compare),
    (ast.BoolOp, _boolean),
    (ast.IfExp, _choice),
    (ast.Constant, _constant),
    (ast.Call, _call),
)
