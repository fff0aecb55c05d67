"""Parts of backends: prompts of clients to the engine, and its completions to replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from burnish.agents.calls import Choice, ModelCall, ModelReply, ReplyStart, invalid
from burnish.chat_message import Message
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import TextCodec
from burnish.rollout.base import Completion, Sampling
from burnish.types import Ids


def checked_ids(ids: Ids, codec: TextCodec) -> Ids:
    """Return the ids of a prompt. Raises CallError (400) if there are none, or if one is not in the
    vocabulary."""
    size = codec.num_tokens
    if not ids or any(not 0 <= token < size for token in ids):
        raise invalid("prompt", f"a prompt needs at least one id, and ids below {size}")
    return ids


def with_stop(sampling: Sampling, stop: Sequence[str]) -> Sampling:
    """Return ``sampling`` with additional stop strings."""
    return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stop))))


def stop_in(completion: Completion, stop: Sequence[str]) -> str | None:
    """Return the client's stop string that ended a response; None if something else did."""
    if completion.finish_reason != "stop":
        return None
    found = [(completion.text.rfind(text), text) for text in stop if text in completion.text]
    return min(found)[1] if found else None


def without_stop(parsed: ParsedMessage, stop: str | None) -> ParsedMessage:
    """Return a message without the stop string that ended it and the text after it."""
    content = parsed.message.get("content") or ""
    if stop is None or stop not in content:
        return parsed
    return replace(parsed, message={**parsed.message, "content": content[: content.rfind(stop)]})


def make_choice(
    call: ModelCall, completion: Completion, message: Message, token_texts: tuple[str, ...]
) -> Choice:
    """Return a response as a choice. ``token_texts``: text of each token, for log-probs."""
    reason: Literal["length", "stop"] = "length" if completion.finish_reason == "length" else "stop"
    return Choice(
        message=message,
        finish_reason="tool_calls" if message.get("tool_calls") else reason,
        token_ids=completion.token_ids,
        token_texts=token_texts,
        logprobs=completion.logprobs,
        stop_sequence=stop_in(completion, call.stop),
    )


def make_reply(start: ReplyStart, choices: Sequence[Choice], *, cached_tokens: int) -> ModelReply:
    """Return the reply to a call, of which ``start`` was known before."""
    return ModelReply(
        reply_id=start.reply_id,
        created=start.created,
        model=start.model,
        choices=tuple(choices),
        prompt_tokens=start.prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        ignored=start.ignored,
    )


def make_start(
    call: ModelCall, prompt_ids: Sequence[int], reply_id: str, *, ignored: Sequence[str] = ()
) -> ReplyStart:
    """Return the part of a reply that is known before its responses are sampled."""
    return ReplyStart(
        reply_id=reply_id,
        created=int(time.time()),
        model=call.model,
        prompt_tokens=len(prompt_ids),
        ignored=tuple(ignored),
    )
