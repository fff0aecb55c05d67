"""The canonical forms of a chat message and of a tool. Every reader of messages produces them.

Keys of a message: ``role``, ``content`` (always a string), ``reasoning_content``, ``tool_calls``,
``name``, ``tool_call_id``, the flags in :data:`TRAIN_FLAGS`, and ``finish_reason``. A key without a
value is absent. Other keys are passed on unchanged. A tool call is ``{"id": ..., "type":
"function", "function": {"name": ..., "arguments": {...}}}``, whose arguments are an object.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Generic, Literal, TypeVar, cast

from burnish.errors import BurnishError
from burnish.json_text import json_value

T = TypeVar("T")
Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``."""

TRAIN_FLAGS = ("train", "weight", "loss", "loss_mask")
"""Keys of a message that state whether it is trained on: true or false, 1 or 0."""

FINISH = "finish_reason"
"""Key of a message: why it ended."""
_REASONS = {
    "stop": (
        *(
            "",
            "stop",
            "eos",
            "eos_token",
            "eos_token_id",
            "stop_sequence",
            "stop_token",
            "stop_str",
        ),
        *("end_turn", "stop_token_ids", "tool_calls", "tool_call", "tool_use", "function_call"),
        *("complete", "completed", "finished"),
    ),
    "length": (
        *("length", "max_tokens", "max_output_tokens", "max_new_tokens", "max_length", "truncated"),
        *("model_length", "incomplete", "model_context_window_exceeded"),
    ),
    "aborted": (
        *("aborted", "abort", "cancelled", "canceled", "error", "failed", "timeout", "pause_turn"),
        *("content_filter", "content_filtered", "safety", "recitation", "language", "blocklist"),
        *("prohibited_content", "spii", "image_safety", "refusal", "repetition"),
        *("malformed_function_call", "guardrail_intervened"),
    ),
}
"""End of a response -> words for it of engines and APIs, in lower case: OpenAI, Anthropic, Gemini,
Mistral, Bedrock, vLLM, SGLang, TGI. Its model ended only those in the first row."""
_ENDS = {word: end for end, words in _REASONS.items() for word in words}

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning of an answer. The first one is the canonical key."""

ROLES = {"developer": "system", "function": "tool"}
"""Role in newer or older APIs -> canonical role."""

CALLS_IN_TEXT = "content_with_calls"
"""Key of an answer whose text follows or interrupts its tool calls, as a malformed call behind
complete ones does: ``{"text": ..., "digest": ...}`` with the content as it was sampled, with the
calls, and a digest of the message's content and calls (:func:`calls_in_text`). An empty text: the
template writes texts in channels, so that no content has this order."""

USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Canonical roles, which chat templates render without naming all of them."""

_RESPONSES = "tool_responses"
"""Key of Gemma 4's own form."""
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_MEDIA = ("image", "images", "audio", "video", "videos", "file", "files")
_OTHER_ARGUMENTS = ("parameters", "input", "args", "kwargs")
_OTHER_SCHEMAS = ("input_schema", "inputSchema")
"""Keys of the schema of a tool's arguments in Anthropic's API and in MCP."""


class MessageError(BurnishError, ValueError):
    """A chat message that cannot be read. The error says which part, and the form that can be."""


