"""Keywords of JSON schemas that take a bounded number of steps.

Clients write schemas and the policy writes arguments, so neither may take unlimited time: nested
references, patterns and comparisons of long lists can.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import regex  # house: ok patterns of schemas, with a limit of their own
from jsonschema.exceptions import ValidationError
from referencing import Specification
from referencing.jsonschema import lookup_recursive_ref

from burnish.errors import BurnishError

PATTERNS_S = 0.5
"""Maximum seconds for the patterns of one comparison. Ordinary ones need microseconds."""

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


BUDGET = _Budget()


def limited_keywords(
    keywords: Mapping[str, Keyword], specification: Specification[Any]
) -> dict[str, Keyword]:
    """Return the keywords of a validator of ``jsonschema`` with a count of steps, and those that
    can take unlimited time, or fail, replaced."""
    unevaluated = partial(_unevaluated, specification)
    replaced = _REPLACED | {"unevaluatedProperties": unevaluated, "unevaluatedItems": unevaluated}
    return {name: partial(_counted, replaced.get(name, keywords[name])) for name in keywords}


def _counted(keyword: Keyword, validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    """Evaluate a keyword after counting its steps. ``nullable: true``, which transformers and
    OpenAPI write, accepts null, whatever the other keywords say."""
    BUDGET.spend(1 + _num_values(value) // 8 if isinstance(value, (list, dict)) else 1)
    if instance is None and schema.get("nullable") is True:
        return ()
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
        return regex.search(pattern, text, timeout=max(1e-3, BUDGET.pattern_s)) is not None
    except regex.error:
        return True
    except TimeoutError as error:
        raise UncheckableError(f"the pattern {pattern[:60]!r} takes too long") from error
    finally:
        BUDGET.pattern_s -= time.perf_counter() - started


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
            BUDGET.spend(1)
            if _matches(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known = _named(instance, schema)
    extra = [key for key in instance if key not in known]
    if isinstance(allowed, dict):
        for key in extra:
            yield from validator.descend(instance[key], allowed, path=key)
    elif allowed is False and extra:
        names = ", ".join(map(repr, extra))
        yield ValidationError(f"Additional properties are not allowed ({names})")


def _named(instance: Mapping[str, Any], schema: Mapping[str, Any]) -> set[str]:
    """Return the keys of an object that ``properties`` and ``patternProperties`` evaluate."""
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    BUDGET.spend(len(instance) * (1 + len(patterns)))
    return {
        key
        for key in instance
        if key in known or any(_matches(pattern, key) for pattern in patterns)
    }


def _additional_items(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    """Compare the items behind those of a list ``items``. Without such a list it has no effect."""
    items = schema.get("items")
    if isinstance(instance, list) and isinstance(items, list):
        for index in range(len(items), len(instance)):
            yield from validator.descend(instance[index], allowed, path=index)


def _unique_items(
    validator: Any, unique: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if unique is not True or not isinstance(instance, list):
        return
    BUDGET.spend(len(instance))
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


_REPLACED: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "additionalItems": _additional_items,
    "uniqueItems": _unique_items,
}


# ---- keywords that depend on others --------------------------------------------------------------


def _unevaluated(
    specification: Specification[Any], validator: Any, rule: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    """Compare the properties of an object, or the items of a list, that no other keyword of the
    schema evaluates."""
    if not isinstance(instance, (dict, list)):
        return
    keyword = "unevaluatedProperties" if isinstance(instance, dict) else "unevaluatedItems"
    if schema.get(keyword) is not rule:
        return
    others = {key: value for key, value in schema.items() if key != keyword}
    evaluated = _evaluated(specification, validator, instance, others)
    places = instance if isinstance(instance, dict) else range(len(instance))
    for place in places:
        if place not in evaluated:
            yield from validator.descend(instance[place], rule, path=place)


def _evaluated(
    specification: Specification[Any], validator: Any, instance: Any, schema: Any
) -> set[Any]:
    """Return the keys of an object, or the indexes of a list, that a schema evaluates, given that
    the instance matches it. ``validator``: that of the schema, for its references."""
    BUDGET.spend(1 + len(instance))
    if not isinstance(schema, dict):
        return set()
    places: set[Any]
    if isinstance(instance, dict):
        places = _named(instance, schema)
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return set(instance)
    else:
        places = _indexed(validator, instance, schema)
        if "unevaluatedItems" in schema:
            return set(range(len(instance)))
    for inner, subschema in _applied(specification, validator, instance, schema):
        places |= _evaluated(specification, inner, instance, subschema)
    return places


def _indexed(validator: Any, instance: list[Any], schema: Mapping[str, Any]) -> set[int]:
    """Return the indexes of a list that ``items`` and its siblings evaluate."""
    items, prefix = schema.get("items"), schema.get("prefixItems")
    prefix = prefix if isinstance(prefix, list) else []
    if isinstance(items, list) and "additionalItems" not in schema:
        prefix = items
    elif items is not None:
        return set(range(len(instance)))
    places = set(range(min(len(prefix), len(instance))))
    if "contains" in schema:
        contained = validator.evolve(schema=schema["contains"])
        places |= {index for index, item in enumerate(instance) if contained.is_valid(item)}
    return places


def _applied(
    specification: Specification[Any], validator: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas that a schema applies to the same instance, and that it matches, with the
    validator of each."""
    resolver = validator._resolver

    def inside(subschema: Any, resolver: Any = resolver) -> tuple[Any, Any]:
        if isinstance(subschema, dict):
            resolver = resolver.in_subresource(specification.create_resource(subschema))
        return validator.evolve(schema=subschema, _resolver=resolver), subschema

    references = [resolver.lookup(schema[key]) for key in ("$ref", "$dynamicRef") if key in schema]
    references += [lookup_recursive_ref(resolver)] if "$recursiveRef" in schema else []
    for resolved in references:
        yield inside(resolved.contents, resolved.resolver)
    candidates = [schema[key] for key in ("allOf", "anyOf", "oneOf") if key in schema]
    subschemas = [subschema for listed in candidates for subschema in listed]
    if isinstance(instance, dict):
        dependent = schema.get("dependentSchemas", {})
        subschemas += [dependent[key] for key in dependent if key in instance]
    for subschema in subschemas:
        inner = inside(subschema)
        if inner[0].is_valid(instance):
            yield inner
    if "if" in schema:
        condition = inside(schema["if"])
        is_met = condition[0].is_valid(instance)
        if is_met:
            yield condition
        branch = "then" if is_met else "else"
        if branch in schema:
            yield inside(schema[branch])
