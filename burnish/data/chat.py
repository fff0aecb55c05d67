"""Text and chat messages to token ids and masks, exactly.

A row is tokenised once, in pieces cut where the policy begins and stops writing, and the ids are
the pieces put one after another. The length of a prompt is the length of its piece; it is never
measured by tokenising prompt and response together, because a tokenizer may merge characters across
the border, and then what is trained on is not what the model sees when it generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from burnish.data.sources import DataError

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``; other keys go to the template as they are."""

_WORD_START = "\u2581"  # what SentencePiece-style tokenizers write in place of a space


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where the tokenizer cannot be trained with: it has no end-of-sequence token.

    A pad token is not needed: rows are ragged.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token (eos_token), so a model trained with it "
            "never learns to stop. Set model.tokenizer_path to a tokenizer that has one, or set "
            "`eos_token` in its tokenizer_config.json to the token that ends a turn"
        )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    *,
    system_prompt: str | None = None,
    apply_chat_template: bool = False,
) -> tuple[str, list[int]]:
    """What the model reads before it answers: (text, ids).

    Messages, and strings with ``apply_chat_template``, go through the chat template and end where
    the assistant begins. Other strings are tokenised with the special tokens that the tokenizer
    puts in front. Raises DataError for anything else, and for a ``system_prompt`` that has no
    conversation to stand in.
    """
    if not isinstance(prompt, str) or apply_chat_template:
        messages = as_messages(prompt, system_prompt=system_prompt)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with an assistant message, so there is nothing left to answer; "
                "leave the last assistant message out of the prompt column"
            )
        text = _render(tokenizer, messages, add_generation_prompt=True)
        return text, _encode_piece(tokenizer, text)
    if system_prompt is not None:
        raise DataError(
            "system_prompt is set and the prompt is a plain string, which has no place for it; "
            "set apply_chat_template: true, or write it into prompt_template"
        )
    return prompt, _encode_with_prefix(tokenizer, prompt)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, trained_from: int = 0
) -> tuple[list[int], list[bool]]:
    """A whole conversation: (ids, mask), the mask True where the assistant writes.

    An assistant turn is trained on up to and including its end token; what the template writes
    after that (a newline, as a rule) is not. Turns before message ``trained_from`` count as prompt.
    Raises DataError where there is no assistant turn to train on, and where the template does not
    render a conversation as the beginning of its continuation, so that the turns cannot be told
    apart.
    """
    messages = as_messages(messages)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= trained_from]
    if not turns:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"the conversation has no assistant message to train on (roles: {roles}); add one, or "
            "drop the row"
        )
    if turns[0] == 0:
        raise DataError(
            "the conversation begins with an assistant message, and there is nothing it answers; "
            "put a user message before it"
        )
    full = _render(tokenizer, messages, add_generation_prompt=False)
    ids: list[int] = []
    mask: list[bool] = []
    done = 0  # characters of `full` that are tokenised
    for turn in turns:
        begin = _prefix_length(tokenizer, messages[:turn], full, add_generation_prompt=True)
        end = _prefix_length(tokenizer, messages[: turn + 1], full, add_generation_prompt=False)
        before = _encode_piece(tokenizer, full[done:begin], follows=bool(ids))
        answer = _encode_piece(tokenizer, full[begin:end], follows=True)
        trained = _trained_length(tokenizer, answer)
        ids += before + answer
        mask += [False] * len(before) + [True] * trained + [False] * (len(answer) - trained)
        done = end
    rest = _encode_piece(tokenizer, full[done:], follows=True)
    return ids + rest, mask + [False] * len(rest)


def encode_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response: str,
    *,
    add_eos: bool = True,
) -> tuple[list[int], list[bool]]:
    """Ids of prompt, response and end token: (ids, mask), the mask True from the response on."""
    piece = _encode_piece(tokenizer, response, follows=bool(prompt_ids))
    if add_eos:
        check_tokenizer(tokenizer)
        if piece[-1:] != [tokenizer.eos_token_id]:
            piece.append(tokenizer.eos_token_id)
    return [*prompt_ids, *piece], [False] * len(prompt_ids) + [True] * len(piece)


def as_messages(
    value: str | Sequence[Message], *, system_prompt: str | None = None
) -> list[dict[str, Any]]:
    """A checked list of messages, without keys whose value is None; a string is one user message.

    Raises DataError where it is no list of messages, and where there would be two system messages.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(
            "expected a string or a list of chat messages with at least one, and got "
            f"{_short(value)}"
        )
    messages = [_as_message(message) for message in value]
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            "system_prompt is set, and the conversation already begins with a system message; "
            "unset system_prompt, or remove the message from the data"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            'a chat message is an object {"role": ..., "content": ...}, and this one is '
            f"{_short(message)}"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    if "content" not in kept and "tool_calls" not in kept:
        raise DataError(f"a chat message needs `content`, and this one has none: {_short(message)}")
    return kept


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, and the row is a conversation; set "
            "model.chat_template to a Jinja template (or a path to one), or use plain string "
            "prompts with apply_chat_template: false"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"the chat template refuses the conversation (roles: {roles}): {error}"
        ) from error


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    full: str,
    *,
    add_generation_prompt: bool,
) -> int:
    prefix = _render(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    if full.startswith(prefix):
        return len(prefix)
    same = next(
        (i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), len(full)
    )
    raise DataError(
        f"the chat template renders the first {len(messages)} messages differently when more "
        f"follow: {prefix[same : same + 40]!r} alone, {full[same : same + 40]!r} in the whole "
        f"conversation, at character {same}. The assistant's turns cannot be told apart, and "
        "training would not match generation. Set model.chat_template to one that only appends "
        "(templates that drop earlier reasoning do not), or split the data into one assistant "
        "turn per row"
    )


def _encode_piece(
    tokenizer: PreTrainedTokenizerBase, text: str, *, follows: bool = False
) -> list[int]:
    """Ids of ``text`` without special tokens added. ``follows``: other tokens stand before it.

    SentencePiece-style tokenizers put a space before whatever they are given, also where the text
    goes on in the middle of a line. For them the piece is tokenised behind a newline, whose ids are
    taken off again.
    """
    ids = _plain_ids(tokenizer, text)
    if not follows or not text:
        return ids
    probe = tokenizer.convert_ids_to_tokens(_plain_ids(tokenizer, "a"))
    if not probe or not probe[0].startswith(_WORD_START):
        return ids
    newline = _plain_ids(tokenizer, "\n")
    behind = _plain_ids(tokenizer, "\n" + text)
    return behind[len(newline) :] if behind[: len(newline)] == newline else ids


def _encode_with_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids with the special tokens put in front by the tokenizer, but no end token put behind."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    plain = _plain_ids(tokenizer, text)
    ends = len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id
    if ends and ids[len(ids) - 1 - len(plain) : -1] == plain:
        ids.pop()
    return ids


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _trained_length(tokenizer: PreTrainedTokenizerBase, answer: Sequence[int]) -> int:
    """Tokens of an assistant piece up to and including its end token, or all where it has none.

    The end token is the first EOS. Templates that end turns with another special token
    (``<|eot_id|>``) have it last but for white space.
    """
    if tokenizer.eos_token_id in answer:
        return answer.index(tokenizer.eos_token_id) + 1
    end = len(answer)
    while end and not str(tokenizer.decode([answer[end - 1]])).strip():
        end -= 1
    is_special = end and not tokenizer.decode([answer[end - 1]], skip_special_tokens=True)
    return end if is_special else len(answer)
