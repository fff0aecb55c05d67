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
    RenderedAnswer,
    Thought,
    split_rendered,
    without_empty_block,
)
from burnish.reasoning_tags import BlockState, Tags
from burnish.special_tokens import special_tokens
from burnish.templates import current_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK, _TEXT = "qzplacezq", "qztextzq"
_SHOWN = 40  # characters of a text in an error
_ONE_ANSWER = (
    "train: false on the earlier answers, or split the conversation into one row per answer, or "
    "set model.chat_template to one that only appends"
)
_CLOSED = (
    "the generation prompt closes reasoning, but the last trained answer has some, which the model "
    "could not write there. Let the prompt open reasoning (in model.chat_template_kwargs, set a "
    "variable of the template, such as thinking: true or enable_thinking: true, or remove the one "
    "that closes it; in the messages, remove a word that does, such as /no_think), or remove the "
    "reasoning. Text before a closing tag (</think>) counts as reasoning; if it is a mention, "
    "write it in another way (`/think`)"
)
_AS_TEXT = (
    "Set model.chat_template to one that only appends, or give the rendered prompt and the "
    "response as columns of text"
)


@dataclass(frozen=True)
class TurnSpan:
    """Span of a trained turn in the text of a row, in characters."""

    begin: int
    end: int


def locate_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    trained: Sequence[int],
    tools: Tools = None,
    *,
    is_cut: bool = False,
    may_choose: bool = False,
) -> tuple[str, list[TurnSpan]]:
    """Return the text up to the last trained turn, and the trained turns in it.

    ``trained``: indices of messages, in order. ``is_cut``: the last one ends where a limit cut it,
    without an end. ``may_choose``: the data has the option
    ``train_on_turns``, for messages. Raises DataError if the prompt that generation
    renders for a turn is not a beginning of the text, because training would not match generation.
    """
    render = partial(render_text, tokenizer, tools=tools, today=current_date())
    last = trained[-1]
    prompt = render(messages[:last], add_generation_prompt=True)
    habits = habits_of(tokenizer, tools)
    of_turn = _cut_turn if is_cut else _last_turn
    turn = of_turn(render, messages[: last + 1], prompt, habits)
    choice = "Set data.train_on_turns: last, or set " if may_choose else "Set "
    advice = choice + _ONE_ANSWER
    place = _Place(tokenizer, render, messages[:last], prompt, advice)
    turns = [place.of(number) for number in trained[:-1]]
    for number, earlier in zip(trained, turns, strict=False):
        answer = prompt[earlier.begin : earlier.end]
        _check_block(prompt[: earlier.begin], answer, number, habits.tags, advice)
    turns.append(TurnSpan(len(prompt), len(prompt) + len(turn)))
    text = prompt + turn
    for number, located in zip(trained, turns, strict=True):
        if not habits.ignores_reasoning_of(messages[number]):
            thought = Thought.of(messages[number], habits.tags)
            if thought.reasoning.strip() not in text[located.begin : located.end]:
                note(
                    "reasoning_dropped",
                    "the chat template removes the reasoning of an earlier answer that is trained, "
                    f"so the model learns to give this answer without reasoning. {choice}train: "
                    "false on the earlier answers, or split the conversation into one row per "
                    "answer",
                )
    return text, turns


Render = Callable[..., str]


