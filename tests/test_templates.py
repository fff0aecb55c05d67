"""Chat templates that take the machine's time or memory, and those that do not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any

import pytest
from jinja2 import TemplateError, Undefined
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.exceptions import SecurityError
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup
from plain_jinja import ADDRESS, environments, outcome

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_tokenizer
from burnish.templates import MAX_TEMPLATE_CHARS, TemplateLimitError, render_chat

LOOP = "{% for i in range(99999) %}"
DOUBLE = "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
END = "{% endfor %}"
NEST = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}" + END
TUPLE = NEST.replace("[1]", "(1,)").replace("[n.x, n.x]", "(n.x, n.x)")
BIG = "{% set b = 'ab' * 1000000 %}"
CHAT = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig(scratch=ScratchConfig()))


def rendered(tokenizer: Any, template: str) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        LOOP + LOOP + END + END,
        LOOP + LOOP + "x" + END + END,
        LOOP + "x" * 5000 + END,
        "{% set b %}" + LOOP + "x" * 5000 + END + "{% endset %}{{ b }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 1000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ 'a\\t'.expandtabs(1000000000) }}",
        DOUBLE + "{% set n.x = n.x ~ n.x %}" + END + "{{ n.x }}",
        DOUBLE + "{% set n.x = n.x + n.x %}" + END + "{{ n.x }}",
        DOUBLE + "{% set n.x = n.x.replace('a', 'aa') %}" + END + "{{ n.x }}",
        DOUBLE + "{% set n.x = n.x.join([n.x, n.x, n.x]) %}" + END + "{{ n.x }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        # filters
        "{{ 'a'|center(2000000000) }}",
        "{{ '%2000000000d'|format(1) }}",
        "{{ [[1]]|tojson(indent=500000000) }}",
        "{{ [1]|tojson(separators=['x' * 100000000, ':']) }}",
        "{{ ([[1]] * 30000)|sum(start=[]) }}",
        "{{ ('{:99999}' * 9000).format(*range(9000)) }}",
        "{{ '{:{}}'.format(1, '1000000000') }}",
        "{{ '{:{}{}}'.format(1, '99999', '9999') }}",
        "{{ '%((a))1000000000d' % {'(a)': 1} }}",
        "{{ ('%99999d' * 9000) % range(9000)|list }}",
        "{{ '%.*f' % (1000000000, 1.5) }}",
        "{{ 'a'.encode() * 1000000000 }}",
        "{{ 'a'.encode().ljust(1000000000) }}",
        "{{ 1 .to_bytes(1000000000, 'big') }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ ('<a>' * 90000)|striptags }}",
        "{{ ('a' * 90000)|wordwrap(1) }}",
        NEST + "{{ [1, 2]|join(n.x) }}",
        NEST + "{{ n.x is lower }}",
        NEST + "{{ [n.x, n.x]|map('string')|list }}",
        NEST + "{{ [n.x]|select('equalto', n.x[0])|list }}",
        NEST + "{{ [n.x]|reverse|join }}",
        NEST + "{{ [n.x]|map('default')|join }}",
        NEST + "{{ {'a': n.x}.values()|string }}",
        NEST + "{{ n.x|pprint }}",
        NEST + "{{ '{!r}'.format(n.x) }}",
        LOOP + "{% set x = ([1] * 9999)|select('string')|list %}" + END,
        "{% set n = namespace(x=range(9)) %}{% for i in range(9000) %}"
        "{% set n.x = n.x|map('string') %}" + END + "{{ n.x|list }}",
        "{{ ('www.' * 300000)|urlize }}",
        "{{ [1]|batch(2000000000, 'x')|list }}",
        "{{ ('a' * 9000)|replace('', 'x' * 99999) }}",
        "{{ ('%(a)s' * 9000)|format(a='x' * 90000) }}",
        DOUBLE + "{% set n.x = [n.x, n.x]|join(n.x) %}" + END,
        LOOP + "{% set x = range(99999)|list %}" + END,
        BIG + LOOP + "{% set x = b|upper %}" + END,
        LOOP + "{{ 'a'|center(90000) }}" + END,
        LOOP + "{{ [1]|slice(99999)|list|length }}" + END,
        *(NEST + "{{ n.x|" + name + " }}" for name in
          ("string", "tojson", "tojson(indent=2)", "join", "upper", "e", "sort", "unique|list")),
        # comparisons, formats and hashes of nested containers
        NEST + "{{ n.x }}",
        NEST + "{{ n }}",
        NEST + "{{ n.x == n.x[0] }}",
        NEST + "{{ n.x in [[n.x[0], n.x[1]]] }}",
        NEST + "{{ n.x is eq(n.x[0]) }}",
        NEST + "{{ [n.x].count([n.x[0], n.x[1]]) }}",
        NEST + "{{ 'a' ~ n.x }}",
        NEST + "{{ '%s' % (n.x,) }}",
        NEST + "{{ '{}'.format(n.x) }}",
        TUPLE + "{{ {n.x: 1} }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ {}.get(varargs) }}"
        "{% endif %}{% endmacro %}{{ m(60, 1, 2) }}",
        BIG + LOOP + "{% if b == b ~ 'a' %}{% endif %}" + END,
        BIG + LOOP + "{% if 'zz' in b %}{% endif %}" + END,
        BIG + LOOP + "{% set x = b[1:] %}" + END,
        BIG + LOOP + "{% set x = b.count('zz') %}" + END,
        # numbers
        "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_never_ends_is_rejected(template: str, tokenizer: Any) -> None:
    with pytest.raises(TemplateLimitError):
        rendered(tokenizer, template)


@pytest.mark.parametrize("items", ["range(100)", "iterable=range(100)"])
@pytest.mark.parametrize("condition", ["", "if x "])
def test_every_level_of_a_recursive_loop_is_charged(
    items: str, condition: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,100 iterations; the last template also writes 20 characters in each."""
    template = (
        "{% for x in range(100) " + condition + "recursive %}{% if loop.depth < 2 %}"
        "{% set part = loop(" + items + ") %}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr("burnish.templates.MAX_WORK", 250_000)
    assert rendered(tokenizer, template) == ""
    monkeypatch.setattr("burnish.templates.MAX_WORK", 150_000)
    with pytest.raises(TemplateLimitError):
        rendered(tokenizer, template)
    monkeypatch.setattr("burnish.templates.MAX_WORK", 250_000)
    with pytest.raises(TemplateLimitError):
        rendered(tokenizer, template.replace("{% endfor %}", "0123456789" * 2 + "{% endfor %}"))


def test_a_template_of_megabytes_is_rejected(tokenizer: Any) -> None:
    with pytest.raises(TemplateLimitError, match="has 1048577 characters"):
        rendered(tokenizer, "x" * (MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{% set x = messages.append(1) %}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_does_not_leave_the_sandbox(template: str, tokenizer: Any) -> None:
    """It raises, or prints nothing."""
    try:
        text = rendered(tokenizer, template)
    except (SecurityError, TemplateError, TypeError):
        return
    assert "class" not in text and "root" not in text and "os" not in text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}"
         "{% if not loop.last %}, {% endif %}{% endfor %}", "1/2 user, 2/2 assistant"),
        ("{% for m in messages if m.role == 'user' %}{{ m['content'] | upper }}{% endfor %}",
         "A\nB"),
        ("{% for m in messages[::-1] %}{{ m.content }}{% else %}none{% endfor %}", "ca\nb"),
        ("{% for m in nothing %}{{ m }}{% else %}none{% endfor %}", "none"),
        ("{{ 'a' ~ 1 ~ none ~ 2.5 }}|{{ 'ab' * 3 }}|{{ '%s-%d' % ('x', 3) }}|{{ 7 % 4 + 2 }}",
         "a1None2.5|ababab|x-3|5"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{{ messages[0].content.split('\\n') | join('+') }}{{ 'abc'.replace('b', 'xx') }}",
         "a+baxxc"),
        ("{{ messages | tojson }}"[:0] + "{{ {'a': [1, 2]} | tojson }}", '{"a": [1, 2]}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f('b') }}", "<a><b>"),
        ("{%- for m in messages -%}{%- if loop.first -%}{% continue %}{%- endif -%}"
         "{{ m.content }}{%- endfor -%}", "c"),
    ],
)  # fmt: skip
def test_ordinary_templates_render_as_before(template: str, expected: str, tokenizer: Any) -> None:
    assert rendered(tokenizer, template) == expected
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == expected