def canonical(message: Any) -> dict[str, Any]:
    """Return a message in the canonical form. Idempotent.

    Raises MessageError if it is no message, or has content that is not text.

    >>> canonical({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None})
    {'role': 'user', 'content': 'Hi'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise MessageError(
            f'a chat message must be an object {{"role": ..., "content": ...}}, got '
            f"{_short(message)}"
        )
    role = ROLES.get(message["role"], message["role"])
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return {"role": role, "content": content}
    rest = {key: value for key, value in message.items() if value is not None and key != "role"}
    _check_media(rest)
    calls = _calls_of(rest.pop("tool_calls", None), rest.pop("function_call", None))
    reasoning = _reasoning_of(rest)
    content = rest.pop("content", None)
    refusal = rest.pop("refusal", None)
    if refusal and refusal != content:
        if content:
            raise MessageError("a message has `content` and `refusal`, which differ; keep one")
        content = refusal
    if rest.get(_RESPONSES):
        raise MessageError(
            f"a message has `{_RESPONSES}`, results of tools inside an answer, which would be "
            'trained as a part of it; write each result as a message {"role": "tool", "content": '
            "...} behind the call, and what follows as an answer of its own"
        )
    if content is None and not (calls or reasoning):
        raise MessageError(f"a chat message has no `content`: {_short(message)}")
    result: dict[str, Any] = {"role": role, "content": "" if content is None else text_of(content)}
    if reasoning:
        result[REASONING[0]] = reasoning
    if calls:
        result["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if rest.get(key) == "":
            del rest[key]
    return result | rest


def is_refusal(message: Any) -> bool:
    """Return whether the text of a message, before :func:`canonical`, is a refusal in OpenAI's
    form: in the key ``refusal``, or in a part of that type."""
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return bool(message.get("refusal")) or any(
        isinstance(part, Mapping) and part.get("type") == "refusal" for part in parts
    )


def text_of(content: Any) -> str:
    """Return content as text: a string, or a list of text parts, which are joined.

    Raises MessageError for another value, and for a part that is not text.

    >>> text_of([{"type": "text", "text": "2"}, {"type": "text", "text": "+2?"}])
    '2+2?'
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageError(
            f"the `content` is {_short(content)}; expected a string or a list of text parts. "
            "Write a number or an object as text (json.dumps)"
        )
    return "".join(_part_text(number, part) for number, part in enumerate(content))


def wrapped_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of a function in OpenAI's form, which chat templates expect. Of the
    forms of Anthropic's API and of MCP, name, description and schema are kept, as in requests to
    servers, and ``strict`` of the Responses API is not. A description of another type is unchanged.

    >>> wrapped_tool({"name": "f", "input_schema": {}})
    {'type': 'function', 'function': {'name': 'f', 'parameters': {}}}
    """
    schema = next((key for key in _OTHER_SCHEMAS if isinstance(tool.get(key), Mapping)), None)
    is_bare = not {"parameters", "function"} & set(tool)
    if schema and is_bare and tool.get("type") in (None, "custom", "function"):
        names = {"name": "name", "description": "description", schema: "parameters"}
        entries = {names[k]: v for k, v in tool.items() if k in names and v is not None}
        return {"type": "function", "function": entries}
    if tool.get("type", "function") != "function":
        return dict(tool)
    function = tool.get("function")
    rest = {key: value for key, value in tool.items() if key not in ("type", "function")}
    if isinstance(function, Mapping):
        return {"type": "function", "function": function, **rest}
    if function is not None:
        return dict(tool)
    if "type" in tool:  # the form of the Responses API
        rest = {k: v for k, v in rest.items() if k != "strict" and v is not None}
    return {"type": "function", "function": rest}


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the arguments of a tool call, given as an object or as JSON text. None and blank text
    are no arguments. Raises MessageError for anything else.

    >>> arguments_of('{"city": "Lima"}')
    {'city': 'Lima'}
    """
    if value is None:
        return {}
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json_value(value) if value.strip() else {}
        except ValueError as error:
            raise MessageError(
                f"the `arguments` of a tool call are the text {value[:60]!r}, which is not valid "
                f"JSON ({error}); write an object, or its JSON text"
            ) from error
    if not isinstance(parsed, Mapping):
        raise MessageError(
            f"the `arguments` of a tool call are {_short(value)}; expected an object, or its JSON "
            "text"
        )
    return dict(parsed)


