"""Recipe of the job ``rm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from burnish.config.base import Node, OlderKeys, named_kind, switched_by
from burnish.config.eval_section import OLDER_EVAL_KEYS, SupervisedEval, with_sets
from burnish.config.held_out import held_out_advice
from burnish.config.job import SupervisedJob
from burnish.config.model import HEAD_NAMES, LoraConfig
from burnish.config.roles import TrainRole
from burnish.data.kinds import RewardDataConfig, RewardRows, kind_with_loss


class RewardLoss(Node):
    """A loss without settings."""

    short_key = "kind"

    kind: Literal["bradley_terry", "log_exp", "process", "mse", "cross_entropy"]


class HuberLoss(Node):
    """Squared error of a score, linear beyond ``delta``."""

    short_key = "kind"

    kind: Literal["huber"]
    delta: float = Field(1.0, gt=0)
    """Error above which the loss is linear."""


RewardLossConfig = Annotated[
    Annotated[RewardLoss | HuberLoss, Field(discriminator="kind")],
    named_kind(),
]


class RewardEval(SupervisedEval[RewardDataConfig]):
    """Evaluation on held-out rows of the same kind."""


class RewardModelConfig(SupervisedJob):
    """``burnish rm``: a reward model from preference pairs (Bradley-Terry), a process reward model
    from solutions with a label on every step, or a regression or classification from single
    responses with scores or a class.

    Only pairs take ``center_coef``, and each kind of rows its own losses. Pairs refuse
    ``label_key``, and ``margin_key`` with the loss ``log_exp``."""

    older_keys = (
        OLDER_EVAL_KEYS,
        OlderKeys("loss", "loss", switched_by("kind"), {"huber_delta": ("delta", 1.0)}),
    )

    job: Literal["rm"] = "rm"
    """Job of the recipe."""
    data: RewardDataConfig
    """Pairs, or with ``kind: steps`` step-labeled solutions, with ``kind: scores`` or ``classes``
    single responses. None: pairs, unless the first row of a file shows scores or a class."""
    eval: RewardEval | None = None
    """Held-out evaluation. None: none. Exports contain the mean and standard deviation of the
    scores of ``eval.data`` in their config."""
    loss: RewardLossConfig | None = None
    """bradley_terry: -log sigmoid(difference - margin). log_exp: log(1 + exp(-difference)), the
    same without margins. process: cross-entropy of step labels. mse, huber: squared error of
    scores, or linear beyond ``loss.delta``. cross_entropy: of the classes (pass or fail: binary).
    None: bradley_terry for pairs, process for steps, mse for scores, cross_entropy for classes."""
    reward_weights: dict[str, float] | None = None
    """Weight of each output in the reward, by attribute or class (others: 0); written to exports.
    The reward is the weighted sum of the scores or class logits. None: the mean of the scores;
    classes need it, except for pass or fail."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near 0 (arXiv 2312.09244).
    0: none."""

    @property
    def rows(self) -> RewardRows:
        return self.data

    @property
    def evaluation(self) -> RewardEval | None:
        return self.eval

    @property
    def eval_metrics(self) -> frozenset[str]:
        if self.eval is None:
            return frozenset()
        metrics = self.data.metrics(weighted=self.weight_of_outputs is not None)
        return with_sets(metrics, self.eval.sets)

    @property
    def weight_of_outputs(self) -> tuple[float, ...] | None:
        """Weight of each output in the reward. None: one output, or the recipe has no weights for
        classes."""
        names = self.data.output_names
        if self.reward_weights is None or not names:
            return self.data.default_weights
        return tuple(self.reward_weights.get(name, 0.0) for name in names)

    @property
    def rows_per_unit(self) -> int:
        return self.data.rows_per_unit

    def roles(self) -> tuple[TrainRole, ...]:
        names = self.data.output_names
        outputs = max(1, len(names))  # 1 until an unknown target is reported
        role = replace(self.trained_role("reward"), head="scalar")
        return (replace(role, outputs=outputs, output_names=names),)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from reward_data_rules(
            self.data,
            {} if self.eval is None else self.eval.sections,
            loss=None if self.loss is None else self.loss.kind,
            centered=bool(self.center_coef),
            weights=self.reward_weights,
        )
        yield from _head_rules(self.model.lora)

    def advice(self) -> Iterator[str]:
        yield from super().advice()
        yield from held_out_advice(self.data, self.eval)
        if self.data.output_names and self.weight_of_outputs is None:
            yield (
                "reward_weights is not set, so a reward needs output_weights to use this "
                "classifier; set e.g. reward_weights={good: 1, bad: -1}, the log-odds of two "
                f"classes (here: {', '.join(self.data.output_names)})"
            )


def reward_data_rules(
    data: RewardRows,
    held_out: Mapping[str, RewardRows],
    *,
    loss: str | None,
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
    if weights is not None and not data.weighs_outputs:
        yield (
            f"reward_weights weigh the outputs of a regression or classification, but "
            f"data.kind={data.kind} trains one output; remove them"
        )
    if loss is not None and loss not in data.losses:
        yield data.loss_problem(loss) or (
            f"loss={loss} is for data.kind={kind_with_loss(loss)}, but data.kind={data.kind}; use "
            f"{' or '.join(data.losses)}, or remove loss"
        )
    if centered and data.rows_per_unit != 2:
        yield (
            f"center_coef applies to the two scores of a pair, which data.kind={data.kind} does "
            "not have; remove it"
        )
    yield from data.model_rules(held_out, loss, weights)


def _head_rules(lora: LoraConfig | None) -> Iterator[str]:
    """Yield an error for each list of adapters that names the output projection."""
    if lora is None or lora.path is not None:
        return
    for key in ("target_modules", "modules_to_save"):
        names = lora.value_of(key)
        for name in names if isinstance(names, tuple) else ():
            if name in HEAD_NAMES:
                yield (
                    f"model.lora.{key} has {name}, but a reward model has its own head, which is "
                    f"always trained, in place of the output projection; remove {name}"
                )
