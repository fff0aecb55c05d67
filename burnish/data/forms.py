"""Convert rows of public forms to the columns that the encoders read, one function per form.

Each function returns the new values of a row, or raises DataError with the column at fault.
:func:`in_columns` adds the position of the row (``path:line``) to the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from burnish.chat_message import REASONING
from burnish.config.columns import finite_number
from burnish.config.forms import (
    ANSWER,
    COMPLETION,
    CONVERSATIONS,
    FINAL,
    FUNCTIONS,
    HISTORY,
    INPUTS,
    INSTRUCTION,
    MESSAGES,
    NAMES,
    OUTPUTS,
    QUESTION,
    REQUEST,
    RESPONSE,
    REWARD_MODEL,
    SHAREGPT,
    SYSTEM,
    TRUTH,
    TURN,
    Form,
    FormError,
    as_object,
    comparison_of,
    first_is_better,
    is_transcript,
)
from burnish.data.config import DataConfig
from burnish.data.episode_rows import episode_of
from burnish.data.held_out import part_of
from burnish.data.messages import (
    as_messages,
    as_rendered,
    parsed,
    with_sharegpt_role,
    without_nulls,
)
from burnish.data.notices import note
from burnish.data.sources import DataError, Row, Source, open_sources
from burnish.data.streamed import StreamedRows
from burnish.data.unread import note_template_variables
from burnish.data_files.reading import nested_value

Values = dict[str, Any]
Messages = list[dict[str, Any]]

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class _Converted:
    """A source whose rows are converted from one form to columns."""

    def __init__(self, source: Source, form: Form, config: DataConfig) -> None:
        self.name = source.name
        self._source, self._form, self._config = source, form, config

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> Row:
        return in_columns(self._source[i], self._form, self._config)


def open_rows(config: DataConfig) -> list[Source]:
    """Open the sources of ``config``, with rows in the columns that its keys name.

    The form of a source is that of its first row. With ``held_out``, only the rows of ``part`` are
    returned. Raises DataError if a source cannot be used.
    """
    sources: list[Source] = []
    for source in open_sources(config.sources):
        form = form_of_row(source[0], config)
        if isinstance(source, StreamedRows):
            convert = partial(in_columns, form=form, config=config)
            sources.append(source.converted(convert))
        elif form == "columns" and not config.nested_keys:
            sources.append(source)
        else:
            sources.append(_Converted(source, form, config))
    return part_of(sources, config)


def form_of_row(row: Row, config: DataConfig) -> Form:
    """Return the form of a source whose first row is ``row``. Raises DataError if it has
    several."""
    try:
        return config.reading_of(row.values).form
    except FormError as error:
        raise DataError(f"{row.where}: {error}") from error


def in_columns(row: Row, form: Form, config: DataConfig) -> Row:
    """Return a row of ``form`` with its content in the columns that the keys of ``config`` name.

    Raises DataError with the position of the row and the column at fault.
    """
    if keys := [key for key in config.nested_keys if key not in row.values]:
        nested = {key: nested_value(row.values, key) for key in keys}
        filled = {key: value for key, value in nested.items() if value is not None}
        row = replace(row, values={**row.values, **filled}, original=row.columns)
    if form == "columns":
        return row
    values = dict(without_nulls(row.values) if row.fills_nulls else row.values)
    try:
        converted = _CONVERTERS[form](values, config)
    except DataError as error:
        raise DataError(f"{row.where}: as {NAMES[form]} (form={form}): {error}") from error
    return replace(row, values=converted, original=row.columns)


def from_messages(values: Values, config: DataConfig) -> Values:
    """Convert chat messages: the last assistant message is the answer, the messages before it the
    prompt. Of the episode of a row that generate wrote, the last response is the answer."""
    if config.answer_key is not None and config.conversation_key is None:
        episode = _in_column(MESSAGES, lambda: episode_of(values))
        if episode is not None:
            number = len(episode.turns) - 1
            text, history = episode.text_before(number), episode.messages_before(number)
            answer = _in_column(MESSAGES, lambda: as_rendered([episode.turns[-1].message]))
            new = _others(values, config, MESSAGES)
            if text is None and config.is_trained:  # (rewards read the episode itself)
                return new | {config.prompt_key: history, config.answer_key: answer}
            prompt = values.get(config.prompt_key) if text is None else text
            prompt = history if prompt is None else prompt
            return new | {config.prompt_key: prompt, config.answer_key: answer[0]["content"]}
    return _of_conversation(values, _turns(values, MESSAGES), config, used=MESSAGES)


def from_sharegpt(values: Values, config: DataConfig) -> Values:
    """Convert ShareGPT turns (``conversations`` with ``from`` and ``value``), with the system
    message of a column ``system``."""
    key = next((key for key in CONVERSATIONS if values.get(key) is not None), SHAREGPT)
    turns = _turns(values, key)
    system = values.get(SYSTEM)
    if system and isinstance(system, str) and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    if not config.pair_keys:
        return _of_conversation(values, turns, config, used=key)
    pair = {key: _response(values, key) for key in config.pair_keys}
    return _others(values, config, key) | {config.prompt_key: turns} | pair


def from_alpaca(values: Values, config: DataConfig) -> Values:
    """Convert Alpaca rows: ``instruction``, ``input`` (may be empty or absent) and ``output``.

    In the chat template, the user message is the instruction, an empty line and the input. As plain
    text, each part has a header, and the input's header is left out if there is no input.
    """
    instruction = _text(values, INSTRUCTION)
    if not instruction.strip():
        raise DataError(f"column {INSTRUCTION!r} is empty; fill it, or remove the row")
    input_key = next((key for key in INPUTS if values.get(key) is not None), None)
    extra = "" if input_key is None else _text(values, input_key)
    user = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    before = _alpaca_turns(values)
    prompt: Any = user
    if before and not config.apply_chat_template:
        names = " and ".join(key for key in (SYSTEM, HISTORY) if values.get(key))
        raise DataError(
            f"a plain-text prompt cannot contain the messages of {names}, and rows without them "
            "would have another format; set apply_chat_template: true"
        )
    if before:
        prompt = [*before, {"role": "user", "content": user}]
    elif not config.apply_chat_template:
        middle = f"### Input:\n{extra}\n\n" if extra.strip() else ""
        prompt = f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"
    new = _others(values, config, INSTRUCTION) | {config.prompt_key: prompt}
    if config.pair_keys:
        return new | {key: _response(values, key) for key in config.pair_keys}
    output = next((key for key in OUTPUTS if values.get(key) is not None), None)
    if output is None:
        if config.answer_key is not None and new.get(config.answer_key) is None:
            raise DataError(f"column {OUTPUTS[0]!r} is empty; fill it, or remove the row")
        return new
    return _with_answer(new, _text(values, output), values, config)


def from_gsm8k(values: Values, config: DataConfig) -> Values:
    """Convert GSM8K rows: ``question`` and ``answer``, whose last ``####`` precedes the label."""
    question, answer = _text(values, QUESTION), _text(values, ANSWER)
    if FINAL not in answer:
        raise DataError(
            f"column {ANSWER!r} has no {FINAL!r} before the final answer: {answer[-60:]!r}; "
            "correct or remove the row"
        )
    prompt = question if config.apply_chat_template else f"{question}\n"
    new = _others(values, config, QUESTION) | {config.prompt_key: prompt}
    label = answer.rpartition(FINAL)[2].strip()
    if not label:
        raise DataError(
            f"column {ANSWER!r} has no final answer after {FINAL!r}: {answer[-60:]!r}; correct or "
            "remove the row"
        )
    if config.reference_pattern is not None:
        label = answer
    return _with_answer(new, answer, values, config) | _label(label, values, config)


