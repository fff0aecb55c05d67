"""Mistakes for the relations of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from burnish.agents import conversation
from burnish.chat_message import AnsweredCalls
from burnish.episodes import renderer

Patch = pytest.MonkeyPatch


class _LastCalls(AnsweredCalls[Any]):
    def answered_by(self, message: Any) -> Any:
        values = self._values.get(message["tool_call_id"])
        return values and values[-1]


def results_have_the_last_name_of_their_id(patch: Patch) -> None:
    """All results of calls that share an id get the name of the last one."""
    patch.setattr(conversation, "AnsweredCalls", _LastCalls)


def calls_may_be_left_out(patch: Patch) -> None:
    """Prompts of requests may lack calls."""
    patch.setattr(renderer, "REFUSED_IN_PROMPTS", frozenset({"content"}))


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "requests_are_rows": (results_have_the_last_name_of_their_id, tuple(range(24))),
    "requests_keep_their_calls": (calls_may_be_left_out, tuple(range(24))),
}
