"""Comparison of tool arguments with JSON schemas, in a bounded number of steps.

Clients write schemas and the policy writes arguments, so neither may take unlimited time: nested
references, patterns and comparisons of long lists can.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote

import regex  # house: ok patterns of schemas, with a limit of their own
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from burnish.errors import BurnishError

MAX_STEPS = 100_000
"""Maximum steps of one comparison: keywords that are evaluated, and values that they contain."""
MAX_SCHEMA_STEPS = 100_000
"""The same for the check that a schema is one."""
MAX_SCHEMA_CHARS = 100_000
"""Maximum length of the JSON text of one tool's schema."""
PATTERNS_S = 0.5
"""Maximum seconds for the patterns of one comparison. Ordinary ones need microseconds."""
_SHOWN = 500  # characters of an error
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names of the user, which may be those of keywords."""

Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


class UncheckableError(BurnishError, ValueError):
    """A comparison that takes too many steps."""


class _Budget(threading.local):
    """Steps and seconds that the comparison of this thread has left."""

    steps = 0
    pattern_s = 0.0

    def reset(self, steps: int) -> None:
        self.steps, self.pattern_s = steps, PATTERNS_S

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise UncheckableError("comparing them with the schema takes too many steps")


_budget = _Budget()


class _Schema:
    """The JSON schema of a tool's arguments."""

    def __init__(self, schema_json: str) -> None:
        """Raises SchemaError if it is none, UncheckableError if it exceeds a limit, and the error
        of a reference that cannot be resolved."""
        if len(schema_json) > MAX_SCHEMA_CHARS:
            raise UncheckableError(
                f"it has {len(schema_json)} characters as JSON, and the limit is {MAX_SCHEMA_CHARS}"
            )
        self._schema = _plain_schema(json.loads(schema_json))
        error = _first_error(_META_SCHEMA, self._schema, MAX_SCHEMA_STEPS)
        if error is not None:
            raise SchemaError.create_from(error)
        root = DRAFT202012.create_resource(self._schema)
        _resolve_references(root, _REGISTRY.with_resource("", root).resolver())
        self.problem({})  # a reference to itself

    def problem(self, arguments: Any) -> str | None:
        """Return why ``arguments`` do not match, or None if they do."""
        error = _first_error(self._schema, arguments, MAX_STEPS)
        if error is None:
            return None
        where = ".".join(map(str, error.absolute_path))
        text = f"{where}: {error.message}" if where else str(error.message)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def argument_problem(parameters: Mapping[str, Any] | None, arguments: Any) -> str | None:
    """Return why ``arguments`` do not match the JSON schema ``parameters``, or None if they do.

    ``nullable: true``, with which transformers writes Optional, is honored. Arguments whose
    comparison takes too many steps do not match. Raises as :func:`check_parameters` does.
    """
    schema = _schema_of(json.dumps(parameters or {}, sort_keys=True))
    try:
        return schema.problem(arguments)
    except UncheckableError as error:
        return str(error)


def check_parameters(parameters: Mapping[str, Any] | None) -> None:
    """Raise SchemaError if ``parameters`` is no JSON schema, UncheckableError if checking that
    exceeds a limit, or the error of a reference that cannot be resolved."""
    _schema_of(json.dumps(parameters or {}, sort_keys=True))


