"""Encode text and chat messages to exact token ids and masks.

A row is tokenized once, in pieces that are split at the points at which the policy starts and stops
generating. The ids of the row are the concatenated ids of the pieces. The prompt length is the
length of its own piece. Prompt and response are never tokenized together, because a tokenizer may
merge characters across the boundary. Training tokens would then differ from generation tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from burnish.chat_message import FINISH, REASONING, Message, is_cut, roles_of, without_flags
from burnish.data.left_out import REFUSED, Field, check_rendering
from burnish.data.messages import as_messages, as_rendered, trained_flags
from burnish.data.notices import known_end, note
from burnish.data.pieces import check_embeddings, encode_piece, plain_ids
from burnish.data.rendering import Tools, habits_of, render_text, with_reasoning_once
from burnish.data.sources import DataError
from burnish.data.thoughts import Thought
from burnish.data.turns import locate_turns
from burnish.data.unread import note_flags
from burnish.special_tokens import end_token_ids, special_tokens, turn_end_ids, turn_length
from burnish.templates import of_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    tools: Tools = None,
    refused: Collection[Field] = REFUSED,
) -> tuple[str, list[int]]:
    """Return the text and the token ids of a prompt.

    Messages, and strings with ``apply_chat_template``, are rendered by the chat template with
    ``tools`` and a generation prompt. Other strings are tokenized with the tokenizer's leading
    special tokens. ``refused``: as in :func:`burnish.data.left_out.check_rendering`.

    Raises DataError if ``prompt`` is neither a string nor messages, if the last message is the
    assistant's, or if ``system_prompt`` is set for a plain string.
    """
    if not isinstance(prompt, str) or apply_chat_template:
        messages = as_messages(prompt, system_prompt=system_prompt)
        check_prompt(messages)
        written = of_conversation(tokenizer, messages, tools)
        messages = with_reasoning_once(written, as_rendered(messages), tools)
        check_rendering(written, messages, tools, system_prompt=system_prompt, refused=refused)
        text = render_text(written, messages, add_generation_prompt=True, tools=tools)
        return text, encode_piece(tokenizer, text)
    if system_prompt is not None:
        raise DataError(
            "there is a system message (system_prompt of the recipe, or a column system or "
            "system_prompt), but the prompt is a plain string, which cannot contain it; set "
            "apply_chat_template: true, or use prompt_template with its text or column"
        )
    if tools:
        note("tools_ignored", _TOOLS_OF_TEXT)
    return prompt, _encode_with_prefix(tokenizer, prompt)


_TOOLS_OF_TEXT = (
    "the row has tools (the column tools_key), but its prompt is plain text, so the model does not "
    "see them; set apply_chat_template: true, or tools_key: null"
)


def check_prompt(messages: Sequence[Message]) -> None:
    """Raise DataError if a prompt ends with an assistant message: a response to it would be a
    second assistant turn, which generation never renders."""
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the prompt ends with an assistant message, so a response would be a second assistant "
            "turn; remove the message from the prompt column. If it is the beginning of the "
            "response, move its text there"
        )


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    trained_from: int = 0,
    only_last: bool = False,
    tools: Tools = None,
    refused: Collection[Field] = REFUSED,
) -> tuple[list[int], list[bool]]:
    """Return (ids, mask) of a conversation up to the last turn that is trained on. The mask is True
    for the tokens that the assistant writes in the trained turns.

    Messages with ``train: false`` or ``weight: 0`` are not trained on. ``only_last``: train only on
    the last assistant message. A last message that was cut (``finish_reason``) is trained as far as
    the model wrote it: without an end token, and without the end of its reasoning if it has no
    text.

    The mask includes the end token of an assistant turn, but no template text after it (usually a
    newline). Turns before message ``trained_from`` count as prompt (0: a demonstration). The ids
    before a trained turn are those that :func:`encode_prompt` returns for the same history, unless
    an earlier trained turn begins with characters that merge with the end of its prompt.

    ``refused``: as in :func:`burnish.data.left_out.check_rendering`. Raises DataError if there is
    no assistant turn to train on, or one that :func:`burnish.data.turns.locate_turns` refuses.
    """
    messages = as_messages(messages)
    learned = trained_turns(messages, trained_from=trained_from, only_last=only_last)
    for number in learned:
        known_end(messages[number].get(FINISH))
    cut = learned[-1] if is_cut(messages[learned[-1]]) else None
    if any(is_cut(messages[turn]) for turn in learned[:-1]):
        note(
            "cut_earlier",
            "an earlier answer that is trained was cut (finish_reason), but the conversation goes "
            "on, so it is trained with the end that the template writes; set train: false on it",
        )
    bare = [without_flags(message) for message in as_rendered(messages)]
    written = of_conversation(tokenizer, messages, tools)
    bare = with_reasoning_once(written, bare, tools)
    check_rendering(written, bare, tools, refused=refused)
    if not tools and any(bare[turn].get("tool_calls") for turn in learned):
        note(
            "calls_without_tools",
            "a trained answer calls a tool, but the row has no tools (data.tools_key, or a column "
            "tools or functions), so its prompt does not offer any; name the column with the "
            "tools, unless they are described in a message",
        )
    bare = _without_own_end(written, bare, tools)
    answers = [bare[turn] for turn in learned]
    _check_answers(written, answers, tools, refused)
    text, located = locate_turns(
        *(written, bare, learned, tools), is_cut=cut is not None, may_choose=not trained_from
    )
    tags = habits_of(written, tools).tags
    for number, turn in zip(learned, located, strict=True):
        content = Thought.of(bare[number], tags).text
        if content and "tool_calls" in bare[number] and content not in text[turn.begin : turn.end]:
            _check_place(content, text[turn.end :], bare[number + 1 : learned[-1] + 1])
    ids: list[int] = []
    mask: list[bool] = []
    done = 0  # number of characters of `text` tokenized so far
    for number, turn in zip(learned, located, strict=True):
        before, head = text[:done], text[: turn.begin]
        ids += encode_piece(tokenizer, text[done : turn.begin], after=ids[-1:], before=before)
        answer = encode_piece(tokenizer, text[turn.begin : turn.end], after=ids[-1:], before=head)
        trained = _trained_length(tokenizer, answer, bare[number], is_cut=number == cut)
        mask += [False] * (len(ids) - len(mask)) + [True] * trained
        ids += answer
        mask += [False] * (len(ids) - len(mask))
        done = turn.end
    if cut is not None:
        note_cut()
    return ids, mask


def encode_plain_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    only_last: bool = False,
    is_cut: bool = False,
) -> tuple[list[int], list[bool]]:
    """Return (ids, mask) of a conversation without a chat template, up to the last trained answer:
    the contents of the messages, joined.

    An end token at the beginning of the text behind a trained answer is its end. The last answer
    ends with the EOS token unless it was cut (``is_cut``). ``only_last`` and flags: as for
    :func:`encode_conversation`. Raises DataError if there is no answer to train on.
    """
    flags = trained_flags(messages)
    learned = [i for i, m in enumerate(messages) if m["role"] == "assistant" and flags[i]]
    if not learned or learned[0] == 0:
        raise DataError(
            "the plain text has no assistant message that continues another message and could be "
            f"trained on (roles: {roles_of(messages)}); drop the row"
        )
    last, trained = learned[-1], set(learned[-1 if only_last else 0 :])
    text = messages[0]["content"]
    ids, ends = encode_prompt(tokenizer, text)[1], end_texts(tokenizer)
    mask = [False] * len(ids)
    for number, message in enumerate(messages[1 : last + 1], 1):
        content, begin = message["content"], len(ids)
        if number in trained:
            check_text(tokenizer, content, refuse=True)
            ends_here = number == last and not is_cut
            ids, learns = encode_completion(tokenizer, ids, content, prompt=text, add_eos=ends_here)
            mask += learns[begin:]
        else:
            piece = encode_piece(tokenizer, content, after=ids[-1:], before=text)
            ids += piece
            is_end = number - 1 in trained and bool(piece) and piece[0] in ends
            mask += [is_end] * len(piece[:1]) + [False] * len(piece[1:])
        text += content
    return ids, mask


def trained_turns(
    messages: Sequence[Message], *, trained_from: int = 0, only_last: bool = False
) -> list[int]:
    """Return the indices of the messages that are trained on, as described for
    :func:`encode_conversation`. Raises DataError if there is none."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= trained_from]
    if not turns:
        raise DataError(
            "the conversation has no assistant message to train on (roles: "
            f"{roles_of(messages)}); add one, or drop the row"
        )
    if turns[0] == 0:
        raise DataError(
            "the conversation begins with an assistant message, which answers nothing; add a user "
            "message before it"
        )
    flags = trained_flags(messages)
    trained = [turn for turn in turns[-1 if only_last else 0 :] if flags[turn]]
    if not trained:
        raise DataError(
            "every assistant message that could be trained on has train: false or weight: 0; drop "
            "the row"
        )
    note_flags(messages, trained)
    return trained


