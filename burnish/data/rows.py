"""Read the columns of a data row, and encode a prompt and a response as one token row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from burnish.chat_message import MessageError, text_of, with_cut_end
from burnish.config.explain import nearest
from burnish.config.forms import FUNCTIONS, SYSTEMS, unread_form
from burnish.config.templates import TemplateError, fields_of
from burnish.data.chat import (
    check_prompt,
    check_text,
    encode_completion,
    encode_conversation,
    encode_prompt,
    note_cut,
)
from burnish.data.config import DataConfig, RewardData
from burnish.data.decoding import response_decoder, response_text
from burnish.data.left_out import REFUSED, check_rendering
from burnish.data.messages import as_messages, as_tools, parsed, without_nulls
from burnish.data.notices import known_end, note
from burnish.data.sources import DataError, Row
from burnish.special_tokens import special_tokens
from burnish.templates import of_conversation
from burnish.vocabulary import num_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLAIN_TEXT = "plain_text"
"""Column of rows of episodes without a chat template: true if the contents of the messages, joined,
are the text of the tokens."""


@dataclass(frozen=True)
class EncodedRow:
    """Token ids [T] and the training mask [T]. Created by :func:`token_row`."""

    ids: Sequence[int]
    mask: Sequence[bool]
    answers: Sequence[bool] | None = None
    """Mask [T] of the answer tokens in demonstrations. None for plain text and for rows with a
    single response."""

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first trained token."""
        return list(self.mask).index(True)

    def without_left(self, count: int) -> EncodedRow | None:
        """Return the row without its first ``count`` tokens, or None if no trained token is left.

        With ``answers``, an answer at the beginning of the new row is not trained on, because its
        start or its prompt was removed. Without ``answers`` a row may begin anywhere."""
        mask = _trainable(self.mask[count:])
        if self.answers is None:
            return EncodedRow(self.ids[count:], mask) if any(mask) else None
        answers = list(self.answers[count:])
        lost = answers.index(False) if False in answers else len(answers)
        answers[:lost] = [False] * lost
        mask[:lost] = [False] * lost
        if not any(answers):
            return None
        return EncodedRow(self.ids[count:], mask, answers)

    def without_right(self, length: int) -> EncodedRow | None:
        """Return the first ``length`` tokens of the row, or None if no trained token is left. The
        last answer may lose its end, and with it its end token."""
        mask = list(self.mask[:length])
        answers = None if self.answers is None else list(self.answers[:length])
        return EncodedRow(self.ids[:length], mask, answers) if any(mask) else None


def token_row(ids: Sequence[int], mask: Sequence[bool]) -> EncodedRow:
    """Return a TokenRow whose first token is not trained on, because no token predicts it.

    Raises DataError if nothing to train on is left.
    """
    trainable = _trainable(mask)
    if not any(trainable):
        raise DataError(
            f"the row has nothing to train on ({len(ids)} tokens); drop it from the data"
        )
    return EncodedRow(list(ids), trainable)


def column(row: Row, key: str, field: str) -> Any:
    """Return the row's value in column ``key``, which is set by the config key ``field``.

    Raises DataError if there is no such column or its value is None.
    """
    if key not in row.values:
        raise DataError(
            f"there is no column {key!r} ({field}); the columns are "
            f"{', '.join(row.values)}{nearest(key, row.values)}"
            + (unread_form(row.values) or f". Set {field}, or rename the column")
        )
    value = row.values[key]
    if value is None:
        raise DataError(f"column {key!r} ({field}) is empty here; fill it, or drop the row")
    return value


def content_column(row: Row, key: str, field: str) -> Any:
    """Return the text or the messages in column ``key``.

    JSON text of messages is parsed, and nulls filled in by the file format are removed. Raises
    DataError as :func:`column` does.
    """
    value = column(row, key, field)
    if isinstance(value, str):  # nulls in JSON text are the data's own
        return parsed(value)
    return without_nulls(value) if row.fills_nulls else value