def argument_types(parameters: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the JSON types that the schema ``parameters`` gives each argument, in its order: those
    of ``type``, ``nullable``, ``enum`` and ``const``, also behind ``$ref``, ``allOf``, ``anyOf``
    and ``oneOf``. Arguments without one are left out."""
    return _types_of(json.dumps(parameters or {}))


@lru_cache(maxsize=1024)
def _types_of(schema_json: str) -> dict[str, list[str]]:
    root = json.loads(schema_json)
    properties = root.get("properties")
    if not isinstance(properties, dict):
        return {}
    types = {name: _value_types(schema, root) for name, schema in properties.items()}
    return {name: list(dict.fromkeys(of)) for name, of in types.items() if of}


def _value_types(schema: Any, root: Any) -> list[str]:
    """Return the types of a schema below ``root``, possibly repeated."""
    types: list[str] = []
    waiting, references = [schema], set[str]()
    for _ in range(_MAX_TYPE_STEPS):
        if not waiting:
            break
        schema = waiting.pop(0)
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        declared = [declared] if isinstance(declared, str) else declared
        if isinstance(declared, list):
            types += [name for name in declared if isinstance(name, str)]
        else:
            values = schema.get("enum")
            values = values if isinstance(values, list) else []
            values = [*values, schema["const"]] if "const" in schema else values
            types += [_TYPE_NAMES[type(value)] for value in values[:_MAX_TYPE_STEPS]]
        types += ["null"] if schema.get("nullable") is True else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            waiting.append(_referenced(reference, root))
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += schema[key] if isinstance(schema.get(key), list) else []
    return types


def _referenced(reference: str, root: Any) -> Any:
    """Return the part of ``root`` that a reference such as ``#/$defs/Point`` names, or None."""
    node, path = root, reference.removeprefix("#").split("/")[1:]
    for name in path if reference.startswith("#") else [""]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node


_MAX_TYPE_STEPS = 1000
_TYPE_NAMES: dict[type, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string"},
    **{type(None): "null", list: "array", dict: "object"},
}


@lru_cache(maxsize=1024)
def _schema_of(schema_json: str) -> _Schema:
    return _Schema(schema_json)


def _first_error(schema: Any, value: Any, steps: int) -> ValidationError | None:
    _budget.reset(steps)
    # With a registry of its own, a validator does not download what a `$ref` names.
    found: ValidationError | None = best_match(
        _Validator(schema, registry=_REGISTRY).iter_errors(value)
    )
    return found


def _resolve_references(schema: Resource[Any], resolver: Any) -> None:
    """Raise Unresolvable if a reference of a schema, or of one inside of it, names nothing."""
    reference = schema.contents.get("$ref") if isinstance(schema.contents, dict) else None
    if isinstance(reference, str):
        resolver.lookup(reference)
    for inner in schema.subresources():
        _resolve_references(inner, resolver.in_subresource(inner))


# ---- schemas -----------------------------------------------------------------------------------


def _plain_schema(schema: Any) -> Any:
    """Return a schema with ``nullable: true`` as a union with the type null, and without
    ``$schema``, which would select a validator without limits."""
    if isinstance(schema, list):
        return [_plain_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {
        key: value if key in _DATA else _plain_value(key, value)
        for key, value in schema.items()
        if key != "nullable" and not (key == "$schema" and isinstance(value, str))
    }
    if schema.get("nullable") is True:
        outside = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
        return {**outside, "anyOf": [inner, {"type": "null"}]}  # `#/$defs/x` stays valid
    return inner if schema.get("nullable") is None else {**inner, "nullable": schema["nullable"]}


def _plain_value(key: str, value: Any) -> Any:
    """Return the value of a keyword, with its schemas as :func:`_plain_schema` returns them."""
    if key in _NAMED and isinstance(value, dict):
        return {name: _plain_schema(schema) for name, schema in value.items()}
    return _plain_schema(value)


def _plain_registry() -> Registry:
    """Return the schemas of JSON schemas without ``$schema``."""
    known = {uri: REGISTRY[uri].contents for uri in REGISTRY if "2020-12" in uri}
    return Registry().with_resources(
        (uri, DRAFT202012.create_resource(_plain_schema(contents)))
        for uri, contents in known.items()
    )


# ---- keywords ----------------------------------------------------------------------------------


def _counted(keyword: Keyword, validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    """Evaluate a keyword after counting its steps."""
    _budget.spend(1 + _num_values(value) // 8 if isinstance(value, (list, dict)) else 1)
    return keyword(validator, value, instance, schema)


def _num_values(value: Any) -> int:
    """Return the number of values in lists of values, which are compared one by one; of schemas,
    the number of keys."""
    if isinstance(value, dict):
        return len(value)
    return sum(len(str(item)) if isinstance(item, (list, dict)) else 1 for item in value)


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern is in a text. One that Python cannot read matches anything."""
    started = time.perf_counter()
    try:
        return regex.search(pattern, text, timeout=max(1e-3, _budget.pattern_s)) is not None
    except regex.error:
        return True
    except TimeoutError as error:
        raise UncheckableError(f"the pattern {pattern[:60]!r} takes too long") from error
    finally:
        _budget.pattern_s -= time.perf_counter() - started


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        for key, value in instance.items():
            _budget.spend(1)
            if _matches(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    _budget.spend(len(instance) * (1 + len(patterns)))
    extra = [
        key
        for key in instance
        if key not in known and not any(_matches(pattern, key) for pattern in patterns)
    ]
    if isinstance(allowed, dict):
        for key in extra:
            yield from validator.descend(instance[key], allowed, path=key)
    elif allowed is False and extra:
        names = ", ".join(map(repr, extra))
        yield ValidationError(f"Additional properties are not allowed ({names})")


def _unique_items(
    validator: Any, unique: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if unique is not True or not isinstance(instance, list):
        return
    _budget.spend(len(instance))
    keys = {json.dumps(_comparable(item), sort_keys=True) for item in instance}
    if len(keys) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _comparable(value: Any) -> Any:
    """Return a JSON value in which equal numbers are written alike."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unchecked(*_: Any) -> None:
    """Accept anything: ``unevaluated...`` evaluates all other keywords again, without a count."""


_OWN: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "unevaluatedProperties": _unchecked,
    "unevaluatedItems": _unchecked,
}
_KEYWORDS = {
    name: partial(_counted, _OWN.get(name, keyword))
    for name, keyword in Draft202012Validator.VALIDATORS.items()
}
_Validator: Any = extend(Draft202012Validator, _KEYWORDS)
_META_SCHEMA = _plain_schema(dict(Draft202012Validator.META_SCHEMA))
_REGISTRY = _plain_registry()