def note_cut() -> None:
    """Record a notice for a trained response that was cut."""
    note("cut", "the response was cut (finish_reason), so it is trained without an end token")


def _check_answers(
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[Message],
    tools: Tools,
    refused: Collection[Field],
) -> None:
    """Refuse or count answers of which the template renders no text and no tool calls, and refuse
    reasoning that would end before its end."""
    for answer in answers:
        if REASONING[0] in answer and "end of reasoning" in refused:
            habits = habits_of(tokenizer, tools)
            end = habits.tags.end
            ends_early = habits.has_tags and end in str(answer[REASONING[0]])
            if ends_early and not habits.ignores_reasoning_of(answer):
                raise DataError(
                    f"the reasoning of a trained answer (`{REASONING[0]}`) contains {end}, which "
                    "would end it there: the model would learn to write the rest as its answer. "
                    "Remove the tags if they are around the reasoning, write a mention in another "
                    "way (`/think`), or move the text behind the tag into the content"
                )
        if answer["content"].strip() or answer.get("tool_calls"):
            continue
        blank = not str(answer.get(REASONING[0], "")).strip()
        if blank or habits_of(tokenizer, tools).ignores_reasoning_of(answer):
            empty_answer(refuse="empty answer" in refused)


def check_text(tokenizer: PreTrainedTokenizerBase, text: str, *, refuse: bool) -> None:
    """Refuse or count a response, or a text, that is blank without its end token."""
    if not text.strip().removesuffix(str(tokenizer.eos_token)).strip():
        empty_answer(refuse=refuse)


