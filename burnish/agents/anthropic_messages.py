"""Anthropic's Messages API, with the body of token counting.

A response has the blocks ``thinking`` (only if the request turns thinking on, as programs that do
not expect the block read ``content[0].text``), ``text``, and a ``tool_use`` per tool call.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal

from burnish.agents.calls import (
    CallError,
    ContextLengthError,
    Delta,
    ModelCall,
    ModelReply,
    ReplyStart,
    ToolChoice,
    well_formed,
)
from burnish.agents.conversation import (
    Conversation,
    RequestTools,
    assistant_message,
    checked_tools,
    function_tool,
    is_server_tool,
    joined_text,
    part_text,
    tool_call,
    unknown_part,
)
from burnish.agents.reading import (
    Json,
    Parameter,
    checked_body,
    ignored_parameters,
    sampling_parameters,
    stop_texts,
    unread_keys,
    unread_parameters,
    unsupported_parameters,
)
from burnish.agents.writing import compact, event, rest_of, shown
from burnish.chat_message import text_of

_TEXT = {"text": "text"}
_ROLES = ("user", "assistant", "system")
_THREAD = "thread"
_PARAMETERS = {
    _THREAD: Parameter("conversations are not stored; send all messages in every request"),
    "compaction": Parameter("the server summarizes no conversation"),
    "mcp_servers": Parameter("the server connects to no other servers; use `tools`", ([],)),
    "container": Parameter("the server has no code execution"),
    "prefill": Parameter("a response cannot be begun by the client"),
}
_MESSAGE_KEYS = frozenset(
    {
        *("role", "content"),
        *("id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage"),
    }
)
"""Keys of messages that are read, and those that clients keep of a reply."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {"context_management": ({},)}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    "context_length_exceeded": "invalid_request_error",
    "episode_closed": "invalid_request_error",
}
_ERROR_TYPES_OF_STATUS = {
    403: "permission_error",
    413: "request_too_large",
    529: "overloaded_error",
}


