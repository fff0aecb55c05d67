"""Recipe of the job ``rm``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

from pydantic import Field

from burnish.config.data import (
    held_out_advice,
)
from burnish.config.job import SupervisedJob
from burnish.config.rewards import StepAggregation
from burnish.config.roles import (
    TrainRole,
)
from burnish.config.steps import (
    PairsDataConfig,
    RewardDataConfig,
    StepsDataConfig,
    reward_data_rules,
)

PAIR_METRICS = ("loss", "accuracy", "score_margin", "score_mean", "score_std")
STEP_METRICS = (
    *("loss", "step_accuracy", "good_step_accuracy", "bad_step_accuracy", "row_exact"),
    *("step_score", "good_steps"),
    *(f"score_{how}_{what}" for how in get_args(StepAggregation) for what in ("mean", "std")),
)


class RewardModelConfig(SupervisedJob):
    """``burnish rm``: a reward model from preference pairs (Bradley-Terry), or a process reward
    model from solutions with a label on every step.

    Steps refuse ``center_coef`` and losses other than ``process``. Pairs refuse ``label_key``, and
    ``margin_key`` with the loss ``log_exp``."""

    job: Literal["rm"] = "rm"
    """Job of the recipe."""
    data: RewardDataConfig
    """Pairs, or with ``kind: steps`` step-labeled solutions."""
    eval_data: RewardDataConfig | None = None
    """Held-out data of the same kind. None: no evaluation. Exports contain the mean and standard
    deviation of its scores in their config."""
    loss: Literal["bradley_terry", "log_exp", "process"] | None = None
    """bradley_terry: -log sigmoid(difference - margin). log_exp: log(1 + exp(-difference)), the
    same without margins. process: cross-entropy of step labels. None: bradley_terry for pairs,
    process for steps."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near 0 (arXiv 2312.09244).
    0: none."""

    @property
    def rows(self) -> PairsDataConfig | StepsDataConfig:
        """Training data."""
        return self.data

    @property
    def eval_metrics(self) -> frozenset[str]:
        """Names after ``eval/`` of the metrics of an evaluation; empty if there is none."""
        if self.eval_data is None:
            return frozenset()
        return frozenset(STEP_METRICS if self.process else PAIR_METRICS)

    @property
    def process(self) -> bool:
        """Return whether it is a process reward model."""
        return isinstance(self.data, StepsDataConfig)

    @property
    def rows_per_unit(self) -> int:
        """Number of rows per unit: 2 for a pair, 1 for step-labeled solutions."""
        return 1 if self.process else 2

    def roles(self) -> tuple[TrainRole, ...]:
        return (replace(self.trained_role("reward"), head="scalar"),)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from reward_data_rules(
            self.data, self.eval_data, loss=self.loss, centered=bool(self.center_coef)
        )

    def advice(self) -> Iterator[str]:
        yield from held_out_advice(self.data, self.eval_data, "eval_data")
