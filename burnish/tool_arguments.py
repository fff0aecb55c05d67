"""Comparison of tool arguments with JSON schemas, in a bounded number of steps.

A schema is read as the draft that its ``$schema`` names, or without one as draft 2020-12. If it is
not valid in that draft, it is read as the newest one in which it is. A schema inside of it that
names another draft is refused if that draft would read it in another way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing import Registry, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from burnish.schema_keywords import BUDGET, UncheckableError, limited_keywords

MAX_STEPS = 100_000
"""Maximum steps of one comparison: keywords that are evaluated, and values that they contain."""
MAX_SCHEMA_STEPS = 100_000
"""The same for the check that a schema is one."""
MAX_SCHEMA_CHARS = 100_000
"""Maximum length of the JSON text of one tool's schema."""
_SHOWN = 500  # characters of an error
_DATA = ("enum", "const", "default", "examples", "required", "dependentRequired")
"""Keywords whose values are no schemas."""
_NAMED = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    "dependencies",
)
"""Keywords whose values are schemas by names of the user, which may be those of keywords."""


# ---- drafts ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Draft:
    """A draft of JSON Schema."""

    name: str
    specification: Specification[Any]
    validator: Any
    """Validator of ``jsonschema`` whose steps are counted."""
    registry: Registry[Any]
    """The schemas of its schemas. With a registry of its own, a validator does not download what a
    ``$ref`` names."""
    ref_is_alone: bool
    """True if other keywords beside ``$ref`` are ignored."""

    def first_error(self, schema: Any, value: Any, steps: int) -> ValidationError | None:
        """Return the most telling error of a value. Raises UncheckableError."""
        BUDGET.reset(steps)
        validator = self.validator(schema, registry=self.registry)
        try:
            error: ValidationError | None = best_match(validator.iter_errors(value))
        except RecursionError as recursion:
            raise UncheckableError("the schema refers to itself too often") from recursion
        return error

    def schema_error(self, schema: Any) -> ValidationError | None:
        """Return the most telling error of a schema. It takes at most the steps that are left."""
        return self.first_error(self.validator.META_SCHEMA, schema, BUDGET.steps)

    def resolver(self, schema: Any) -> Any:
        """Return the resolver of the references of a root."""
        return self.registry.resolver_with_root(self.specification.create_resource(schema))


_NAMES = ("2020-12", "2019-09", "07", "06", "04")
"""Names of all drafts, the newest first."""
_URIS = {
    "2020-12": "https://json-schema.org/draft/2020-12/",
    "2019-09": "https://json-schema.org/draft/2019-09/",
    "07": "http://json-schema.org/draft-07/",
    "06": "http://json-schema.org/draft-06/",
    "04": "http://json-schema.org/draft-04/",
}


@lru_cache
def _draft(name: str) -> _Draft:
    uri = f"{_URIS[name]}schema"
    specification: Specification[Any] = specification_with(uri)
    original = validator_for({"$schema": uri})
    keywords = limited_keywords(original.VALIDATORS, specification)
    uris = [uri for uri in REGISTRY if uri.startswith(_URIS[name])]
    registry: Registry[Any] = Registry().with_resources(
        (uri, specification.create_resource(_plain_schema(REGISTRY[uri].contents))) for uri in uris
    )
    validator: Any = extend(original, keywords)
    validator.META_SCHEMA = _plain_schema(dict(original.META_SCHEMA))
    return _Draft(name, specification, validator, registry, name in ("07", "06", "04"))


def _drafts(schema: Any) -> Iterator[_Draft]:
    """Yield the drafts as which a schema may be read, the declared one first."""
    declared = schema.get("$schema") if isinstance(schema, dict) else None
    draft = _named_draft(declared) if isinstance(declared, str) else None
    return map(_draft, sorted(_NAMES, key=lambda name: draft is None or name != draft.name))


def _named_draft(uri: str) -> _Draft | None:
    """Return the draft that a ``$schema`` names; None if it is unknown."""
    names = [n for n in _NAMES if _address(f"{_URIS[n]}schema") == _address(uri)]
    return _draft(names[0]) if names else None


def _address(uri: str) -> str:
    """Return the part of a URI that names a draft, however it is written."""
    return uri.strip().rstrip("#").partition("://")[2]


def _plain_schema(schema: Any) -> Any:
    """Return a schema without ``$schema``, which would select a validator without limits."""
    if isinstance(schema, list):
        return [_plain_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA else _plain_value(key, value)
        for key, value in schema.items()
        if not (key == "$schema" and isinstance(value, str))
    }


