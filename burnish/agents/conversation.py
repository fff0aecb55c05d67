"""Messages and tools of a request, checked for the rules that all APIs share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.agents.calls import CallError, Message, ToolChoice, invalid
from burnish.agents.reading import Json, checked_value
from burnish.chat_message import AnsweredCalls, text_of
from burnish.json_text import json_value

_SERVER_TOOLS = (
    *("web_search", "web_fetch", "file_search", "tool_search", "code_execution"),
    *("code_interpreter", "image_generation", "mcp"),
)
"""Beginnings of the types of tools that OpenAI's or Anthropic's server runs."""
_MEDIA = ("image", "audio", "video", "file", "document")


class Conversation:
    """Collects the messages of a request.

    A tool result gets the name of its call. Every error names the JSON path of the message.
    """

    def __init__(self, *, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages: list[Message] = []
        self._last_path = ""
        self._names: AnsweredCalls[str] = AnsweredCalls()

    def add(self, message: Mapping[str, Any], path: str) -> None:
        """Append a message. Raises CallError if there are too many, or if it is a tool result
        without a call."""
        if len(self._messages) >= self._max_messages:
            raise invalid(
                path, f"the conversation has more than {self._max_messages} messages; shorten it"
            )
        if message["role"] == "tool":
            name = self._names.answered_by(message)
            if name is None:
                raise invalid(
                    path,
                    f"{path} is the result of the tool call {message['tool_call_id'][:60]!r}, but "
                    "no earlier assistant message has a call with this id; send that message too",
                )
            message = {"name": name, **message}
        calls = message.get("tool_calls", ())
        self._names.add((call["id"], call["function"]["name"]) for call in calls)
        self._messages.append(message)
        self._last_path = path

    def finish(self, path: str) -> tuple[Message, ...]:
        """Return all messages. ``path``: path of their list.

        Raises CallError if there are none, or if the last one is the assistant's.
        """
        if not self._messages:
            raise invalid(path, f"{path} is empty, so there is nothing to answer; add a message")
        if self._messages[-1]["role"] == "assistant":
            raise invalid(
                self._last_path,
                f"{self._last_path}: the last message is the assistant's, so there is nothing to "
                "answer (beginning a response for the model is not supported); end the "
                "conversation with a user message or a tool result",
            )
        return tuple(self._messages)


class FunctionCalls:
    """Calls in the form before tools: ``function_call`` of an answer, and the result as a message
    of the role ``function``. They have no ids."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, str] = {}
        """Name of a function -> id of its last call, which has no result yet."""

    def add_call_id(self, node: Json, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the id of its call."""
        function_call = node.get("function_call") if message["role"] == "assistant" else None
        if function_call is not None:
            name, encoded = function_call.need("name").name(), function_call.get("arguments")
            self._count += 1
            self._open[name] = call_id = f"f{self._count:08d}"
            arguments = arguments_of(encoded) if encoded else {}
            calls = [*message.get("tool_calls", ()), tool_call(call_id, name, arguments)]
            return {**message, "tool_calls": calls}
        if node.value["role"] != "function":
            return message
        name = node.need("name").name()
        if name not in self._open:
            raise invalid(
                node.path,
                f"{node.path} is a result of the function {name[:60]!r}, but no earlier assistant "
                "message has a function_call with this name",
            )
        return {**message, "tool_call_id": self._open.pop(name)}


def assistant_message(
    content: str, reasoning: str = "", calls: Collection[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return an assistant message. Empty parts other than the content are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry of ``tool_calls``."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def joined_text(node: Json, kinds: Mapping[str, str]) -> str:
    """Return content: a string, or a list of text parts, which are joined as in the messages of
    data files.

    ``kinds``: ``type`` of a text part -> key of its text. Raises CallError for other parts.
    """
    if isinstance(node.value, str):
        return node.value
    if not isinstance(node.value, list):
        raise node.wrong("a string or a list of text parts")
    return text_of([part_text(part, kinds) for part in node.items()])


def part_text(part: Json, kinds: Mapping[str, str]) -> str:
    """Return the text of one part of content."""
    kind = part.need("type").name()
    if kind in kinds:
        return part.need(kinds[kind]).text()
    raise unknown_part(part, kinds)


def unknown_part(part: Json, known: Collection[str]) -> CallError:
    """Return the error for a part of content whose ``type`` is not ``known``."""
    where, kind = part.child("type").path, part.value["type"]
    if any(word in kind for word in _MEDIA):
        reason = "the model reads text only; send text parts"
    else:
        reason = f"known are {', '.join(known)}"
    return invalid(where, f"{where} is {kind[:60]!r}, which is not supported: {reason}")


def arguments_of(node: Json) -> Mapping[str, Any]:
    """Return the arguments of a tool call, given as JSON text or as an object.

    Empty text means no arguments. Numbers that are not finite become None: the model may have
    written them. Raises CallError if the text is not a JSON object, or has a key twice.
    """
    value = node.value
    if isinstance(value, str):
        try:
            value = json_value(value) if value.strip() else {}
        except ValueError as error:
            raise invalid(
                node.path,
                f"{node.path} is not valid JSON text ({error}); send a JSON object as text",
            ) from error
        value = checked_value(value, node.path, finite=False)
    if not isinstance(value, Mapping):
        raise node.wrong("a JSON object, or its text")
    return value


def function_tool(function: Json, schema_key: str, *, others: bool = False) -> dict[str, Any]:
    """Return a tool in the form of chat templates. What the client leaves out or sends as null is
    left out, so that a row of data with the same tool has the same prompt.

    ``schema_key``: key of the JSON schema of the arguments. ``others``: keep the keys besides name,
    description and schema, as templates render them.
    """
    name = function.need("name").name()
    function.read("description", Json.text, None)
    function.read(schema_key, Json.mapping, None)
    names = {"name": "name", "description": "description", schema_key: "parameters"}
    entries = {
        names.get(key, key): value
        for key, value in function.mapping().items()
        if value is not None and (others or key in names)
    }
    return {"type": "function", "function": {**entries, "name": name}}


def checked_tools(tools: list[dict[str, Any]], path: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools. Raises CallError if two have the same name."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            where = f"{path}[{number}]"
            raise invalid(where, f"{where}: another tool is also named {name[:60]!r}; rename one")
        names.add(name)
    return tuple(tools)


@dataclass(frozen=True)
class RequestTools:
    """The tools of a request."""

    functions: tuple[Mapping[str, Any], ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """As :attr:`ModelCall.namespaces`."""
    server_tools: Mapping[str, str] = field(default_factory=dict)
    """As :attr:`ModelCall.server_tools`."""

    def required(self, node: Json, name: Json | None = None) -> ToolChoice:
        """Return the tool choice of a request that requires a call, of the tool ``name`` if it is
        given. If only a tool of the server can be meant, the choice is left to the model: the
        backend refuses such tools, or drops them.

        Raises CallError if a call is required without tools, or of an unknown tool.
        """
        names = [tool["function"]["name"] for tool in self.functions]
        known = [*names, *(short for _, short in self.namespaces.values())]
        if self.functions if name is None else name.name() in known:
            return "required"
        if self.server_tools:
            return "auto"
        if not self.functions:
            raise invalid(node.path, f"{node.path} requires a tool call, but there are no tools")
        assert name is not None
        raise name.wrong(f"the name of a tool ({', '.join(known)[:200]})")


def is_server_tool(kind: Json) -> bool:
    """Return whether a type of tools is one that a provider runs."""
    return str(kind.value).startswith(_SERVER_TOOLS)


def openai_choice(
    node: Json | None, tools: RequestTools, named: Callable[[Json], Json]
) -> ToolChoice:
    """Return the tool choice of OpenAI's APIs. ``named``: the name in the choice of one tool."""
    if node is None or node.value == "auto":
        return "auto"
    if node.value == "none":
        return "none"
    if node.value == "required":
        return tools.required(node)
    if not isinstance(node.value, dict):
        raise node.wrong("'auto', 'none', 'required', or an object that names a function")
    kind = node.need("type")
    if tools.server_tools and is_server_tool(kind):
        return "auto"
    kind.one_of(("function",))
    return tools.required(node, named(node))