VALUES: dict[str, Callable[[], Any]] = {
    **{repr(value): partial(copy.deepcopy, value) for value in (
        None, True, 0, 3, -2, 10**200, 1.5, float("inf"), "", "a b\n<c>", "%s", "12", "  Ä ",
        [], [3, 1, 2], ["b", "a", "B"], [None, "a", 1], [[1, 2], [3]], (), ("x", ["y"]), {},
        {"b": 1, "A": [2, {"z": None}]}, b"b", CHAT, [{"role": "user", "content": [{"text": "t"}]}],
    )},
    "undefined": Undefined,
    "missing key": lambda: Undefined(obj={}, name="reasoning_content"),
    "markup": lambda: Markup("<b>"),
    "list of markup": lambda: [Markup("<b>"), "<"],
    "generator": lambda: (item for item in ["a", "", "c"]),
    "empty generator": lambda: iter(()),
    "generator of messages": lambda: (message for message in CHAT),
    "range": lambda: range(4),
    "keys": lambda: {"b": 1, "a": 2}.keys(),
    "items": lambda: {"b": 1, "a": 2}.items(),
    "values": lambda: {"b": 1, "a": [2]}.values(),
    "namespace": lambda: Namespace(x=1),
    "cycler": lambda: Cycler(1, 2),
    "long text": lambda: "a b\n" * 80,
    "long list": lambda: list(range(220, 300)),
    "deep list": lambda: reduce(lambda inner, _: [inner], range(50), [1]),
}  # fmt: skip
ARGUMENTS: dict[str, Sequence[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "attr": [(("x",), {}), (("upper",), {})],
    "batch": [((2,), {}), ((2, "f"), {})],
    "center": [((), {}), ((20,), {}), ((), {"width": 3})],
    "d": [((), {}), (("D",), {}), (("D", True), {}), ((), {"boolean": True}), ((1700000000,), {})],
    "dictsort": [((), {}), ((True, "value"), {}), ((), {"reverse": True})],
    "format": [((), {}), (("x",), {}), ((1700000000,), {})],
    "groupby": [(("role",), {}), ((0,), {}), (("role",), {"default": "none"})],
    "indent": [((), {}), ((2, True), {}), (("> ",), {"blank": True})],
    "int": [((), {}), ((5, 16), {}), ((1700000000,), {})],
    "join": [((), {}), ((", ",), {}), ((), {"attribute": "role"}), ((Markup("<"),), {})],
    "map": [((), {}), (("upper",), {}), (("default", "x"), {}), ((), {"attribute": "role"})],
    "max": [((), {}), ((), {"attribute": "role"})],
    "reject": [((), {}), (("none",), {}), (("equalto", "a"), {}), (("gt", 1700000000), {})],
    "rejectattr": [(("role",), {}), (("role", "equalto", "user"), {})],
    "replace": [(("s", "t"), {}), (("s", "t", 1), {}), ((), {"new": "xy", "old": "s"})],
    "round": [((), {}), ((2,), {}), ((-1, "floor"), {})],
    "slice": [((2,), {}), ((3, "f"), {})],
    "sort": [((), {}), ((True, True), {}), ((), {"attribute": "role"})],
    "sum": [((), {}), ((), {"start": 5}), ((), {"attribute": "x"}), ((), {"start": []})],
    "tojson": [((), {}), ((), {"indent": 2}), ((), {"separators": (",", ":"), "sort_keys": True})],
    "trim": [((), {}), (("a",), {})],
    "truncate": [((), {}), ((5,), {}), ((5, True, ".."), {})],
    "unique": [((), {}), ((), {"attribute": "role"})],
    "wordwrap": [((), {}), ((3,), {}), ((3, False, "\r\n"), {})],
}
"""Arguments of filters; () for the others. A name stands for the filters with the same code."""
SAME = {"default": "d", "min": "max", "select": "reject", "selectattr": "rejectattr"}
REFUSED = {"random", "urlize"}
"""Filters that are never rendered: at random, or without a bound."""


def filter_calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    nothing: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {})]
    return [
        (name, *arguments)
        for name in sorted(set(DEFAULT_FILTERS) - REFUSED)
        for arguments in ARGUMENTS.get(SAME.get(name, name), nothing)
    ]


