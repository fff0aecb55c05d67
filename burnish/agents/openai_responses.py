"""OpenAI's Responses API, without its server-side state: clients send the whole conversation.

A response is a list of items: ``reasoning``, ``message``, and a ``function_call`` per tool call.
Consecutive items of this kind in the input are one assistant message, up to an item that begins
another one. A streamed response may have several items with reasoning or text; their ids name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.agents.calls import CallError, Delta, ModelCall, ModelReply, ReplyStart
from burnish.agents.conversation import (
    Conversation,
    RequestTools,
    arguments_of,
    assistant_message,
    checked_tools,
    function_tool,
    is_server_tool,
    joined_text,
    openai_choice,
    tool_call,
)
from burnish.agents.reading import (
    Json,
    Parameter,
    checked_body,
    ignored_parameters,
    sampling_parameters,
    unread_keys,
    unread_parameters,
    unsupported_parameters,
)
from burnish.agents.writing import ShownCall, event, openai_error, rest_of, shown, token_logprobs

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHT = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"
_STATELESS = "the server stores no responses; send the whole conversation in `input`"
_PARAMETERS = {
    "previous_response_id": Parameter(_STATELESS),
    "conversation": Parameter(_STATELESS),
    "prompt": Parameter("the server stores no prompts; send `instructions` and `input`"),
    "background": Parameter("responses are not stored", (False,)),
    "top_logprobs": Parameter("only log-probs of sampled tokens are known; use 0", (0,)),
}
_KEYS_OF_REPLIES = frozenset({"type", "id", "status"})
_ITEM_KEYS = {
    "message": {"role", "content"},
    "reasoning": {"content", "summary", "encrypted_content"},
    "function_call": {"call_id", "name", "namespace", "arguments", "parsed_arguments"},
    "function_call_output": {"call_id", "output"},
}
"""Keys of each type of item that are read, and those that clients keep of a reply."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "truncation": ("disabled",),
    "context_management": ([],),
}


