"""Tool calls as values: from the JSON that a response contains to calls that can be run.

Every mistake is described in words for the policy, so that it can answer with a corrected call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from burnish.json_text import json_value
from burnish.tool_arguments import argument_problem

MAX_CALLS = 64
"""Maximum tool calls of one response."""
MAX_DEPTH = 64
"""Maximum depth of lists and objects in the arguments of a call."""
_SHOWN = 200  # characters of a malformed call that are shown to the policy
_BARE = {"name", "id", "type", "index"}
"""Keys of a call without arguments."""


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
            calls.append(self._finished(call, [*self.calls, *calls]))
            mismatch = self._mismatch(call[0], call[1])
            remarks += [f"{label} {mismatch}"] if mismatch else []
        self.calls += calls
        self.problems += remarks
        return True

    def _finished(
        self, call: tuple[str, dict[str, Any], str], before: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        name, arguments, call_id = call
        if not call_id or any(call_id == other["id"] for other in before):
            number = bytes([self._number])
            call_id = blake2b(self._salt + number, digest_size=8).hexdigest()[:9]
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

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
    arguments = _arguments(function)
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
    if not _is_json(arguments):
        return "has a number in its arguments that is not finite, which JSON does not have"
    call_id = value.get("id")
    return name.strip(), dict(arguments), call_id if isinstance(call_id, str) else ""


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call. A call with a name alone has none; None if they are under
    another key."""
    for key in ("arguments", "parameters"):
        if key in function:
            return function[key]
    return {} if set(function) <= _BARE else None


def _is_json(value: Any) -> bool:
    """Return whether all numbers are finite. Python reads ``NaN``, ``Infinity`` and ``1e999``."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


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