@cache
def _context(environment: Any) -> Any:
    return environment.from_string("").new_context()


def through(environment: Any, calls: Sequence[tuple[str, Any, Any]], value: Any) -> Any:
    """Pass a value through filters, as a template does."""
    context = _context(environment)
    for name, arguments, named in calls:
        value = environment.call_filter(name, value, arguments, copy.deepcopy(named), context)
        if isinstance(value, str) and ADDRESS.search(value):
            return "the address of an object"
    return value


@pytest.mark.parametrize("part", range(4))
def test_filters_give_what_they_give_without_limits(part: int) -> None:
    """Each alone on all values, and before each other filter on some."""
    plain, bounded = environments()
    names, calls = list(VALUES), filter_calls()
    for number, call in list(enumerate(calls))[part::4]:
        chains = [[call], *([call, other] for other in calls)]
        for second, chain in enumerate(chains):
            for name in names[(number + second) % 14 :: 14] if second else names:
                make = VALUES[name]
                expected = outcome(lambda: through(plain, chain, make()))  # noqa: B023
                result = outcome(lambda: through(bounded, chain, make()))  # noqa: B023
                assert result == expected, (name, chain)


@pytest.mark.parametrize("name", sorted(DEFAULT_TESTS))
def test_a_test_gives_what_it_gives_without_limits(name: str) -> None:
    for make, other in itertools.product(VALUES.values(), VALUES.values()):
        for arguments in (lambda: [], lambda: [other()]):  # noqa: B023
            results = [
                outcome(lambda: e.call_test(name, make(), arguments(), {}, _context(e)))  # noqa: B023
                for e in environments()
            ]
            assert results[1] == results[0], (make(), other())