def _plain_value(key: str, value: Any) -> Any:
    """Return the value of a keyword, with its schemas as :func:`_plain_schema` returns them."""
    if key in _NAMED and isinstance(value, dict):
        schemas = {name: _plain_schema(schema) for name, schema in value.items()}
        if key == "dependencies":  # the library `referencing` reads no mixture of both forms
            required = {n: {"required": v} for n, v in schemas.items() if isinstance(v, list)}
            return schemas | required
        return schemas
    return _plain_schema(value)


def _with_drafts(declared: Any, draft: _Draft) -> Iterator[tuple[Mapping[str, Any], _Draft]]:
    """Yield each schema inside of ``declared``, whose own draft is ``draft``, with the draft that
    the nearest ``$schema`` around it names."""
    waiting: list[tuple[Any, _Draft]] = [(declared, draft)]
    while waiting:
        schema, draft = waiting.pop()
        if isinstance(schema, list):
            waiting += [(item, draft) for item in schema]
        if not isinstance(schema, dict):
            continue
        if schema is not declared and isinstance(schema.get("$schema"), str):
            draft = _named_draft(schema["$schema"]) or draft
        yield schema, draft
        for key, value in schema.items():
            is_by_name = key in _NAMED and isinstance(value, dict)
            values = value.values() if is_by_name else [value]
            waiting += [(inner, draft) for inner in values if key not in _DATA]


# ---- schemas -----------------------------------------------------------------------------------