def _last_turn(render: Render, messages: Sequence[Message], prompt: str, habits: Habits) -> str:
    """Return the text that generation would produce after ``prompt``: the last message, with the
    end that the template writes.

    It continues the block of reasoning that the prompt has opened, or follows the one that it has
    closed. Templates that cut reasoning, or whose generation prompt opens it, render the answer
    alone or in a block of its own. Then the reasoning is added as the model would write it.
    """
    tags = habits.tags
    thought = Thought.of(messages[-1], tags)
    head, state = _prompt_block(render, messages[:-1], prompt, tags)
    if state == "closed":
        if thought.reasoning.strip() and not habits.ignores_reasoning_of(messages[-1]):
            raise DataError(_CLOSED)
        messages = [*messages[:-1], without_empty_block(messages[-1], tags)]
    full = render(messages, add_generation_prompt=False)
    if not full.startswith(prompt if state == "none" else head):
        raise _moved(prompt, full, "the last trained answer", _AS_TEXT)
    rewrites = habits.reasoning_key is not None
    rendered = split_rendered(full[len(head) :], thought, tags, rewrites=rewrites)
    if state == "closed":
        alone = full[len(prompt) :] if full.startswith(prompt) else ""
        return alone if alone.lstrip() == rendered.text else rendered.text
    if state == "opened":
        if not thought.reasoning and not rendered.is_closed:
            _note_empty_reasoning(tags)
            emptied = _emptied(render, messages, prompt)
            if emptied is not None:
                return emptied
        return _closing(
            full[len(prompt) :] if full.startswith(prompt) else None,
            prompt,
            thought,
            rendered,
            tags,
        )
    if not (habits.cuts_reasoning and thought.reasoning) or rendered.reasoning is not None:
        turn = full[len(prompt) :]
        return _without_first_block(turn, tags) if thought.reasoning else turn
    if habits.prompt_block == "closed" and messages[-2]["role"] == "tool":
        # The answer continues the turn in which the prompt closed reasoning (DeepSeek-V3.1).
        raise DataError(_CLOSED)
    written, _, behind = rendered.text.partition(tags.begin)
    if behind.lstrip().startswith(thought.reasoning.strip()):
        raise DataError(
            f"the chat template writes {written[-_SHOWN:]!r} before the reasoning of the last "
            f"trained answer, but not in the prompt, so the model would not write it. {_AS_TEXT}"
        )
    return f"{tags.begin}\n{thought.reasoning}\n{tags.end}{thought.gap}{rendered.text}"


def _cut_turn(render: Render, messages: Sequence[Message], prompt: str, habits: Habits) -> str:
    """Return what the model wrote after ``prompt`` of an answer that a limit cut: its reasoning or
    its text, without what the template writes behind it.

    A mark at the end of the answer shows the place at which the rendering is cut. The end of tool
    calls has none; their end token is left out by the caller.
    """
    answer, tags = messages[-1], habits.tags
    if answer.get("tool_calls"):
        return _last_turn(render, messages, prompt, habits)
    content, reasoning = answer["content"], answer.get(REASONING[0], "")
    begins = content.lstrip()
    state = _prompt_block(render, messages[:-1], prompt, tags)[1]
    if (
        state == "opened"
        and not reasoning
        and tags.end not in content
        and tags.begin not in content
    ):
        return content
    if habits.has_tags and state == "none" and tags.begin[:-1].startswith(begins or tags.begin):
        return content  # an opening tag that was cut
    reads = state != "none" or habits.reasoning_key is not None or habits.cuts_reasoning
    is_inside = bool(reasoning) and not content.strip()
    if reads and habits.has_tags and not reasoning and tags.is_cut(content):
        reasoning, content = begins.removeprefix(tags.begin).lstrip("\n"), ""
        is_inside = True
    if reads and is_inside:
        marked = {**answer, REASONING[0]: reasoning + _MARK, "content": _TEXT}
    else:
        marked = {**answer, "content": content + _MARK}
    turn, mark, _ = _last_turn(render, [*messages[:-1], marked], prompt, habits).rpartition(_MARK)
    if not mark:
        raise DataError(
            "an answer that was cut (finish_reason) cannot be located, because the chat template "
            "changes its text. Drop the row, or set model.chat_template to one that writes texts "
            "as they are"
        )
    if begins == tags.begin:
        turn = turn.rstrip("\n")
    return _without_first_block(turn, tags) if tags.is_cut(begins) else turn


def _without_first_block(turn: str, tags: Tags) -> str:
    """Return a rendered answer without the empty block that the template writes before the block of
    the text (Kimi K2 Thinking)."""
    block = tags.block(turn)
    if block is None or block[0].strip() or not block[1].lstrip().startswith(tags.begin):
        return turn
    return block[1].lstrip()


def _prompt_block(
    render: Render, messages: Sequence[Message], prompt: str, tags: Tags
) -> tuple[str, BlockState]:
    """Return the block at the end of a prompt (:meth:`Tags.of_prompt`), unless the mark at its end
    is a message's text."""
    head, state = tags.of_prompt(prompt)
    content = str(messages[-1].get("content") or "").rstrip()
    if state != "none" and content.endswith((tags.begin, tags.end)):
        before = render(messages, add_generation_prompt=False)
        if prompt.rstrip() == before.rstrip():
            return prompt, "none"
    return head, state


