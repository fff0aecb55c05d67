"""Encode text and chat messages to exact token ids and masks.

A row is tokenized once, in pieces that are split at the points at which the policy starts and stops
generating. The ids of the row are the concatenated ids of the pieces. The prompt length is the
length of its own piece. Prompt and response are never tokenized together, because a tokenizer may
merge characters across the boundary. Training tokens would then differ from generation tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from burnish.chat_message import Message, roles_of, without_flags
from burnish.data.messages import as_messages, trained_flags
from burnish.data.notices import note
from burnish.data.sources import DataError
from burnish.special_tokens import special_tokens, turn_length
from burnish.templates import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_START = "\u2581"  # SentencePiece-style tokenizers replace a space with this


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no end-of-sequence token, which training needs.

    No pad token is needed, because rows are ragged.
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
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[int]]:
    """Return the text and the token ids of a prompt.

    Messages, and strings with ``apply_chat_template``, are rendered by the chat template with
    ``tools`` and a generation prompt. Other strings are tokenized with the tokenizer's leading
    special tokens.

    Raises DataError if ``prompt`` is neither a string nor messages, if the last message is the
    assistant's, or if ``system_prompt`` is set for a plain string.
    """
    if not isinstance(prompt, str) or apply_chat_template:
        messages = as_messages(prompt, system_prompt=system_prompt)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with an assistant message, so there is no response to generate; "
                "remove the last assistant message from the prompt column"
            )
        check_rendering(tokenizer, messages, tools, system_prompt=system_prompt)
        text = render_text(tokenizer, messages, add_generation_prompt=True, tools=tools)
        return text, encode_piece(tokenizer, text)
    if system_prompt is not None:
        raise DataError(
            "system_prompt is set but the prompt is a plain string, which cannot contain it; "
            "set apply_chat_template: true, or include it in prompt_template"
        )
    return prompt, _encode_with_prefix(tokenizer, prompt)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    trained_from: int = 0,
    only_last: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return (ids, mask) of a conversation. The mask is True for tokens written by the assistant.

    Messages with ``train: false`` or ``weight: 0`` are not trained on. ``only_last``: train only on
    the last assistant message.

    The mask includes the end token of an assistant turn, but no template text after it (usually a
    newline). Turns before message ``trained_from`` count as prompt.

    Raises DataError if there is no assistant turn to train on. Also raises DataError if the
    rendering of the first messages is not a prefix of the full rendering, because the turns could
    not be located then.
    """
    messages = as_messages(messages)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= trained_from]
    if not turns:
        raise DataError(
            "the conversation has no assistant message to train on (roles: "
            f"{roles_of(messages)}); add one, or "
            "drop the row"
        )
    if turns[0] == 0:
        raise DataError(
            "the conversation begins with an assistant message, which answers nothing; add a user "
            "message before it"
        )
    flags = trained_flags(messages)
    learned = [turn for turn in turns[-1 if only_last else 0 :] if flags[turn]]
    if not learned:
        raise DataError(
            "every assistant message that could be trained on has train: false or weight: 0; drop "
            "the row"
        )
    bare = [without_flags(message) for message in messages]
    check_rendering(tokenizer, bare, tools)
    messages = _without_own_end(tokenizer, bare, turns, tools)
    full = render_text(tokenizer, messages, add_generation_prompt=False, tools=tools)
    prefix = partial(_prefix_length, tokenizer, full=full, tools=tools)
    ids: list[int] = []
    mask: list[bool] = []
    done = 0  # number of characters of `full` tokenized so far
    for turn in turns:
        begin = prefix(messages[:turn], add_generation_prompt=True)
        end = prefix(messages[: turn + 1], add_generation_prompt=False)
        before = encode_piece(tokenizer, full[done:begin], follows=bool(ids))
        answer = encode_piece(tokenizer, full[begin:end], follows=True)
        trained = _trained_length(tokenizer, answer) if turn in learned else 0
        ids += before + answer
        mask += [False] * len(before) + [True] * trained + [False] * (len(answer) - trained)
        done = end
    rest = encode_piece(tokenizer, full[done:], follows=True)
    return ids + rest, mask + [False] * len(rest)