class _Schema:
    """The JSON schema of a tool's arguments."""

    def __init__(self, schema_json: str) -> None:
        """Raises SchemaError if it is none, UncheckableError if it exceeds a limit, and
        Unresolvable if a reference names no schema in it."""
        if len(schema_json) > MAX_SCHEMA_CHARS:
            raise UncheckableError(
                f"it has {len(schema_json)} characters as JSON, and the limit is {MAX_SCHEMA_CHARS}"
            )
        declared = json.loads(schema_json)
        self._schema = _plain_schema(declared)
        errors: list[ValidationError] = []
        BUDGET.reset(MAX_SCHEMA_STEPS)
        for self.draft in _drafts(declared):
            error = self.draft.schema_error(self._schema)
            if error is None:
                break
            errors.append(error)
        else:
            raise SchemaError.create_from(errors[0])
        self._check_inner_drafts(declared)
        BUDGET.reset(MAX_SCHEMA_STEPS)
        self._check_references()
        self.problem({})  # a reference to itself

    def problem(self, arguments: Any) -> str | None:
        """Return why ``arguments`` do not match, or None if they do."""
        error = self.draft.first_error(self._schema, arguments, MAX_STEPS)
        if error is None:
            return None
        where = ".".join(map(str, error.absolute_path))
        text = f"{where}: {error.message}" if where else str(error.message)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

    def keywords(self) -> Iterator[Mapping[str, Any]]:
        """Yield the schema and all schemas inside of it."""
        waiting = [self.draft.specification.create_resource(self._schema)]
        while waiting:
            resource = waiting.pop()
            waiting += resource.subresources()
            if isinstance(resource.contents, dict):
                yield resource.contents

    def _check_inner_drafts(self, declared: Any) -> None:
        """Raise UncheckableError if a schema inside of ``declared`` names a draft that reads it in
        another way."""
        by_draft: dict[_Draft, list[Mapping[str, Any]]] = {}
        for keywords, draft in _with_drafts(declared, self.draft):
            by_draft.setdefault(draft, []).append(keywords)
        for draft, parts in by_draft.items():
            if not _read_alike(parts, self.draft, draft):
                raise UncheckableError(
                    f"a schema inside of it declares draft {draft.name}, which reads it in another "
                    f"way than draft {self.draft.name} of the outer schema; write both in one "
                    "draft, or remove the inner $schema"
                )

    def _check_references(self) -> None:
        """Raise Unresolvable if a reference of the schema, or of one that it refers to, names no
        schema."""
        create = self.draft.specification.create_resource
        waiting = [(create(self._schema), self.draft.resolver(self._schema))]
        known: set[int] = set()
        references: list[tuple[str, Any]] = []
        while waiting or references:
            if not waiting:
                reference, resolver = references.pop()
                if not isinstance(reference, str):
                    raise Unresolvable(ref=str(reference))
                resolved = resolver.lookup(reference)
                if id(resolved.contents) not in known:
                    self._check_target(reference, resolved.contents)
                    waiting.append((create(resolved.contents), resolved.resolver))
                continue
            resource, resolver = waiting.pop()
            BUDGET.spend(1)
            known.add(id(resource.contents))
            waiting += [
                (inner, resolver.in_subresource(inner)) for inner in resource.subresources()
            ]
            if isinstance(resource.contents, dict):
                named = (resource.contents.get(key) for key in ("$ref", "$dynamicRef"))
                references += [
                    (reference, resolver) for reference in named if reference is not None
                ]

    def _check_target(self, reference: str, target: Any) -> None:
        """Raise Unresolvable if the value that a reference names is outside of the schemas that
        were checked and is none."""
        BUDGET.spend(len(json.dumps(target)) // 100)
        is_plain = isinstance(target, (dict, bool)) and _plain_schema(target) == target
        if not is_plain or self.draft.schema_error(target) is not None:
            raise Unresolvable(ref=reference)


# ---- comparisons -------------------------------------------------------------------------------


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


def without_draft(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without ``$schema``, unless it would then be read in another way. Raises as
    :func:`check_parameters` does."""
    schema = _schema_of(json.dumps(parameters, sort_keys=True))
    plain = {key: value for key, value in parameters.items() if key != "$schema"}
    try:
        other = _schema_of(json.dumps(plain, sort_keys=True)).draft
    except (SchemaError, Unresolvable, UncheckableError):
        return dict(parameters)
    is_alike = _read_alike(list(schema.keywords()), schema.draft, other)
    return plain if is_alike else dict(parameters)


def _read_alike(schemas: Sequence[Mapping[str, Any]], draft: _Draft, other: _Draft) -> bool:
    """Return whether two drafts read schemas in the same way."""
    if draft is other:
        return True
    if _draft("04") in (draft, other):  # 1.0 is no integer there
        return False
    differing = draft.validator.VALIDATORS.keys() ^ other.validator.VALIDATORS.keys()
    differing |= {"minContains", "maxContains"}
    has_references = any("$ref" in keywords for keywords in schemas)
    differing |= {"$id", "$anchor"} if has_references else set()
    if draft.ref_is_alone != other.ref_is_alone:
        checked = draft.validator.VALIDATORS.keys() | other.validator.VALIDATORS.keys()
        if any("$ref" in keywords and len(keywords.keys() & checked) > 1 for keywords in schemas):
            return False
    return not any(keywords.keys() & differing for keywords in schemas)


@lru_cache(maxsize=1024)
def _schema_of(schema_json: str) -> _Schema:
    return _Schema(schema_json)


# ---- types -------------------------------------------------------------------------------------


def argument_types(parameters: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the JSON types that the schema ``parameters`` gives each argument, in its order: those
    of ``type``, ``nullable``, ``enum`` and ``const``, also behind ``$ref``, ``allOf``, ``anyOf``
    and ``oneOf``. Arguments without one are left out, and so are all of an invalid schema."""
    return _types_of(json.dumps(parameters or {}))


@lru_cache(maxsize=1024)
def _types_of(schema_json: str) -> dict[str, list[str]]:
    root = json.loads(schema_json)
    properties = root.get("properties") if isinstance(root, dict) else None
    if not isinstance(properties, dict):
        return {}
    try:
        draft = _schema_of(json.dumps(root, sort_keys=True)).draft
    except (SchemaError, Unresolvable, UncheckableError, RecursionError):
        return {}
    resolver = draft.resolver(root)
    types = {name: _value_types(draft, schema, resolver) for name, schema in properties.items()}
    return {name: list(dict.fromkeys(of)) for name, of in types.items() if of}


def _value_types(draft: _Draft, schema: Any, resolver: Any) -> list[str]:
    """Return the types of a schema, possibly repeated. ``resolver``: that of the schema around
    it."""
    types: list[str] = []
    waiting, references = [(schema, resolver)], set[int]()
    for _ in range(_MAX_TYPE_STEPS):
        if not waiting:
            break
        schema, resolver = waiting.pop(0)
        if not isinstance(schema, dict):
            continue
        resolver = resolver.in_subresource(draft.specification.create_resource(schema))
        types += ["null"] if schema.get("nullable") is True else []
        reference = schema.get("$ref")
        if isinstance(reference, str):
            resolved = resolver.lookup(reference)
            if id(resolved.contents) not in references:
                references.add(id(resolved.contents))
                waiting.append((resolved.contents, resolved.resolver))
            if draft.ref_is_alone:
                continue
        types += _declared_types(schema)
        for key in ("allOf", "anyOf", "oneOf"):
            inner = schema.get(key)
            waiting += [(part, resolver) for part in inner] if isinstance(inner, list) else []
    return types


def _declared_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of a schema's ``type``, or else of its ``enum`` and ``const``."""
    declared = schema.get("type")
    declared = [declared] if isinstance(declared, str) else declared
    if isinstance(declared, list):
        return [name for name in declared if isinstance(name, str)]
    values = schema.get("enum")
    values = values if isinstance(values, list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    return [_TYPE_NAMES[type(value)] for value in values[:_MAX_TYPE_STEPS]]


_MAX_TYPE_STEPS = 1000
_TYPE_NAMES: dict[type, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string"},
    **{type(None): "null", list: "array", dict: "object"},
}
