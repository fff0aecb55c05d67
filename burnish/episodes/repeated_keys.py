"""Arguments that a tool call contains twice.

transformers keeps the last one, other servers the first, and the tool would run with one that the
policy may not have meant. All formats agree: such a call is malformed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from burnish.json_text import RepeatedKeyError, json_value
from burnish.model_text import DOTALL, Pattern

_BARE_KEY = Pattern(r"(?<=[{,])(\w+):")
_SHOWN = 200  # characters of a key that are shown to the policy


def repeated_key(body: str, field: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the text of a call is malformed, or None.

    ``field``: the tool calls of a loaded response template. ``arguments``: those that were read
    from ``body``.
    """
    try:
        if field.content == "json":
            _check(_plain_json(body, field.content_args))
        elif field.content in ("xml-inline", "kv-lines"):
            _check_pairs(_pairs(body, field.content, field.content_args), field, arguments)
    except RepeatedKeyError as error:
        return f"has an argument more than once: {error}"
    return None


def _check_pairs(
    pairs: Iterable[tuple[str, str]], field: Any, arguments: Mapping[str, Any]
) -> None:
    """Raise RepeatedKeyError."""
    seen = set()
    for key, value in pairs:
        if key in seen and not field.content_args.get("merge_duplicates"):
            raise RepeatedKeyError(f"it has the parameter {key[:_SHOWN]!r} twice")
        seen.add(key)
        if isinstance(arguments.get(key), dict | list):  # its schema says that it is JSON
            _check(value)


def _check(text: str) -> None:
    """Raise RepeatedKeyError. Text that is no JSON has no keys."""
    try:
        json_value(text)
    except RepeatedKeyError:
        raise
    except ValueError:
        return


def _pairs(body: str, content: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a call that is a list of arguments, as transformers does."""
    if content == "xml-inline":
        pattern = Pattern(options["tag_pattern"], DOTALL, is_own=False)
        yield from ((match["key"], match["value"]) for match in pattern.finditer(body))
        return
    separator = options.get("kv_sep", ":")
    for line in body.split(options.get("line_sep", "\n")):
        key, has_separator, value = line.strip().partition(separator)
        if has_separator:
            yield key.strip(), value.strip()


def _plain_json(body: str, options: Mapping[str, Any]) -> str:
    """Return the JSON of a dialect with its own quotes, or keys without quotes, as transformers
    does."""
    texts: list[str] = []
    for begin, end in options.get("string_delims", ()):
        body = "".join(_set_aside(body, begin, end, texts))
    if options.get("unquoted_keys"):
        body = _BARE_KEY.sub(r'"\1":', body)
    for number, text in enumerate(texts):
        body = body.replace(f"\1{number}\2", json.dumps(text), 1)
    return body


def _set_aside(body: str, begin: str, end: str, texts: list[str]) -> Iterator[str]:
    """Yield the parts of ``body`` with marks in place of the texts between ``begin`` and ``end``,
    which are added to ``texts``."""
    place = 0
    for number in count(len(texts)):
        opened = body.find(begin, place)
        closed = body.find(end, opened + len(begin)) if opened >= 0 else -1
        if closed < 0:
            yield body[place:]
            return
        yield f"{body[place:opened]}\1{number}\2"
        texts.append(body[opened + len(begin) : closed])
        place = closed + len(end)