def from_implicit_prompt(values: Values, config: DataConfig) -> Values:
    """Convert pairs without a prompt column: two transcripts or two lists of messages that begin
    with the same messages.

    The prompt ends at the last boundary of messages before the first difference, at which both
    continue with the assistant.
    """
    keys = config.pair_keys
    sides = [parsed(_filled(values, key)) for key in keys]
    texts = [is_transcript(value) for value in sides]
    if any(texts) != all(texts):
        raise DataError(
            f"one of the columns {keys[0]!r} and {keys[1]!r} is a transcript (Human: ...), the "
            "other is not; use the same form for both"
        )
    as_text = all(texts) and not config.apply_chat_template
    turns = [
        transcript_turns(value, key) if text else _list_turns(value, key)
        for value, key, text in zip(sides, keys, texts, strict=True)
    ]
    shared = _shared_turns(turns[0], turns[1], keys)
    rest = [side[shared:] for side in turns]
    if as_text and any(len(side) > 1 for side in rest):
        note(
            "differ_early",
            "chosen and rejected differ before their last answer, so the text of later Human turns "
            "belongs to the response; set apply_chat_template: true to train only on the answers",
        )
    new = _others(values, config, *keys)
    if not as_text:
        turns = [
            [{**turn, "content": turn["content"].strip()} for turn in side] if all(texts) else side
            for side in turns
        ]
        rest = [side[shared:] for side in turns]
        return new | {config.prompt_key: turns[0][:shared]} | dict(zip(keys, rest, strict=True))
    prompt = _as_transcript(turns[0][:shared]) + "\n\nAssistant:"
    responses = [_as_transcript(side).removeprefix("\n\nAssistant:") for side in rest]
    return new | {config.prompt_key: prompt} | dict(zip(keys, responses, strict=True))


