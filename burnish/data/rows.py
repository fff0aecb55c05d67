"""Columns of a data row, and the token row that a prompt and a response make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.data import PreferenceDataConfig, SFTDataConfig
from burnish.config.explain import nearest
from burnish.data.chat import (
    as_messages,
    encode_completion,
    encode_conversation,
    encode_prompt,
)
from burnish.data.sources import DataError, Row


@dataclass(frozen=True)
class TokenRow:
    """Token ids [T] and which of them are trained on [T]; made by :func:`token_row`."""

    ids: Sequence[int]
    mask: Sequence[bool]

    @property
    def prompt_len(self) -> int:
        """Tokens before the first that is trained on."""
        return list(self.mask).index(True)

    def without_left(self, count: int) -> TokenRow | None:
        """The row without its first ``count`` tokens; None where nothing to train on is left."""
        mask = _trainable(self.mask[count:])
        return TokenRow(self.ids[count:], mask) if any(mask) else None


def token_row(ids: Sequence[int], mask: Sequence[bool]) -> TokenRow:
    """A row whose first token is not trained on, since nothing before it could predict it.

    Raises DataError where that leaves nothing to train on.
    """
    trainable = _trainable(mask)
    if not any(trainable):
        raise DataError(
            f"the row has nothing to train on ({len(ids)} tokens); drop it from the data"
        )
    return TokenRow(list(ids), trainable)


def column(row: Row, key: str, field: str) -> Any:
    """The row's value in column ``key``, which the config calls ``field``.

    Raises DataError where there is no such column, or no value in it.
    """
    if key not in row.values:
        raise DataError(
            f"there is no column {key!r} ({field}); the columns are "
            f"{', '.join(row.values)}{nearest(key, row.values)}. Set {field}, or rename the column"
        )
    value = row.values[key]
    if value is None:
        raise DataError(f"column {key!r} ({field}) is empty here; fill it, or drop the row")
    return value


def prompt_column(row: Row, key: str, template: str | None) -> Any:
    """The prompt of a row: ``template`` filled with its columns, or column ``key`` as it is."""
    if template is None:
        return column(row, key, "prompt_key")
    try:
        return template.format_map(row.values)
    except KeyError as error:
        wanted = str(error.args[0])
        raise DataError(
            f"prompt_template wants {wanted!r}, and there is no such column; the columns are "
            f"{', '.join(row.values)}{nearest(wanted, row.values)}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"prompt_template {template!r} cannot be filled: {error}. It is a Python format "
            "string: "
            "{column} for a column, {{ and }} for braces"
        ) from error


def encode_exchange(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    response: Any,
    config: SFTDataConfig | PreferenceDataConfig,
) -> TokenRow:
    """A prompt and the response to it, each a string or messages, with the response trained on.

    Strings are put one after the other, with the end token behind; as soon as one of the two is
    messages (or by ``config.apply_chat_template``) both go through the chat template. The prompt's
    tokens are exactly those of :func:`burnish.data.chat.encode_prompt`. Raises DataError.
    """
    plain = isinstance(prompt, str) and isinstance(response, str)
    if plain and not config.apply_chat_template:
        _, prompt_ids = encode_prompt(tokenizer, prompt, system_prompt=config.system_prompt)
        return token_row(*encode_completion(tokenizer, prompt_ids, response))
    own = as_messages(prompt)
    answer = _answer(response, own)
    before = as_messages(own, system_prompt=config.system_prompt)
    return token_row(*encode_conversation(tokenizer, [*before, *answer], trained_from=len(before)))


def _answer(response: Any, prompt: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that follow the prompt, also where the data repeats the prompt before them."""
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    messages = as_messages(response)
    if messages[: len(prompt)] == list(prompt):
        messages = messages[len(prompt) :]
    if not messages or messages[0]["role"] != "assistant":
        begins = (
            f"begins with a {messages[0]['role']!r} message"
            if messages
            else "only repeats the prompt"
        )
        raise DataError(
            f"the response {begins}; it has to be a string, or messages that follow the prompt "
            "(or repeat it word for word) and go on with an assistant message"
        )
    return messages


def _trainable(mask: Sequence[bool]) -> list[bool]:
    return [value and i > 0 for i, value in enumerate(mask)]
