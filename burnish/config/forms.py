"""Recognize the form of data rows: the project's own columns, or a form of public datasets, such as
two responses in columns of their own with a column that says which one is better."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from burnish.config.columns import finite_number
from burnish.errors import BurnishError
from burnish.json_text import json_value

Form = Literal[
    "columns",
    "messages",
    "sharegpt",
    "alpaca",
    "gsm8k",
    "implicit_prompt",
    "comparison",
    "completion",
    "verl",
    "api_log",
]
FormChoice = Literal["auto"] | Form
Purpose = Literal["demonstrations", "prompts", "responses", "pairs", "labeled", "steps"]
"""Use of the rows by a job. labeled: single responses with a label. steps: process supervision."""

MESSAGES, SHAREGPT, SYSTEM = "messages", "conversations", "system"
SYSTEMS = (SYSTEM, "system_prompt")
"""Columns with a system message."""
CONVERSATIONS = (SHAREGPT, "conversation")
"""Columns of ShareGPT turns."""
INSTRUCTION, HISTORY = "instruction", "history"
INPUTS, OUTPUTS = ("input", "context"), ("output", "response")
QUESTION, ANSWER, FINAL = "question", "answer", "####"
COMPLETION = "completion"
REWARD_MODEL, TRUTH = "reward_model", "ground_truth"
TURN = "turn"
"""Column of the answer, from 1, that a vote on two conversations is about."""
REQUEST, RESPONSE = "request", "response"
FUNCTIONS = "functions"
"""Column of tools in OpenAI's older form, and their parameter in a request."""

NAMES: Mapping[Form, str] = {
    "columns": "columns",
    "messages": "chat messages",
    "sharegpt": "ShareGPT",
    "alpaca": "Alpaca",
    "gsm8k": "GSM8K",
    "implicit_prompt": "preferences with an implicit prompt",
    "comparison": "comparisons",
    "completion": "prompt and completion",
    "verl": "verl",
    "api_log": "API logs",
}


Verdict = Literal["index", "sign", "first", "scores", "winner"]


@dataclass(frozen=True)
class Comparison:
    """Columns of a public form with two responses and a verdict on which one is better."""

    prompt: str | None
    """None: the responses are conversations that begin with the prompt."""
    responses: tuple[str, str]
    verdict: Verdict
    """index: number of the better response, from 0. sign: below 0, the first is better. first: 1 if
    the first is better, else 0. scores: of both responses. winner: ``model_a`` or ``model_b``."""
    by: tuple[str, ...]
    """Columns of the verdict."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the form."""
        prompt = () if self.prompt is None else (self.prompt,)
        return (*prompt, *self.responses, *self.by)


COMPARISONS = (
    Comparison("prompt", ("response_0", "response_1"), "index", ("better_response_id",)),
    Comparison("context", ("response1", "response2"), "sign", ("overall_preference",)),
    Comparison("prompt", ("response_1", "response_2"), "sign", ("preference_strength",)),
    Comparison("history", ("human_ref_A", "human_ref_B"), "first", ("labels",)),
    Comparison("question", ("answer_0", "answer_1"), "scores", ("score_0", "score_1")),
    Comparison(None, ("conversation_a", "conversation_b"), "winner", ("winner",)),
)
"""PKU-SafeRLHF (by helpfulness), HelpSteer3, the preferences of HelpSteer2, SHP, WebGPT, and
Chatbot Arena."""


class FormError(BurnishError, ValueError):
    """Rows with several possible forms, or without the columns of the form that the recipe
    sets."""


@dataclass(frozen=True)
class Keys:
    """The columns that a recipe reads, for :func:`form_of`."""

    purpose: Purpose
    form: FormChoice
    prompt: str
    """Column of the prompt."""
    is_customized: bool
    """True if the recipe sets a column of the prompt or the demonstration, or a prompt template.
    Rows are then read by columns."""
    complete: tuple[tuple[str, ...], ...] = ()
    """Sets of columns of which one is enough to read a row by columns."""
    pair: tuple[str, str] = ("chosen", "rejected")
    """Columns of the two responses."""


@dataclass(frozen=True)
class Reading:
    """The form of a row and the columns that it is converted from."""

    form: Form
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.form == "columns":
            return f"columns ({', '.join(self.columns)})" if self.columns else "columns"
        return f"{NAMES[self.form]} ({', '.join(self.columns)})"


