"""Relations of chat templates: rendering within limits and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chat_templates import TEMPLATES
from metamorphic.base import Draw, Refused, equal, relation
from metamorphic.draw_text import text_of
from plain_jinja import ADDRESS, environments, outcome

_FILTERS = (
    "default('')", "default(true)", "default([], true)", "trim", "upper", "string", "e", "list",
    "length", "first", "last", "reverse", "join(', ')", "join(',', attribute='role')", "tojson",
    "map(attribute='content')", "map(attribute='x')", "map('string')", "selectattr('role')",
    "selectattr('role', 'equalto', 'user')", "rejectattr('x', 'defined')", "select",
    "reject('none')", "sort(attribute='role')", "groupby('role')", "batch(2)",
    "items", "dictsort",
    "replace('a', 'bc')", "indent(2)", "safe", "int", "sum", "max", "center(9)", "format(1)",
    "wordcount", "truncate(3, true, '')", "capitalize", "title", "tojson(indent=2)",
)  # fmt: skip
_VALUES = (
    "undefined", "messages", "messages[0]", "messages[0].content", "messages[0].x", "messages[9]",
    "none", "true", "7", "2.5", "'%s'", "'<b>' | e", "range(4)", "messages[0].items()", "[]", "{}",
    "messages[0].keys()", "['b', none, 'a']", "namespace(a=1)", "messages[1:]", "{'a': [1]}",
)  # fmt: skip
_USES = (
    "{{ X }}", "{{ 'a' ~ (X) ~ 'b' }}", "{% if X %}yes{% else %}no{% endif %}", "{{ (X) == none }}",
    "{% for x in X %}[{{ x }}{{ loop.index }}{{ loop.last }}]{% endfor %}", "{{ 'a' in (X) }}",
    "{% set y = X %}{{ y is defined }}{{ y is string }}{{ y is iterable }}{{ y is mapping }}",
)  # fmt: skip


def _messages(draw: Draw) -> list[dict[str, Any]]:
    """A conversation, with keys that some messages lack."""
    messages: list[dict[str, Any]] = []
    for turn in range(draw.rng.randint(1, 4)):
        message = {"role": ("user", "assistant")[turn % 2], "content": text_of(draw)}
        if draw.rng.random() < 0.4:
            message[draw.rng.choice(["x", "reasoning_content", "name"])] = text_of(draw)
        messages.append(message)
    return messages


def _refuse_addresses(steps: list[str], messages: list[dict[str, Any]]) -> None:
    """Raise Refused if filters get a text with the address of an object, which never is the same
    twice."""
    plain, _ = environments()
    for number in range(2, len(steps) + 1):
        value = " | ".join(steps[:number])
        template = plain.from_string(f"{{% set y = {value} %}}{{{{ y if y is string }}}}")
        if ADDRESS.search(str(outcome(lambda: template.render(messages=messages)))):  # noqa: B023
            raise Refused("a text has the address of an object")


@relation
def limits_change_no_rendering(draw: Draw) -> None:
    """A template renders a conversation, or fails, in the same way with limits as without: a
    published one, or an expression of a value and up to three filters. Exact."""
    messages = _messages(draw)
    files = sorted(Path(TEMPLATES).glob("*.jinja"))
    if draw.rng.random() < 0.2:
        template = draw.one(file=files).read_text(encoding="utf-8")
    else:
        filters = draw.rng.choices(_FILTERS, k=draw.rng.randint(1, 3))
        steps = [f"({draw.rng.choice(_VALUES)})", *filters]
        _refuse_addresses(steps, messages)
        template = "".join(draw.rng.sample(_USES, 2)).replace("X", " | ".join(steps))
    options = {"add_generation_prompt": draw.rng.random() < 0.5, "bos_token": "<s>"}
    draw.note(template=template, messages=messages, **options)
    plain, limited = (
        outcome(lambda: e.from_string(template).render(messages=messages, **options))  # noqa: B023
        for e in environments()
    )
    equal(limited, plain, "the rendering")