def response_column(row: Row, key: str, field: str) -> Any:
    """Return the text or the messages in column ``key``, as :func:`content_column` does. A text in
    a row of the job generate is what was sampled, also if it is JSON of messages."""
    value = column(row, key, field)
    ends = {"finish_reason", _written_beside(row, key, field, "finish_reason")} & row.values.keys()
    is_sampled = f"{key}_tokens" in row.values or (ends and "prompt_id" in row.values)
    return value if is_sampled and isinstance(value, str) else content_column(row, key, field)


def _written_beside(row: Row, key: str, field: str, suffix: str) -> str:
    """Return the name of a column about the response in column ``key``: ``key_finish_reason``.

    If the response's column was renamed alone, it is ``chosen_finish_reason`` of the default name
    of ``field``."""
    default = field.removesuffix("_key")
    is_renamed = f"{key}_{suffix}" not in row.values and default not in row.values
    return f"{default if is_renamed else key}_{suffix}"


def prompt_column(row: Row, key: str, template: str | None) -> Any:
    """Return the prompt of a row: ``template`` filled with its columns, or column ``key``.

    Raises DataError if the prompt is a blank text, as an empty cell of a CSV file is."""
    if template is None:
        prompt = content_column(row, key, "prompt_key")
    else:
        try:
            for name in fields_of(template):
                _check_fills(row, name)
            prompt = template.format_map(row.values)
        except (DataError, TemplateError) as error:
            raise DataError(str(error)) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise DataError(
                f"prompt_template {template!r} cannot be filled: {error}. It is a Python format "
                "string: {column} for a column, {{ and }} for braces"
            ) from error
    if isinstance(prompt, str) and not prompt.strip():
        source = f"column {key!r} (prompt_key)" if template is None else "prompt_template"
        raise DataError(
            f"the prompt is empty ({source} gives a blank text), so a response would follow "
            "nothing; fill it, drop the row, or set on_bad_row: skip"
        )
    return prompt


def _check_fills(row: Row, name: str) -> None:
    """Raise DataError unless column ``name`` has a text or a number to fill a template with."""
    if name not in row.values:
        raise DataError(
            f"prompt_template uses {name!r}, but there is no such column; the columns are "
            f"{', '.join(row.values)}{nearest(name, row.values)}"
        )
    value = row.values[name]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(
            f"column {name!r} is empty here, so prompt_template would insert {value}; fill it, or "
            "drop the row"
        )
    if isinstance(value, (list, tuple, dict, bytes)):
        raise DataError(
            f"column {name!r} contains a {type(value).__name__}, but prompt_template accepts only "
            "texts and numbers; use a column of text, or remove prompt_template for chat messages"
        )


def system_of(row: Row, config: DataConfig, content: Any) -> str | None:
    """Return the system message to insert before ``content`` (text or messages): that of the
    recipe, or of the row's column ``system`` or ``system_prompt``.

    Return None if ``content`` begins with the same message. A column that ``prompt_template`` uses
    is no system message. Raises DataError if there are two different system messages, or one that
    is no text.
    """
    texts = {key: _system_text(row.values.get(key), key) for key in SYSTEMS}
    texts = {key: text for key, text in texts.items() if text.strip()}
    if texts and config.prompt_template is not None:
        used = set(fields_of(config.prompt_template))
        texts = {key: text for key, text in texts.items() if key not in used}
        if texts and not config.apply_chat_template:  # the template writes plain text
            note(
                "unused_system",
                f"the column {next(iter(texts))!r} is in no prompt, because prompt_template does "
                "not use it; add it, or set apply_chat_template: true for a system message",
            )
            texts = {}
    if not texts:
        return config.system_prompt
    places = dict(texts)
    if config.system_prompt is not None:
        places["the key system_prompt of the recipe"] = config.system_prompt
    first = content[:1] if isinstance(content, list | tuple) else content
    begins = None if isinstance(content, str) else as_messages(first)[0]
    if begins is not None and begins["role"] == "system":
        places["the first message"] = begins["content"]
    if len(set(places.values())) > 1:
        raise DataError(
            f"the row has different system messages in {' and '.join(places)}; keep one, or use "
            "prompt_template with the column"
        )
    return None if "the first message" in places else next(iter(texts.values()))


