"""Read reasoning, content and tool calls from the text of a response.

transformers' response templates do the parsing. This module checks the calls against the tools and
describes every mistake in words for the policy, so that it can answer with a corrected call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema_specifications import REGISTRY

from burnish.chat_message import Message
from burnish.episodes.formats import ToolFormat
from burnish.episodes.streaming import REASONING, MessageText, without_long_spaces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 200  # characters of a malformed call that are shown to the policy
MAX_CALLS = 64
"""Maximum tool calls of one response."""
MAX_DEPTH = 64
"""Maximum depth of lists and objects in the arguments of a call."""


@dataclass(frozen=True)
class ParsedMessage:
    """An assistant message read from a response.

    Example: ``ParsedMessage({"role": "assistant", "content": "4"}, None)``.
    """

    message: Message
    """``role``, ``content``, and if present ``reasoning_content`` and ``tool_calls``. A call is
    ``{"id", "type": "function", "function": {"name", "arguments": {...}}}``."""
    problem: str | None
    """Description of malformed tool calls, addressed to the policy; None if there are none."""


class ResponseParser:
    """Reads responses with one response template.

    ``prefix``: text after which responses begin (the end of the prompt). A reasoning block that the
    prompt opens is recognized by it. ``tool_format``: for hints; None if ``template`` is the
    tokenizer's own or the template reads no calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        *,
        tool_format: ToolFormat | None = None,
        prefix: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = _lenient(template)
        self._format = tool_format
        self._prefix = prefix
        closing = self._template["fields"].get("reasoning_content", {}).get("close")
        self._reasoning_end = closing if isinstance(closing, str) else ""

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, salt: bytes = b""
    ) -> ParsedMessage:
        """Return the message in ``text``. Raises nothing.

        ``salt``: seed of ids for calls that have none. They are 9 characters long, as Mistral's
        templates require, and depend only on ``salt`` and the position. Of more than 256
        consecutive spaces, 256 are kept: patterns of published templates need quadratic time.
        """
        text = without_long_spaces(text)
        num_calls = text.count(self._format.opening) if self._format and self._format.opening else 0
        if num_calls > MAX_CALLS:
            return ParsedMessage(self._without_calls(text), _refused(num_calls))
        try:
            found = self._tokenizer.parse_response(
                text, self._template, prefix=self._prefix, tools=[dict(tool) for tool in tools]
            )
        except Exception as error:  # a malformed response is data
            problem = self._with_example(f"the tool call is malformed: {error}")
            return ParsedMessage(self._without_calls(text), problem)
        message, content, reasoning = _texts(found)
        calls, problems = _read_calls(found.get("tool_calls"), tools, salt)
        if calls:
            message["tool_calls"] = calls
        problems += self._left_over(text, content, reasoning)
        return ParsedMessage(message, self._with_example("; ".join(problems)) if problems else None)

    def stream(self) -> MessageText:
        """Return a reader of a response that is being sampled. What it returns is a beginning of
        what :meth:`parse` returns."""
        return MessageText(self._template, prefix=self._prefix)

    def _without_calls(self, text: str) -> dict[str, Any]:
        """Return the message of a response whose calls cannot be read: they are content."""
        fields = {n: field for n, field in self._template["fields"].items() if n != "tool_calls"}
        try:
            found = self._tokenizer.parse_response(
                text, {**self._template, "fields": fields}, prefix=self._prefix
            )
        except Exception:  # the malformed part is in another field
            return {"role": "assistant", "content": text.strip()}
        return _texts(found)[0]

    def _left_over(self, text: str, content: str, reasoning: str) -> Iterator[str]:
        """Describe calls that are not closed, or whose beginning is left in the content."""
        if self._format is None or not self._format.opening:
            return
        opening, closing = self._format.opening, self._format.closing
        if opening in content:
            yield f"{opening!r} is not followed by a well-formed tool call"
            return
        if self._reasoning_end not in text and opening in reasoning:
            yield f"tool calls in reasoning are not run; write {self._reasoning_end!r} first"
            return
        behind = text.rpartition(reasoning)[2] if reasoning else text
        if closing and behind.count(opening) > behind.count(closing):
            yield f"a tool call is not closed by {closing!r}"

    def _with_example(self, problem: str) -> str:
        example = f"\nWrite a tool call as:\n{self._format.example}" if self._format else ""
        return problem + example