def from_comparison(values: Values, config: DataConfig) -> Values:
    """Convert two responses with a verdict to a chosen and a rejected response."""
    form = comparison_of(values)
    if form is None:
        raise DataError(f"the row has no comparison; its columns are {', '.join(values)}")
    first = first_is_better(form, values)
    if first is None:
        raise DataError(
            f"no response is better ({', '.join(f'{k}={values.get(k)!r}' for k in form.by)}); "
            "remove the row, or set on_bad_row: skip"
        )
    better, worse = form.responses if first else form.responses[::-1]
    responses = [_response(values, key) for key in (better, worse)]
    if form.prompt is None:
        responses = [_up_to_turn(turns, values.get(TURN)) for turns in responses]
    pair = dict(zip(config.pair_keys, responses, strict=True))
    new = _others(values, config, *form.columns)
    if form.prompt is None:
        return from_implicit_prompt(new | pair, config)
    prompt = as_object(values[form.prompt]).get("full_text", values[form.prompt])  # WebGPT
    return new | {config.prompt_key: parsed(prompt)} | pair


def _up_to_turn(turns: Any, number: Any) -> Any:
    """Return a conversation up to its answer ``number`` (from 1), which the verdict of the row is
    about (MT-Bench). Chatbot Arena has the number of answers there."""
    if not isinstance(turns, list):
        return turns
    answers = [i for i, turn in enumerate(as_messages(turns)) if turn["role"] == "assistant"]
    end = {float(i): at for i, at in enumerate(answers, 1)}.get(finite_number(number) or 0.0)
    return turns if end is None else turns[: end + 1]


def from_completion(values: Values, config: DataConfig) -> Values:
    """Convert TRL's prompt and completion: the completion is the response."""
    assert config.answer_key is not None
    rest = {key: value for key, value in values.items() if key != COMPLETION}
    return rest | {config.answer_key: _response(values, COMPLETION)}


def from_verl(values: Values, config: DataConfig) -> Values:
    """Convert verl's rows: the label is ``reward_model.ground_truth``."""
    return values | _label(as_object(values.get(REWARD_MODEL)).get(TRUTH), values, config)