def encode_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response: str,
    *,
    add_eos: bool = True,
) -> tuple[list[int], list[bool]]:
    """Return (ids, mask) of prompt, response and end token. The mask is False for the prompt."""
    if add_eos:
        check_tokenizer(tokenizer)
        ended = response.rstrip()
        response = ended if ended.endswith(str(tokenizer.eos_token)) else response
    piece = encode_piece(tokenizer, response, follows=bool(prompt_ids))
    if add_eos and piece[-1:] != [tokenizer.eos_token_id]:
        piece.append(tokenizer.eos_token_id)
    return [*prompt_ids, *piece], [False] * len(prompt_ids) + [True] * len(piece)


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> str:
    """Return the text of ``response_ids`` as a continuation of ``prompt_ids``, without special
    tokens.

    Decoded alone, a response can lose its first space (SentencePiece) or gain ``##`` (WordPiece).
    """
    alone, head, both = (
        str(tokenizer.decode(list(ids), skip_special_tokens=True))
        for ids in (response_ids, prompt_ids, [*prompt_ids, *response_ids])
    )
    return both[len(head) :] if both.startswith(head) else alone


_Checked = tuple[str, tuple[str, ...], bool]
_checked: WeakKeyDictionary[PreTrainedTokenizerBase, dict[_Checked, str | None]] = (
    WeakKeyDictionary()
)
_MOST_CHECKED = 4096  # cached role sequences per tokenizer


def check_rendering(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    system_prompt: str | None = None,
) -> None:
    """Raise DataError if the chat template drops a message, such as one with an unsupported role.

    The check renders markers in place of the contents, once for each sequence of roles. If the
    template ignores ``tools``, a notice is recorded.
    """
    known = _checked.setdefault(tokenizer, {})
    roles = tuple(f"{m['role']}{'!' * _has_prose(m)}" for m in messages)
    key = (str(tokenizer.chat_template), roles, bool(tools))
    if key not in known:
        if len(known) >= _MOST_CHECKED:
            known.clear()
        known[key] = _left_out(tokenizer, messages, tools)
    left_out = known[key]
    if left_out is None:
        return
    if left_out == _TOOLS:
        note(
            "tools_ignored",
            "the chat template does not render tools, so the model does not see those in the "
            "column tools_key; set model.chat_template to one that does, or tools_key: null",
        )
        return
    what = f"messages of the role {left_out!r}"
    if left_out == "system" and system_prompt is not None:
        what = "the system prompt (system_prompt)"
    raise DataError(
        f"the chat template leaves out {what}: it does not render that role, so the model would "
        "never see the text. Set model.chat_template to a template that renders it, or put the "
        "text into a user message"
    )


