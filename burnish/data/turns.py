"""Locate the assistant's turns that are trained in the text of a conversation.

The text of a row is the prompt that generation renders for the last trained turn, followed by that
turn. An earlier trained turn is located in this text: it begins where the prompt that generation
renders for it ends, so this prompt must be a beginning of the text. Turns that are not trained need
not be located, so a template may rewrite them (Qwen3 removes the reasoning of earlier answers).

Reading order: locate_turns, _last_turn, _earlier_turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from burnish.chat_message import REASONING, Message
from burnish.data.notices import note
from burnish.data.rendering import Habits, Tools, habits_of, render_text
from burnish.data.sources import DataError
from burnish.data.thoughts import (
    THINK,
    THINK_END,
    reasoning_block,
)
from burnish.special_tokens import special_tokens
from burnish.templates import current_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "qzplacezq"
_SHOWN = 40  # characters of a text in an error
_ONE_ANSWER = (
    "train: false on the earlier answers, or split the conversation into one row per answer, or "
    "set model.chat_template to one that only appends"
)
_CLOSED = (
    "The generation prompt closes reasoning, but the answer has some: remove it, or the variable "
    "of model.chat_template_kwargs that closes it. "
)
_AS_TEXT = (
    "Set model.chat_template to one that only appends, or give the rendered prompt and the "
    "response as columns of text"
)


@dataclass(frozen=True)
class Turn:
    """Span of a trained turn in the text of a row, in characters."""

    begin: int
    end: int


def locate_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    trained: Sequence[int],
    tools: Tools = None,
    *,
    may_choose: bool = False,
) -> tuple[str, list[Turn]]:
    """Return the text up to the last trained turn, and the trained turns in it.

    ``trained``: indices of messages, in order. ``may_choose``: the data has the option
    ``train_on_turns``, for messages. Raises DataError if the prompt that generation
    renders for a turn is not a beginning of the text, because training would not match generation.
    """
    render = partial(render_text, tokenizer, tools=tools, today=current_date())
    last = trained[-1]
    prompt = render(messages[:last], add_generation_prompt=True)
    habits = habits_of(tokenizer, tools)
    turn = _last_turn(render, messages[: last + 1], prompt, habits)
    choice = "Set data.train_on_turns: last, or set " if may_choose else "Set "
    place = _Place(tokenizer, render, messages[:last], prompt, choice + _ONE_ANSWER)
    turns = [place.of(number) for number in trained[:-1]]
    turns.append(Turn(len(prompt), len(prompt) + len(turn)))
    text = prompt + turn
    for number, located in zip(trained, turns, strict=True):
        if not habits.ignores_reasoning_of(messages[number]):
            _note_lost_reasoning(messages[number], text[located.begin : located.end], choice)
    return text, turns


Render = Callable[..., str]


def _last_turn(render: Render, messages: Sequence[Message], prompt: str, habits: Habits) -> str:
    """Return the text that generation would produce after ``prompt``: the last message, with the
    end that the template writes.

    Templates that cut reasoning, or whose generation prompt opens it, render the answer alone. Then
    the reasoning is added as the model would write it. An empty block before the reasoning of the
    text is removed.
    """
    full = render(messages, add_generation_prompt=False)
    reasoning, gap = _reasoning_of(messages[-1])
    cuts = habits.cuts_reasoning and bool(reasoning)
    opened = prompt.rstrip()
    head = opened.removesuffix(THINK)
    if head != opened and REASONING[0] not in messages[-1]:
        block = reasoning_block(full[len(head) :])
        if block is not None and not block[0].strip():
            cuts = cuts or _block(block[1], reasoning) is not None
    if full.startswith(prompt) and not cuts:
        return full[len(prompt) :]
    if full.startswith(prompt) and head == opened:
        return f"{THINK}\n{_closing(full[len(prompt) :], reasoning, gap)}"
    if head != opened and full.startswith(head):
        answer = full[len(head) :]
        block = reasoning_block(answer)
        if not reasoning and not (block and block[0].strip()):
            note(
                "empty_reasoning",
                f"the generation prompt opens reasoning ({THINK}), but the answer has none; it is "
                "trained with an empty one. Set model.chat_template to one that does not open "
                "reasoning, if the model should answer at once",
            )
        line = "" if prompt.endswith("\n") else "\n"
        return f"{line}{_closing(answer, reasoning, gap)}"
    closed = bool(reasoning) and opened.endswith(THINK_END)
    advice = f"{_CLOSED if closed else ''}{_AS_TEXT}"
    raise _moved(prompt, full, "the last trained answer", advice)


def _closing(answer: str, reasoning: str, gap: str) -> str:
    """Return the reasoning, its end and the answer, for a prompt that opens reasoning.

    ``answer``: rendered text. It may begin with a block of reasoning in another form than the
    prompt (Nemotron 3: the prompt ends with ``<think>\\n``, an answer begins with
    ``<think></think>``), which is not repeated.
    """
    block = _block(answer, reasoning)
    if block is not None and reasoning.strip() in block[0]:
        lines = block[0].strip("\n")
        return f"{lines}\n{THINK_END}{block[1]}"
    if block is not None and not block[0].strip():
        answer = block[1]
        if reasoning.strip() and _block(answer, reasoning):
            return _closing(answer, reasoning, gap)
    return f"{reasoning}\n{THINK_END}{gap}{answer.lstrip()}"


def _block(answer: str, reasoning: str) -> tuple[str, str] | None:
    """Return (reasoning, text behind it) of a rendered answer that begins with a block of
    reasoning, or with ``reasoning`` in a block that is not opened."""
    if block := reasoning_block(answer):
        return block
    head, end, rest = answer.partition(THINK_END)
    is_unopened = bool(end and reasoning.strip()) and head.strip() == reasoning.strip()
    return (head, rest) if is_unopened else None


def _reasoning_of(message: Message) -> tuple[str, str]:
    """Return the reasoning of an answer, from its key or its text, and the white space after it."""
    if reasoning := message.get(REASONING[0]):
        return reasoning.strip("\n"), "\n\n"
    head, end, answer = message["content"].partition(THINK_END)
    head = head.lstrip()
    if not end or (THINK in head and not head.startswith(THINK)):
        return "", "\n\n"
    gap = answer[: len(answer) - len(answer.lstrip())]
    return head.removeprefix(THINK).strip("\n"), gap


class _Place:
    """Places of earlier turns in the prompt of the last one.

    ``text``: the prompt for the answer to ``messages``. ``advice``: ways out of a turn that cannot
    be located.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        render: Render,
        messages: Sequence[Message],
        text: str,
        advice: str,
    ) -> None:
        self._tokenizer, self._render = tokenizer, render
        self._messages, self._text, self._advice = messages, text, advice

    def of(self, turn: int) -> Turn:
        """Return the span of message ``turn``. Raises DataError if it cannot be located."""
        messages, text = self._messages, self._text
        prompt = self._render(messages[:turn], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise _moved(prompt, text, f"message {turn}", self._advice)
        alone = self._render(messages[: turn + 1], add_generation_prompt=False)
        if text.startswith(alone) and len(alone) > len(prompt):
            return Turn(len(prompt), len(alone))
        end = self._end_token(alone)
        region = text[len(prompt) : self._next(turn)]
        length = region.find(end) if end else -1
        if length < 0:
            raise DataError(
                f"the end of message {turn} cannot be located: the chat template writes "
                f"{alone[-_SHOWN:]!r} at the end if it is the last message, and "
                f"{region[-_SHOWN:]!r} if more follow. {self._advice}"
            )
        return Turn(len(prompt), len(prompt) + length + len(end))

    def _end_token(self, alone: str) -> str:
        """Return the special token at the end of a text, or an empty string."""
        text = alone.rstrip()
        tokens = special_tokens(self._tokenizer).values()
        return max((t for t in tokens if t and text.endswith(t)), key=len, default="")

    def _next(self, turn: int) -> int:
        """Return a position in the text after the end of message ``turn`` and before the content of
        the message that follows it."""
        messages, text = self._messages, self._text
        if turn + 1 == len(messages):
            return len(text)
        following = {**messages[turn + 1], "content": _MARK}
        marked = [*messages[: turn + 1], following, *messages[turn + 2 :]]
        head, mark, _ = self._render(marked, add_generation_prompt=True).partition(_MARK)
        if not mark or not text.startswith(head):
            raise _moved(head, text, f"the message after message {turn}", self._advice)
        return len(head)


def _note_lost_reasoning(message: Message, turn: str, choice: str) -> None:
    reasoning, _ = _reasoning_of(message)
    if reasoning.strip() and reasoning.strip() not in turn:
        note(
            "reasoning_dropped",
            "the chat template removes the reasoning of an earlier answer that is trained, so the "
            f"model learns to give this answer without reasoning. {choice}train: false on the "
            "earlier answers, or split the conversation into one row per answer",
        )


def _moved(prompt: str, text: str, subject: str, advice: str) -> DataError:
    same = next(
        (i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text)
    )
    return DataError(
        f"the chat template renders the conversation before {subject} differently when more "
        f"follows: {prompt[same : same + _SHOWN]!r} as a prompt, {text[same : same + _SHOWN]!r} in "
        f"the row, at character {same}. Training would not match generation. {advice}"
    )