class Responses:
    """``POST /v1/responses``. See :class:`~burnish.agents.calls.Dialect`."""

    def read(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in a request body.

        ``instructions`` is the first system message. Items of types that only OpenAI's own tools
        create are refused.
        """
        root = checked_body(body)
        tools = root.read("tools", _read_tools, RequestTools())
        include = [node.text() for node in root.read("include", Json.items, [])]
        unsupported, ignored = _text_and_reasoning(root)
        ignored += ["include"] * (not {_LOGPROBS}.issuperset(include))
        # Tools may ask for arguments that are constrained to their schema.
        ignored += ["strict"] * any(tool.get("strict") for tool in root.value.get("tools") or ())
        return ModelCall(
            model=root.need("model").name(),
            messages=_Input(max_messages).read(root),
            tools=tools.functions,
            namespaces=tools.namespaces,
            server_tools=tools.server_tools,
            tool_choice=openai_choice(
                root.get("tool_choice"), tools, lambda choice: choice.need("name")
            ),
            max_tokens=root.read("max_output_tokens", lambda node: node.integer(1), None),
            logprobs=_LOGPROBS in include,
            stream_usage=True,
            unsupported={**unsupported_parameters(root, _PARAMETERS), **unsupported},
            **sampling_parameters(root),
            ignored=(
                *ignored_parameters(root, _NO_EFFECT),
                *ignored,
                *_unread_keys(root.need("input")),
                *unread_parameters(root),
            ),
        )

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        return _finished(call, reply, _items(call, reply))

    def writer(self, call: ModelCall, start: ReplyStart) -> ResponseWriter:
        """Return the writer of the events of a response: created, in progress, those of each item,
        and completed or incomplete."""
        return ResponseWriter(call, start)

    def error(self, error: CallError) -> dict[str, Any]:
        return openai_error(error)

    def error_event(self, error: CallError) -> str:
        """Return an ``error`` event. It has the fields of the documented event, and the error body,
        for which the official client raises an exception."""
        body = openai_error(error)
        fields = {key: body["error"][key] for key in ("code", "message", "param")}
        return event({"type": "error", "sequence_number": 0, **fields, **body}, "error")


# ---- requests ----------------------------------------------------------------------------------


@dataclass
class _Turn:
    """Items of one assistant message."""

    path: str
    reply: str
    """Name of the response that the items belong to, empty if they have no ids."""
    reasoning: str = ""
    content: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_answer(self) -> bool:
        return self.content is not None or bool(self.calls)

    def has_part(self, item: Json) -> bool:
        """Return whether an item is certainly of the same response."""
        return bool(self.reply) and self.reply == _reply(item)


class _Input:
    """Reads ``instructions`` and ``input``."""

    def __init__(self, max_messages: int) -> None:
        self.conversation = Conversation(max_messages=max_messages)
        self.turn: _Turn | None = None

    def read(self, root: Json) -> tuple[Any, ...]:
        if instructions := root.get("instructions"):
            content = joined_text(instructions, _TEXT)
            self.conversation.add({"role": "system", "content": content}, instructions.path)
        node = root.need("input")
        if isinstance(node.value, str):
            self.conversation.add({"role": "user", "content": node.value}, node.path)
        else:
            for item in node.items():
                self._item(item)
            self._end_turn()
        return self.conversation.finish(node.path)

    def _item(self, item: Json) -> None:
        kind = item.get("type")
        match "message" if kind is None else kind.value:
            case "message":
                self._message(item)
            case "reasoning":
                self._begin_part(item)
                parts = [item.get(key) for key in ("content", "summary")]
                texts = [joined_text(part, _THOUGHT) for part in parts if part is not None]
                if text := next(filter(None, texts), ""):
                    turn = self._open_turn(item)
                    is_next = not turn.reasoning or turn.has_part(item)
                    turn.reasoning += text if is_next else f"\n{text}"
            case "function_call":
                call_id, name = item.need("call_id").name(), item.need("name").name()
                namespace = item.read("namespace", Json.text, "")
                name = _in_namespace(namespace, name) if namespace else name
                call = tool_call(call_id, name, arguments_of(item.need("arguments")))
                self._open_turn(item).calls.append(call)
            case "function_call_output":
                self._end_turn()
                content = joined_text(item.need("output"), _TEXT)
                call_id = item.need("call_id").name()
                message = {"role": "tool", "content": content, "tool_call_id": call_id}
                self.conversation.add(message, item.path)
            case _:
                assert kind is not None
                known = "message, reasoning, function_call or function_call_output"
                raise kind.wrong(f"{known}: the server has no tools and stores no items")

    def _message(self, item: Json) -> None:
        role = item.need("role").one_of(_ROLES)
        content = joined_text(item.need("content"), _TEXT)
        if role != "assistant":
            self._end_turn()
            role = "system" if role == "developer" else role
            self.conversation.add({"role": role, "content": content}, item.path)
            return
        self._begin_part(item)
        turn = self._open_turn(item)
        turn.content = (turn.content or "") + content

    def _begin_part(self, item: Json) -> None:
        """End the message so far if it has an answer, unless ``item`` is of the same response."""
        turn = self.turn
        if turn is not None and turn.has_answer and not turn.has_part(item):
            self._end_turn()

    def _open_turn(self, item: Json) -> _Turn:
        if self.turn is None:
            self.turn = _Turn(item.path, _reply(item))
        return self.turn

    def _end_turn(self) -> None:
        turn, self.turn = self.turn, None
        if turn is not None:
            message = assistant_message(turn.content or "", turn.reasoning, turn.calls)
            self.conversation.add(message, turn.path)


def _reply(item: Json) -> str:
    """Return the name of the response in the id of an item (:func:`_items`), or ""."""
    node = item.get("id")
    prefix, _, name = str("" if node is None else node.value).partition("_")
    head, _, number = name.rpartition("_")
    name = head if head and number.isdigit() else name
    return name if prefix in ("rs", "msg", "fc") else ""


def _read_tools(node: Json) -> RequestTools:
    """Return the tools. Functions in a namespace have its name before their own."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    server_tools: dict[str, str] = {}
    for tool in node.items():
        kind = tool.need("type")
        if kind.value == "namespace":
            namespace = tool.need("name").name()
            for inner in tool.need("tools").items():
                if inner.need("type").value != "function":
                    raise inner.need("type").wrong("'function'")
                function = function_tool(inner, "parameters")
                name = function["function"]["name"]
                function["function"]["name"] = _in_namespace(namespace, name)
                namespaces[function["function"]["name"]] = (namespace, name)
                functions.append(function)
        elif is_server_tool(kind):
            server_tools[kind.path] = kind.name()
        elif kind.value == "function":
            functions.append(function_tool(tool, "parameters"))
        else:
            raise kind.wrong("'function', or a 'namespace' of functions")
    return RequestTools(checked_tools(functions, node.path), namespaces, server_tools)


def _in_namespace(namespace: str, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}__{name}"


def _unread_keys(node: Json) -> list[str]:
    if isinstance(node.value, str):
        return []
    return unread_keys(
        node, lambda item: _KEYS_OF_REPLIES | _ITEM_KEYS[item.get("type") or "message"]
    )


def _text_and_reasoning(root: Json) -> tuple[dict[str, str], list[str]]:
    """Return (unsupported, ignored) parameters in the objects ``text`` and ``reasoning``."""
    unsupported: dict[str, str] = {}
    ignored: list[str] = []
    if text := root.get("text"):
        kind = text.get("format")
        if kind is not None and kind.need("type").value != "text":
            unsupported["text.format"] = (
                "constrained sampling is not supported; describe the format in the prompt"
            )
        if text.get("verbosity") is not None:
            ignored.append("text.verbosity")
    if reasoning := root.get("reasoning"):
        keys = ("effort", "summary", "generate_summary")
        ignored += [f"reasoning.{key}" for key in keys if reasoning.get(key) is not None]
    return unsupported, ignored


# ---- replies -----------------------------------------------------------------------------------


def _items(call: ModelCall, reply: ModelReply) -> list[dict[str, Any]]:
    """Return the output items. The text is incomplete if the token limit cut it; calls never
    are."""
    choice = reply.choices[0]
    response = shown(call, choice)
    items: list[dict[str, Any]] = []
    if response.reasoning:
        items.append(_text_item("reasoning", f"rs_{reply.reply_id}", response.reasoning))
    if response.content or not response.calls:
        items.append(_text_item("message", f"msg_{reply.reply_id}", response.content))
        items[-1]["content"][0]["logprobs"] = token_logprobs(choice) if call.logprobs else []
    if choice.finish_reason == "length" and items:
        items[-1]["status"] = "incomplete"
    return items + _call_items(call, reply, response.calls)


def _text_item(kind: Literal["reasoning", "message"], name: str, text: str) -> dict[str, Any]:
    """Return an item with text. ``name``: its id."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        more: dict[str, Any] = {"summary": []}
    else:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        more = {"role": "assistant"}
    return {"type": kind, "id": name, **more, "content": [part], "status": "completed"}


def _call_items(
    call: ModelCall, reply: ModelReply, shown_calls: Sequence[ShownCall]
) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call",
            "id": f"fc_{reply.reply_id}_{number}",
            "call_id": shown_call.call_id,
            **_client_name(call, shown_call.name),
            "arguments": shown_call.text,
            "status": "completed",
        }
        for number, shown_call in enumerate(shown_calls)
    ]


def _client_name(call: ModelCall, name: str) -> dict[str, str]:
    """Return the keys that name a called function."""
    if name not in call.namespaces:
        return {"name": name}
    namespace, short = call.namespaces[name]
    return {"namespace": namespace, "name": short}


def _response(
    call: ModelCall,
    reply: ModelReply | ReplyStart,
    *,
    status: str,
    output: list[dict[str, Any]],
) -> dict[str, Any]:
    tools = [
        {"type": "function", "parameters": None, **tool["function"], "strict": False}
        for tool in call.tools
    ]
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": call.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": call.tool_choice,
        "tools": tools,
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(call: ModelCall, reply: ModelReply, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = reply.choices[0].finish_reason == "length"
    response = _response(call, reply, status="incomplete" if cut else "completed", output=items)
    if cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    response["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    return response


class ResponseWriter:
    """Events of a response. Implements :class:`~burnish.agents.calls.EventWriter`.

    Reasoning that comes after content has begun is in an item of its own.
    """

    def __init__(self, call: ModelCall, start: ReplyStart) -> None:
        self._call, self._start = call, start
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """True while the last item gets more text."""
        self._sent = {"reasoning": "", "message": ""}

    def _event(self, kind: str, /, **data: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return event(numbered, kind)

    def _item_event(self, kind: str, /, **data: Any) -> str:
        return self._event(f"response.{kind}", output_index=len(self._items) - 1, **data)

    def _part_event(self, kind: str, /, **data: Any) -> str:
        place = {"item_id": self._items[-1]["id"], "content_index": 0}
        return self._item_event(kind, **place, **data)

    def add(self, delta: Delta) -> Iterator[str]:
        if not self._num_events:
            begun = _response(self._call, self._start, status="in_progress", output=[])
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._text("message", delta.content)

    def _text(self, kind: Literal["reasoning", "message"], text: str) -> Iterator[str]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            prefix, number = ("rs" if kind == "reasoning" else "msg"), len(self._items)
            name = f"{prefix}_{self._start.reply_id}" + (f"_{number}" if number > 1 else "")
            item = _text_item(kind, name, "")
            self._items.append(item)
            self._is_open = True
            emptied = {**item, "content": [], "status": "in_progress"}
            yield self._item_event("output_item.added", item=emptied)
            yield self._part_event("content_part.added", part=item["content"][0])
        self._sent[kind] += text
        part = self._items[-1]["content"][0] = dict(self._items[-1]["content"][0])
        part["text"] += text
        fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._part_event(f"{part['type']}.delta", delta=text, **fields)

    def _close(self, *, status: str = "completed", logprobs: Any = None) -> Iterator[str]:
        """End the open item, if there is one. ``logprobs``: of the text of a message."""
        if not self._is_open:
            return
        item = self._items[-1]
        part, item["status"], self._is_open = item["content"][0], status, False
        if logprobs is not None and item["type"] == "message":
            part["logprobs"] = logprobs
        fields = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._part_event(f"{part['type']}.done", text=part["text"], **fields)
        yield self._part_event("content_part.done", part=part)
        yield self._item_event("output_item.done", item=item)

    def finish(self, reply: ModelReply) -> Iterator[str]:
        """Yield the events that are left. There is a message unless there are tool calls."""
        choice = reply.choices[0]
        response = shown(self._call, choice)
        reasoning = rest_of(self._sent["reasoning"], response.reasoning)
        content = rest_of(self._sent["message"], response.content)
        yield from self.add(Delta(0, reasoning, content))
        if not response.content and not response.calls:
            yield from self._text("message", "")
        logprobs = token_logprobs(choice) if self._call.logprobs else None
        last = "incomplete" if choice.finish_reason == "length" else "completed"
        yield from self._close(status=last, logprobs=logprobs)
        for item in _call_items(self._call, reply, response.calls):
            self._items.append(item)
            emptied = {**item, "arguments": "", "status": "in_progress"}
            yield self._item_event("output_item.added", item=emptied)
            text, place = item["arguments"], {"item_id": item["id"]}
            yield self._item_event("function_call_arguments.delta", **place, delta=text)
            done = {"arguments": text, "name": item["name"]}
            yield self._item_event("function_call_arguments.done", **place, **done)
            yield self._item_event("output_item.done", item=item)
        finished = _finished(self._call, reply, self._items)
        yield self._event(f"response.{finished['status']}", response=finished)
