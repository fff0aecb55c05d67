"""Parts of backends: prompts of clients to the engine, and its completions to replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from burnish.agents.calls import Choice, ModelCall, ModelReply, ReplyStart, invalid
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import TextCodec
from burnish.episodes.token_texts import TokenPart
from burnish.rollout.base import Completion, Sampling
from burnish.transcript import FinishReason
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


def finish_reason_of(completion: Completion, parsed: ParsedMessage) -> FinishReason:
    """Return the end of a response. One that a stop string of the client ends is not cut, even if
    the engine did not recognize the string."""
    return completion.finish_reason if parsed.stop is None else "stop"


def make_choice(
    call: ModelCall,
    completion: Completion,
    parsed: ParsedMessage,
    parts: Sequence[TokenPart] = (),
) -> Choice:
    """Return a response as a choice. ``parts``: text of each token, for log-probs.

    A response that the token limit cut says so, also if it has complete calls.
    """
    reason: Literal["length", "stop", "tool_calls"] = "stop"
    if finish_reason_of(completion, parsed) == "length":
        reason = "length"
    elif parsed.message.get("tool_calls"):
        reason = "tool_calls"
    return Choice(
        message=parsed.message,
        finish_reason=reason,
        token_ids=completion.token_ids,
        token_texts=tuple(part.text for part in parts),
        token_bytes=tuple(part.data for part in parts),
        logprobs=completion.logprobs,
        stop_sequence=parsed.stop,
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
    call: ModelCall, prompt_tokens: int, reply_id: str, *, ignored: Sequence[str] = ()
) -> ReplyStart:
    """Return the part of a reply that is known before its responses are sampled.
    ``prompt_tokens``: those of all prompts."""
    return ReplyStart(
        reply_id=reply_id,
        created=int(time.time()),
        model=call.model,
        prompt_tokens=prompt_tokens,
        ignored=tuple(ignored),
    )