def empty_answer(*, refuse: bool) -> None:
    """Raise DataError, or record a notice, for an answer that is the end token alone."""
    if refuse:
        raise DataError(
            "an answer that is trained is empty, so the model would learn to answer with the end "
            "token alone; fill it or drop the row (data.on_bad_row: skip skips all such rows). A "
            "message with train: false may be empty"
        )
    note(
        "empty_answer",
        "an answer is empty: it is the end token alone. Drop the row if that is not what the data "
        "means",
    )


def encode_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response: str,
    *,
    prompt: str | None = None,
    add_eos: bool = True,
) -> tuple[list[int], list[bool]]:
    """Return (ids, mask) of prompt, response and end token. The mask is False for the prompt, and
    for text behind an end token inside the response (recorded as a notice). ``prompt``: the text
    of ``prompt_ids``, if it is known."""
    if add_eos:
        check_tokenizer(tokenizer)
        ended = response.rstrip()
        response = ended if ended.endswith(str(tokenizer.eos_token)) else response
    after = () if prompt == "" else prompt_ids[-1:]  # the response alone is the text
    piece = encode_piece(tokenizer, response, after=after, before=prompt or "")
    if add_eos and piece[-1:] != [tokenizer.eos_token_id]:
        piece.append(tokenizer.eos_token_id)
    trained, ends = len(piece), end_texts(tokenizer)
    if not ends.keys().isdisjoint(piece[:-1]):
        trained = next(i + 1 for i, token in enumerate(piece) if token in ends)
        _note_text_after_end(ends[piece[trained - 1]])
    mask = [True] * trained + [False] * (len(piece) - trained)
    return [*prompt_ids, *piece], [False] * len(prompt_ids) + mask


def _without_own_end(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Tools
) -> list[dict[str, Any]]:
    """Remove an end token at the end of an answer, if the template appends the same token."""
    shortened = list(messages)
    for turn, message in enumerate(messages):
        text = message["content"].rstrip() if message["role"] == "assistant" else ""
        ids = plain_ids(tokenizer, text[-64:]) if text else ()
        end = special_tokens(tokenizer).get(ids[-1], "") if ids else ""
        if not end or not text.endswith(end):
            continue
        bare = {**message, "content": text.removesuffix(end)}
        rendered = render_text(
            tokenizer, [*messages[:turn], bare], add_generation_prompt=False, tools=tools
        )
        if rendered.rstrip().endswith(end):
            note(
                "double_eos",
                f"an answer ends with {end!r}, which the chat template appends as well; it is kept "
                "once. Remove it from the data",
            )
            shortened[turn] = bare
    return shortened


