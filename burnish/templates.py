"""Render chat templates with limits. Templates come with models and are untrusted.

Jinja's sandbox protects Python's internals, but does not limit time and memory: nested loops,
``'a' * 10**9`` or a text that is doubled forty times. Here every rendering has a budget of steps
and characters. transformers compiles templates with the class ``ImmutableSandboxedEnvironment`` of
its module; the first call of :func:`render_chat` replaces it with :class:`Bounded`. Renderings
outside :func:`render_chat` have no budget and are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from datetime import datetime
from functools import cache, update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from jinja2 import nodes, pass_context
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from burnish.template_charges import (
    CHARGED_TESTS,
    STEP,
    TemplateLimitError,
    charged_filter,
    charged_test,
    check_power,
    check_product,
    counted,
    left_of_budget,
    size,
    spend,
    spend_for,
    spend_for_field,
    spend_for_format,
    spend_for_replace,
)

if TYPE_CHECKING:  # recipes are checked without transformers
    from transformers import PreTrainedTokenizerBase

__all__ = ["TemplateLimitError", "of_conversation", "render_chat", "variables", "with_defaults"]

MAX_TEMPLATE_CHARS = 1 << 20
"""Longest template. Published templates have up to about 30,000 characters."""
MAX_WORK = 100_000_000
"""Budget of one rendering. Each character created costs 1, each loop iteration :data:`STEP`, each
call 5 times :data:`STEP`. Spending all of it takes a few seconds."""

_today: ContextVar[datetime | None] = ContextVar("today", default=None)
_run_date: list[datetime | None] = [None]
_SCALARS = frozenset({bool, int, float, type(None)})
_UNBOUNDED = frozenset({"translate"})
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})


_TOOL_USE = "tool_use"
_LISTED = "{%- if not tools %}{% set tools = [] %}{% endif %}\n"
"""Beginning of the template for tools: it loops over them, also if a conversation shows none."""
_selected: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, PreTrainedTokenizerBase]] = (
    WeakKeyDictionary()
)


def of_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the template of a conversation, if its templates have names:
    ``tool_use`` if tools are shown or messages have tool calls or results, else ``default``.

    Whoever renders the beginning of a conversation, too, renders it with the result: the beginning
    alone may have no call. The result is for rendering only; other modules know facts about
    ``tokenizer`` itself.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return tokenizer
    calls = tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
    name = _TOOL_USE if calls and _TOOL_USE in templates else "default"
    if name not in templates:
        return tokenizer  # transformers raises an error with the names
    text = _LISTED + templates[name] if name == _TOOL_USE else templates[name]
    known = _selected.setdefault(tokenizer, {})
    if name not in known or known[name].chat_template != text:
        known[name] = copy(tokenizer)
        known[name].chat_template = text
    return known[name]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    today: datetime | None = None,
    **options: Any,
) -> str:
    """Return the text of ``tokenizer.apply_chat_template``, of several templates with that of
    :func:`of_conversation`. ``today``: date for templates that write one; None is
    :func:`current_date`.

    Raises jinja2.TemplateError as that method does, and TemplateLimitError if the template is too
    large or exceeds its budget.
    """
    tokenizer = of_conversation(tokenizer, messages, options.get("tools"))
    templates = tokenizer.chat_template
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        if len(text or "") > MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(
                f"the chat template has {len(text)} characters, but the limit is "
                f"{MAX_TEMPLATE_CHARS}"
            )
    _use_bounded()
    token, date = left_of_budget.set([MAX_WORK]), _today.set(today)
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (MemoryError, RecursionError, OverflowError) as error:
        raise TemplateLimitError(f"{type(error).__name__}: {error}") from error
    finally:
        left_of_budget.reset(token)
        _today.reset(date)


def with_defaults(template: str, values: Mapping[str, str | int | float | bool | None]) -> str:
    """Return a template in which variables that a rendering does not set have ``values``.

    The values become part of the text, so every user of a tokenizer with this template, an exported
    model included, renders the same conversation.
    """
    sets = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in values.items()
    ]
    return "".join(sets) + "\n" + template if sets else template  # (Jinja drops this newline)


def _literal(value: str | int | float | bool | None) -> str:
    """Return a JSON scalar as a literal of Jinja, whose strings have the escapes of Python."""
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)


def variables(template: str) -> set[str]:
    """Return the names that a template reads from outside. Raises jinja2.TemplateError if it is
    invalid."""
    from transformers.utils import chat_template_utils

    _use_bounded()
    environment = chat_template_utils._compile_jinja_template(template).environment
    return find_undeclared_variables(environment.parse(template)) - set(environment.globals)


def _strftime_now(pattern: str) -> str:
    """Replace the function of the same name that transformers gives to templates."""
    return (_today.get() or current_date()).strftime(pattern)


def current_date() -> datetime:
    """Return the date that chat templates write: that of the run in this process, else now."""
    return _run_date[0] or datetime.now()


@contextmanager
def date_of_run() -> Iterator[Callable[[datetime], None]]:
    """Yield a function that sets the date of the run in this process, in all threads, until the end
    of the block. A run that is resumed, or continues after midnight, renders the same prompts."""

    def fix(date: datetime) -> None:
        _run_date[0] = date

    try:
        yield fix
    finally:
        _run_date[0] = None


def _check_text(name: str, text: str | bytes, given: Sequence[Any]) -> None:
    """Check a call of the method ``name`` of a text and charge for its result in advance."""
    if name in _UNBOUNDED:
        raise TemplateLimitError(f"{name} is not allowed")
    spend(len(text) // STEP)
    if name in _PADDING:
        tabs = len(text) if name == "expandtabs" else 1
        spend(tabs * sum(int(width) for width in given if isinstance(width, int)))
    elif name in ("format", "format_map"):
        spend(len(text))
    elif name == "replace" and len(given) > 1:
        spend_for_replace(text, *given[:2])
    elif name == "join" and given and isinstance(given[0], list | tuple):
        spend(len(text) * len(given[0]) + sum(map(size, given[0])))


class _ChargedFields(SandboxedFormatter):
    """``str.format`` with every field charged to the budget."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend_for(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        spend_for_field(value, format_spec)
        return super().format_field(value, format_spec)


