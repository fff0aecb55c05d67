"""Rows of episodes: written by the job generate, one for each token row, and read by score.

The columns of a row are a conversation with its end, the status of the episode, and the exact
tokens. Readers of text (``messages``) and of tokens train the same responses: each sampled response
in the one row whose tokens contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from burnish.chat_message import without_flags
from burnish.data.messages import as_messages, as_tools, parsed, trained_flags
from burnish.data.rows import PLAIN_TEXT, TOKENS, TOKENS_MASK, TOKENS_TEXT
from burnish.transcript import Episode, EpisodeStatus, FinishReason, Turn

if TYPE_CHECKING:  # forms of rows are found without torch
    from transformers import PreTrainedTokenizerBase

    from burnish.types import TokenRow

MESSAGES, TOOLS, STATUS, TURNS, FINISH = "messages", "tools", "status", "turns", "finish_reason"
EPISODE_COLUMNS = frozenset({TOOLS, STATUS, TURNS, PLAIN_TEXT, TOKENS, TOKENS_MASK, TOKENS_TEXT})
"""Columns that rows of episodes have besides those of single responses."""


def conversation_columns(episode: Episode, row: TokenRow) -> dict[str, Any]:
    """Return the conversation of a token row up to its last response, with the tools and the end of
    that response. The last row of an episode also has the messages that answered it.

    Assistant messages that the policy did not sample in this row have ``train: false``, as have
    responses that a limit cut before the last one: as text they would be trained with an end.
    """
    sampled = sorted(set(row.turns) - {-1})
    number = sampled[-1] if sampled else len(episode.turns) - 1
    last = episode.turns[number]
    messages = [dict(message) for message in (*episode.messages_before(number), last.message)]
    trained = {
        len(episode.messages_before(turn))
        for turn in sampled
        if turn == number or episode.turns[turn].finish_reason == "stop"
    }
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place not in trained:
            message["train"] = False
    if number == len(episode.turns) - 1:
        messages += [dict(message) for message in last.answer]
    tools = [dict(tool) for tool in episode.tools_of(number)]
    columns = {MESSAGES: messages, TOOLS: tools, FINISH: last.finish_reason}
    return columns | ({PLAIN_TEXT: True} if last.is_text else {})


def token_columns(row: TokenRow, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the exact tokens of a row, and the text that they decode to."""
    assert tokenizer is not None
    ids = [*row.prompt_ids, *row.response_ids]
    mask = [False] * len(row.prompt_ids) + list(row.action_mask)
    return {TOKENS: ids, TOKENS_MASK: mask, TOKENS_TEXT: str(tokenizer.decode(ids))}


def episode_of(columns: Mapping[str, Any], *, finish: FinishReason = "stop") -> Episode | None:
    """Return the episode in the columns of a row that the job generate wrote; None for other rows.

    Its turns are the responses that the policy sampled in the row. ``finish``: end of the last one,
    from the column that the recipe names. Raises DataError if the messages
    are malformed.
    """
    if columns.get(STATUS) not in get_args(EpisodeStatus) or type(columns.get(TURNS)) is not int:
        return None
    value = parsed(columns.get(MESSAGES))
    if not isinstance(value, list | tuple) or not value:
        return None
    messages = as_messages(value)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    flags, is_text = trained_flags(messages), columns.get(PLAIN_TEXT) is True
    sampled = [i for i in answers if flags[i]] or answers[-1:]
    if not sampled or sampled[0] == 0:
        return None
    bare = [without_flags(message) for message in messages]
    turns = [
        Turn(
            bare[i],
            tuple(bare[i + 1 : end]),
            finish_reason=finish if i == sampled[-1] else "stop",
            is_text=is_text,
        )
        for i, end in zip(sampled, [*sampled[1:], len(bare)], strict=True)
    ]
    return Episode(
        cast(EpisodeStatus, columns[STATUS]),
        tuple(bare[: sampled[0]]),
        tools=tuple(as_tools(columns.get(TOOLS)) or ()),
        turns=tuple(turns),
    )