class Messages:
    """``POST /v1/messages``. See :class:`~burnish.agents.calls.Dialect`."""

    def read(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in a request body.

        Text blocks of one message are joined without a separator. ``cache_control`` and
        ``is_error`` are not used.
        """
        root = checked_body(body)
        return _read(root, max_messages, root.need("max_tokens").integer(1))

    def read_count(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in the body of ``POST /v1/messages/count_tokens``, which has no
        ``max_tokens``."""
        return _read(checked_body(body), max_messages, None)

    def write_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the response body of ``POST /v1/messages/count_tokens``."""
        return {"input_tokens": num_tokens}

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the message. There is a text block unless there are tool calls."""
        response = shown(call, reply.choices[0])
        blocks: list[dict[str, Any]] = []
        if response.reasoning:
            thought = {"thinking": response.reasoning, "signature": _signature(response.reasoning)}
            blocks.append({"type": "thinking", **thought})
        if response.content or not response.calls:
            blocks.append({"type": "text", "text": response.content})
        for tool_use in response.calls:
            fields = {"id": tool_use.call_id, "name": tool_use.name, "input": tool_use.arguments}
            blocks.append({"type": "tool_use", **fields})
        usage = _usage(reply, reply.completion_tokens)
        return {**_head(reply), "content": blocks, **_stop(reply), "usage": usage}

    def writer(self, call: ModelCall, start: ReplyStart) -> MessageWriter:
        """Return the writer of the events of a message: start, those of each block, delta with the
        stop reason and the usage, stop."""
        return MessageWriter(call, start)

    def error(self, error: CallError) -> dict[str, Any]:
        by_status = _ERROR_TYPES_OF_STATUS.get(error.status)
        kind = by_status or _ERROR_TYPES.get(error.kind, error.kind)
        message = error.message
        if isinstance(error, ContextLengthError):
            message = (
                f"prompt is too long: {error.num_tokens} tokens > {error.limit - 1} maximum "
                f"({error.setting} is {error.limit}, with the response)"
            )
        wrong: dict[str, Any] = {"type": kind, "message": message}
        if error.param == _THREAD:  # a client of the SDK then goes on without a thread
            code = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
            wrong["details"] = code
        return {"type": "error", "error": wrong}

    def error_event(self, error: CallError) -> str:
        return event(self.error(error), "error")


# ---- requests ----------------------------------------------------------------------------------


def _read(root: Json, max_messages: int, max_tokens: int | None) -> ModelCall:
    tools = root.read("tools", _read_tools, RequestTools())
    unsupported = unsupported_parameters(root, _PARAMETERS)
    ignored: list[str] = []
    if output := root.get("output_config"):
        if output.get("format") is not None:
            wrong = "constrained sampling is not supported; describe the format in the prompt"
            unsupported["output_config.format"] = wrong
        if output.get("effort") is not None:
            ignored.append("output_config.effort")
    choice = root.get("tool_choice")
    if choice is not None and choice.read("disable_parallel_tool_use", Json.boolean, False):
        ignored.append("disable_parallel_tool_use")
    thinks = _thinks(root.get("thinking"))
    if thinks:
        ignored.append("thinking")
    if any(tool.get("strict") for tool in root.value.get("tools") or ()):
        ignored.append("strict")
    return ModelCall(
        model=root.need("model").name(),
        messages=_read_messages(root, max_messages),
        tools=tools.functions,
        server_tools=tools.server_tools,
        tool_choice=_read_choice(choice, tools),
        max_tokens=max_tokens,
        stop=root.read("stop_sequences", stop_texts, ()),
        stream_usage=True,
        show_reasoning=thinks,
        unsupported=unsupported,
        **sampling_parameters(root),
        ignored=(
            *ignored_parameters(root, _NO_EFFECT),
            *ignored,
            *unread_keys(root.need("messages"), lambda _: _MESSAGE_KEYS),
            *unread_parameters(root),
        ),
    )


def _thinks(node: Json | None) -> bool:
    """Return whether the reply contains the reasoning."""
    if node is None or node.need("type").name() == "disabled":
        return False
    node.get("budget_tokens")  # the call names the entire parameter as one without effect
    display = node.get("display")
    return display is None or display.value != "omitted"


def _read_tools(node: Json) -> RequestTools:
    functions: list[dict[str, Any]] = []
    server_tools: dict[str, str] = {}
    for tool in node.items():
        kind = tool.get("type")
        if kind is not None and is_server_tool(kind):
            server_tools[kind.path] = kind.name()
            continue
        if kind is not None and kind.value != "custom":
            raise kind.wrong("'custom': describe other tools by their schema")
        functions.append(function_tool(tool, "input_schema"))
    return RequestTools(checked_tools(functions, node.path), server_tools=server_tools)


def _read_choice(node: Json | None, tools: RequestTools) -> ToolChoice:
    if node is None:
        return "auto"
    match node.need("type").one_of(("auto", "none", "any", "tool")):
        case "auto":
            return "auto"
        case "none":
            return "none"
        case "any":
            return tools.required(node)
        case _:
            return tools.required(node, node.need("name"))


def _read_messages(root: Json, max_messages: int) -> tuple[Any, ...]:
    conversation = Conversation(max_messages=max_messages)
    if system := root.get("system"):
        conversation.add({"role": "system", "content": joined_text(system, _TEXT)}, system.path)
    messages = root.need("messages")
    for each in messages.items():
        role = each.need("role").one_of(_ROLES)
        content = each.need("content")
        if role == "assistant":
            conversation.add(_read_assistant(content), each.path)
        elif role == "system" or isinstance(content.value, str):
            text = joined_text(content, _TEXT)
            conversation.add({"role": role, "content": text}, each.path)
        else:
            _add_user_blocks(conversation, content)
    if not messages.value:
        raise messages.wrong("a list with at least one message")
    return conversation.finish(messages.path)


def _add_user_blocks(conversation: Conversation, content: Json) -> None:
    """Add the tool results and the texts of a user message, in order. Successive texts are one
    message."""
    texts: list[str] = []
    blocks = content.items()
    if not blocks:
        raise content.wrong("a string or a non-empty list of blocks")
    for block in blocks:
        if block.need("type").value != "tool_result":
            texts.append(part_text(block, {**_TEXT, "tool_result": ""}))
            continue
        if texts:
            conversation.add({"role": "user", "content": text_of(texts)}, content.path)
            texts = []
        result = block.read("content", _result_text, "")
        call_id = block.need("tool_use_id").name()
        conversation.add({"role": "tool", "content": result, "tool_call_id": call_id}, block.path)
    if texts:
        conversation.add({"role": "user", "content": text_of(texts)}, content.path)


def _result_text(node: Json) -> str:
    """Return the text of a result. A reference to a tool, with which a client answers a search for
    tools, is the name of the tool."""
    if not isinstance(node.value, list):
        return joined_text(node, _TEXT)
    parts = [
        f"[tool {part.need('tool_name').name()}]"
        if part.need("type").value == "tool_reference"
        else part_text(part, {**_TEXT, "tool_reference": ""})
        for part in node.items()
    ]
    return text_of(parts)


def _read_assistant(content: Json) -> dict[str, Any]:
    if isinstance(content.value, str):
        return assistant_message(content.value)
    texts, thoughts, calls = [], [], []
    for block in content.items():
        match block.need("type").name():
            case "text":
                texts.append(block.need("text").text())
            case "thinking":
                thoughts.append(block.need("thinking").text())
            case "redacted_thinking":
                continue  # encrypted by another server
            case "tool_use":
                name, arguments = block.need("name").name(), block.need("input").mapping()
                calls.append(tool_call(block.need("id").name(), name, arguments))
            case _:
                raise unknown_part(block, ("text", "thinking", "tool_use"))
    return assistant_message(text_of(texts), text_of(thoughts), calls)


# ---- replies -----------------------------------------------------------------------------------


def _event(name: str, data: Mapping[str, Any]) -> str:
    return event({"type": name, **data}, name)


class MessageWriter:
    """Events of a message. Implements :class:`~burnish.agents.calls.EventWriter`.

    Reasoning that comes after content has begun is in a block of its own.
    """

    def __init__(self, call: ModelCall, start: ReplyStart) -> None:
        self._call, self._start = call, start
        self._begun = False
        self._index = -1
        self._open: Literal["", "thinking", "text"] = ""
        self._thought = ""
        """Text of the last thinking block."""
        self._sent = {"thinking": "", "text": ""}

    def add(self, delta: Delta) -> Iterator[str]:
        if not self._begun:
            self._begun = True
            nothing = {"stop_reason": None, "stop_sequence": None}
            usage = _usage(self._start, 0)
            begun = {**_head(self._start), "content": [], **nothing, "usage": usage}
            yield _event("message_start", {"message": begun})
        if delta.reasoning and self._call.show_reasoning:
            yield from self._text("thinking", delta.reasoning)
        if delta.content:
            yield from self._text("text", delta.content)

    def _text(self, kind: Literal["thinking", "text"], text: str) -> Iterator[str]:
        if self._open != kind:
            yield from self._close()
            self._open, self._index, self._thought = kind, self._index + 1, ""
            signature = {"signature": ""} if kind == "thinking" else {}
            block = {"type": kind, kind: "", **signature}
            yield _event("content_block_start", {"index": self._index, "content_block": block})
        self._sent[kind] += text
        self._thought += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> Iterator[str]:
        if self._open == "thinking":
            signature = _signature(self._thought)
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open:
            yield _event("content_block_stop", {"index": self._index})
        self._open = ""

    def finish(self, reply: ModelReply) -> Iterator[str]:
        """Yield the events that are left. There is a text block unless there are tool calls."""
        response = shown(self._call, reply.choices[0])
        reasoning = rest_of(self._sent["thinking"], response.reasoning)
        content = rest_of(self._sent["text"], response.content)
        yield from self.add(Delta(0, reasoning, content))
        if not response.content and not response.calls:
            yield from self._text("text", "")
        yield from self._close()
        for tool_use in response.calls:
            self._index += 1
            block = {"type": "tool_use", "id": tool_use.call_id, "name": tool_use.name, "input": {}}
            yield _event("content_block_start", {"index": self._index, "content_block": block})
            text = compact(tool_use.arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": text})
            yield _event("content_block_stop", {"index": self._index})
        usage = _usage(reply, reply.completion_tokens)
        yield _event("message_delta", {"delta": _stop(reply), "usage": usage})
        yield _event("message_stop", {})


def _head(reply: ModelReply | ReplyStart) -> dict[str, Any]:
    name = f"msg_{reply.reply_id}"
    return {"id": name, "type": "message", "role": "assistant", "model": reply.model}


def _stop(reply: ModelReply) -> dict[str, Any]:
    choice = reply.choices[0]
    reason = _STOP_REASONS[choice.finish_reason]
    if choice.finish_reason == "stop" and choice.stop_sequence is not None:
        reason = "stop_sequence"
    stopped = well_formed(choice.stop_sequence) if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(reply: ModelReply | ReplyStart, sampled: int) -> dict[str, Any]:
    """Return the usage object. ``sampled``: number of sampled tokens."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": sampled,
    }


def _signature(reasoning: str) -> str:
    """Return the signature of a thinking block. Clients must return one; it is not checked."""
    return b64encode(blake2b(reasoning.encode(), digest_size=24).digest()).decode()
