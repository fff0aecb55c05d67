"""Mistakes for the relations of the APIs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import burnish.agents.prompts as matching
import burnish.agents.serving as serving
import burnish.episodes.renderer as renderer
import burnish.rollout.requests as requests
from burnish.episodes.token_texts import TokenPart

Patch = pytest.MonkeyPatch


def stops_are_cut_at_their_last_place(patch: Patch) -> None:
    """A token that contains a stop string several times leaves it in the reply."""

    def cut(text: str, stops: Any) -> tuple[str, str | None]:
        stop = next((stop for stop in stops if stop in text), None)
        return (text, None) if stop is None else (text[: text.rfind(stop)], stop)

    patch.setattr(renderer, "before_stop", cut)
    patch.setattr(serving, "before_stop", cut)


def cut_replies_are_complete(patch: Patch) -> None:
    """A response with calls is complete, also if the limit cut it."""
    own = serving.make_choice

    def make(*arguments: Any) -> Any:
        choice = own(*arguments)
        has_calls = bool(choice.message.get("tool_calls"))
        return replace(choice, finish_reason="tool_calls") if has_calls else choice

    patch.setattr(serving, "make_choice", make)


def tokens_are_decoded_alone(patch: Patch) -> None:
    """The text of a token is that of the token alone."""

    def parts(tokenizer: Any, prompt: Any, ids: Any, text: str, **_: Any) -> tuple[TokenPart, ...]:
        texts = [str(tokenizer.decode([token])) for token in ids]
        return tuple(TokenPart(text, text.encode()) for text in texts)

    patch.setattr(renderer, "token_parts", parts)


def numbers_are_compared_as_text(patch: Patch) -> None:
    """1.0 is another number than 1."""
    patch.setattr(matching, "_doubles", lambda value: value)


def special_tokens_are_searched(patch: Patch) -> None:
    """A stop string is found inside a special token that the text does not show."""
    patch.setattr(requests, "hidden_tokens", lambda tokenizer: {})


PLANTED = {
    "streamed_reply": (stops_are_cut_at_their_last_place, tuple(range(40))),
    "same_reply_in_every_api": (cut_replies_are_complete, tuple(range(80))),
    "tokens_are_the_text": (tokens_are_decoded_alone, tuple(range(12))),
    "stops_are_in_the_text": (special_tokens_are_searched, tuple(range(40))),
    "history_of_other_languages": (numbers_are_compared_as_text, tuple(range(24))),
}
