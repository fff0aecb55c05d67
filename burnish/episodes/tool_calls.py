"""Tool calls as values: from the JSON that a response contains to calls that can be run.

Every mistake is described in words for the policy, so that it can answer with a corrected call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

from burnish.json_text import RepeatedKeyError, json_value
from burnish.model_text import DOTALL, Pattern
from burnish.tool_arguments import argument_problem

MAX_CALLS = 64
"""Maximum tool calls of one response."""
MAX_DEPTH = 64
"""Maximum depth of lists and objects in the arguments of a call."""
_SHOWN = 200  # characters of a malformed call or a key that are shown to the policy
_BARE = {"name", "id", "type", "index"}
"""Keys of a call without arguments."""
_BARE_KEY = Pattern(r"(?<=[{,])(\w+):")


class CallReader:
    """Reads the calls of one response.

    ``tools``: descriptions with which arguments are compared; None: they are not. ``salt``: seed of
    ids for calls that have none. ``num_values``: number of calls in the response.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None, salt: bytes, num_values: int
    ) -> None:
        self._functions = None if tools is None else tool_functions(tools)
        self._salt, self._num_values = salt, num_values
        self._number = 0
        self.calls: list[dict[str, Any]] = []
        self.problems: list[str] = []
        """Descriptions of calls that are malformed or do not match the tools."""

    def read(self, values: Sequence[Any], problem: str | None) -> bool:
        """Read the calls of one region. Return False if one of them is malformed; then none of the
        region is a call. ``problem``: why the region is malformed, if that is known."""
        calls: list[dict[str, Any]] = []
        remarks: list[str] = []
        if not values and problem is None:
            problem = "is empty"
        for value in values or [None]:
            self._number += 1
            label = f"tool call {self._number}" if self._num_values > 1 else "the tool call"
            call = read_call(value) if problem is None else problem
            if isinstance(call, str):
                self.problems.append(f"{label} {call}")
                return False
            name, arguments, call_id = call
            if not call_id or any(call_id == other["id"] for other in (*self.calls, *calls)):
                number = bytes([self._number])
                call_id = blake2b(self._salt + number, digest_size=8).hexdigest()[:9]
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
            mismatch = self._mismatch(name, arguments)
            remarks += [f"{label} {mismatch}"] if mismatch else []
        self.calls += calls
        self.problems += remarks
        return True

    def _mismatch(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        functions = self._functions
        if functions is None:
            return None
        if name not in functions:
            known = ", ".join(functions)
            return f"names the tool {name!r}, which does not exist; the tools are {known}"
        problem = argument_problem(functions[name].get("parameters"), arguments)
        return f"has arguments that {name} does not accept: {problem}" if problem else None


def tool_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return name -> description (``name``, ``description``, ``parameters``) of every tool."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(function["name"]): function for function in functions}


def read_call(value: Any) -> tuple[str, dict[str, Any], str] | str:
    """Return (name, arguments, id or an empty string), or the reason why ``value`` is no call."""
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            return f"is not valid JSON ({error}): {value.strip()[:_SHOWN]}"
    if not isinstance(value, Mapping):
        return f"is not a JSON object: {json.dumps(value)[:_SHOWN]}"
    function = value.get("function", value)
    if isinstance(function, str):
        return read_call(function)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        return f'has no "name": {json.dumps(function)[:_SHOWN]}'
    none: dict[str, Any] | None = {} if set(function) <= _BARE else None
    arguments = function.get("arguments", function.get("parameters", none))
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except ValueError as error:
            return f"has arguments that are not valid JSON ({error}): {arguments[:_SHOWN]}"
    if arguments is None:
        return f'has no "arguments": {json.dumps(function)[:_SHOWN]}'
    if not isinstance(arguments, Mapping):
        return f"has arguments that are not a JSON object: {json.dumps(arguments)[:_SHOWN]}"
    if _is_deep(arguments):
        return f"has arguments that are nested more than {MAX_DEPTH} deep"
    try:  # Python reads NaN, Infinity and 1e999
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return "has a number in its arguments that is not finite, which JSON does not have"
    call_id = value.get("id")
    return name, dict(arguments), call_id if isinstance(call_id, str) else ""


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [item for v in nested if isinstance(v, list) for item in v]
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def repeated_key(body: str, field: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the text of a call has an argument twice, or None.

    transformers keeps the last one, other servers the first, and the tool would run with one that
    the policy may not have meant. In all formats such a call is malformed.

    ``field``: the tool calls of a loaded response template. ``arguments``: those that were read
    from ``body``.
    """
    try:
        if field.content == "json":
            _check(_plain_json(body, field.content_args))
        elif field.content in ("xml-inline", "kv-lines"):
            seen = set()
            for key, value in _pairs(body, field.content, field.content_args):
                if key in seen and not field.content_args.get("merge_duplicates"):
                    raise RepeatedKeyError(f"it has the parameter {key[:_SHOWN]!r} twice")
                seen.add(key)
                if isinstance(arguments.get(key), dict | list):  # its schema says that it is JSON
                    _check(value)
    except RepeatedKeyError as error:
        return f"has an argument more than once: {error}"
    return None


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