def _texts(found: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return (message without calls, content with the white space around it, reasoning)."""
    content = str(found.get("content") or "") + str(found.get("outside") or "")
    message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    reasoning = next((str(found[key]) for key in REASONING if found.get(key)), "")
    if reasoning:
        message["reasoning_content"] = reasoning
    return message, content, reasoning


def tool_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return name -> description (``name``, ``description``, ``parameters``) of every tool."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(function["name"]): function for function in functions}


def argument_problem(parameters: Mapping[str, Any] | None, arguments: Any) -> str | None:
    """Return why ``arguments`` do not match the JSON schema ``parameters``, or None if they do.

    ``nullable: true``, with which transformers writes Optional, is honored. Raises
    jsonschema.SchemaError if ``parameters`` is no JSON schema.
    """
    validator = _validator(json.dumps(parameters or {}, sort_keys=True))
    error = best_match(validator.iter_errors(arguments))
    if error is None:
        return None
    where = ".".join(map(str, error.absolute_path))
    return f"{where}: {error.message}" if where else str(error.message)


@lru_cache(maxsize=1024)
def _validator(schema_json: str) -> Draft202012Validator:
    schema = _with_null(json.loads(schema_json))
    Draft202012Validator.check_schema(schema)
    # With a registry of its own, a validator does not download what a `$ref` names.
    return Draft202012Validator(schema, registry=REGISTRY)


def _with_null(schema: Any) -> Any:
    """Rewrite ``nullable: true`` as a union with the type null, recursively."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def _lenient(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a response template that keeps JSON it cannot parse as text."""
    copy = deepcopy(dict(template))
    for entry in copy["fields"].values():
        if entry.get("content") == "json":
            entry["content_args"] = {**entry.get("content_args", {}), "allow_non_json": True}
    return copy


def _read_calls(
    found: Any, tools: Sequence[Mapping[str, Any]], salt: bytes
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (well-formed calls, problems). A call of an unknown tool is in both."""
    values = found if isinstance(found, list) else [] if found is None else [found]
    values = [call for value in values for call in (value if isinstance(value, list) else [value])]
    if len(values) > MAX_CALLS:  # one list may contain all calls
        return [], [_refused(len(values))]
    functions = tool_functions(tools)
    calls: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, value in enumerate(values, start=1):
        label = f"tool call {number}" if len(values) > 1 else "the tool call"
        call = _read_call(value)
        if isinstance(call, str):
            problems.append(f"{label} {call}")
            continue
        name, arguments, call_id = call
        if not call_id or any(call_id == other["id"] for other in calls):
            call_id = blake2b(salt + bytes([number]), digest_size=8).hexdigest()[:9]
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        problem = _mismatch(functions, name, arguments)
        if problem:
            problems.append(f"{label} {problem}")
    return calls, problems


def _refused(num_calls: int) -> str:
    return f"there are {num_calls} tool calls in one response, and the limit is {MAX_CALLS}"


def _read_call(value: Any) -> tuple[str, dict[str, Any], str] | str:
    """Return (name, arguments, id or an empty string), or the reason why ``value`` is no call."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"is not valid JSON ({error}): {value.strip()[:_SHOWN]}"
    if not isinstance(value, Mapping):
        return f"is not a JSON object: {json.dumps(value)[:_SHOWN]}"
    function = value.get("function", value)
    if isinstance(function, str):
        return _read_call(function)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        return f'has no "name": {json.dumps(function)[:_SHOWN]}'
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"has arguments that are not valid JSON ({error}): {arguments[:_SHOWN]}"
    if not isinstance(arguments, Mapping):
        return f"has arguments that are not a JSON object: {json.dumps(arguments)[:_SHOWN]}"
    if _is_deep(arguments):
        return f"has arguments that are nested more than {MAX_DEPTH} deep"
    if not _is_json(arguments):
        return "has a number in its arguments that is not finite, which JSON does not have"
    call_id = value.get("id")
    return name.strip(), dict(arguments), call_id if isinstance(call_id, str) else ""


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


def _mismatch(
    functions: Mapping[str, Mapping[str, Any]], name: str, arguments: Mapping[str, Any]
) -> str | None:
    if name not in functions:
        known = f"the tools are {', '.join(functions)}" if functions else "there are no tools"
        return f"names the tool {name!r}, which does not exist; {known}"
    try:
        problem = argument_problem(functions[name].get("parameters"), arguments)
    except Exception:  # an invalid schema, which is the tool's mistake and not the policy's
        return None
    return f"has arguments that {name} does not accept: {problem}" if problem else None