def form_of(row: Mapping[str, Any], keys: Keys) -> Reading:
    """Return the form of a row of a file.

    The project's own columns take precedence. Raises FormError if the row has two forms, or if it
    lacks the columns of the form that the recipe sets.

    >>> keys = Keys("demonstrations", "auto", "prompt", is_customized=False)
    >>> str(form_of({"instruction": "Add 1 and 2.", "input": "", "output": "3"}, keys))
    'Alpaca (instruction, input, output)'
    """
    readings = {reading.form: reading for reading in _readings(row, keys)}
    if keys.form == "columns":
        return Reading("columns")
    if keys.form != "auto":
        if keys.form not in readings:
            raise FormError(_lacks(row, keys.form, keys.purpose))
        return readings[keys.form]
    complete = () if keys.purpose == "pairs" and without_pair(row, keys) else keys.complete
    by_columns = next(
        (
            Reading("columns", names)
            for names in complete
            if all(row.get(name) is not None for name in names)
        ),
        None,
    )
    if "verl" in readings:  # only its label is nested
        return readings["verl"]
    if keys.is_customized:
        return Reading("columns")
    if by_columns is not None and by_columns.columns != ("text",):
        return by_columns
    if set(readings) == {"sharegpt"}:  # conversations take precedence over a plain text
        return readings["sharegpt"]
    candidates = [*([] if by_columns is None else [by_columns]), *readings.values()]
    if len(candidates) > 1:
        raise FormError(
            f"the rows have several forms: {' or '.join(map(str, candidates))}; set form to "
            f"{' or '.join(c.form for c in candidates)} to choose one"
        )
    return candidates[0] if candidates else Reading("columns")


def unread_form(row: Mapping[str, Any]) -> str:
    """Return how to rewrite a row of a public form that is not read, as the end of an error; ""
    for other rows.

    >>> unread_form({"conversation": [{"input": "Hi", "output": "Hello"}]})[:43]
    ". Column 'conversation' has pairs of input "
    """
    for key, value in row.items():
        items = as_list(value)
        names = set(items[0]) if items and isinstance(items[0], Mapping) else set()
        if {"input", "output"} <= names:
            return (
                f". Column {key!r} has pairs of input and output; write each pair as two messages "
                '({"role": "user", ...}, {"role": "assistant", ...}) of a column messages'
            )
        if {"answer", "rank"} <= names:
            return (
                f". Column {key!r} has ranked answers; write pairs of them as the columns prompt, "
                "chosen (the better rank) and rejected"
            )
        if isinstance(value, str) and value.lstrip().startswith("USER:"):
            return (
                f". Column {key!r} is a transcript with USER: and ASSISTANT:; write its turns as "
                "messages of a column messages, without the names and end tokens"
            )
    return ""


def without_pair(row: Mapping[str, Any], keys: Keys) -> bool:
    """Return whether a row lacks the two responses of a pair."""
    return any(row.get(key) is None for key in keys.pair)


def _readings(row: Mapping[str, Any], keys: Keys) -> Iterator[Reading]:
    """Yield the forms of public datasets that a row has."""
    purpose = keys.purpose
    yield from _readings_by_name(row, keys)
    if purpose in ("steps", "labeled"):
        return
    of_pair = () if purpose != "pairs" else keys.pair
    if purpose == "pairs" and without_pair(row, keys):
        return
    more = tuple(name for name in (SYSTEM, "tools", FUNCTIONS) if row.get(name) is not None)
    if purpose != "demonstrations" and purpose != "pairs" and _is_turns(row, MESSAGES, "role"):
        yield Reading("messages", (MESSAGES, *more))
    turns = turns_column(row)
    if turns is not None:
        yield Reading("sharegpt", (turns, *more, *of_pair))
    if isinstance(row.get(INSTRUCTION), str):
        used = [n for n in (SYSTEM, HISTORY, *INPUTS[:1]) if row.get(n) is not None]
        if INPUTS[0] not in used and row.get(INPUTS[1]) is not None:
            used.append(INPUTS[1])
        output = next((name for name in OUTPUTS if isinstance(row.get(name), str)), None)
        if output is not None or purpose in ("prompts", "pairs"):
            last = of_pair or (() if output is None else (output,))
            yield Reading("alpaca", (INSTRUCTION, *used, *last))
    question, answer = row.get(QUESTION), row.get(ANSWER)
    is_gsm8k = isinstance(question, str) and isinstance(answer, str) and FINAL in answer
    if purpose != "pairs" and is_gsm8k:
        yield Reading("gsm8k", (QUESTION, ANSWER))
    if purpose == "pairs" and keys.prompt not in row:
        response = row[keys.pair[0]]
        if is_transcript(response) or _begins_with_user(response):
            yield Reading("implicit_prompt", keys.pair)


