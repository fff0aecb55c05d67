"""OpenAI's chat completions and completions.

The reasoning of a response is in ``reasoning_content``, which servers of open models use; OpenAI's
own API returns none. Log-probs cover every sampled token, those of reasoning and tool calls too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any

from burnish.agents.calls import (
    CallError,
    Choice,
    Delta,
    ModelCall,
    ModelReply,
    ReplyStart,
    invalid,
    well_formed,
)
from burnish.agents.conversation import (
    Conversation,
    FunctionCalls,
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
    stop_texts,
    unread_keys,
    unread_parameters,
    unsupported_parameters,
)
from burnish.agents.writing import (
    Shown,
    event,
    finite_logprob,
    openai_error,
    openai_usage,
    rest_of,
    shown,
    token_logprobs,
)
from burnish.chat_message import REASONING

_MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "tool_call_id", "name"),
        *("annotations", "id", "index", "type", "status", "finish_reason"),
    }
)
"""Keys of messages that are read, and those that clients keep of a reply and that say nothing of
its text."""
_ANSWER_KEYS = frozenset({"refusal", "tool_calls", "function_call", *REASONING})
"""Keys of messages of the assistant that are read, too."""
MAX_N = 128
"""Maximum responses of one call."""
_MAX_TOKEN_ID = 2**31 - 1
_DONE = "data: [DONE]\n\n"
_TEXT = {"text": "text", "refusal": "refusal"}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RENAMED = {"developer": "system", "function": "tool"}
_SCALED = "it changes the distribution that log-probs describe"
_CONSTRAINED = "constrained sampling is not supported; describe the format in the prompt"
_ECHO = "the prompt is not returned; it is known to the client"
_SUFFIX = "the model continues text; it does not fill gaps"
_SHARED = {
    "logit_bias": Parameter(_SCALED, ({},)),
    "presence_penalty": Parameter(_SCALED, (0,)),
    "frequency_penalty": Parameter(_SCALED, (0,)),
    "repetition_penalty": Parameter(_SCALED, (1,)),
    "min_p": Parameter(_SCALED, (0,)),
    "min_tokens": Parameter(_SCALED, (0,)),
    "ignore_eos": Parameter(_SCALED, (False,)),
    "bad_words": Parameter(_SCALED, ([],)),
    "allowed_token_ids": Parameter(_SCALED),
    "logits_processors": Parameter(_SCALED, ([],)),
    "typical_p": Parameter(_SCALED, (1,)),
    "truncate_prompt_tokens": Parameter("prompts are not cut; send a shorter one"),
    "include_stop_str_in_output": Parameter("a reply ends before the stop text", (False,)),
    "use_beam_search": Parameter("responses are sampled", (False,)),
    "stop_token_ids": Parameter("use `stop`", ([],)),
    "prompt_logprobs": Parameter("log-probs are those of sampled tokens", (False,)),
    "best_of": Parameter("responses are not ranked; use `n`", (1,)),
    "structured_outputs": Parameter(_CONSTRAINED),
    "guided_json": Parameter(_CONSTRAINED),
    "guided_regex": Parameter(_CONSTRAINED),
    "guided_choice": Parameter(_CONSTRAINED),
    "guided_grammar": Parameter(_CONSTRAINED),
    "json_schema": Parameter(_CONSTRAINED),
    "regex": Parameter(_CONSTRAINED),
    "ebnf": Parameter(_CONSTRAINED),
    "response_format": Parameter(_CONSTRAINED, ({"type": "text"},)),
}
_CHAT = {
    **_SHARED,
    "top_logprobs": Parameter("only log-probs of sampled tokens are known; use 0", (0,)),
    "functions": Parameter("deprecated; use `tools`", ([],)),
    "function_call": Parameter("deprecated; use `tool_choice`", ("none", "auto")),
    "modalities": Parameter("the model writes text only", (["text"],)),
    "audio": Parameter("the model writes text only"),
    "web_search_options": Parameter("the server has no tools of its own; use `tools`"),
    "documents": Parameter("they are not rendered; send them in a message", ([],)),
    "echo": Parameter(_ECHO, (False,)),
    "suffix": Parameter(_SUFFIX, ("",)),
    "add_special_tokens": Parameter("the chat template adds them", (False,)),
    "chat_template": Parameter("the server's chat template is used"),
    "continue_final_message": Parameter("a response cannot be begun by the client", (False,)),
    "add_generation_prompt": Parameter("a prompt without it is not answered", (True,)),
}
_COMPLETION = {
    **_SHARED,
    "echo": Parameter(_ECHO, (False,)),
    "suffix": Parameter(_SUFFIX, ("",)),
    "add_special_tokens": Parameter("they are added; send token ids for other prompts", (True,)),
    "logprobs": Parameter("only log-probs of sampled tokens are known; use 0", (0,)),
}
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
}
_NO_TEMPLATE: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
}


class ChatCompletions:
    """``POST /v1/chat/completions``. See :class:`~burnish.agents.calls.Dialect`."""

    def read(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in a request body.

        ``developer`` is another name of the role ``system``. Parts of content are joined
        without a separator. ``max_completion_tokens`` is used before ``max_tokens``.
        """
        root = checked_body(body)
        tools = root.read("tools", _read_tools, RequestTools())
        max_tokens = root.read("max_tokens", _positive, None)
        strict = any(tool["function"].get("strict") for tool in tools.functions)
        return ModelCall(
            model=root.need("model").name(),
            messages=_read_messages(root.need("messages"), max_messages),
            tools=tools.functions,
            server_tools=tools.server_tools,
            tool_choice=openai_choice(
                root.get("tool_choice"), tools, lambda choice: choice.need("function").need("name")
            ),
            max_tokens=root.read("max_completion_tokens", _positive, max_tokens),
            logprobs=root.read("logprobs", Json.boolean, False),
            show_reasoning=root.read("include_reasoning", Json.boolean, True),
            unsupported=unsupported_parameters(root, _CHAT),
            **_shared(root),
            ignored=(
                *ignored_parameters(root, _NO_EFFECT),
                *["strict"] * strict,  # arguments constrained to the schema of a tool
                *unread_keys(root.need("messages"), _read_keys),
                *unread_parameters(root),
            ),
        )

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        return {
            **_head(reply, "chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": _message(shown(call, choice)),
                    "logprobs": {"content": token_logprobs(choice), "refusal": None}
                    if call.logprobs
                    else None,
                    "finish_reason": choice.finish_reason,
                    **_token_ids(call, choice),
                }
                for index, choice in enumerate(reply.choices)
            ],
            "usage": openai_usage(reply),
        }

    def writer(self, call: ModelCall, start: ReplyStart) -> ChunkWriter:
        """Return the writer of chunks: role, reasoning, content, tool calls and finish reason of
        each choice; then the usage if the call wants it, and ``[DONE]``."""
        return ChunkWriter(call, start, "chat.completion.chunk", ChatChunks)

    def error(self, error: CallError) -> dict[str, Any]:
        return openai_error(error)

    def error_event(self, error: CallError) -> str:
        return event(openai_error(error))


