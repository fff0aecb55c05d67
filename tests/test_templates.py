"""Chat templates that take the machine's time or memory, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

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
        "{{ 10 ** 10 ** 10 }}",
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
        "{{ [[1]]|tojson(indent=50000) }}",
        "{{ [1]|tojson(separators=['x' * 100000, ':']) }}",
        "{{ ([[1]] * 1000)|sum(start=[]) }}",
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