def _system_text(value: Any, key: str) -> str:
    """Return the text of a system message: a text or a list of text parts; "" if there is none. A
    number or a truth value is none."""
    if not value or isinstance(value, bool | int | float):
        return ""
    try:
        return text_of(value)
    except MessageError as error:
        raise DataError(
            f"column {key!r} is no text: {repr(value)[:80]}; write the system message as text, or "
            "rename the column if it is none"
        ) from error


def tools_column(row: Row, config: DataConfig) -> list[dict[str, Any]] | None:
    """Return the tools for the row's chat template, or None if there are none. The column of
    OpenAI's older form is read if the default column is missing.

    Raises DataError if ``tools_key`` is set explicitly and its column does not contain tools. A
    default column without tools is ignored.
    """
    key = config.tools_key
    value = None if key is None else row.values.get(key)
    if value is None and key is not None and not config.is_own("tools_key"):
        key, value = FUNCTIONS, row.values.get(FUNCTIONS)
    if value is None or value in ([], ""):
        return None
    tools = as_tools(without_nulls(value) if row.fills_nulls else value)
    if tools is None and config.is_own("tools_key"):
        raise DataError(
            f"column {key!r} (tools_key) must contain a list of tool descriptions (objects with a "
            f"name or a function, or their JSON text), got {repr(value)[:60]}; set tools_key: null "
            "to ignore it"
        )
    return tools


@dataclass(frozen=True)
class Exchange:
    """A prompt and a response to it, each a string or messages, as read from the data."""

    prompt: Any
    response: Any
    tools: list[dict[str, Any]] | None = None
    response_ids: Sequence[int] | None = None
    """The sampled ids of ``response`` (in rows written by the job generate). None if unknown."""
    sampled_prompt_ids: Sequence[int] | None = None
    """The ids after which ``response`` was sampled (``prompt_tokens``). None if unknown."""
    system: str | None = None
    """System message before the prompt."""
    may_be_empty: bool = False
    """True if the model does not learn to give this response: a rejected or a rated one."""
    is_cut: bool = False
    """The response ends at a length limit, not where the model ended it."""


def exchange(
    row: Row, prompt: Any, config: DataConfig, *, key: str, field: str, use_tokens: bool
) -> Exchange:
    """Return the exchange of ``prompt`` and column ``key``, which is set by the config key
    ``field``. ``use_tokens``: with its sampled token ids, if the row has them."""
    ids = row.values.get(_written_beside(row, key, field, "tokens")) if use_tokens else None
    is_list = isinstance(ids, (list, tuple)) and bool(ids)
    usable = is_list and all(isinstance(i, int) and not isinstance(i, bool) for i in ids or ())
    return Exchange(
        prompt,
        response_column(row, key, field),
        tools_column(row, config),
        list(ids or ()) if usable else None,
        row.values.get("prompt_tokens"),
        system_of(row, config, prompt),
        is_cut=is_cut(row, key, field),
    )


def is_cut(row: Row, key: str, field: str) -> bool:
    """Return whether the column ``key_finish_reason`` or ``finish_reason`` says that the response
    in column ``key``, which is set by the config key ``field``, was cut."""
    column_of_end = _written_beside(row, key, field, "finish_reason")
    reason = row.values.get(column_of_end, row.values.get("finish_reason"))
    return known_end(reason) != "stop"


def _without_end(tokenizer: PreTrainedTokenizerBase, row: EncodedRow) -> EncodedRow:
    """Return the tokens of a response that was cut: without the end token and what follows it, so
    that a model does not learn to stop in mid-sentence."""
    end = len(row.mask) - row.mask[::-1].index(True) if any(row.mask) else 0
    if not end or row.ids[end - 1] not in special_tokens(tokenizer):
        return row
    note_cut()
    return token_row(row.ids[: end - 1], row.mask[: end - 1])