class Completions:
    """``POST /v1/completions``: text or token ids, without a chat template."""

    def read(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in a request body. ``max_messages`` is not used: there are none.

        The choices of several prompts follow each other, ``n`` for each.
        """
        root = checked_body(body)
        first, *others = _read_prompts(root.need("prompt"))
        return ModelCall(
            model=root.need("model").name(),
            prompt=first,
            more_prompts=tuple(others),
            max_tokens=root.read("max_tokens", _positive, None),
            logprobs=root.get("logprobs") is not None,
            unsupported=unsupported_parameters(root, _COMPLETION),
            **_shared(root),
            ignored=ignored_parameters(root, _NO_EFFECT | _NO_TEMPLATE) + unread_parameters(root),
        )

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        choices = [
            {"index": index, **_completion(call, choice), **_token_ids(call, choice)}
            for index, choice in enumerate(reply.choices)
        ]
        return {
            **_head(reply, "text_completion"),
            "choices": choices,
            "usage": openai_usage(reply),
        }

    def writer(self, call: ModelCall, start: ReplyStart) -> ChunkWriter:
        """Return the writer of chunks: text of each choice, with the finish reason in the last one;
        then the usage if the call wants it, and ``[DONE]``."""
        return ChunkWriter(call, start, "text_completion", CompletionChunks)

    def error(self, error: CallError) -> dict[str, Any]:
        return openai_error(error)

    def error_event(self, error: CallError) -> str:
        return event(openai_error(error))


# ---- requests ----------------------------------------------------------------------------------


def _positive(node: Json) -> int:
    return node.integer(1)


def _shared(root: Json) -> dict[str, Any]:
    """Return the arguments of ModelCall that both APIs have."""
    options = root.get("stream_options")
    return {
        **sampling_parameters(root),
        "stop": root.read("stop", stop_texts, ()),
        "n": root.read("n", lambda node: node.integer(1, MAX_N), 1),
        "stream_usage": options.read("include_usage", Json.boolean, False) if options else False,
        "return_token_ids": root.read("return_token_ids", Json.boolean, False),
    }


def _read_tools(node: Json) -> RequestTools:
    functions: list[dict[str, Any]] = []
    server_tools: dict[str, str] = {}
    for tool in node.items():
        kind = tool.need("type")
        if is_server_tool(kind):
            server_tools[kind.path] = kind.name()
            continue
        if kind.value != "function":
            raise kind.wrong("'function'")
        functions.append(function_tool(tool.need("function"), "parameters", others=True))
    return RequestTools(checked_tools(functions, node.path), server_tools=server_tools)


def _read_messages(node: Json, max_messages: int) -> tuple[Any, ...]:
    conversation = Conversation(max_messages=max_messages)
    function_calls = FunctionCalls()
    for each in node.items():
        conversation.add(function_calls.add_call_id(each, _read_message(each)), each.path)
    return conversation.finish(node.path)


def _read_keys(message: Mapping[str, Any]) -> Collection[str]:
    if message.get("role") == "assistant":  # (answers have no names: sampled ones have none)
        return (_MESSAGE_KEYS | _ANSWER_KEYS) - {"name"}
    return _MESSAGE_KEYS


def _read_message(node: Json) -> dict[str, Any]:
    role = node.need("role").one_of(_ROLES)
    if role == "assistant":
        content = node.read("content", lambda content: joined_text(content, _TEXT), "")
        reasoning = _reasoning(node)
        calls = node.read("tool_calls", Json.items, [])
        return assistant_message(
            content or node.read("refusal", Json.text, ""),
            reasoning,
            [_read_call(call) for call in calls],
        )
    message = {
        "role": _RENAMED.get(role, role),
        "content": joined_text(node.need("content"), _TEXT),
    }
    if role == "tool":
        message["tool_call_id"] = node.need("tool_call_id").name()
    if name := node.read("name", Json.text, ""):
        message["name"] = name
    return message


def _reasoning(node: Json) -> str:
    """Return the reasoning of an answer: the first of its keys with a text. In other APIs,
    ``thinking`` is a setting."""
    values = [node.get(key) for key in REASONING]
    texts = [
        value.text()
        for key, value in zip(REASONING, values, strict=True)
        if value is not None and (key != "thinking" or isinstance(value.value, str))
    ]
    return next(filter(None, texts), "")


def _read_call(node: Json) -> dict[str, Any]:
    kind = node.get("type")
    if kind is not None and kind.value != "function":
        raise kind.wrong("'function'")
    function = node.need("function")
    arguments = function.get("arguments")
    return tool_call(
        node.need("id").name(),
        function.need("name").name(),
        arguments_of(arguments) if arguments else {},
    )


def _read_prompts(node: Json) -> list[str | tuple[int, ...]]:
    """Return one or more prompts."""
    if not isinstance(node.value, list) or not node.value:
        return [_read_prompt(node)]
    if not isinstance(node.value[0], (str, list)):
        return [_read_prompt(node)]
    if len(node.value) > MAX_N:
        raise invalid(node.path, f"{node.path} has {len(node.value)} prompts; send at most {MAX_N}")
    return [_read_prompt(each) for each in node.items()]


def _read_prompt(node: Json) -> str | tuple[int, ...]:
    if isinstance(node.value, str) and node.value:
        return node.value
    if isinstance(node.value, list) and node.value:
        if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in node.value):
            return tuple(token.integer(0, _MAX_TOKEN_ID) for token in node.items())
        return tuple(node.value)
    raise node.wrong("non-empty text or a non-empty list of token ids")


# ---- replies -----------------------------------------------------------------------------------


def _head(reply: ModelReply | ReplyStart, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{reply.reply_id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
    }


class ChunkWriter:
    """Chunks of all choices. Implements :class:`~burnish.agents.calls.EventWriter`."""

    def __init__(
        self,
        call: ModelCall,
        start: ReplyStart,
        kind: str,
        make: Callable[[ModelCall], ChatChunks | CompletionChunks],
    ) -> None:
        self._call, self._head, self._make = call, _head(start, kind), make
        if call.stream_usage:
            self._head["usage"] = None
        self._choices: dict[int, ChatChunks | CompletionChunks] = {}

    def add(self, delta: Delta) -> Iterator[str]:
        for part in self._choice(delta.index).add(delta):
            yield self._chunk(delta.index, part)

    def finish(self, reply: ModelReply) -> Iterator[str]:
        """Yield the chunks that are left, the usage if the call wants it, and ``[DONE]``."""
        for index, choice in enumerate(reply.choices):
            for part in self._choice(index).finish(choice):
                yield self._chunk(index, part)
        if self._call.stream_usage:
            yield event({**self._head, "choices": [], "usage": openai_usage(reply)})
        yield _DONE

    def _choice(self, index: int) -> ChatChunks | CompletionChunks:
        if index not in self._choices:
            self._choices[index] = self._make(self._call)
        return self._choices[index]

    def _chunk(self, index: int, part: Mapping[str, Any]) -> str:
        return event({**self._head, "choices": [{"index": index, **part}]})


class ChatChunks:
    """Chunks of one choice of a chat completion: ``delta``, ``logprobs``, ``finish_reason``."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._begun = False
        self._reasoning = self._content = ""

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield from self._texts(delta.reasoning if self._call.show_reasoning else "", delta.content)

    def _texts(
        self, reasoning: str, content: str, logprobs: Any = None
    ) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield _chunk({"role": "assistant", "content": ""})
        self._reasoning += reasoning
        self._content += content
        if reasoning:
            yield _chunk({"reasoning_content": reasoning})
        if content:
            yield _chunk({"content": content}, logprobs=logprobs)

    def finish(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the chunks that are left. The log-probs of all tokens are in the last chunk with
        content, or in the one with the finish reason."""
        response = shown(self._call, choice)
        logprobs = None
        if self._call.logprobs:
            logprobs = {"content": token_logprobs(choice), "refusal": None}
        content = rest_of(self._content, response.content)
        yield from self._texts(rest_of(self._reasoning, response.reasoning), content, logprobs)
        for index, call in enumerate(response.calls):
            function = {"name": call.name, "arguments": ""}
            opening = {"index": index, "id": call.call_id, "type": "function", "function": function}
            yield _chunk({"tool_calls": [opening]})
            yield _chunk({"tool_calls": [{"index": index, "function": {"arguments": call.text}}]})
        yield _chunk({}, logprobs=None if content else logprobs, finish_reason=choice.finish_reason)


class CompletionChunks:
    """Chunks of one choice of a completion: ``text``, ``logprobs``, ``finish_reason``."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._text = ""

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._text += delta.content
        yield {"text": delta.content, "logprobs": None, "finish_reason": None}

    def finish(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the last chunk, with the log-probs of all tokens."""
        last = _completion(self._call, choice)
        yield {**last, "text": rest_of(self._text, last["text"])}


def _message(response: Shown) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": response.content, "refusal": None}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.calls:
        message["content"] = response.content or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in response.calls
        ]
    return message


def _chunk(
    delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token_ids(call: ModelCall, choice: Choice) -> dict[str, Any]:
    """Return the sampled ids, if the call wants them (an extension of vLLM)."""
    return {"token_ids": list(choice.token_ids)} if call.return_token_ids else {}


def _completion(call: ModelCall, choice: Choice) -> dict[str, Any]:
    """Return a choice. Its log-probs are parallel lists; ``text_offset`` counts characters from the
    start of the response."""
    logprobs = None
    if call.logprobs:
        tokens = well_formed(choice.token_texts)
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [finite_logprob(logprob) for logprob in choice.logprobs],
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        }
    return {
        "text": shown(call, choice).content,
        "logprobs": logprobs,
        "finish_reason": "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason,
    }
