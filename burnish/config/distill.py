"""Recipe of the job ``distill``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from pydantic import Field

from burnish.config.eval_section import with_sets
from burnish.config.job import SupervisedJob
from burnish.config.roles import DistillTeacher, TrainRole
from burnish.config.sft import SFTEval
from burnish.config.teacher import DistillLossConfig, ForwardKlLoss, TeacherConfig
from burnish.data.demonstrations.config import SFTDataConfig


class DistillConfig(SupervisedJob):
    """``burnish distill``: train a student on a teacher's distribution over every next token of
    given rows."""

    job: Literal["distill"] = "distill"
    """Job of the recipe."""
    data: SFTDataConfig
    """Rows, as for ``sft``. The models are compared on their responses (``train_on_prompt``: on all
    tokens), which the teacher usually generated."""
    eval: SFTEval | None = None
    """Held-out evaluation. None: none."""
    teacher: TeacherConfig
    """Model to learn from."""
    loss: DistillLossConfig = ForwardKlLoss()
    """Divergence to minimize per token: a kind, or a mapping."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of both models' logits; the divergence is multiplied by its square (arXiv
    1503.02531). Above 1, unlikely tokens weigh more."""
    nll_weight: float = Field(0.0, ge=0, lt=1)
    """Weight w of the negative log-likelihood of the rows' tokens: (1 - w) x divergence + w x
    nll."""

    @property
    def rows(self) -> SFTDataConfig:
        return self.data

    @property
    def evaluation(self) -> SFTEval | None:
        return self.eval

    @property
    def eval_metrics(self) -> frozenset[str]:
        names = ("loss", "divergence", "teacher_kl", "nll", "agreement")
        return frozenset() if self.eval is None else with_sets(names, self.eval.sets)

    def roles(self) -> tuple[TrainRole, ...]:
        precision = self.teacher.precision_or(self.precision)
        model = self.teacher.model
        target = DistillTeacher(model, precision.dtype, self.loss.kind)
        student = replace(self.trained_role("policy"), distillation=target)
        teacher = student.derived_role("teacher", model, self.cluster, trainable=False)
        return student, replace(teacher, precision=precision, passes=("states",))

    def advice(self) -> Iterator[str]:
        yield from super().advice()
        if self.teacher.model == self.model:
            yield (
                "teacher.model is the student's own model, so the distillation loss is 0; set "
                "another model"
            )
