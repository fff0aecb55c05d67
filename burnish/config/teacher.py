"""The teacher of a student: which model, what is compared, and which recipes have a use for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.algorithm import name_to_node
from burnish.config.base import Node
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig


class TeacherConfig(Node):
    """The frozen model that a student learns from. It must have the student's tokens."""

    model: ModelConfig
    """Where it is loaded from."""
    dtype: Dtype | None = None
    """Number format that it computes in. None: ``precision.dtype``."""

    def precision_or(self, precision: PrecisionConfig) -> PrecisionConfig:
        """Return its own number format, or the job's where it has none."""
        return precision if self.dtype is None else PrecisionConfig(dtype=self.dtype)

    def rules(self) -> Iterator[str]:
        if self.model.lora is not None:
            yield "model.lora trains adapters, and a teacher is not trained; remove it"


class ForwardKlLoss(Node):
    """KL(teacher || student): cross-entropy to the teacher's distribution (arXiv 1503.02531)."""

    kind: Literal["forward_kl"] = "forward_kl"


class ReverseKlLoss(Node):
    """KL(student || teacher) (arXiv 2306.08543)."""

    kind: Literal["reverse_kl"]


class JsdLoss(Node):
    """Generalised Jensen-Shannon divergence (arXiv 2306.13649)."""

    kind: Literal["jsd"]
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture that both are compared with. Towards 0 it pulls as
    forward KL does, towards 1 as reverse KL (and ever more weakly: raise the learning rate)."""


DistillLossConfig = Annotated[
    Annotated[ForwardKlLoss | ReverseKlLoss | JsdLoss, Field(discriminator="kind")],
    BeforeValidator(name_to_node),
]


def without_rewards(recipe: Any) -> Any:
    """A recipe for ``rl``, before it is read: with no rewards where it names none and its advantage
    needs none."""
    if not isinstance(recipe, dict) or "rewards" in recipe:
        return recipe
    algorithm = recipe.get("algorithm")
    advantage = algorithm.get("advantage") if isinstance(algorithm, dict) else None
    kind = advantage.get("kind") if isinstance(advantage, dict) else advantage
    return {**recipe, "rewards": ()} if kind == "on_policy_distill" else recipe