def _encode_with_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize with the tokenizer's leading special tokens and without its trailing ones.

    Its trailing token need not be ``eos_token``. If the text itself begins with the leading special
    tokens, they are kept once.
    """
    text_ids = plain_ids(tokenizer, text)
    check_embeddings(tokenizer, text_ids)
    plain = text_ids or plain_ids(tokenizer, "a")  # an empty text does not show the positions
    ids = list(tokenizer(text if text_ids else "a", verbose=False)["input_ids"])
    places = range(len(ids) - len(plain) + 1)
    begin = next((i for i in places if ids[i : i + len(plain)] == plain), None)
    if begin is None:  # special tokens change the tokenization of the text
        return ids
    prefix = ids[:begin]
    if prefix and text_ids[:begin] == prefix:
        note(
            "double_bos",
            f"the text begins with {tokenizer.decode(prefix)!r}, which the tokenizer prepends as "
            "well; it is kept once. Remove it from the data",
        )
        return text_ids
    return prefix + text_ids


def _trained_length(
    tokenizer: PreTrainedTokenizerBase, answer: Sequence[int], message: Message, *, is_cut: bool
) -> int:
    """Return the number of tokens of an assistant piece up to and including its end token. Without
    an end token, all tokens count. ``is_cut``: those before it.

    What follows an end token that ``message`` contains is not trained, because sampling stops at
    the token.
    """
    ends = end_texts(tokenizer)
    calls = json.dumps(message["tool_calls"], **_AS_TEXT) if "tool_calls" in message else ""
    text = f"{message.get(REASONING[0], '')}{message['content']}{calls}"
    if any(end in text for end in ends.values() if end):
        first = next((i for i, token in enumerate(answer) if token in ends), len(answer))
        if str(tokenizer.decode(list(answer[first + 1 :]))).strip():
            _note_text_after_end(ends[answer[first]])
        if first < len(answer):
            return first + 1
    if is_cut and "tool_calls" not in message:
        return len(answer)
    length = turn_length(tokenizer, answer)
    if length is not None:
        _check_behind(tokenizer, answer[length:], message)
        return length - is_cut
    note(
        "no_end_token",
        "the chat template appends no end token to the assistant's turn, so the model does not "
        "learn to stop; set model.chat_template to one that does",
    )
    return len(answer)


def _check_place(content: str, behind: str, following: Sequence[Message]) -> None:
    """Raise DataError if the text of an answer with calls, which is not in its own turn, is behind
    the results of the calls (Gemma 4)."""
    later = json.dumps([list(message.values()) for message in following], **_AS_TEXT)
    if behind.count(content) > later.count(json.dumps(content, **_AS_TEXT)[1:-1]):
        raise DataError(
            f"the chat template writes the text of an answer with calls ({content[:60]!r}) behind "
            f"the results of the calls, outside of the answer, so the model would never learn it. "
            f"{_WAYS_OUT_OF_TEXT}"
        )


def _check_behind(
    tokenizer: PreTrainedTokenizerBase, behind: Sequence[int], message: Message
) -> None:
    """Raise DataError if a part of an answer is behind its end token."""
    text = str(tokenizer.decode(list(behind), skip_special_tokens=True)).strip() if behind else ""
    if not text:
        return
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    part = next(
        (part for part in (message["content"].strip(), *names) if part and part in text), ""
    )
    if part:
        raise DataError(
            f"the chat template writes a part of an answer ({part[:60]!r}) behind its end token, "
            f"as a turn of its own, so the model would never learn it. {_WAYS_OUT_OF_TEXT}"
        )


_WAYS_OUT_OF_TEXT = (
    "Remove the text of an answer with tool calls, set train: false on it, or set "
    "model.chat_template to one that writes both in one turn"
)
_AS_TEXT: dict[str, Any] = {"ensure_ascii": False, "default": str}
"""Options of JSON in which a text is searched."""
_ends: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, dict[int, str]]] = WeakKeyDictionary()


def end_texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return id -> text of the special tokens at which the sampling of a turn stops."""
    key = f"{sorted(end_token_ids(tokenizer))} {tokenizer.chat_template}"
    known = _ends.get(tokenizer)
    if known is None or known[0] != key:
        ids = end_token_ids(tokenizer) | turn_end_ids(tokenizer)
        special = special_tokens(tokenizer)
        known = (key, {i: special[i] for i in ids if i in special})
        _ends[tokenizer] = known
    return known[1]


def _note_text_after_end(end: str) -> None:
    note(
        "text_after_end",
        f"an answer contains the end token {end!r} before its end, and what follows it is not "
        "trained, because sampling stops at the token; remove the token from the data",
    )