def _readings_by_name(row: Mapping[str, Any], keys: Keys) -> Iterator[Reading]:
    """Yield the forms that only names of columns tell."""
    purpose = keys.purpose
    if purpose == "pairs" and without_pair(row, keys) and (form := comparison_of(row)):
        yield Reading("comparison", form.columns)
    if purpose in ("demonstrations", "responses", "labeled") and row.get(COMPLETION) is not None:
        yield Reading("completion", (keys.prompt, COMPLETION))
    if purpose in ("prompts", "responses") and TRUTH in as_object(row.get(REWARD_MODEL)):
        yield Reading("verl", (keys.prompt, f"{REWARD_MODEL}.{TRUTH}"))
    request, response = as_object(row.get(REQUEST)), as_object(row.get(RESPONSE))
    if purpose in ("demonstrations", "prompts", "responses") and MESSAGES in request and response:
        yield Reading("api_log", (f"{REQUEST}.{MESSAGES}", f"{RESPONSE}.choices"))


def turns_column(row: Mapping[str, Any]) -> str | None:
    """Return the column with ShareGPT turns; None if there is none."""
    return next((key for key in CONVERSATIONS if _is_turns(row, key, "from")), None)


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object, or the object that JSON text contains; else an empty one."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json_value(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def is_transcript(value: Any) -> bool:
    """Return whether a text is a transcript with ``Human:`` and ``Assistant:`` turns."""
    return isinstance(value, str) and value.lstrip("\n").startswith("Human:")


def _begins_with_user(value: Any) -> bool:
    turns = as_list(value)
    if not turns or not isinstance(turns[0], Mapping) or len(turns) < 2:
        return False
    role = turns[0].get("role", turns[0].get("from"))
    return role in ("user", "human", "system")


def _is_turns(row: Mapping[str, Any], key: str, role: str) -> bool:
    turns = as_list(row.get(key))
    return (
        bool(turns) and isinstance(turns[0], Mapping) and (role in turns[0] or "role" in turns[0])
    )


def as_list(value: Any) -> list[Any]:
    """Return a list, or the list that JSON text contains; else an empty list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else []


_NEEDED: Mapping[Form, str] = {
    "messages": "a column messages with a list of {role, content}",
    "sharegpt": "a column conversations or conversation with a list of {from, value}",
    "alpaca": "the columns instruction and output",
    "gsm8k": "the columns question and answer, with the final answer after ####",
    "implicit_prompt": "two columns with transcripts (Human: ... Assistant: ...) or lists of "
    "messages that begin with the same messages, and no column with the prompt",
    "comparison": "the columns of "
    + ", or of ".join("/".join(form.columns) for form in COMPARISONS),
    "completion": "the columns prompt and completion",
    "verl": "a column reward_model with {ground_truth}",
    "api_log": "the columns request with {messages} and response with {choices}",
}


def _lacks(row: Mapping[str, Any], form: Form, purpose: Purpose) -> str:
    by_name = purpose == "steps" or (purpose == "labeled" and form != "completion")
    if by_name or (form, purpose) == ("messages", "demonstrations"):
        return (
            f"form={form} is not possible for rows of this kind, which are read by columns; "
            "remove form"
        )
    return (
        f"form={form} needs {_NEEDED[form]}; the columns are {', '.join(map(str, row))}. "
        "Correct form, or the file"
    )


def comparison_of(row: Mapping[str, Any]) -> Comparison | None:
    """Return the form of a row with two responses; None if it has none of :data:`COMPARISONS`."""
    return next((form for form in COMPARISONS if set(form.columns) <= row.keys()), None)


def first_is_better(form: Comparison, row: Mapping[str, Any]) -> bool | None:
    """Return whether the first response is the better one. None: they are equal, or the verdict is
    missing."""
    values = [row.get(name) for name in form.by]
    if form.verdict == "winner":
        return {"model_a": True, "model_b": False}.get(str(values[0]))
    numbers = [number for value in values if (number := finite_number(value)) is not None]
    if len(numbers) < len(values):
        return None
    if form.verdict == "index":
        return {0.0: True, 1.0: False}.get(numbers[0])
    if form.verdict == "first":
        return {1.0: True, 0.0: False}.get(numbers[0])
    difference = numbers[0] - numbers[1] if form.verdict == "scores" else -numbers[0]
    return difference > 0 if difference else None
