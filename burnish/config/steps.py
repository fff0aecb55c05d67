"""Config of solutions with a label on every step: the data of process reward models (job
``rm``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.columns import missing_columns
from burnish.config.data import DataConfig, PreferenceDataConfig
from burnish.config.templates import template_rules

STEP_KEYS = ("completions", "steps")
"""Columns tried if ``steps_key`` is not set."""


class PairsDataConfig(PreferenceDataConfig):
    """Pairs of a chosen and a rejected response to one prompt."""

    kind: Literal["pairs"] = "pairs"
    """Trains a reward model that scores entire responses."""


class StepsDataConfig(DataConfig):
    """Prompts with a list of steps and a list of their labels, as in the public datasets from
    Math-Shepherd and PRM800K (TRL's stepwise supervision)."""

    kind: Literal["steps"]
    """Trains a process reward model, which scores every step."""
    steps_key: str | None = None
    """Column with the list of steps (texts). None: ``completions`` or ``steps``."""
    labels_key: str = "labels"
    """Column with a label per step. Hard: true or false, 1 or 0, ``+`` or ``-``, ``good`` or
    ``bad``. Soft: the probability in [0, 1] that the step is correct."""
    step_separator: str = Field("\n", min_length=1)
    """Text appended to steps that do not end with it, except a last step with an end token. Rewards
    split responses at it."""
    add_end_token: bool = True
    """Append the end token to the last step, as in sampled responses. False: append the separator
    (rows that stop within a solution)."""
    max_len: int = Field(2048, ge=2)
    """Maximum tokens of prompt + steps; see ``overlong``."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from template_rules(self.prompt_template, self.files)
        if self.steps_key == self.labels_key:
            yield (
                f"steps_key and labels_key are both {self.labels_key!r}; set two different columns"
            )
        wanted = {
            "prompt_key": self.prompt_key if self.prompt_template is None else None,
            "labels_key": self.labels_key,
            "steps_key": self.steps_key,
        }
        yield from missing_columns(self.files, wanted)


def _pairs_unless_named(value: Any) -> Any:
    """Treat rows without a kind as pairs."""
    return {"kind": "pairs", **value} if isinstance(value, dict) else value


RewardDataConfig = Annotated[
    Annotated[PairsDataConfig | StepsDataConfig, Field(discriminator="kind")],
    BeforeValidator(_pairs_unless_named),
]


def reward_data_rules(
    data: PairsDataConfig | StepsDataConfig,
    eval_data: PairsDataConfig | StepsDataConfig | None,
    *,
    loss: str | None,
    centered: bool,
) -> Iterator[str]:
    """Yield an error for each setting of a reward model that does not fit the kind of its data."""
    if eval_data is not None and eval_data.kind != data.kind:
        yield (
            f"eval_data.kind={eval_data.kind} and data.kind={data.kind}: held-out rows must be "
            "of the same kind as training rows; use one kind for both"
        )
    if isinstance(data, StepsDataConfig):
        if loss not in (None, "process"):
            yield (
                f"loss={loss} compares two responses, but rows of data.kind=steps have labels of "
                "single steps; use loss=process, or remove loss"
            )
        if centered:
            yield (
                "center_coef applies to the two scores of a pair, which data.kind=steps does not "
                "have; remove it"
            )
        return
    if loss == "process":
        yield (
            "loss=process needs a label for every step, which data.kind=pairs does not have; use "
            "data.kind=steps"
        )
    for name, rows in (("data", data), ("eval_data", eval_data)):
        if isinstance(rows, PairsDataConfig):
            yield from _pairs_rules(name, rows, loss)


def _pairs_rules(name: str, rows: PairsDataConfig, loss: str | None) -> Iterator[str]:
    yield from rows.missing_pairs(name)
    if rows.label_key is not None:
        yield (
            f"{name}.label_key={rows.label_key} means that rows are single responses, but a "
            "reward model learns from pairs; remove it"
        )
    if loss == "log_exp" and rows.margin_key is not None:
        yield (
            f"{name}.margin_key={rows.margin_key} has no effect with loss=log_exp, which has no "
            "margin; remove it, or use bradley_terry"
        )
