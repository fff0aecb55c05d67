"""Recipe of the job ``rm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, get_args

from pydantic import Field

from burnish.config.eval_sets import eval_sections, with_sets
from burnish.config.job import SupervisedJob
from burnish.config.rewards import StepAggregation
from burnish.config.roles import (
    TrainRole,
)
from burnish.data.kinds import RewardDataConfig, RewardRows
from burnish.data.preferences.config import PairsDataConfig
from burnish.data.prompts.config import held_out_advice
from burnish.data.rated.config import ClassesDataConfig, RatedDataConfig, class_names, rated_rules
from burnish.data.steps.config import StepsDataConfig

RATED_METRICS = {
    "scores": ("loss", "mse", "mae", "pearson", "spearman"),
    "classes": ("loss", "accuracy"),
}
"""Kind of rows -> metrics of an evaluation; those of single outputs are appended."""
PAIR_METRICS = ("loss", "accuracy", "score_margin", "score_mean", "score_std")
STEP_METRICS = (
    *("loss", "step_accuracy", "good_step_accuracy", "bad_step_accuracy", "row_exact"),
    *("step_score", "good_steps"),
    *(f"score_{how}_{what}" for how in get_args(StepAggregation) for what in ("mean", "std")),
)


RewardLoss = Literal["bradley_terry", "log_exp", "process", "mse", "huber", "cross_entropy"]
LOSSES: Mapping[str, tuple[RewardLoss, ...]] = {
    "pairs": ("bradley_terry", "log_exp"),
    "steps": ("process",),
    "scores": ("mse", "huber"),
    "classes": ("cross_entropy",),
}
"""Kind of rows -> its losses; the first is the default."""


class RewardModelConfig(SupervisedJob):
    """``burnish rm``: a reward model from preference pairs (Bradley-Terry), a process reward model
    from solutions with a label on every step, or a regression or classification from single
    responses with scores or a class.

    Only pairs take ``center_coef``, and each kind of rows its own losses. Pairs refuse
    ``label_key``, and ``margin_key`` with the loss ``log_exp``."""

    job: Literal["rm"] = "rm"
    """Job of the recipe."""
    data: RewardDataConfig
    """Pairs, or with ``kind: steps`` step-labeled solutions, with ``kind: scores`` or ``classes``
    single responses. None: pairs, unless the first row of a file shows scores or a class."""
    eval_data: RewardDataConfig | None = None
    """Held-out data of the same kind. None: no evaluation. Exports contain the mean and standard
    deviation of its scores in their config."""
    eval_sets: dict[str, RewardDataConfig] = Field(default_factory=dict)
    """Further held-out data by name, with metrics ``eval/NAME/...``. Needs eval_data."""
    loss: RewardLoss | None = None
    """bradley_terry: -log sigmoid(difference - margin). log_exp: log(1 + exp(-difference)), the
    same without margins. process: cross-entropy of step labels. mse, huber: squared error of
    scores, or linear beyond ``huber_delta``. cross_entropy: of the classes (pass or fail: binary).
    None: bradley_terry for pairs, process for steps, mse for scores, cross_entropy for classes."""
    huber_delta: float = Field(1.0, gt=0)
    """Error of a score above which the loss ``huber`` is linear."""
    reward_weights: dict[str, float] | None = None
    """Weight of each output in the reward, by attribute or class (others: 0); written to exports.
    The reward is the weighted sum of the scores or class logits. None: the mean of the scores;
    classes need it, except for pass or fail."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near 0 (arXiv 2312.09244).
    0: none."""

    @property
    def rows(self) -> RewardRows:
        """Training data."""
        return self.data

    @property
    def eval_metrics(self) -> frozenset[str]:
        """Names after ``eval/`` of the metrics of an evaluation; empty if there is none."""
        if self.eval_data is None:
            return frozenset()
        if isinstance(self.data, RatedDataConfig):
            return with_sets(self._rated_metrics(self.data), self.eval_sets)
        names = STEP_METRICS if self.process else PAIR_METRICS
        return with_sets(names, self.eval_sets)

    @property
    def process(self) -> bool:
        """Return whether it is a process reward model."""
        return isinstance(self.data, StepsDataConfig)

    @property
    def weight_of_outputs(self) -> tuple[float, ...] | None:
        """Weight of each output in the reward. None: one output, or the recipe has no weights for
        classes."""
        if not isinstance(self.data, RatedDataConfig) or not self.data.names:
            return None
        names = self.data.names
        if self.reward_weights is not None:
            return tuple(self.reward_weights.get(name, 0.0) for name in names)
        if isinstance(self.data, ClassesDataConfig) and len(names) > 1:
            return None
        return (1 / len(names),) * len(names)

    def _rated_metrics(self, data: RatedDataConfig) -> Iterator[str]:
        own = RATED_METRICS[data.kind_of_rows]
        yield from own
        if self.weight_of_outputs is not None:
            yield from ("score_mean", "score_std")
        if isinstance(data, ClassesDataConfig):
            yield from (f"accuracy_{name}" for name in class_names(data))
        elif len(data.names) > 1:
            yield from (f"{what}_{name}" for what in own[1:] for name in data.names)

    @property
    def rows_per_unit(self) -> int:
        """Number of rows per unit: 2 for a pair, 1 for single responses."""
        return 2 if isinstance(self.data, PairsDataConfig) else 1

    def roles(self) -> tuple[TrainRole, ...]:
        names = self.data.names if isinstance(self.data, RatedDataConfig) else ()
        outputs = max(1, len(names))  # 1 until an unknown target is reported
        role = replace(self.trained_role("reward"), head="scalar")
        return (replace(role, outputs=outputs, output_names=names),)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from reward_data_rules(
            self.data,
            eval_sections(self.eval_data, self.eval_sets, keys=("eval_data", "eval_sets")),
            loss=self.loss,
            centered=bool(self.center_coef),
            weights=self.reward_weights,
        )
        if self.is_own("huber_delta") and self.loss != "huber":
            yield f"huber_delta={self.huber_delta:g} has no effect without loss=huber; set it"

    def advice(self) -> Iterator[str]:
        yield from super().advice()
        for name, data in self.eval_sections.items():
            yield from held_out_advice(self.data, data, name)
        if isinstance(self.data, ClassesDataConfig) and self.weight_of_outputs is None:
            yield (
                "reward_weights is not set, so a reward needs output_weights to use this "
                "classifier; set e.g. reward_weights={good: 1, bad: -1}, the log-odds of two "
                f"classes (here: {', '.join(self.data.names)})"
            )


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
