"""Render chat templates with limits. Templates come with models and are untrusted.

Jinja's sandbox protects Python's internals, but does not limit time and memory: nested loops,
``'a' * 10**9`` or a text that is doubled forty times. Here every rendering has a budget of steps
and characters. transformers compiles templates with the class ``ImmutableSandboxedEnvironment`` of
its module; the first call of :func:`render_chat` replaces it with :class:`Bounded`. Renderings
outside :func:`render_chat` have no budget and are unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateRuntimeError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from burnish.errors import BurnishError

if TYPE_CHECKING:  # recipes are checked without transformers
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_CHARS = 1 << 20
"""Longest template. Published templates have up to about 30,000 characters."""
MAX_WORK = 100_000_000
"""Budget of one rendering. Each character created costs 1, each loop iteration :data:`STEP`, each
call 5 times :data:`STEP`. Spending all of it takes a few seconds."""
STEP = 20
MAX_WIDTH = 100_000
"""Largest number that may be passed to a string method (widths, indents, repetitions)."""

_left: ContextVar[list[int] | None] = ContextVar("work_left", default=None)
_today: ContextVar[datetime | None] = ContextVar("today", default=None)
_WIDE = re.compile(r"\*|\d{6,}")
_UNBOUNDED = frozenset({"translate", "format_map"})


class TemplateLimitError(BurnishError, TemplateRuntimeError):
    """A template exceeds the limits on size, time or memory."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    today: datetime | None = None,
    **options: Any,
) -> str:
    """Return the text of ``tokenizer.apply_chat_template``. ``today``: date for templates that
    write one; None is now.

    Raises jinja2.TemplateError as that method does, and TemplateLimitError if the template is too
    large or exceeds its budget.
    """
    templates = tokenizer.chat_template
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        if len(text or "") > MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(
                f"the chat template has {len(text)} characters, but the limit is "
                f"{MAX_TEMPLATE_CHARS}"
            )
    _use_bounded()
    token, date = _left.set([MAX_WORK]), _today.set(today)
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (MemoryError, RecursionError, OverflowError) as error:
        raise TemplateLimitError(f"{type(error).__name__}: {error}") from error
    finally:
        _left.reset(token)
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
    return (_today.get() or datetime.now()).strftime(pattern)


def _spend(amount: int) -> None:
    left = _left.get()
    if left is None:
        return
    left[0] -= amount
    if left[0] < 0:
        raise TemplateLimitError(
            "it exceeds the limits on steps or characters, which no conversation needs"
        )


def _size(value: Any) -> int:
    """Return the number of characters of a text, entries of a container or digits of a number."""
    if isinstance(value, int):
        return value.bit_length() // 3
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


def _check_numbers(what: str, values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(
                f"{what} has the argument {str(value)[:20]}, above {MAX_WIDTH}"
            )


def _check_text(name: str, text: str, given: Sequence[Any]) -> None:
    """Check a call of the string method ``name`` and charge for its result in advance."""
    if name in _UNBOUNDED:
        raise TemplateLimitError(f"{name} is not allowed")
    if name == "format" and _WIDE.search(text):
        raise TemplateLimitError("a width in a format is too large")
    if name == "replace" and len(given) > 1 and isinstance(given[0], str):
        _spend(text.count(given[0]) * len(str(given[1])))
    if name == "indent":
        _spend((text.count("\n") + 1) * max((_size_of_indent(g) for g in given), default=4))


def _size_of_indent(value: Any) -> int:
    return value if isinstance(value, int) else len(str(value))


def _charge_join(separator: Any, parts: Any) -> None:
    if isinstance(parts, (list, tuple)):
        _spend(len(str(separator)) * len(parts) + sum(len(p) for p in parts if isinstance(p, str)))


def _counted(iterable: Any, cost: int) -> Any:
    """Wrap the iterable of a loop, so that every iteration is charged ``cost``."""
    return iterable if _left.get() is None else _Counted(iterable, cost)


class _Counted:
    """The items of a loop. Each iteration is charged."""

    def __init__(self, iterable: Any, cost: int) -> None:
        self._iterable, self._cost = iterable, cost

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            _spend(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


def _joined(parts: Sequence[Any]) -> str:
    """Evaluate ``a ~ b`` and charge for it."""
    texts = [str(part) for part in parts]
    _spend(sum(map(len, texts)))
    return "".join(texts)


def _shown(value: Any) -> Any:
    """Charge for ``{{ value }}`` and return it."""
    _spend(len(value) if isinstance(value, str) else 1)
    return value


class _AddCharges(NodeTransformer):
    """A transformer that makes loops, ``~`` and output charge the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "_counted", nodes.Const(STEP + text))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "_joined")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        shown: list[nodes.Expr] = []
        for part in node.nodes:
            literal = isinstance(part, nodes.TemplateData)
            shown.append(part if literal else _filtered(part, "_shown"))
        node.nodes = shown
        return node


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(arguments), [], None, None)


class Bounded(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with its work charged to the budget of the rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.filters |= {"_counted": _counted, "_joined": _joined, "_shown": _shown}
        self.optimized = False  # no constant folding: constants must be charged to the budget too

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _AddCharges().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def from_string(self, source: Any, *arguments: Any, **named: Any) -> Any:
        """Compile a template, in which the date is that given to :func:`render_chat`."""
        self.globals["strftime_now"] = _strftime_now
        return super().from_string(source, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge ``+``, ``*`` and ``%`` before computing them. Refuse ``**``."""
        if _left.get() is not None:
            if operator == "**":
                raise TemplateLimitError("powers are not allowed")
            if operator == "%" and isinstance(left, str) and _WIDE.search(left):
                raise TemplateLimitError("the width of a format is too large")
            if operator == "*":
                times = [v for v in (left, right) if isinstance(v, int)]
                texts = [v for v in (left, right) if isinstance(v, (str, list, tuple))]
                _spend(_size(texts[0]) * max(0, times[0]) if texts and times else 1)
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function, macro or method, and charge for it."""
        if _left.get() is None:
            return super().call(context, obj, *arguments, **named)
        owner = vars(type(obj)).get("__self__") and obj.__self__
        if isinstance(owner, str):
            given = [*arguments, *named.values()]
            _check_numbers(f"{obj.__name__}()", given)
            _check_text(obj.__name__, owner, given)
            if obj.__name__ == "join" and given:
                _charge_join(owner, given[0])
        result = super().call(context, obj, *arguments, **named)
        _spend(5 * STEP + _size(result))
        return result


@cache
def _use_bounded() -> None:
    """Make transformers compile templates with :class:`Bounded`."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = Bounded  # type: ignore[misc, attr-defined]
    chat_template_utils._compile_jinja_template.cache_clear()
