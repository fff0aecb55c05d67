"""OpenAI's Responses API, without its server-side state: clients send the whole conversation.

A response is a list of items: ``reasoning``, ``message``, and a ``function_call`` per tool call.
Consecutive items of this kind in the input are one assistant message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.agents.calls import CallError, ModelCall, ModelReply
from burnish.agents.conversation import (
    Conversation,
    arguments_of,
    assistant_message,
    checked_tools,
    function_tool,
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
    unsupported_parameters,
)
from burnish.agents.writing import event, openai_error, shown, token_logprobs

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHT = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_ROLES = ("system", "developer", "user", "assistant")
_STATELESS = "the server stores no responses; send the whole conversation in `input`"
_PARAMETERS = {
    "previous_response_id": Parameter(_STATELESS),
    "conversation": Parameter(_STATELESS),
    "prompt": Parameter("the server stores no prompts; send `instructions` and `input`"),
    "background": Parameter("responses are not stored", (False,)),
    "top_logprobs": Parameter("only log-probs of sampled tokens are known; use 0", (0,)),
}
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
        tools = root.read("tools", _read_tools, ())
        include = [node.text() for node in root.read("include", Json.items, [])]
        unsupported, ignored = _text_and_reasoning(root)
        return ModelCall(
            model=root.need("model").name(),
            messages=_Input(max_messages).read(root),
            tools=tools,
            tool_choice=openai_choice(
                root.get("tool_choice"), tools, lambda choice: choice.need("name")
            ),
            max_tokens=root.read("max_output_tokens", lambda node: node.integer(1), None),
            logprobs="message.output_text.logprobs" in include,
            stream_usage=True,
            unsupported={**unsupported_parameters(root, _PARAMETERS), **unsupported},
            ignored=ignored_parameters(root, _NO_EFFECT) + ignored + _strict(root),
            **sampling_parameters(root),
        )

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the response object."""
        return _finished(call, reply, _items(call, reply))

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[str]:
        """Yield the events of a response: created, in progress, those of each item, and completed
        or incomplete."""
        for number, (name, data) in enumerate(_events(call, reply)):
            yield event({"type": name, "sequence_number": number, **data}, name)

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the error body."""
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
    reasoning: list[str] = field(default_factory=list)
    content: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_answer(self) -> bool:
        return self.content is not None or bool(self.calls)


class _Input:
    """Reads ``instructions`` and ``input``."""

    def __init__(self, max_messages: int) -> None:
        self.conversation = Conversation(max_messages=max_messages)
        self.turn: _Turn | None = None

    def read(self, root: Json) -> tuple[Any, ...]:
        if instructions := root.get("instructions"):
            content = joined_text(instructions, _TEXT)
            self.conversation.add({"role": "system", "content": content}, instructions.path)
        given = root.need("input")
        if isinstance(given.value, str):
            self.conversation.add({"role": "user", "content": given.value}, given.path)
        else:
            for item in given.items():
                self._item(item)
            self._end_turn()
        return self.conversation.finish(given.path)

    def _item(self, item: Json) -> None:
        kind = item.get("type")
        match "message" if kind is None else kind.value:
            case "message":
                self._message(item)
            case "reasoning":
                self._reasoning(item)
            case "function_call":
                self._open_turn(item).calls.append(_read_call(item))
            case "function_call_output":
                self._end_turn()
                self.conversation.add(_read_output(item), item.path)
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
        if self.turn is not None and self.turn.has_answer:
            self._end_turn()
        self._open_turn(item).content = content

    def _reasoning(self, item: Json) -> None:
        if self.turn is not None and self.turn.has_answer:
            self._end_turn()
        parts = item.get("content") or item.get("summary")
        if parts is not None and (text := joined_text(parts, _THOUGHT)):
            self._open_turn(item).reasoning.append(text)

    def _open_turn(self, item: Json) -> _Turn:
        if self.turn is None:
            self.turn = _Turn(item.path)
        return self.turn

    def _end_turn(self) -> None:
        turn, self.turn = self.turn, None
        if turn is not None:
            reasoning = "\n".join(turn.reasoning)
            message = assistant_message(turn.content or "", reasoning, turn.calls)
            self.conversation.add(message, turn.path)


def _read_call(item: Json) -> dict[str, Any]:
    return tool_call(
        item.need("call_id").name(),
        item.need("name").name(),
        arguments_of(item.need("arguments")),
    )


def _read_output(item: Json) -> dict[str, Any]:
    content = joined_text(item.need("output"), _TEXT)
    return {"role": "tool", "content": content, "tool_call_id": item.need("call_id").name()}


def _read_tools(node: Json) -> tuple[Any, ...]:
    tools = []
    for tool in node.items():
        kind = tool.need("type")
        if kind.value != "function":
            raise kind.wrong("'function': the server has no tools of its own")
        tools.append(function_tool(tool, "parameters"))
    return checked_tools(tools, node.path)


def _strict(root: Json) -> tuple[str, ...]:
    """Return ("strict",) if a tool asks for arguments that are constrained to its schema."""
    tools = root.value.get("tools") or ()
    return ("strict",) if any(tool.get("strict") for tool in tools) else ()


def _text_and_reasoning(root: Json) -> tuple[dict[str, str], tuple[str, ...]]:
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
        given = reasoning.mapping()
        ignored += [f"reasoning.{key}" for key in ("effort", "summary") if given.get(key)]
    return unsupported, tuple(ignored)


# ---- replies -----------------------------------------------------------------------------------


def _items(call: ModelCall, reply: ModelReply) -> list[dict[str, Any]]:
    """Return the output items. The last one is incomplete if the token limit ended it."""
    choice = reply.choices[0]
    response = shown(call, choice)
    items: list[dict[str, Any]] = []
    if response.reasoning:
        part = {"type": "reasoning_text", "text": response.reasoning}
        name = f"rs_{reply.reply_id}"
        items.append({"type": "reasoning", "id": name, "summary": [], "content": [part]})
    if response.content or not response.calls:
        logprobs = token_logprobs(choice) if call.logprobs else []
        text = {"type": "output_text", "text": response.content, "annotations": []}
        message = {"type": "message", "id": f"msg_{reply.reply_id}", "role": "assistant"}
        items.append({**message, "content": [{**text, "logprobs": logprobs}]})
    for number, made in enumerate(response.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{reply.reply_id}_{number}",
                "call_id": made.call_id,
                "name": made.name,
                "arguments": made.text,
            }
        )
    for item in items:
        item["status"] = "completed"
    if choice.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def _response(
    call: ModelCall, reply: ModelReply, *, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in call.tools]
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


def _events(call: ModelCall, reply: ModelReply) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, fields) of every event."""
    begun = _response(call, reply, status="in_progress", output=[])
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    items = _items(call, reply)
    for number, item in enumerate(items):
        where = {"output_index": number}
        emptied = {key: [] if key == "content" else value for key, value in item.items()}
        emptied["status"] = "in_progress"
        if item["type"] == "function_call":
            emptied["arguments"] = ""
        yield "response.output_item.added", {**where, "item": emptied}
        for name, data in _item_events(item):
            yield name, {**where, "item_id": item["id"], **data}
        yield "response.output_item.done", {**where, "item": item}
    finished = _finished(call, reply, items)
    yield f"response.{finished['status']}", {"response": finished}


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, fields) of the events that fill an item."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done
        return
    part, where = item["content"][0], {"content_index": 0}
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield "response.content_part.added", {**where, "part": empty}
    kind = f"response.{part['type']}"
    yield f"{kind}.delta", {**where, "delta": part["text"], **logprobs}
    yield f"{kind}.done", {**where, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**where, "part": part}