def encode_exchange(
    tokenizer: PreTrainedTokenizerBase,
    exchange: Exchange,
    config: DataConfig,
    *,
    as_chat: bool = False,
    only_last: bool = False,
) -> EncodedRow:
    """Encode a prompt and a response, with the response as the trained part.

    Strings are concatenated and followed by the end token. Both are rendered by the chat template
    if one of them is messages, or with ``config.apply_chat_template`` or ``as_chat``. The prompt's
    tokens are exactly those of :func:`burnish.data.chat.encode_prompt`. The response's tokens are
    the sampled ones, if the row has them; a reward model learns from what a reward reads
    (``rewards/model/rows.py``), the row of the text, with sampled ids that have the same text.
    ``only_last``: of several assistant messages, train only
    on the last. Raises DataError if the row cannot be encoded.
    """
    prompt, response = exchange.prompt, exchange.response
    as_chat = as_chat or config.apply_chat_template or not is_text(prompt, response)
    sampled = _sampled(tokenizer, exchange, config, as_chat=as_chat)
    if isinstance(response, str):  # an empty one that was sampled is meant
        check_text(tokenizer, response, refuse=not exchange.may_be_empty and sampled is None)
    if sampled is not None and not isinstance(config, RewardData):
        return sampled
    exchange = replace(exchange, may_be_empty=exchange.may_be_empty or sampled is not None)
    try:
        row = _text_row(tokenizer, exchange, config, as_chat=as_chat, only_last=only_last)
    except DataError:  # a reward reads the sampled ids of a text that the template cannot write
        if sampled is None:
            raise
        return sampled
    return sampled if sampled is not None and _is_written(tokenizer, sampled, row) else row


def _is_written(tokenizer: PreTrainedTokenizerBase, sampled: EncodedRow, row: EncodedRow) -> bool:
    """Return whether ``row`` is the row of sampled ids but for the division of its text. Around
    special tokens some tokenizers decode other ids to the same text."""
    special = special_tokens(tokenizer)
    if any(id in special for id in sampled.ids[sampled.prompt_len : -1]):
        return False
    ids = (list(to_last_trained(each).ids) for each in (sampled, row))
    return tokenizer.decode(next(ids)) == tokenizer.decode(next(ids))


def to_last_trained(row: EncodedRow) -> EncodedRow:
    """Remove the tokens after the last trained token, which is the end token.

    Chat templates often add a newline after it. No sampled response contains that newline, and a
    reward model scores the last token.
    """
    end = len(row.mask) - row.mask[::-1].index(True) if any(row.mask) else len(row.mask)
    return replace(row, ids=row.ids[:end], mask=row.mask[:end])


def _text_row(
    tokenizer: PreTrainedTokenizerBase,
    exchange: Exchange,
    config: DataConfig,
    *,
    as_chat: bool,
    only_last: bool,
) -> EncodedRow:
    """Encode a prompt and the text, or the messages, of a response."""
    prompt, response = exchange.prompt, exchange.response
    if not as_chat:
        text, prompt_ids = encode_prompt(
            tokenizer, prompt, system_prompt=exchange.system, tools=exchange.tools
        )
        note_unused_template(tokenizer, prompt_ids, config)
        encoded = token_row(*encode_completion(tokenizer, prompt_ids, response, prompt=text))
        return _without_end(tokenizer, encoded) if exchange.is_cut else encoded
    row_messages = as_messages(prompt)
    check_prompt(row_messages)
    unsplit = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else None
    answer = _answer(response, row_messages, unsplit)
    before = as_messages(row_messages, system_prompt=exchange.system)
    written = of_conversation(tokenizer, [*before, *answer], exchange.tools)
    check_rendering(written, before, exchange.tools, system_prompt=exchange.system)
    return token_row(
        *encode_conversation(
            tokenizer,
            [*before, *(with_cut_end(answer) if exchange.is_cut else answer)],
            trained_from=len(before),
            only_last=only_last,
            tools=exchange.tools,
            refused=REFUSED - {"empty answer"} if exchange.may_be_empty else REFUSED,
        )
    )