def from_api_log(values: Values, config: DataConfig) -> Values:
    """Convert a request and the response of a chat-completions API: the messages of the request and
    the first choice."""
    request, response = (as_object(values.get(key)) for key in (REQUEST, RESPONSE))
    choices = response.get("choices")
    choice = as_object(choices[0] if isinstance(choices, list) and choices else None)
    message = choice.get("message")
    if not isinstance(message, Mapping) or not isinstance(request.get(MESSAGES), list):
        raise DataError(
            f"column {RESPONSE!r} has no choices with a message, or {REQUEST!r} no messages, as "
            "failed calls have; remove the row, or set on_bad_row: skip"
        )
    turns = _in_column(REQUEST, lambda: as_messages([*request[MESSAGES], without_nulls(message)]))
    rest = {key: value for key, value in values.items() if key not in (REQUEST, RESPONSE)}
    new = _of_conversation(rest, turns, config, used=REQUEST)
    new = {"finish_reason": choice.get("finish_reason")} | new
    if variables := request.get("chat_template_kwargs"):
        note_template_variables("chat_template_kwargs", variables)
    if request.get(SYSTEM):  # (of Anthropic's API)
        if new.get(SYSTEM) not in (None, "", request[SYSTEM]):
            raise DataError(
                f"the row has different system messages in column {SYSTEM!r} and {REQUEST}.{SYSTEM}"
                "; keep one, or rename the column if it is none"
            )
        new = new | {SYSTEM: request[SYSTEM]}
    tools = request.get("tools", request.get(FUNCTIONS))
    choice_of_tools = request.get("tool_choice")
    offers_none = "none" in (
        as_object(choice_of_tools).get("type", choice_of_tools),
        request.get("function_call"),
    )
    if tools is None or config.tools_key is None or offers_none:
        return new
    return new | {config.tools_key: tools}


