"""Parts of replies that several APIs share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.agents.calls import CallError, Choice, ModelCall, ModelReply, well_formed

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity

_OPENAI_TYPES = {
    "rate_limit_error": "rate_limit_error",
    "authentication_error": "authentication_error",
    "api_error": "server_error",
}
_OPENAI_CODES = {
    "authentication_error": "invalid_api_key",
    "not_found_error": "not_found",
    "rate_limit_error": "rate_limit_exceeded",
    "api_error": "server_error",
    "context_length_exceeded": "context_length_exceeded",
    "episode_closed": "episode_closed",
}


@dataclass(frozen=True)
class ShownCall:
    """A tool call as clients receive it."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    text: str
    """The arguments as JSON text."""


@dataclass(frozen=True)
class Shown:
    """A response as clients receive it, well-formed."""

    reasoning: str
    """Empty if there is none, or if the client does not want it."""
    content: str
    calls: tuple[ShownCall, ...]


def shown(call: ModelCall, choice: Choice) -> Shown:
    """Return the parts of a response that the client receives."""
    message = well_formed(choice.message)
    calls = []
    for number, sampled in enumerate(choice.message.get("tool_calls") or ()):
        tool_call = message["tool_calls"][number]
        function = tool_call["function"]
        is_changed = function != sampled["function"]
        if is_changed or not choice.arguments_text:
            text = compact(function["arguments"])
        else:
            text = choice.arguments_text[number]
        calls.append(ShownCall(tool_call["id"], function["name"], function["arguments"], text))
    reasoning = message.get("reasoning_content") or "" if call.show_reasoning else ""
    return Shown(reasoning, message.get("content") or "", tuple(calls))


def rest_of(sent: str, text: str) -> str:
    """Return ``text`` without its beginning ``sent``. Raises CallError (500) if it begins
    otherwise."""
    if not text.startswith(sent):
        message = (
            "the text of the response changed while it was sampled; repeat the call unstreamed"
        )
        raise CallError(message, status=500, kind="api_error")
    return text[len(sent) :]


def compact(value: Any) -> str:
    """Return JSON text of a well-formed value."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event. It is ASCII: some clients split lines at U+2028 or U+0085."""
    text = f"data: {json.dumps(data, allow_nan=False)}\n\n"
    return text if name is None else f"event: {name}\n{text}"


def token_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """Return ``{"token", "bytes", "logprob", "top_logprobs"}`` of every sampled token.

    The tokens joined are the text of the response, and so are their bytes: a character that several
    tokens share is in the last one's text, and each has its own bytes.
    """
    texts = well_formed(choice.token_texts)
    data = choice.token_bytes or [b"" if "\ufffd" in text else text.encode() for text in texts]
    return [
        {
            "token": text,
            "bytes": list(token_bytes),
            "logprob": finite_logprob(logprob),
            "top_logprobs": [],
        }
        for text, token_bytes, logprob in zip(texts, data, choice.logprobs, strict=True)
    ]


def finite_logprob(logprob: float) -> float:
    """Return a log-prob for JSON: at least -9999."""
    return max(_LOWEST_LOGPROB, logprob)


def openai_usage(reply: ModelReply) -> dict[str, Any]:
    """Return the usage object of chat completions and completions."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def openai_error(error: CallError) -> dict[str, Any]:
    """Return the error body of OpenAI's APIs."""
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(error.kind, "invalid_request_error"),
            "param": error.param,
            "code": _OPENAI_CODES.get(error.kind),
        }
    }
