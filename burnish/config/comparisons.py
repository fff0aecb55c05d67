"""Public forms of comparisons: two responses in columns of their own, and a column that says which
one is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from burnish.config.columns import finite_number

Verdict = Literal["index", "sign", "first", "scores", "winner"]


@dataclass(frozen=True)
class Comparison:
    """The columns of one form."""

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


def comparison_of(row: Mapping[str, Any]) -> Comparison | None:
    """Return the form of a row with two responses; None if it has none of them."""
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