@pytest.mark.parametrize(
    "template",
    [
        "{{ v }}{{ v ~ w ~ 1 }}",
        "{{ v + w }}", "{{ v * w }}", "{{ v % w }}", "{{ v // w }}", "{{ v - w }}",
        "{{ v == w }}{{ v != w }}{{ v and 1 }}{{ v or 2 }}{{ 3 if v else 4 }}",
        "{{ v < w }}", "{{ v >= w }}", "{{ v in w }}", "{{ v[:2] }}", "{{ v[w] }}", "{{ v.role }}",
        "{{ {v: 1} }}", "{{ [v, (w, v)] }}{{ [v] is sameas [v] }}", "{{ -v }}",
        "{% for x in v %}{{ x }}{{ loop.index }}{{ loop.last }}{{ loop.nextitem }}{% endfor %}",
        "{% for x in v %}{{ loop.length }}{{ loop.revindex }}{{ loop }}{% endfor %}",
        "{% for x in v if x %}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}",
        "{% for x in v recursive %}{{ x }}{{ loop([]) }}{% endfor %}",
        "{% for x in v if x recursive %}{{ loop.depth }}{{ loop.length }}{{ loop.nextitem }}"
        "{% if loop.depth < 2 %}{{ loop(w) }}{% endif %}{{ loop.last }}{% else %}0{% endfor %}",
        "{% for x in v %}{{ loop.previtem }}{{ loop | map('first') | list }}{% endfor %}",
        "{% autoescape true %}{{ v }}{{ v ~ '<' }}{{ v | replace('b', '<') }}{% endautoescape %}",
        "{% macro m(a, b=1) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(v, w, v) | upper }}",
        "{{ '{} {a!r:>9} {{}} 1000000'.format(v, a=w) }}", "{{ '{:{}}'.format(v, w) }}",
        "{{ '{x}'.format_map({'x': v}) }}", "{{ '**%s** 2 * 100000 %% at 1700000000' % (v,) }}",
        "{{ '%*d' % (w, v) }}", "{{ '%(a)s %(b)5.1f' % {'a': v, 'b': w} }}",
        "{{ 'a b'.join(v) }}", "{{ 'a b'.replace('a', v) }}", "{{ 'ab'.center(v) }}",
        "{{ 'a,b'.split(',', v) }}", "{{ dict(a=v) }}{{ namespace(a=v) }}{{ dict(a=v).get(w) }}",
        "{% set a, b = v, w %}{{ a is defined }}{{ b is none }}{{ b is iterable }}",
        "{{ 2 ** 3 }}{{ 10 ** 200 }}{{ 2 ** -1 }}{{ 1 ** 10000000000 }}{{ 2.5 ** 3 }}",
        "{% filter upper %}{{ v }}{% endfilter %}{% set x %}{{ w }}{% endset %}{{ x | length }}",
    ],
)  # fmt: skip
def test_an_operation_gives_what_it_gives_without_limits(template: str) -> None:
    """A refusal may take the place of another error: a width of 200 digits."""
    compiled = [environment.from_string(template) for environment in environments()]
    names = list(VALUES)
    for number, name in enumerate(names):
        for second in names[number % 5 :: 5]:
            results = [
                outcome(lambda: one.render(v=VALUES[name](), w=VALUES[second]()))  # noqa: B023
                for one in compiled
            ]
            fails = isinstance(results[0], str) and results[0].endswith("Error")
            assert results[1] == results[0] or (fails and results[1] == "refused"), (name, second)
