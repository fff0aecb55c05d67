"""The recipe of the job ``distill``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from pydantic import Field

from burnish.config.data import SFTDataConfig
from burnish.config.job import SupervisedJob
from burnish.config.roles import DistillTarget, TrainRole
from burnish.config.teacher import DistillLossConfig, ForwardKlLoss, TeacherConfig


class DistillConfig(SupervisedJob):
    """``burnish distill``: a student learns a teacher's distribution over every next token of given
    rows."""

    job: Literal["distill"] = "distill"
    """Which job the recipe is for."""
    data: SFTDataConfig
    """Rows, as for ``sft``: their responses (``train_on_prompt``: all tokens) are what teacher and
    student are compared on. What a teacher wrote itself is usual."""
    eval_data: SFTDataConfig | None = None
    """Held-out rows. None: no evaluation."""
    teacher: TeacherConfig
    """The model to learn from."""
    loss: DistillLossConfig = ForwardKlLoss()
    """``forward_kl | reverse_kl | jsd``, or a node with ``kind`` and its options: what is made
    small, per token."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both models before they are compared; the divergence is multiplied by
    its square (arXiv 1503.02531). Above 1 the less likely tokens count for more."""
    nll_weight: float = Field(0.0, ge=0, lt=1)
    """Share w of the ordinary loss on the data's own tokens: (1 - w) x divergence + w x negative
    log-likelihood."""

    @property
    def rows(self) -> SFTDataConfig:
        """The training data."""
        return self.data

    def roles(self) -> tuple[TrainRole, ...]:
        precision = self.teacher.precision_or(self.precision)
        model = self.teacher.model
        target = DistillTarget(model, precision.dtype, self.loss.kind)
        student = replace(self.trained_role("policy"), distillation=target)
        teacher = student.beside("teacher", model, self.cluster, trainable=False)
        return student, replace(teacher, precision=precision, returns_states=True)

    def advice(self) -> Iterator[str]:
        if self.teacher.model == self.model:
            yield "teacher.model is the student's own model: there is nothing to learn from it"
