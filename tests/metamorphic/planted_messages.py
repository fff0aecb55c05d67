"""Mistakes for the relations of chat messages."""

from __future__ import annotations

from typing import Any

import pytest

import burnish.chat_message as chat_message
import burnish.data.chat as chat
import burnish.data.left_out as left_out
import burnish.data.messages as messages
import burnish.data.rows as data_rows
import burnish.data.turns as turns
from burnish.reasoning_tags import Tags

Patch = pytest.MonkeyPatch


def the_last_part_wins(patch: Patch) -> None:
    """Only the last text part of a content is read."""

    def last(content: Any) -> str:
        return content if isinstance(content, str) else str((content or [{"text": ""}])[-1])

    patch.setattr(chat_message, "text_of", last)


def arguments_stay_text(patch: Patch) -> None:
    """Arguments given as JSON text are passed to the template as they are."""
    patch.setattr(chat_message, "arguments_of", lambda value: value or {})


def nulls_of_parquet_are_kept(patch: Patch) -> None:
    """The nulls that Parquet fills in are read as arguments and keys."""
    patch.setattr(data_rows, "without_nulls", lambda value: value)


def nothing_is_noticed(patch: Patch) -> None:
    """Names and reasoning that a template drops are not reported."""
    patch.setattr(left_out, "note", lambda kind, text: None)


def turns_are_found_in_the_final_text(patch: Patch) -> None:
    """The prompt of a turn ends one character late."""
    own = turns.TurnSpan
    patch.setattr(turns, "TurnSpan", lambda begin, end: own(begin + 1, end))


def tools_stay_as_they_are(patch: Patch) -> None:
    """Tools are passed to the template in the form of the data."""
    patch.setattr(messages, "wrapped_tool", dict)


def all_tokens_of_an_answer_are_trained(patch: Patch) -> None:
    """Text behind an end token is trained."""
    patch.setattr(chat, "_trained_length", lambda tokenizer, answer, *_, **__: len(answer))


def marks_in_texts_are_not_rendered(patch: Patch) -> None:
    """Lost text is searched for without the marks of reasoning in it."""
    patch.setattr(left_out, "marked_parts", lambda *_: ())


def rendered_answers_are_trained_as_they_are(patch: Patch) -> None:
    """The blocks of prompts are ignored."""
    patch.setattr(Tags, "of_prompt", lambda self, prompt: (prompt, "none"))


def text_is_written_before_calls(patch: Patch) -> None:
    """The order of text and calls is that of the template."""
    patch.setattr(chat, "as_rendered", list)
    patch.setattr(left_out, "as_rendered", list)


def cut_answers_are_whole(patch: Patch) -> None:
    """A response that was cut is rendered as if it had ended."""
    patch.setattr(turns, "_cut_turn", turns._last_turn)


PLANTED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "content_forms": (the_last_part_wins, tuple(range(8))),
    "argument_forms": (arguments_stay_text, tuple(range(24))),
    "tool_forms": (tools_stay_as_they_are, tuple(range(12))),
    "text_behind_end": (all_tokens_of_an_answer_are_trained, tuple(range(6))),
    "message_files": (nulls_of_parquet_are_kept, tuple(range(24))),
    "dropped_fields": (nothing_is_noticed, tuple(range(40))),
    "answers_with_marks_are_trained_once": (
        marks_in_texts_are_not_rendered,
        tuple(range(120)),
    ),
    "answers_continue_the_block_of_their_prompt": (
        rendered_answers_are_trained_as_they_are,
        tuple(range(60)),
    ),
    "cut_answers_are_trained_as_written": (cut_answers_are_whole, tuple(range(12))),
    "text_behind_calls_is_trained_as_written": (text_is_written_before_calls, tuple(range(24))),
    "trained_prompt": (turns_are_found_in_the_final_text, tuple(range(12))),
}
