"""Relations of tools: their schemas, and the texts of their docstrings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema_specifications import REGISTRY
from metamorphic.base import Broken, Draw, Refused, equal, relation
from referencing.exceptions import Unresolvable

from burnish.environments.docstrings import read_docstring
from burnish.tool_arguments import argument_problem, without_draft

_DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
}
_NAMES = ("a", "b", "c")
_VALUES = (None, True, False, 0, 1, 2.0, 2.5, -3, "", "a", "abc", [], {})


def _value(draw: Draw, depth: int = 2) -> Any:
    rng = draw.rng
    if depth and rng.random() < 0.5:
        if rng.random() < 0.5:
            return [_value(draw, depth - 1) for _ in range(rng.randint(0, 3))]
        return {name: _value(draw, depth - 1) for name in _NAMES if rng.random() < 0.5}
    return rng.choice(_VALUES)


def _schema(draw: Draw, depth: int = 3) -> Any:
    """A schema of a few keywords of any draft."""
    rng = draw.rng
    if depth < 3 and rng.random() < 0.15:
        return rng.choice([True, False, {}, {"$ref": "#/definitions/d"}, {"$ref": "#/$defs/e"}])
    schema: dict[str, Any] = {}
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(_PLAIN if not depth or rng.random() < 0.3 else _NESTED)
        schema[key] = _of_keyword(draw, key, depth - 1)
    return schema


_PLAIN = (
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minItems", "maxItems", "minLength", "uniqueItems", "required", "multipleOf", "pattern"),
    *("dependentRequired", "minProperties", "minContains", "maxContains", "format"),
)
_NESTED = (
    *("properties", "patternProperties", "additionalProperties", "items", "additionalItems"),
    *("prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains"),
    *("dependencies", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
    *("propertyNames", "$ref", "items"),
)


def _of_keyword(draw: Draw, key: str, depth: int) -> Any:
    rng = draw.rng
    names = rng.sample(_NAMES, rng.randint(1, 2))
    match key:
        case "type":
            kinds = ("object", "array", "string", "integer", "number", "null", "boolean")
            return rng.choice([rng.choice(kinds), list(rng.sample(kinds, 2))])
        case "enum":
            return rng.sample(_VALUES, 3)
        case "const":
            return rng.choice(_VALUES)
        case "exclusiveMinimum" | "exclusiveMaximum":
            return rng.choice([0, 1, True, False])
        case "uniqueItems":
            return True
        case "required":
            return names
        case "pattern":
            return rng.choice(["^a", "b|c", "^$"])
        case "format":
            return rng.choice(["date", "uri", "x"])
        case "multipleOf":
            return rng.choice([1, 0.5, 2])
        case "dependentRequired":
            return {names[0]: ["b"]}
        case "dependencies":
            return {name: rng.choice([["c"], _schema(draw, depth)]) for name in names}
        case "properties" | "dependentSchemas":
            return {name: _schema(draw, depth) for name in names}
        case "patternProperties":
            return {rng.choice(["^a", "b|c"]): _schema(draw, depth)}
        case "allOf" | "anyOf" | "oneOf" | "prefixItems":
            return [_schema(draw, depth) for _ in range(rng.randint(1, 2))]
        case "items" if rng.random() < 0.4:
            return [_schema(draw, depth) for _ in range(rng.randint(1, 2))]
        case "$ref":
            return rng.choice(["#/definitions/d", "#/$defs/e", "item", "#f"])
        case _ if key in _PLAIN:
            return rng.randint(0, 2)
    return _schema(draw, depth)


def _drawn_schema(draw: Draw) -> dict[str, Any]:
    """The schema of one argument, with definitions that its references name."""
    declared = draw.one(declared=[None, *_DRAFTS])
    number = list(_DRAFTS).index(declared) if declared else draw.rng.randrange(len(_DRAFTS))
    anchor = ("$anchor", "$anchor", "$id", "$id", "id")[number]
    name = "id" if anchor == "id" else "$id"
    places = ("$defs", "$defs", "definitions", "definitions", "definitions")
    named = {
        "f": {anchor: "f" if anchor == "$anchor" else "#f", "type": "null"},
        "i": {name: "item", "type": ["integer", "object"]},
    }
    root: dict[str, Any] = {"type": "object", "properties": {"x": _schema(draw)}}
    root |= {"definitions": {"d": _schema(draw, 0)}, "$defs": {"e": _schema(draw, 0)}}
    root[places[number]] |= named
    if draw.rng.random() < 0.3:
        root[name] = "http://tools.example/root"
    return root if declared is None else {"$schema": declared} | root


def _oracle(schema: dict[str, Any]) -> Any:
    """The plain validator of jsonschema: of the declared draft, or else of the newest one in which
    the schema is valid. Raises Refused if there is none."""
    declared = schema.get("$schema")
    first = [_DRAFTS[declared]] if declared else []
    for kind in (*first, *_DRAFTS.values()):
        if kind(kind.META_SCHEMA, registry=REGISTRY).is_valid(schema):
            plain = {key: value for key, value in schema.items() if key != "$schema"}
            text = json.dumps(plain)
            both = "unevaluatedProperties" in text and "additionalProperties" in text
            if both and kind is jsonschema.Draft201909Validator:
                raise Refused("jsonschema takes the keywords of that schema for names")
            return kind(plain, registry=REGISTRY)
    raise Refused("invalid in every draft")


@relation
def schemas_mean_what_their_draft_says(draw: Draw) -> None:
    """Arguments match a schema if they do in jsonschema's validator of the draft: the declared one,
    or the newest in which the schema is valid; and also in the form that a policy is shown. Exact.
    """
    schema = _drawn_schema(draw)
    draw.note(schema=json.dumps(schema))
    oracle = _oracle(schema)
    values = [_value(draw) for _ in range(12)]
    try:
        forms = {"declared": schema, "shown": without_draft(schema)}
    except Unresolvable as error:
        raise Refused("a reference names nothing") from error
    problems = [
        (value, name, argument_problem(form, {"x": value}))
        for value in values
        for name, form in forms.items()
    ]
    for value, name, problem in problems:
        try:
            is_valid = oracle.is_valid({"x": value})
        except Exception as error:  # of the library
            raise Refused(f"jsonschema fails: {type(error).__name__}") from error
        if (problem is None) != is_valid:
            reason = best_match(oracle.iter_errors({"x": value}))
            raise Broken(f"{value!r} in the schema that is {name}: {problem} instead of {reason}")


_PROSE = (
    "one two",
    "Note: three",
    "x y:",
    "(four) five",
    "- six",
    "http://a.b/c",
    "q is seven",
    "",
)
_HEADERS = ("Args", "Arguments", "Parameters", "Keyword Args", "Other Parameters")
_OTHERS = ("Note", "Example", "Attributes", "See Also", "Warning")


def _entry(draw: Draw, name: str, expected: dict[str, list[str]]) -> list[str]:
    """The lines of a parameter's entry. Its words are appended to ``expected``."""
    rng = draw.rng
    kind = rng.choice(
        ["", " (str)", " (int, optional)", "(Callable[[int], str])", " (tuple(a, b))"]
    )
    lines = [f"{rng.choice(['', '', '*'])}{name}{kind}: {_words(draw)}"]
    words = [lines[0].partition(": ")[2]]
    for _ in range(rng.randint(0, 2)):
        text = rng.choice(_PROSE)
        lines.append("    " + text if text else "")
        words.append(text)
    expected.setdefault(name, []).extend(" ".join(words).split())
    return lines