_special_ids: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


def note_unused_template(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], config: DataConfig
) -> None:
    """Record a notice if a prompt is plain text although the tokenizer has a chat template. A
    prompt with special tokens, or one that a prompt_template formats, has a form of its own."""
    if tokenizer.chat_template is None or config.prompt_template is not None:
        return
    if tokenizer not in _special_ids:
        _special_ids[tokenizer] = frozenset(special_tokens(tokenizer))
    if _special_ids[tokenizer].isdisjoint(prompt_ids[1:]):
        note(
            "template_unused",
            "the prompt is plain text, so the chat template of the model is not used, and the "
            "response follows the prompt without a separator; set data.apply_chat_template: true "
            "to train and sample in the form in which chat models are served",
        )


OTHER_TOKENS = "other_tokens"
"""Notice of rows whose token ids are not used, and its name in counts."""


def note_other_tokens(reason: str) -> None:
    """Record a notice for a row whose text is tokenized again. ``reason``: why its ids are not
    used."""
    note(
        OTHER_TOKENS,
        f"{reason}, so the text is tokenized again; without the columns of token ids, or with "
        "data.use_tokens: false in a job that trains, it is so without a notice",
    )


OTHER_TEXT = (
    "the row's token ids do not decode to its text with this tokenizer (another model's, or the "
    "text was changed)"
)


_OTHER_PROMPT = (
    "a sampled response is trained after another prompt than the one after which it was sampled "
    "(prompt_tokens): the prompt was edited, or model.chat_template, model.chat_template_kwargs, "
    "system_prompt or the date differ from those of generate; set them as there"
)


def is_text(*values: Any) -> bool:
    """Return whether all values are strings."""
    return all(isinstance(value, str) for value in values)


def _sampled(
    tokenizer: PreTrainedTokenizerBase,
    exchange: Exchange,
    config: DataConfig,
    *,
    as_chat: bool,
) -> EncodedRow | None:
    """Return the prompt's ids followed by the sampled ids.

    Return None if there are no sampled ids, or if they do not decode to ``given.response`` (ids of
    another tokenizer, or an edited text).
    """
    ids = exchange.response_ids
    if ids is None or not isinstance(exchange.response, str):
        return None
    _, prompt_ids = encode_prompt(
        tokenizer,
        exchange.prompt,
        system_prompt=exchange.system,
        apply_chat_template=as_chat,
        tools=exchange.tools,
    )
    if min(ids) >= 0 and max(ids) < num_tokens(tokenizer):
        alone = response_decoder(tokenizer)(ids)
        if exchange.response in (alone, response_text(tokenizer, prompt_ids, ids)):
            before = exchange.sampled_prompt_ids
            if isinstance(before, list | tuple) and list(before) != prompt_ids:
                note("other_prompt", _OTHER_PROMPT)
            return token_row([*prompt_ids, *ids], [False] * len(prompt_ids) + [True] * len(ids))
    note_other_tokens(OTHER_TEXT)
    return None


def _answer(
    response: Any, prompt: list[dict[str, Any]], unsplit: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the messages that follow the prompt. A prompt repeated before them is removed.
    ``unsplit``: the text of the prompt as one message, if it was split into turns."""
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    messages = as_messages(response)
    for repeated in (prompt, unsplit):
        if repeated is not None and messages[: len(repeated)] == repeated:
            messages = messages[len(repeated) :]
            break
    if not messages or messages[0]["role"] != "assistant":
        begins = (
            f"begins with a {messages[0]['role']!r} message"
            if messages
            else "only repeats the prompt"
        )
        raise DataError(
            f"the response {begins}; it has to be a string, or messages that follow the prompt "
            "(or repeat it word for word) and continue with an assistant message"
        )
    return messages


def _trainable(mask: Sequence[bool]) -> list[bool]:
    return [value and i > 0 for i, value in enumerate(mask)]