def _closing(
    turn: str | None, prompt: str, thought: Thought, rendered: RenderedAnswer, tags: Tags
) -> str:
    """Return the reasoning, its end and the answer, for a prompt that opens reasoning.

    The rendered text may begin with a block of another form than the prompt (Nemotron 3: the prompt
    ends with ``<think>\\n``, an answer begins with ``<think></think>``), with an end alone
    (DeepSeek-V3.1), or be the answer alone. ``turn``: the rendered text behind the prompt, if it
    begins with the prompt.
    """
    if not thought.reasoning and not rendered.reasoning:
        _note_empty_reasoning(tags)
    written, end, _ = (turn or "").partition(tags.end)
    if turn is not None and end and written.strip() == thought.reasoning.strip():
        return turn
    reasoning = thought.reasoning if rendered.reasoning is None else rendered.reasoning
    gap = rendered.gap if rendered.is_closed or not tags.has_lines else thought.gap
    is_line = rendered.is_line or (tags.has_lines and not rendered.is_closed)
    line = "\n" if prompt.endswith("\n") or is_line else ""
    begin = "" if prompt.endswith("\n") else line
    return f"{begin}{reasoning}{line}{tags.end}{gap}{rendered.text}"


def _note_empty_reasoning(tags: Tags) -> None:
    note(
        "empty_reasoning",
        f"the generation prompt opens reasoning ({tags.begin}), but the answer has none; it is "
        "trained with an empty one. Set model.chat_template to one that does not open "
        "reasoning, if the model should answer at once",
    )


def _emptied(render: Render, messages: Sequence[Message], prompt: str) -> str | None:
    """Return the turn of an answer without reasoning in the form that the template gives one with
    reasoning: with a mark as reasoning, which is removed. None if the template renders no such turn
    behind the prompt."""
    answer = {**messages[-1], REASONING[0]: _MARK}
    full = render([*messages[:-1], answer], add_generation_prompt=False)
    written, mark, rest = full.removeprefix(prompt).partition(_MARK)
    return written + rest if mark and full.startswith(prompt) and not written.strip() else None


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

    def of(self, turn: int) -> TurnSpan:
        """Return the span of message ``turn``. Raises DataError if it cannot be located."""
        messages, text = self._messages, self._text
        prompt = self._render(messages[:turn], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise _moved(prompt, text, f"message {turn}", self._advice)
        begin = len(prompt)
        alone = self._render(messages[: turn + 1], add_generation_prompt=False)
        if text.startswith(alone) and len(alone) > begin:
            return TurnSpan(begin, len(alone))
        # If the template writes other text when more messages follow, the turn ends at its token.
        tokens = [token for token in special_tokens(self._tokenizer).values() if token]
        alone = alone.rstrip()
        ends = (token for token in tokens if alone.endswith(token))
        end = max(ends, key=len, default="")
        region = text[begin : self._next(turn)]
        if end and end not in region:  # an end that is behind the last message alone (Phi-4)
            same = alone[begin:].removesuffix(end).rstrip()
            if region.startswith(same) and same.endswith(tuple(tokens)):
                return TurnSpan(begin, begin + len(same))
        length = region.find(end) if end else -1
        if length < 0:
            raise DataError(
                f"the end of message {turn} cannot be located: the chat template writes "
                f"{alone[-_SHOWN:]!r} at the end if it is the last message, and "
                f"{region[-_SHOWN:]!r} if more follow. {self._advice}"
            )
        return TurnSpan(begin, begin + length + len(end))

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


def _check_block(prompt: str, answer: str, turn: int, tags: Tags, advice: str) -> None:
    """Raise DataError if an earlier turn does not continue the block of reasoning that its prompt
    has opened, or begins another one."""
    state, begin = tags.of_prompt(prompt)[1], answer.lstrip()
    if state == "none" and _without_first_block(answer, tags) == answer:
        return
    if state == "closed" and not begin.startswith((tags.begin, tags.end)):
        return
    if state == "opened" and tags.end in answer and not begin.startswith(tags.begin):
        return
    raise DataError(
        f"the chat template renders message {turn} as {begin[:_SHOWN]!r} after a prompt that ends "
        f"with {prompt[-_SHOWN:]!r}: a block of reasoning would be opened or closed twice, or "
        f"never. {advice}"
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
