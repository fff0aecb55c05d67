"""Schemas of tools are read as the draft that they declare, in bounded time and without network."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from jsonschema.exceptions import SchemaError
from referencing.exceptions import Unresolvable

from burnish.schema_keywords import UncheckableError
from burnish.tool_arguments import argument_problem, check_parameters, without_draft

D04, D06, D07 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 6, 7))
D2019, D2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))
PAIR = {"type": "array", "items": [{"type": "number"}, {"type": "string"}]}
POSITIVE = {"minimum": 0, "exclusiveMinimum": True}
BOTH = {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}


def argument(schema: Any, draft: str | None = None, **more: Any) -> dict[str, Any]:
    """The schema of one argument x."""
    declared = {} if draft is None else {"$schema": draft}
    return {**declared, "type": "object", "properties": {"x": schema}, **more}


TUPLE_07 = {"$schema": D07, "items": [{"type": "number"}], "additionalItems": False}
PLAIN_07 = {"$schema": D07, "type": "array", "items": {"type": "number"}}


@pytest.mark.parametrize(
    "schema",
    [
        argument({"$schema": D2020, "prefixItems": [{"type": "null"}]}, D07),
        argument({"$schema": D07, "$ref": "#/$defs/i", "type": "null"}) | {"$defs": {"i": {}}},
        argument({"$schema": D04, "type": "integer"}),
        argument({"$id": "http://a.b/c", "$schema": D07, "dependencies": {"a": ["b"]}}, D2020),
        argument({"anyOf": [{"allOf": [{"$schema": D07, "minContains": 1}]}]}),
    ],
)
def test_an_inner_draft_that_reads_its_schema_in_another_way_is_refused(schema: Any) -> None:
    with pytest.raises(UncheckableError, match="inner"):
        check_parameters(schema)


@pytest.mark.parametrize("inner", [TUPLE_07, {**TUPLE_07, "$id": "http://a.b/inner"}])
@pytest.mark.parametrize("outer", [D2020, D2019, None])
def test_an_inner_draft_decides_if_the_outer_one_has_no_such_form(inner: Any, outer: Any) -> None:
    """Draft 2020-12 has no list of ``items``, so all is read as 2019-09, which agrees with 07."""
    schema = argument({"anyOf": [inner, {"type": "null"}]}, outer)
    assert argument_problem(schema, {"x": [1]}) is None
    assert argument_problem(schema, {"x": ["a"]}) and argument_problem(schema, {"x": [1, 2]})


@pytest.mark.parametrize(
    "schema",
    [
        argument(PLAIN_07),
        argument({"$schema": "https://example.com/other", "items": {"type": "number"}}),
        argument({"const": [1], "default": TUPLE_07}),
        argument({"type": "array"}, properties={"x": {}, "$schema": {"const": D07}}),
    ],
)
def test_an_inner_draft_that_reads_its_schema_alike_is_accepted(schema: Any) -> None:
    assert argument_problem(schema, {"x": [1]}) is None


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        *((argument(PAIR, draft), [1, "a", None], ["a"]) for draft in (D07, D06, D04, D2019)),
        *((argument(PAIR | {"additionalItems": False}, d), [1], [1, "a", 2]) for d in (D07, D2019)),
        (argument(PAIR), [1, "a"], [1, 2]),
        (argument({"items": True, "additionalItems": False}, D07, required=["x"]), [1], ...),
        (argument(POSITIVE, D04), 1, 0),
        (argument(POSITIVE), 1, 0),
        (argument({"type": "integer"}, D04), 1, 1.0),
        (argument({"dependencies": {"a": ["b"]}}, D07), {"b": 1}, {"a": 1}),
        (argument({"dependencies": {"a": {"minProperties": 2}}}, D06), {"b": 1}, {"a": 1}),
        (
            argument({"dependencies": {"a": ["b"], "b": {"$ref": "#/definitions/d"}}}, D04)
            | {"definitions": {"d": {"minProperties": 3}}},
            *({"c": 1}, {"a": 1, "b": 1}),
        ),
        (
            argument({"$ref": "#/definitions/i", "type": "string"}, D07)
            | {"definitions": {"i": {"type": "integer"}}},
            *(1, "a"),
        ),
        (
            argument({"$ref": "item"}, None)
            | {"$id": "http://a.b/root", "$defs": {"i": {"$id": "item", "type": "integer"}}},
            *(1, "a"),
        ),
        (
            argument({"$ref": "#i"}, D07) | {"definitions": {"i": {"$id": "#i", "type": "null"}}},
            *(None, "a"),
        ),
        (
            argument({"$ref": "item"}, D04)
            | {"id": "http://a.b/c", "definitions": {"i": {"id": "item", "type": "integer"}}},
            *(1, "a"),
        ),
        *(
            (argument(BOTH | {"unevaluatedProperties": False}, d), {"a": 1, "b": 1}, {"c": 1})
            for d in (None, D2019, D2020)
        ),
        (argument({"unevaluatedProperties": {"type": "null"}}), {"a": None}, {"a": 1}),
        (argument({"prefixItems": [{}], "unevaluatedItems": False}), [1], [1, 2]),
        (argument({"contains": {"type": "null"}, "unevaluatedItems": False}), [None], [None, 2]),
        (argument({"items": [{}], "unevaluatedItems": False}, D2019), [1], [1, 2]),
        (
            argument(
                {"if": {"required": ["a"]}, "then": {"properties": {"a": {}, "b": {}}}}
                | {"else": {"properties": {"c": {}}}, "unevaluatedProperties": False}
            ),
            *({"c": 1}, {"b": 1}),
        ),
        (
            argument({"$recursiveRef": "#"}, D2019, additionalProperties=False),
            *({"x": {"x": {}}}, {"x": {"y": {}}}),
        ),
        (argument(POSITIVE | {"minimum": 1}, D07), 2, 1),  # valid in draft-04 alone
        (argument({"exclusiveMinimum": 0, "type": "number"}, D04), 1, 0),  # in newer ones
        (argument(PAIR, D07.replace("http", "https").rstrip("#")), [1], ["a"]),
        (argument({"type": "integer"}, "http://a.b/my-schema"), 1, "a"),
        (argument({"type": "integer", "nullable": True}, D07), None, "a"),
    ],
)
def test_keywords_mean_what_the_draft_says(schema: Any, valid: Any, wrong: Any) -> None:
    """``...``: no value."""
    shown = without_draft(schema)
    for form in (schema, shown):
        assert argument_problem(form, {"x": valid}) is None
        assert argument_problem(form, {} if wrong is ... else {"x": wrong}) is not None


def test_references_through_nullable_schemas_are_found() -> None:
    schema = argument({"$ref": "#/properties/y/properties/z"}, nullable=True)
    schema["properties"]["y"] = {"nullable": True, "properties": {"z": {"type": "integer"}}}
    assert argument_problem(schema, {"x": 1, "y": None}) is None
    assert argument_problem(schema, {"x": "a"}) is not None


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        (argument({"type": "integer"}, D07), False),
        (argument({"items": {"type": "integer"}, "minItems": 1}, D07), False),
        (argument(PAIR, D07), False),
        (argument(PAIR, D2019, **{"$id": "http://a.b/c"}), False),
        (argument({"$ref": "#/definitions/i"}, D07, definitions={"i": {}}), False),
        (argument({"properties": {"dependencies": {}, "prefixItems": {}}}, D06), False),
        (argument({"$ref": "#/definitions/i", "type": "null"}, D07, definitions={"i": {}}), True),
        (argument({"dependencies": {"a": ["b"]}}, D07), True),
        (argument({"contains": {}, "minContains": 0}, D07), True),
        (argument({"type": "integer"}, D04), True),
    ],
)
def test_a_declaration_is_shown_only_if_it_changes_the_meaning(schema: Any, is_kept: bool) -> None:
    plain = {key: value for key, value in schema.items() if key != "$schema"}
    assert without_draft(schema) == (schema if is_kept else plain)


@pytest.mark.parametrize(
    "schema",
    [
        argument({"$ref": "http://127.0.0.1:9/x"}),
        argument({"$ref": "other.json"}, D07, **{"$id": "http://127.0.0.1:9/x"}),
        argument({"$ref": "file:///etc/hostname"}, D06),
        argument({"$ref": D07}),  # another draft's
        argument({"$dynamicRef": "#no"}),
        argument({"$ref": 5}, D04),
        argument({"$ref": "#/required/0"}, required=["x"]),
        argument({"$ref": "#/other"}, other={"type": "strin"}),
        argument({"$ref": "#/other"}, other={"$ref": "#/nowhere"}),
        argument({"default": {"$schema": D07}, "not": {"$ref": "#/properties/x/default"}}),
    ],
)
def test_references_outside_of_the_schema_are_refused(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(Unresolvable):
        check_parameters(schema)


@pytest.mark.parametrize("draft", [None, D04, D06, D07, D2019, D2020])
def test_what_no_draft_allows_is_refused(draft: str | None) -> None:
    for schema in ({"type": "strin"}, {"minimum": "1"}, {"properties": []}, {"items": 5}):
        with pytest.raises(SchemaError):
            check_parameters(argument(schema, draft))


DEEP = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}
LOOP = {"l": {"$ref": "#/$defs/l"}}
SLOW = "(a|a)+$"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (argument({"unevaluatedProperties": False, "$ref": "#/$defs/d0"}) | {"$defs": DEEP}, {}),
        (argument({"unevaluatedItems": False, "$ref": "#/$defs/d0"}) | {"$defs": DEEP}, [1]),
        (argument({"unevaluatedItems": {}, "contains": {"type": "null"}}), [1] * 90_000),
        (
            argument({"unevaluatedProperties": False, "patternProperties": {SLOW: {}}}),
            {"a" * 40 + "!": 1},
        ),
        (argument({"$schema": D07, "pattern": SLOW}, D06), "a" * 40 + "!"),
        (argument({"$ref": "#/$defs/l"}) | {"$defs": LOOP}, 1),
    ],
)
def test_comparisons_of_all_drafts_are_bounded(schema: Any, value: Any) -> None:
    begun = time.process_time()
    check_parameters(schema)
    assert argument_problem(schema, {"x": value}) is not None
    assert time.process_time() - begun < 5


def test_the_drafts_share_the_steps_of_the_check() -> None:
    """A schema that only the last keyword makes invalid is not compared completely in each."""
    large = {"allOf": [{"properties": {str(i): {}}} for i in range(1_500)], "not": {"type": "x"}}
    begun = time.process_time()
    with pytest.raises((SchemaError, UncheckableError)):
        check_parameters(large)
    assert time.process_time() - begun < 5
