"""The teacher of a student: which model, what is compared, and which recipes have a use for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.algorithm import OnPolicyDistillAdvantage, name_to_node
from burnish.config.base import Node
from burnish.config.model import Dtype, ModelConfig
from burnish.config.rewards import ShapingConfig


class TeacherConfig(Node):
    """The frozen model that a student learns from. It must have the student's tokens."""

    model: ModelConfig
    """Where it is loaded from."""
    dtype: Dtype | None = None
    """Number format that it computes in. None: ``precision.dtype``."""

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


def teacher_rules(config: Any) -> Iterator[str]:
    """One sentence for each thing in a recipe for ``rl`` that does not go with its having, or not
    having, a teacher."""
    kind = config.algorithm.advantage.kind
    if not isinstance(config.algorithm.advantage, OnPolicyDistillAdvantage):
        if config.teacher is not None:
            yield (
                f"teacher is set and algorithm.advantage={kind} never reads it; remove it, or use "
                "on_policy_distill"
            )
        if not config.rewards:
            yield f"rewards is empty and algorithm.advantage={kind} learns from them; add one"
        return
    if config.teacher is None:
        yield (
            f"algorithm.advantage={kind} measures every token against a teacher, and there is "
            "none; set teacher.model.path"
        )
    kl = config.algorithm.kl
    if kl.init_kl_coef and kl.placement == "reward":
        yield (
            f"algorithm.kl.placement=reward with advantage={kind}, which learns from no reward; "
            "use placement=loss (estimator k3 is usual)"
        )
    if config.rollout.dynamic_sampling is not None:
        yield (
            f"rollout.dynamic_sampling leaves groups out by their rewards, and advantage={kind} "
            "learns from every token; remove it"
        )
    if config.shaping != ShapingConfig():
        yield (
            f"shaping changes rewards, and with advantage={kind} they are only measured; remove it"
        )
    if config.eval is not None and not config.rewards:
        yield (
            f"eval measures rewards, and the recipe has none (advantage={kind} needs none); add "
            "some, which are then measured in training too, or remove eval"
        )