def _special_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the special token at the end of ``text``, or an empty string."""
    ids = _plain_ids(tokenizer, text[-64:])
    token = special_tokens(tokenizer).get(ids[-1], "") if ids else ""
    return token if text.endswith(token) else ""


_TOOLS = "(tools)"


def _has_prose(message: Message) -> bool:
    """Return whether the content is text that every template should render.

    Messages with tool calls do not count, because some templates drop their content.
    """
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls")


def _left_out(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    """Return the role of the first message that the template does not render.

    Return ``_TOOLS`` if only the tools are not rendered, and None if everything is.
    """
    marked = [
        {**m, "content": f"marker{i}end"} if _has_prose(m) else m for i, m in enumerate(messages)
    ]
    prompts = messages[-1]["role"] != "assistant"
    try:
        text = render_text(tokenizer, marked, add_generation_prompt=prompts, tools=tools)
        plain = text if not tools else render_text(tokenizer, marked, add_generation_prompt=prompts)
    except DataError:  # the template inspects contents; rendering the row itself reports errors
        return None
    for i, message in enumerate(messages):
        if _has_prose(message) and f"marker{i}end" not in text:
            return str(message["role"])
    return _TOOLS if tools and plain == text else None


def _without_own_end(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    turns: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Remove an end token at the end of an answer, if the template appends the same token."""
    kept = list(messages)
    for turn in turns:
        content = messages[turn].get("content")
        text = content.rstrip() if isinstance(content, str) else ""
        end = _special_end(tokenizer, text)
        if not end:
            continue
        bare = {**messages[turn], "content": text.removesuffix(end)}
        rendered = render_text(
            tokenizer, [*messages[:turn], bare], add_generation_prompt=False, tools=tools
        )
        if rendered.rstrip().endswith(end):
            note(
                "double_eos",
                f"an answer ends with {end!r}, which the chat template appends as well; it is kept "
                "once. Remove it from the data",
            )
            kept[turn] = bare
    return kept


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    today: datetime | None = None,
) -> str:
    """Return the text of a conversation. ``today``: date for templates that write one.

    Raises DataError if there is no chat template, or if it rejects the conversation.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, but the row is a conversation; set "
            "model.chat_template to a Jinja template (or a path to one), or use plain string "
            "prompts with apply_chat_template: false"
        )
    try:
        return render_chat(
            tokenizer,
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            today=today,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the chat template rejects the conversation (roles: {roles_of(messages)}): {error}"
        ) from error


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    full: str,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
) -> int:
    prefix = render_text(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools
    )
    if full.startswith(prefix):
        return len(prefix)
    same = next(
        (i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), len(full)
    )
    raise DataError(
        f"the chat template renders the first {len(messages)} messages differently when more "
        f"follow: {prefix[same : same + 40]!r} alone, {full[same : same + 40]!r} in the full "
        f"conversation, at character {same}. The assistant's turns cannot be located, and "
        "training would not match generation. Set model.chat_template to one that only appends "
        "(templates that drop earlier reasoning do not), or split the data into one assistant "
        "turn per row"
    )


def encode_piece(
    tokenizer: PreTrainedTokenizerBase, text: str, *, follows: bool = False, literal: bool = False
) -> list[int]:
    """Tokenize ``text`` without adding special tokens. ``follows``: other tokens precede it.
    ``literal``: special tokens in it are tokenized as ordinary text.

    SentencePiece-style tokenizers prepend a space to any text, even if it continues a line. For
    them the piece is tokenized after a newline, and the newline's ids are removed.
    """
    tokenize = _literal_ids if literal else _plain_ids
    ids = tokenize(tokenizer, text)
    if not follows or not text:
        return ids
    probe = tokenizer.convert_ids_to_tokens(_plain_ids(tokenizer, "a"))
    if not probe or not probe[0].startswith(_WORD_START):
        return ids
    newline = _plain_ids(tokenizer, "\n")
    behind = tokenize(tokenizer, "\n" + text)
    return behind[len(newline) :] if behind[: len(newline)] == newline else ids


def _encode_with_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize with the tokenizer's leading special tokens and without its trailing ones.

    Its trailing token need not be ``eos_token``. If the text itself begins with the leading special
    tokens, they are kept once.
    """
    own = _plain_ids(tokenizer, text)
    plain = own or _plain_ids(tokenizer, "a")  # an empty text does not show the positions
    ids = list(tokenizer(text if own else "a", verbose=False)["input_ids"])
    places = range(len(ids) - len(plain) + 1)
    begin = next((i for i in places if ids[i : i + len(plain)] == plain), None)
    if begin is None:  # special tokens change the tokenization of the text
        return ids
    prefix = ids[:begin]
    if prefix and own[:begin] == prefix:
        note(
            "double_bos",
            f"the text begins with {tokenizer.decode(prefix)!r}, which the tokenizer prepends as "
            "well; it is kept once. Remove it from the data",
        )
        return own
    return prefix + own


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _literal_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found = tokenizer(text, add_special_tokens=False, verbose=False, split_special_tokens=True)
    return list(found["input_ids"])


def _trained_length(tokenizer: PreTrainedTokenizerBase, answer: Sequence[int]) -> int:
    """Return the number of tokens of an assistant piece up to and including its end token. Without
    an end token, all tokens count."""
    length = turn_length(tokenizer, answer)
    if length is not None:
        return length
    note(
        "no_end_token",
        "the chat template appends no end token to the assistant's turn, so the model does not "
        "learn to stop; set model.chat_template to one that does",
    )
    return len(answer)
