"""Config of solutions with a label on every step, the data of process reward models (job
``rm``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, get_args

from pydantic import Field

from burnish.config.columns import missing_columns
from burnish.config.templates import template_rules
from burnish.data.config import DataConfig, RewardData
from burnish.rewards.model.config import StepAggregation

STEP_KEYS = ("completions", "steps")
"""Columns tried if ``steps_key`` is not set."""


class StepsDataConfig(DataConfig, RewardData):
    """Prompts with a list of steps and a list of their labels, as in the public datasets from
    Math-Shepherd and PRM800K (TRL's stepwise supervision)."""

    losses: ClassVar[tuple[str, ...]] = ("process",)

    kind: Literal["steps"]
    """Trains a process reward model, which scores every step."""
    steps_key: str | None = None
    """Column with the list of steps (texts). None: ``completions`` or ``steps``."""
    labels_key: str = "labels"
    """Column with a label per step. Hard: true or false, 1 or 0, ``+`` or ``-``, ``good`` or
    ``bad``. Soft: the probability in [0, 1] that the step is correct."""
    step_separator: str = Field("\n", min_length=1)
    """Text after each step, except a last step with an end token. A separator, or a part of it, at
    the end of a step is replaced. Rewards split responses at it."""
    add_end_token: bool = True
    """Append the end token to the last step, as in sampled responses. False: append the separator
    (rows that stop within a solution)."""
    max_len: int = Field(2048, ge=2)
    """Maximum tokens of prompt + steps; see ``overlong``."""

    @property
    def needed_keys(self) -> Mapping[str, str]:
        return {"labels_key": self.labels_key}

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        if self.steps_key == self.labels_key:
            yield (
                f"steps_key and labels_key are both {self.labels_key!r}; set two different columns"
            )
        columns = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "labels_key": self.labels_key,
            "steps_key": self.steps_key,
        }
        yield from missing_columns(self.files, columns)

    def metrics(self, *, weighted: bool) -> Iterable[str]:
        yield from ("loss", "step_accuracy", "good_step_accuracy", "bad_step_accuracy", "row_exact")
        yield from ("step_score", "good_steps")
        for aggregation in get_args(StepAggregation):
            yield from (f"score_{aggregation}_mean", f"score_{aggregation}_std")

    def loss_problem(self, loss: str) -> str:
        return (
            f"loss={loss} compares two responses, but rows of data.kind=steps have labels of "
            "single steps; use loss=process, or remove loss"
        )