def _parameters(
    draw: Draw, names: Sequence[str], expected: dict[str, list[str]]
) -> tuple[list[str], list[str]]:
    """The lines of a section of parameters, and those of them that are of no parameter."""
    section: list[str] = []
    others: list[str] = []
    for name in draw.rng.sample([*names, "gone"], draw.rng.randint(1, 3)):
        if name in names:
            section += _entry(draw, name, expected)
        else:
            others.append(f"{name} (int): {_words(draw)}")
            section.append(others[-1])
    return section, others


def _words(draw: Draw) -> str:
    return " ".join(f"w{draw.rng.randrange(10**6)}" for _ in range(draw.rng.randint(1, 3)))


@relation
def docstrings_lose_no_word(draw: Draw) -> None:
    """Each word of a docstring is in the description or in the text of its parameter, in its order,
    except for headers of parameters, types, and the sections of results and exceptions. Exact."""
    rng, names = draw.rng, ["q", "limit"]
    expected: dict[str, list[str]] = {}
    description, lines = [first := _words(draw)], [first, ""]
    for _ in range(rng.randint(1, 5)):
        section: list[str] = []
        kind = rng.choice(["prose", "parameters", "parameters", "others", "left out"])
        if kind == "prose":
            lines += [text := _words(draw)]
            description.append(text)
        elif kind == "parameters":
            header = rng.choice(_HEADERS)
            section, others = _parameters(draw, names, expected)
            description += [f"{header}:", *others] if others else []
            lines += [f"{header}:"]
        else:
            header = rng.choice(_OTHERS if kind == "others" else ["Returns", "Raises", "Yields"])
            section = [_words(draw) for _ in range(rng.randint(1, 2))]
            lines.append(f"{header}:")
            description += [f"{header}:", *section] if kind == "others" else []
        lines += [f"    {line}" if line else "" for line in section]
        lines += [""] * rng.randint(0, 2)
    docstring = "\n".join(lines)
    draw.note(docstring=docstring)
    texts = read_docstring(docstring, names)
    equal(texts.description.split(), " ".join(description).split(), "the description")
    equal({n: text.split() for n, text in texts.parameters.items()}, expected, "the parameters")
