"""Config of a student's teacher: model, divergence, and rules for recipes with a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from burnish.config.base import Node, named_kind
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig


class TeacherConfig(Node):
    """Frozen model that a student learns from. It must have the student's vocabulary."""

    model: ModelConfig
    """Teacher model."""
    dtype: Dtype | None = None
    """Compute format of the teacher. None: ``precision.dtype``."""

    def precision_or(self, precision: PrecisionConfig) -> PrecisionConfig:
        """Return the teacher's own number format, or the job's if it has none."""
        return precision if self.dtype is None else PrecisionConfig(dtype=self.dtype)

    def rules(self) -> Iterator[str]:
        if self.model.lora is not None:
            yield (
                "model.lora trains adapters, but a teacher is not trained; remove it. For a "
                "teacher with an adapter, set model.path to the folder of the adapter"
            )
        for key in ("chat_template", "chat_template_kwargs", "eos_token"):
            if self.model.is_own(key):
                yield (
                    f"model.{key} has no effect: the teacher reads the tokens of the student's "
                    "rows; remove it, or set it in the section model"
                )


class ForwardKlLoss(Node):
    """KL(teacher || student): cross-entropy to the teacher's distribution (arXiv 1503.02531)."""

    kind: Literal["forward_kl"] = "forward_kl"


class ReverseKlLoss(Node):
    """KL(student || teacher) (arXiv 2306.08543)."""

    kind: Literal["reverse_kl"]


class JsdLoss(Node):
    """Generalized Jensen-Shannon divergence (arXiv 2306.13649)."""

    kind: Literal["jsd"]
    beta: float = Field(0.5, gt=0, lt=1)
    """Teacher's weight in the mixture that both are compared with. Near 0: like forward KL. Near 1:
    like reverse KL, but ever more weakly (raise the learning rate)."""


DistillLossConfig = Annotated[
    Annotated[ForwardKlLoss | ReverseKlLoss | JsdLoss, Field(discriminator="kind")],
    named_kind(),
]


def without_rewards(recipe: Any) -> Any:
    """Return a raw recipe for ``rl`` with empty rewards if it sets none and its advantage needs
    none."""
    if not isinstance(recipe, dict) or "rewards" in recipe:
        return recipe
    algorithm = recipe.get("algorithm")
    advantage = algorithm.get("advantage") if isinstance(algorithm, dict) else None
    kind = advantage.get("kind") if isinstance(advantage, dict) else advantage
    return {**recipe, "rewards": ()} if kind == "on_policy_distill" else recipe