def trained_flag(message: Message) -> bool:
    """Return False if a flag of the message is false or 0, else True.

    Raises MessageError for other values, and for two flags that differ.
    """
    flags = {key: message[key] for key in TRAIN_FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise MessageError(
                f"has {key}: {value!r}; use train: true or false, or weight: 1 or 0 (loss and "
                "loss_mask are read like weight)"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        listed = " and ".join(f"{key}: {value}" for key, value in flags.items())
        raise MessageError(f"has {listed}, which differ; keep one")
    return all(flags.values())


def without_flags(message: Message) -> dict[str, Any]:
    """Return the message without the keys in :data:`TRAIN_FLAGS` and its reason to end."""
    return {k: value for k, value in message.items() if k not in TRAIN_FLAGS and k != FINISH}


def end_of(reason: Any) -> Literal["stop", "length", "aborted"] | None:
    """Return the end of a response by its finish reason, in the words of any engine: ``stop`` if
    there is none, None if it is unknown. Of an object, its ``type`` or ``reason`` counts.

    >>> end_of("MAX_TOKENS"), end_of({"type": "stop", "matched": 2}), end_of(None), end_of("odd")
    ('length', 'stop', 'stop', None)
    """
    if isinstance(reason, Mapping):
        reason = reason.get("type") or reason.get("reason") or "?"
    if reason is None:
        return "stop"
    if not isinstance(reason, str):
        return None
    word = reason.strip().lower().removeprefix("finishreason.")  # Gemini's enumeration as text
    end: Any = _ENDS.get(word.replace("-", "_").replace(" ", "_"))
    return cast(Literal["stop", "length", "aborted"] | None, end)


def is_cut(message: Message) -> bool:
    """Return whether the message ends at a limit, not where the model ended it."""
    return end_of(message.get(FINISH)) in ("length", "aborted")


def calls_in_text(message: Message, text: str) -> dict[str, str]:
    """Return the value of :data:`CALLS_IN_TEXT` for an answer that was sampled as ``text``."""
    return {"text": text, "digest": _digest(message)}


def with_calls_in_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as they are rendered: an answer with :data:`CALLS_IN_TEXT` has this text
    in place of its content and its calls. Raises MessageError if content or calls were edited, or
    if the text is empty.

    >>> answer = {"role": "assistant", "content": "b", "tool_calls": []}
    >>> with_calls_in_text([answer | {"content_with_calls": calls_in_text(answer, "{} b")}])
    [{'role': 'assistant', 'content': '{} b'}]
    """
    return [_with_calls_in_text(message) for message in messages]


def _with_calls_in_text(message: Message) -> dict[str, Any]:
    sampled = message.get(CALLS_IN_TEXT)
    if sampled is None:
        return dict(message)
    if not isinstance(sampled, Mapping) or sampled.get("digest") != _digest(message):
        raise MessageError(
            f"content or tool calls of an answer with {CALLS_IN_TEXT} were edited since it was "
            f"sampled; remove {CALLS_IN_TEXT} from the message"
        )
    text = sampled.get("text")
    if not text:
        raise MessageError(
            "an answer has text behind its tool calls, in an order that the chat template cannot "
            "write; use the row's token ids (data.use_tokens), or drop the row"
        )
    rest = {k: v for k, v in message.items() if k not in ("tool_calls", CALLS_IN_TEXT)}
    return {**rest, "content": text}


def with_calls_behind(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without :data:`CALLS_IN_TEXT`, so that templates write the calls of an
    answer behind its content: for text that is compared or thrown away, not trained."""
    return [{k: v for k, v in message.items() if k != CALLS_IN_TEXT} for message in messages]


def _digest(message: Message) -> str:
    """Return a digest of the content of an answer and of the names and arguments of its calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], function["arguments"]] for function in functions]
    text = json.dumps(_plain([message["content"], calls]), sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a value of JSON as every type of file keeps it: Parquet adds keys without a value and
    has no lone surrogates, and other languages write 1.0 as 1."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_names_of_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return canonical messages whose tool results have the name of the call with their
    ``tool_call_id``, as episodes and servers give it to them, unless they have one.

    >>> call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    >>> answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    >>> result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    >>> with_names_of_calls([answer, result])[1]["name"]
    'f'
    """
    if all(message["role"] != "tool" or "name" in message for message in messages):
        return messages
    calls: AnsweredCalls[str] = AnsweredCalls()
    named = []
    for message in messages:
        made = message.get("tool_calls") or ()
        calls.add((call.get("id"), call["function"]["name"]) for call in made)
        name = calls.answered_by(message) if message["role"] == "tool" else None
        named.append(message if name is None or "name" in message else {**message, "name": name})
    return named


class AnsweredCalls(Generic[T]):
    """A value of each tool call so far, which its result finds by ``tool_call_id``.

    The calls of one answer that share an id have results in order. A later answer may use an id
    again.
    """

    def __init__(self) -> None:
        self._values: dict[str, deque[T]] = {}

    def add(self, calls: Iterable[tuple[Any, T]]) -> None:
        """Add the calls of one answer: (id, value)."""
        added: dict[str, deque[T]] = {}
        for call_id, value in calls:
            if call_id:
                added.setdefault(str(call_id), deque()).append(value)
        self._values |= added

    def answered_by(self, message: Message) -> T | None:
        """Return the value of the call that a tool result answers, None if there is none."""
        values = self._values.get(str(message.get("tool_call_id") or ""))
        if not values:
            return None
        return values.popleft() if len(values) > 1 else values[0]


def with_cut_end(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation whose last answer was cut."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    return [{**m, FINISH: "length"} if i == last else dict(m) for i, m in enumerate(messages)]


def is_blank(message: Message) -> bool:
    """Return whether a canonical message has no text, no reasoning and no tool calls."""
    if message["content"].strip() or message.get("tool_calls"):
        return False
    return not str(message.get(REASONING[0], "")).strip()


def tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call in the canonical form.

    Raises MessageError if it has no name, or arguments that are not an object.
    """
    function: Any = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise MessageError(
            'a tool call must be {"function": {"name": ..., "arguments": {...}}}, got '
            f"{_short(call)}"
        )
    kind = call.get("type") or "function"
    if kind != "function":
        raise MessageError(f"a tool call has the type {kind!r:.60}; only 'function' can be read")
    other = next((key for key in _OTHER_ARGUMENTS if function.get(key)), None)
    if function.get("arguments") is None and other is not None:
        raise MessageError(
            f"the tool call of {name!r} has {other!r} but no 'arguments'; rename the key"
        )
    named = {"name": name, "arguments": arguments_of(function.get("arguments"))}
    if function is not call:
        named |= _without(function, named)
    rest = _without(call, {**named, "function": None, "type": None})
    head = {"id": rest.pop("id")} if "id" in rest else {}
    return {**head, "type": "function", "function": named, **rest}


def _without(mapping: Message, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k not in keys and v is not None}


def _calls_of(calls: Any, function_call: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message. ``function_call``: the only call in OpenAI's older
    form."""
    if isinstance(calls, str):
        try:
            calls = json_value(calls) if calls.strip() else []
        except ValueError as error:
            raise MessageError(
                f"`tool_calls` is the text {calls[:60]!r}, which is not JSON ({error}); write a "
                "list, or its JSON text"
            ) from error
    if calls is None:
        calls = []
    if not isinstance(calls, list | tuple):
        raise MessageError(f"`tool_calls` is {_short(calls)}, not a list of tool calls")
    if function_call is not None:
        if calls:
            raise MessageError("a message has `tool_calls` and `function_call`; keep one")
        calls = [function_call]
    return [tool_call(call) for call in calls]


def _reasoning_of(rest: dict[str, Any]) -> str:
    """Remove the reasoning from the keys of a message and return it."""
    texts = {key: _reasoning_text(key, rest.pop(key)) for key in REASONING if key in rest}
    distinct = {text for text in texts.values() if text}
    if len(distinct) > 1:
        raise MessageError(f"a message has {' and '.join(texts)}, which differ; keep one")
    return next(iter(distinct), "")


def _reasoning_text(key: str, value: Any) -> str:
    try:
        return text_of(value)
    except MessageError as error:
        raise MessageError(f"`{key}` is not text: {error}") from error


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if isinstance(part, Mapping) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise MessageError(
        f"part {number} of the `content` is {_short(part)} (type {kind!r:.40}); only text parts "
        '({"type": "text", "text": ...}) can be read, because the model reads text only. Remove '
        "the part, or the row"
    )


def _check_media(rest: Message) -> None:
    for key in _MEDIA:
        if rest.get(key):
            raise MessageError(
                f"a message has `{key}`, but the model reads text only; remove the row, or the key"
            )


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def roles_of(messages: Sequence[Message]) -> str:
    """Return the roles of a conversation for use in an error."""
    return ", ".join(str(message["role"]) for message in messages)