class _ChargedEscapedFields(_ChargedFields, SandboxedEscapeFormatter):
    """The same for Markup."""


@pass_context  # so that Jinja does not compute it once, when it compiles the template
def _shown(_context: Any, value: Any) -> Any:
    """Charge for a value that is written out or compared, and return it."""
    left = left_of_budget.get()
    if left is None:
        return value
    kind = type(value)
    if kind is str:
        left[0] -= len(value)
    elif kind in _SCALARS:
        left[0] -= 1
    else:
        spend_for(value)
    if left[0] < 0:
        spend(0)
    return value


@pass_context
def _searched(context: Any, value: Any) -> Any:
    """Charge for a search in a value, and return it. One in a mapping takes one step."""
    return value if isinstance(value, dict) else _shown(context, value)


def _sliced(value: Any) -> Any:
    """Charge for a part of a text or a list, and return it."""
    spend(size(value))
    return value


class _AddCharges(NodeTransformer):
    """A transformer that makes loops, ``~`` and output charge the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        if node.recursive:  # the items of loop(...) are charged by the call, the text by the body
            charge = _filtered(nodes.Const(text), "_spent")
            node.body.insert(0, nodes.ExprStmt(charge))
            text = 0
        node.iter = _filtered(node.iter, "_counted", nodes.Const(STEP + text))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charge for the operands, unless a constant bounds the work."""
        self.generic_visit(node)
        for operand in node.ops:
            if _is_bounded(operand.expr):
                continue
            if operand.op in ("in", "notin"):
                operand.expr = _filtered(operand.expr, "_searched")
            elif not _is_bounded(node.expr):
                operand.expr = _filtered(operand.expr, "_shown")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_sliced") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Charge for a tuple, whose hash reads all that is in it."""
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_bounded(node) else _filtered(node, "_shown")

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_bounded(node.key):
            node.key = _filtered(node.key, "_shown")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_shown") for part in node.nodes]
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        shown: list[nodes.Expr] = []
        for part in node.nodes:
            literal = isinstance(part, nodes.TemplateData)
            shown.append(part if literal else _filtered(part, "_shown"))
        node.nodes = shown
        return node


