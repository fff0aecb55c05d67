"""Texts for which a regular expression takes the most time, made from the expression itself."""

from __future__ import annotations

import re._constants as kinds  # type: ignore[import-untyped]
import re._parser as parser  # type: ignore[import-untyped]
from collections.abc import Iterator
from typing import Any

_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_CATEGORIES = {
    kinds.CATEGORY_DIGIT: "1",
    kinds.CATEGORY_NOT_DIGIT: "a",
    kinds.CATEGORY_SPACE: " ",
    kinds.CATEGORY_NOT_SPACE: "a",
    kinds.CATEGORY_WORD: "a",
    kinds.CATEGORY_NOT_WORD: " ",
}


def worst_texts(expression: str, length: int) -> Iterator[str]:
    """Yield texts of ``length`` characters: parts, beginnings and pairs of characters of the
    expression, over and over, also after a beginning of it or after a match, and before a match."""
    tree = parser.parse(expression)
    parts = [_example([part]) for part in _parts(tree)]
    beginnings = [_example(tree[:end]) for end in range(len(tree) + 1)]
    letters = list(dict.fromkeys("".join(parts)))
    units = [*parts, *beginnings, *(a + b for a in letters[:6] for b in letters[:6])]
    match = beginnings[-1]
    for unit in dict.fromkeys(units):
        for start in ("", match):
            yield from _repeated(start, unit, match, length)
    for start in dict.fromkeys(beginnings):
        for unit in letters:
            yield from _repeated(start, unit, match, length)


def _repeated(start: str, unit: str, match: str, length: int) -> Iterator[str]:
    if unit:
        body = start + unit * max((length - len(start)) // len(unit), 1)
        yield body
        yield body + "\0" + match


def _parts(tree: Any) -> Iterator[Any]:
    """Yield all nodes of an expression."""
    for kind, value in tree:
        yield kind, value
        if kind in _REPEATS:
            yield from _parts(value[2])
        elif kind is kinds.SUBPATTERN:
            yield from _parts(value[3])
        elif kind is kinds.BRANCH:
            for branch in value[1]:
                yield from _parts(branch)
        elif kind is kinds.ATOMIC_GROUP:
            yield from _parts(value)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            yield from _parts(value[1])


def _example(tree: Any) -> str:
    """Return a short text that an expression matches, as far as its assertions allow."""
    return "".join(_of_node(kind, value) for kind, value in tree)


def _of_node(kind: Any, value: Any) -> str:
    if kind is kinds.LITERAL:
        return chr(value)
    if kind is kinds.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if kind is kinds.ANY:
        return "a"
    if kind is kinds.IN:
        return _of_set(value)
    if kind in _REPEATS:
        return _example(value[2]) * max(value[0], 1)
    if kind is kinds.SUBPATTERN:
        return _example(value[3])
    if kind is kinds.BRANCH:
        return _example(value[1][0])
    if kind is kinds.ATOMIC_GROUP:
        return _example(value)
    return ""


def _of_set(members: Any) -> str:
    if members[0][0] is kinds.NEGATE:
        refused = {chr(value) for kind, value in members[1:] if kind is kinds.LITERAL}
        return next(letter for letter in "a 1.b" if letter not in refused)
    kind, value = members[0]
    if kind is kinds.CATEGORY:
        return _CATEGORIES[value]
    return chr(value[0] if kind is kinds.RANGE else value)
