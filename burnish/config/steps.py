"""Config of the data of reward models (job ``rm``): pairs, solutions with a label on every step,
and the choice between these and the rows of ``rated.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.columns import missing_columns
from burnish.config.data import DataConfig, PreferenceDataConfig
from burnish.config.rated import (
    ClassesDataConfig,
    RatedDataConfig,
    ScoresDataConfig,
    rated_rules,
    recognized_kind,
)
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


def _with_kind(value: Any) -> Any:
    """Add the kind of rows to a data section without one."""
    if not isinstance(value, dict) or "kind" in value:
        return value
    return {"kind": recognized_kind(value), **value}


RewardRows = PairsDataConfig | StepsDataConfig | ScoresDataConfig | ClassesDataConfig

RewardDataConfig = Annotated[
    Annotated[RewardRows, Field(discriminator="kind")], BeforeValidator(_with_kind)
]

RewardLoss = Literal["bradley_terry", "log_exp", "process", "mse", "huber", "cross_entropy"]
LOSSES: Mapping[str, tuple[RewardLoss, ...]] = {
    "pairs": ("bradley_terry", "log_exp"),
    "steps": ("process",),
    "scores": ("mse", "huber"),
    "classes": ("cross_entropy",),
}
"""Kind of rows -> its losses; the first is the default."""


def reward_data_rules(
    data: RewardRows,
    held_out: Mapping[str, RewardRows],
    *,
    loss: RewardLoss | None,
    centered: bool,
    weights: Mapping[str, float] | None,
) -> Iterator[str]:
    """Yield an error for each setting of a reward model that does not fit the kind of its data.
    ``held_out``: evaluation sections by their place in the recipe."""
    others = {name: rows for name, rows in held_out.items() if rows.kind != data.kind}
    for name, rows in others.items():
        yield (
            f"{name}.kind={rows.kind} and data.kind={data.kind}: held-out rows must be "
            "of the same kind as training rows; use one kind for both"
        )
    if others:
        return
    if weights is not None and not isinstance(data, RatedDataConfig):
        yield (
            f"reward_weights weigh the outputs of a regression or classification, but "
            f"data.kind={data.kind} trains one output; remove them"
        )
    if isinstance(data, RatedDataConfig):
        rated = {name: r for name, r in held_out.items() if isinstance(r, RatedDataConfig)}
        yield from _loss_rules(data.kind, loss, centered)
        yield from rated_rules(data, rated, weights)
        return
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
    elif loss is not None and loss not in LOSSES["pairs"]:
        yield from _loss_rules(data.kind, loss, False)
    for name, rows in {"data": data, **held_out}.items():
        if isinstance(rows, PairsDataConfig):
            yield from _pairs_rules(name, rows, loss)


def _loss_rules(kind: str, loss: RewardLoss | None, centered: bool) -> Iterator[str]:
    if loss is not None and loss not in LOSSES[kind]:
        fits = next(other for other, losses in LOSSES.items() if loss in losses)
        yield (
            f"loss={loss} is for data.kind={fits}, but data.kind={kind}; use "
            f"{' or '.join(LOSSES[kind])}, or remove loss"
        )
    if centered:
        yield (
            f"center_coef applies to the two scores of a pair, which data.kind={kind} does not "
            "have; remove it"
        )


def _pairs_rules(name: str, rows: PairsDataConfig, loss: str | None) -> Iterator[str]:
    yield from rows.missing_pairs(name)
    if rows.label_key is not None:
        yield (
            f"{name}.label_key={rows.label_key} means that rows are single responses, but a "
            "reward model learns from pairs unless data.kind says otherwise; remove it, or set "
            "data.kind=classes to train a classifier of pass and fail"
        )
    if loss == "log_exp" and rows.margin_key is not None:
        yield (
            f"{name}.margin_key={rows.margin_key} has no effect with loss=log_exp, which has no "
            "margin; remove it, or use bradley_terry"
        )