def transcript_turns(text: str, key: str = "text") -> Messages:
    """Return the messages of a transcript ``\\n\\nHuman: ...\\n\\nAssistant: ...``. The contents
    keep their spaces.

    >>> transcript_turns("\\n\\nHuman: Hi\\n\\nAssistant: Hello")
    [{'role': 'user', 'content': ' Hi'}, {'role': 'assistant', 'content': ' Hello'}]
    """
    marks = list(_TURN.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [
        {"role": _ROLES[mark[1]], "content": text[mark.end() : end]}
        for mark, end in zip(marks, ends, strict=True)
    ]
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError(f"column {key!r}: the transcript has no Assistant turn: {text[:80]!r}")
    return turns


def _as_transcript(turns: Sequence[Mapping[str, Any]]) -> str:
    names = {role: name for name, role in _ROLES.items()}
    return "".join(f"\n\n{names[turn['role']]}:{turn['content']}" for turn in turns)


def _list_turns(value: Any, key: str) -> Messages:
    if not isinstance(value, list):
        raise DataError(
            f"column {key!r} is neither a transcript (Human: ... Assistant: ...) nor a list of "
            f"messages: {repr(value)[:80]}; the prompt could not be separated from the response. "
            "Add a column with the prompt"
        )
    return _in_column(key, lambda: as_messages(value))


def _shared_turns(chosen: Messages, rejected: Messages, keys: Sequence[str]) -> int:
    """Return the number of messages of the common prompt."""
    same = 0
    for turn, other in zip(chosen, rejected, strict=False):
        if turn != other:
            break
        same += 1
    for shared in range(min(same, len(chosen) - 1, len(rejected) - 1), 0, -1):
        if chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
            return shared
    raise DataError(
        f"columns {keys[0]!r} and {keys[1]!r} have no common prompt: they share their first {same} "
        "messages, and no assistant message follows in both. A pair needs two answers to one "
        "prompt; correct or remove the row"
    )


def _of_conversation(values: Values, turns: Messages, config: DataConfig, *, used: str) -> Values:
    """Return the values of a conversation: all of it for demonstrations, else split before the last
    assistant message."""
    new = _others(values, config, used)
    if config.conversation_key is not None:
        return new | {config.conversation_key: turns}
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    last = answers[-1] if answers and answers[-1] == len(turns) - 1 else len(turns)
    new[config.prompt_key] = turns[:last]
    if not turns[:last]:
        raise DataError(f"column {used!r} has no message before the answer, so there is no prompt")
    if last == len(turns):
        if config.answer_key is not None:
            raise DataError(f"column {used!r} does not end with an assistant message to score")
        return new
    answer = turns[last]
    if answer.get("tool_calls"):
        if config.answer_key is not None:
            raise DataError(
                f"column {used!r} ends with a tool call, and a response is a text; remove the row"
            )
        return new
    if REASONING[0] in answer and config.answer_key is not None:
        note("reasoning_ignored", _NO_REASONING)
    return _with_answer(new, answer["content"], values, config)


_NO_REASONING = (
    "the reasoning of the last answer is not part of the response, which is the text of the "
    "answer; write it into the content (<think>...</think>) if it belongs to what is scored"
)


def _with_answer(new: Values, text: str, values: Values, config: DataConfig) -> Values:
    """Return ``new`` with an answer: the response of rows that have one (a response that ``new``
    keeps takes precedence), and the label of other prompts."""
    if config.answer_key is None:
        return new | _label(text, values, config)
    return new if new.get(config.answer_key) is not None else new | {config.answer_key: text}


def _label(text: Any, values: Values, config: DataConfig) -> Values:
    """Return the column of the label, unless the row has one or the job reads none."""
    key = config.reference_key
    return {} if key is None or values.get(key) is not None else {key: text}


def _others(values: Values, config: DataConfig, *used: str) -> Values:
    """Return the columns that the conversion does not replace."""
    dropped = {*used, MESSAGES, *CONVERSATIONS, *config.replaced_keys}
    return {key: value for key, value in values.items() if key not in dropped}


def _alpaca_turns(values: Values) -> Messages:
    """Return the messages before an Alpaca instruction: ``system`` and ``history``, a list of
    [instruction, answer]."""
    turns: Messages = []
    if values.get(SYSTEM):
        message = {"role": "system", "content": values[SYSTEM]}
        turns += _in_column(SYSTEM, lambda: as_messages([message]))
    for pair in values.get(HISTORY) or ():
        if not isinstance(pair, list | tuple) or [type(text) for text in pair] != [str, str]:
            raise DataError(
                f"column {HISTORY!r} must be a list of [instruction, answer], got {repr(pair)[:60]}"
            )
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": "assistant", "content": pair[1]})
    return turns


def _turns(values: Values, key: str) -> Messages:
    value = _in_column(key, lambda: parsed(_filled(values, key)))
    if isinstance(value, str):
        raise DataError(f"column {key!r} contains a string, not a list of messages")
    if key in CONVERSATIONS and isinstance(value, list):
        value = [with_sharegpt_role(turn) for turn in value]
    return _in_column(key, lambda: as_messages(value))


def _response(values: Values, key: str) -> Any:
    """Return a response: text, one message, or messages."""
    value = _in_column(key, lambda: parsed(_filled(values, key)))
    return _in_column(key, lambda: as_messages([value])) if isinstance(value, dict) else value


def _in_column(key: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except DataError as error:
        raise DataError(f"column {key!r}: {error}") from error


def _filled(values: Values, key: str) -> Any:
    value = values.get(key)
    if value is None:
        raise DataError(
            f"column {key!r} is empty or absent; the columns are {', '.join(map(str, values))}. "
            "Fill it, remove the row, or set form"
        )
    return value


def _text(values: Values, key: str) -> str:
    value = _filled(values, key)
    if not isinstance(value, str):
        raise DataError(f"column {key!r} contains a {type(value).__name__}, not a text")
    return value


_CONVERTERS: Mapping[Form, Callable[[Values, DataConfig], Values]] = {
    "messages": from_messages,
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
    "gsm8k": from_gsm8k,
    "implicit_prompt": from_implicit_prompt,
    "comparison": from_comparison,
    "completion": from_completion,
    "verl": from_verl,
    "api_log": from_api_log,
}
