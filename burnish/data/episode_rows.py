"""Rows of episodes: written by the job generate, one for each token row, and read by score.

The columns of a row are a conversation with its end, the status of the episode, and the exact
tokens. Readers of text (``messages``) and of tokens train the same responses: each sampled response
in the one row whose tokens contain it, unless it has ``train: false``. The tokens are read only if
the row still has the messages and tools that they were written with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from burnish.chat_message import Message, canonical, without_flags, wrapped_tool
from burnish.compact import IntRuns
from burnish.data.base import Row
from burnish.data.messages import as_messages, as_tools, parsed, trained_flags
from burnish.data.rows import OTHER_TEXT, PLAIN_TEXT, EncodedRow, note_other_tokens, token_row
from burnish.json_text import json_types
from burnish.transcript import Episode, EpisodeStatus, FinishReason, Turn
from burnish.vocabulary import num_tokens

if TYPE_CHECKING:  # forms of rows are found without torch
    from transformers import PreTrainedTokenizerBase

    from burnish import types

MESSAGES, TOOLS, STATUS, TURNS, FINISH = "messages", "tools", "status", "turns", "finish_reason"
TOKENS, TOKENS_MASK, TOKENS_TEXT = "tokens", "tokens_mask", "tokens_text"
"""Columns of the exact token ids of a row: the ids, true for those that the policy sampled, and the
text that they decode to."""
TOKENS_TURNS, TOKENS_DIGEST = "tokens_turns", "tokens_digest"
"""Columns that connect tokens with messages: the index of each sampled message with the begin and
the end of its tokens, and a digest of the messages and tools."""
TOKEN_COLUMNS = (TOKENS, TOKENS_MASK, TOKENS_TEXT, TOKENS_TURNS, TOKENS_DIGEST)
EPISODE_COLUMNS = frozenset({TOOLS, STATUS, TURNS, PLAIN_TEXT, *TOKEN_COLUMNS})
"""Columns that rows of episodes have besides those of single responses."""


def conversation_columns(episode: Episode, row: types.TokenRow) -> dict[str, Any]:
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


def token_columns(
    episode: Episode,
    row: types.TokenRow,
    conversation: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the exact tokens of a row, the text that they decode to, and their connection with
    ``conversation``, the columns of :func:`conversation_columns`."""
    ids = [*row.prompt_ids, *row.response_ids]
    mask = [False] * len(row.prompt_ids) + list(row.action_mask)
    turns, begin = [], len(row.prompt_ids)
    for turn, length in IntRuns(row.turns).runs():
        if turn >= 0:
            place = len(episode.messages_before(turn))
            turns.append({"message": place, "begin": begin, "end": begin + length})
        begin += length
    return {
        TOKENS: ids,
        TOKENS_MASK: mask,
        TOKENS_TEXT: str(tokenizer.decode(ids)),
        TOKENS_TURNS: turns,
        TOKENS_DIGEST: _digest(conversation[MESSAGES], conversation[TOOLS]),
    }


def _digest(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of a conversation without its flags."""
    bare = [without_flags(canonical(message)) for message in messages]
    value = json_types([bare, [wrapped_tool(tool) for tool in tools]], finite=True)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


OTHER_MESSAGES = (
    "the row's token ids are not those of the messages and tools that are read here (the recipe "
    "sets another column, system_prompt or tools_key; or the row was edited, or has no "
    f"{TOKENS_DIGEST})"
)


def has_tokens(row: Row) -> bool:
    """Return whether a row has the columns of exact tokens."""
    lists = (row.values.get(TOKENS), row.values.get(TOKENS_MASK))
    return all(isinstance(v, list | tuple) and v for v in lists) and TOKENS_TEXT in row.values


def sampled_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    trained: Collection[int],
) -> EncodedRow | None:
    """Return the exact tokens of a conversation, trained where the policy sampled the messages with
    the indices ``trained``.

    Return None if the row has none. Also, with a notice, if they are those of other messages or
    tools, if they do not decode to their text with this tokenizer, or if not all messages of
    ``trained`` were sampled.
    """
    if not has_tokens(row):
        return None
    values = row.values
    ids, mask = list(values[TOKENS]), [bool(value) for value in values[TOKENS_MASK]]
    turns = values.get(TOKENS_TURNS) or ()
    in_vocabulary = all(type(i) is int and 0 <= i < num_tokens(tokenizer) for i in ids)
    if values.get(TOKENS_DIGEST) != _digest(messages, tools or ()):
        problem = OTHER_MESSAGES
    elif not (
        in_vocabulary
        and len(ids) == len(mask)
        and str(tokenizer.decode(ids)) == values[TOKENS_TEXT]
    ):
        problem = OTHER_TEXT
    elif not set(trained) <= {turn["message"] for turn in turns}:
        problem = "a message that is trained was not sampled in this row, so it has no token ids"
    else:
        for turn in turns:
            if turn["message"] not in trained:
                begin, end = turn["begin"], turn["end"]
                mask[begin:end] = [False] * (end - begin)
        return token_row(ids, mask)
    note_other_tokens(problem)
    return None


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