def _is_bounded(node: nodes.Node) -> bool:
    """Return whether an expression is a literal, also a list of literals, or true or false."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(_is_bounded(item) for item in node.items)
    return isinstance(node, nodes.Const | nodes.Compare | nodes.Not | nodes.Test)


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(arguments), [], None, None)


@pass_context
def _spent(_context: Any, amount: int) -> None:
    """Charge ``amount``."""
    spend(amount)


_OWN_FILTERS = {
    "_counted": counted,
    "_shown": _shown,
    "_searched": _searched,
    "_sliced": _sliced,
    "_spent": _spent,
}


class Bounded(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with its work charged to the budget of the rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.globals.pop("lipsum", None)
        self._charged = False
        self.optimized = False  # no constant folding: constants must be charged to the budget too

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _AddCharges().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def from_string(self, source: Any, *arguments: Any, **named: Any) -> Any:
        """Compile a template, in which the date is that given to :func:`render_chat`."""
        self.globals["strftime_now"] = _strftime_now
        if not self._charged:  # transformers adds its own filters after the construction
            self._charged = True
            self.filters = {name: charged_filter(name, f) for name, f in self.filters.items()}
            self.filters |= _OWN_FILTERS
            self.tests |= {
                name: charged_test(cast(Any, self.tests[name])) for name in CHARGED_TESTS
            }
        return super().from_string(source, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge an operation before computing it."""
        left_over = left_of_budget.get()
        if type(left) is str and type(right) is str and operator == "+" and left_over is not None:
            left_over[0] -= len(left) + len(right)
            if left_over[0] < 0:
                spend(0)
            return left + right
        if left_over is not None:
            if operator == "**":
                check_power(left, right)
            if operator == "%" and isinstance(left, str):
                spend_for_format(left, [right])
            if operator in ("*", "%", "//"):
                check_product(left, right)
            if operator == "*":
                times = [v for v in (left, right) if isinstance(v, int)]
                texts = [v for v in (left, right) if isinstance(v, str | bytes | list | tuple)]
                spend(size(texts[0]) * max(0, times[0]) if texts and times else 1)
            spend(size(left) + size(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` or ``str.format_map`` as the sandbox does, with its fields charged;
        None for other values."""
        function = super().wrap_str_format(value)
        if function is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        escaped = isinstance(text, Markup)
        fields = (
            _ChargedEscapedFields(self, escape=text.escape) if escaped else _ChargedFields(self)
        )

        def formatted(*arguments: Any, **named: Any) -> str:
            if is_map and (named or len(arguments) != 1):
                return function(*arguments, **named)  # raises TypeError
            values = ((), arguments[0]) if is_map else (arguments, named)
            return type(text)(fields.vformat(text, *values))

        return update_wrapper(formatted, value)

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function, macro or method, and charge for it."""
        if left_of_budget.get() is None:
            return super().call(context, obj, *arguments, **named)
        if isinstance(obj, LoopContext):  # one more level of a recursive loop
            arguments = tuple(counted(items, STEP) for items in arguments)
            named = {name: counted(items, STEP) for name, items in named.items()}
        method = vars(obj).get("__wrapped__", obj) if type(obj) is FunctionType else obj
        owner = vars(type(method)).get("__self__") and method.__self__  # (Jinja wraps str.format)
        for value in arguments:
            if type(value) is tuple:  # its hash reads all that is in it
                spend_for(value)
        if isinstance(owner, str | bytes):
            _check_text(method.__name__, owner, [*arguments, *named.values()])
        elif isinstance(owner, int) and method.__name__ in _PADDING:
            _check_text(method.__name__, b"", [*arguments, *named.values()])
        elif isinstance(owner, (list, tuple, LoopContext)):  # count, index, changed: they compare
            spend_for([*arguments, *([] if isinstance(owner, LoopContext) else owner)])
        result = super().call(context, obj, *arguments, **named)
        spend(5 * STEP + size(result))
        return result


@cache
def _use_bounded() -> None:
    """Make transformers compile templates with :class:`Bounded`."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = Bounded  # type: ignore[misc, attr-defined]
    chat_template_utils._compile_jinja_template.cache_clear()
