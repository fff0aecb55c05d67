"""Config of the RL update: advantage, loss and KL; and of the preference losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_constant"]
Discount = Literal["token", "turn"]


class GroupAdvantage(Node):
    """Advantages from the rewards of one prompt's samples. Needs n_samples_per_prompt > 1, no
    critic."""

    kind: Literal["grpo", "dr_grpo", "rloo", "opo"]
    """grpo: (R - mean) / (std + eps), arXiv 2402.03300. dr_grpo: R - mean, arXiv 2503.20783. rloo:
    R - mean of the others, arXiv 2402.14740. opo: R - length-weighted mean, arXiv 2505.23585."""
    eps: float = Field(1e-6, gt=0)
    """Added to the standard deviation (grpo)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token. Must be 1: a group compares entire responses, each with one reward."""

    def rules(self) -> Iterator[str]:
        if self.kind != "grpo" and self.eps != _default(self, "eps"):
            yield (
                f"eps={self.eps:g} is added to a standard deviation, but {self.kind} does not "
                "divide by one; remove it"
            )
        if self.gamma != 1.0:
            yield (
                f"gamma={self.gamma:g} with the group baseline {self.kind}: the baseline "
                "compares complete responses and is not discounted; use gamma=1, or an advantage "
                "with returns per token (gae, reinforce_pp)"
            )


class GaeAdvantage(Node):
    """Generalized advantage estimation with a critic (PPO): arXiv 1506.02438, 1707.06347."""

    kind: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, or per turn (``discount``)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE lambda: 1 is Monte Carlo, 0 is one-step TD."""
    discount: Discount = "token"
    """token: gamma and lam apply from each sampled token to the next. turn: only from the last
    token of a turn to the first of the next."""
    whiten: bool = True
    """Normalize the rollout batch's advantages to mean 0 and variance 1."""

    def rules(self) -> Iterator[str]:
        if self.discount == "turn" and self.gamma == self.lam == 1.0:
            yield (
                "discount=turn does nothing with gamma=1 and lam=1, which discount nothing; lower "
                "one of them, or remove it"
            )


class ReinforceAdvantage(Node):
    """REINFORCE++ (arXiv 2501.03262): discounted return-to-go, whitened, no critic."""

    kind: Literal["reinforce_pp", "reinforce_pp_baseline"]
    """``_baseline`` first subtracts the group's mean reward."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, or per turn (``discount``)."""
    discount: Discount = "token"
    """token: gamma applies from each sampled token to the next. turn: only from the last token of a
    turn to the first of the next."""
    whiten: bool = True
    """Normalize the rollout batch's advantages to mean 0 and variance 1."""

    def rules(self) -> Iterator[str]:
        if self.discount == "turn" and self.gamma == 1.0:
            yield (
                "discount=turn does nothing with gamma=1, which discounts nothing; lower gamma, or "
                "remove it"
            )


class OnPolicyDistillAdvantage(Node):
    """Per token, the teacher's log-prob minus the policy's. Needs a ``teacher``, no rewards, no
    groups."""

    kind: Literal["on_policy_distill"]


def _default(node: Node, name: str) -> Any:
    """Return the default of a field."""
    return type(node).model_fields[name].default


def name_to_node(value: Any) -> Any:
    """Expand the name of a variant to a node: ``dpo`` -> ``{kind: dpo}``."""
    return {"kind": value} if isinstance(value, str) else value


AdvantageConfig = Annotated[
    Annotated[
        GroupAdvantage | GaeAdvantage | ReinforceAdvantage | OnPolicyDistillAdvantage,
        Field(discriminator="kind"),
    ],
    BeforeValidator(name_to_node),
]


class PpoLoss(Node):
    """Clipped surrogate (arXiv 1707.06347), with separate bounds (DAPO's clip-higher) and dual
    clip."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower bound of the ratio: 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Upper bound of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c on the loss if the advantage is negative (arXiv 1912.09729). None: no bound."""


class GspoLoss(Node):
    """Clipped surrogate with one ratio per sequence (arXiv 2507.18071)."""

    kind: Literal["gspo"]
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """Lower bound of the sequence's ratio (geometric mean over tokens): 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """Upper bound of the sequence's ratio: 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c on the loss of tokens with a negative advantage, as in ppo. None: no bound."""


class CispoLoss(Node):
    """-weight x advantage x log-prob, with a clipped and detached weight (arXiv 2506.13585)."""

    kind: Literal["cispo"]
    clip_low: float = Field(1.0, gt=0, le=1)
    """Lower bound of the weight: 1 - clip_low. 1: no bound, as in the paper's experiments."""
    clip_high: float = Field(2.0, gt=0)
    """Upper bound of the weight: 1 + clip_high."""
    max_ratio: float | None = Field(None, gt=1)
    """Upper bound of the weight, instead of 1 + clip_high (arXiv 2510.13786). None: 1 +
    clip_high."""

    def rules(self) -> Iterator[str]:
        if self.max_ratio is not None and self.clip_high != _default(self, "clip_high"):
            yield (
                f"clip_high={self.clip_high:g} and max_ratio={self.max_ratio:g} both set the "
                "upper bound of the weight, and only max_ratio would take effect; remove one of "
                "the two"
            )


class ReinforceLoss(Node):
    """-advantage x log-prob, without a ratio. Needs one optimizer step per rollout."""

    kind: Literal["reinforce"] = "reinforce"


PolicyLossConfig = Annotated[
    Annotated[PpoLoss | GspoLoss | CispoLoss | ReinforceLoss, Field(discriminator="kind")],
    BeforeValidator(name_to_node),
]


class CorrectionConfig(Node):
    """Off-policy correction if sampler and trainer disagree, or if samples are stale (decoupled
    PPO): each token's loss is multiplied by w = exp(trainer's log-prob - sampler's log-prob),
    bounded. The trainer's log-prob is that of the start of the update."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Scope of w. token: per token. sequence: the product over the sampled tokens of the response
    or episode. geometric: its geometric mean."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: at most ``high`` (with level=token: TIS). clip: to [low, high]. mask: 0 outside
    [low, high] (with level=token: IcePop; with geometric: masked importance sampling)."""
    low: float = Field(0.5, ge=0, lt=1)
    """Lower bound (clip and mask)."""
    high: float = Field(2.0, ge=1)
    """Upper bound."""

    def rules(self) -> Iterator[str]:
        if self.mode == "truncate" and self.low != _default(self, "low"):
            yield (
                f"low={self.low:g} has no effect with mode=truncate, which bounds weights only "
                "from above; remove it, or use mode=clip"
            )


class KlConfig(Node):
    """KL divergence from the reference model, as a term of the loss or of the rewards."""

    init_kl_coef: float = Field(0.0, ge=0)
    """Weight beta. 0: no KL term and no reference model. On resume an adaptive weight keeps its
    value, unless this key is changed."""
    placement: Literal["reward", "loss"] = "loss"
    """Subtract the KL from every token's reward (all that use rewards; group advantages: after the
    group's normalization), or add it to the loss (all)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (http://joschu.net/blog/kl-approx.html). In the reward: k1 (k2 and k3 are
    a warning: the gradient is not that of the KL). In the loss: k2 or k3 (k1 is a warning: its
    gradient is 0 on average). If the policy's log-prob is over 10 nats below the reference's, k3 is
    linear, which bounds its gradient."""
    kl_target: float | None = Field(None, gt=0)
    """Target mean KL per token of an adaptive weight (Ziegler 2019). None: fixed weight."""
    kl_horizon: int = Field(10_000, ge=1)
    """Time scale of the adaptive weight, in samples."""

    def rules(self) -> Iterator[str]:
        if self.kl_target is not None and not self.init_kl_coef:
            yield (
                "kl_target adapts init_kl_coef, which is 0; set init_kl_coef (0.01 is a usual "
                "start)"
            )
        if self.kl_target is None and self.kl_horizon != _default(self, "kl_horizon"):
            yield (
                f"kl_horizon={self.kl_horizon} has no effect without kl_target, which enables "
                "the adaptive weight; set both or neither"
            )

    def advice(self) -> Iterator[str]:
        if self.init_kl_coef and self.placement == "reward" and self.estimator != "k1":
            yield (
                f"estimator={self.estimator} in the reward: the policy gradient of this penalty "
                "is not that of the KL divergence; use estimator=k1 with placement=reward"
            )
        if self.init_kl_coef and self.placement == "loss" and self.estimator == "k1":
            yield (
                "estimator=k1 as a loss has a gradient of mean 0, so it adds noise and does not "
                "limit the KL divergence; use k2 or k3, or placement=reward"
            )


class AlgorithmConfig(Node):
    """One RL algorithm = an advantage + a policy loss + an aggregation + a KL term."""

    advantage: AdvantageConfig = GroupAdvantage(kind="grpo")
    """Advantage: a kind, or a mapping."""
    policy_loss: PolicyLossConfig = PpoLoss()
    """Policy loss: a kind, or a mapping."""
    loss_aggregation: Aggregation | None = None
    """token_mean: over the step's tokens (DAPO). sequence_mean: mean of per-sequence means
    (original GRPO). sequence_sum_constant: sums / ``generate_max_len`` (Dr. GRPO). An episode of
    several turns is one sequence; its constant is ``episodes.max_tokens`` - ``prompt_max_len``.
    None: sequence_mean for policy_loss gspo, sequence_sum_constant for advantage dr_grpo, else
    token_mean; printed at start."""
    mask_truncated: bool = False
    """Leave samples that were cut off at a length limit out of the loss (overlong filtering of
    DAPO). They still count in the baselines of their groups."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. 0: no bonus."""
    kl: KlConfig = KlConfig()
    """KL term."""
    correction: CorrectionConfig | None = None
    """Off-policy correction. None: none."""
    old_policy: Literal["trainer", "sampler"] = "trainer"
    """Policy in the denominator of the loss's ratio. trainer: the one before the update, whose
    log-probs the trainer computes. sampler: the one that sampled the tokens, by its own log-probs,
    which saves the trainer's pass; the ratio then includes the age of the tokens, and replaces the
    correction. KL in the reward and a teacher are also compared with it."""

    @property
    def reduces_over_samples(self) -> bool:
        """True if the loss of a token depends on all tokens of its sample, so that the rows of a
        sample must be in one micro-batch."""
        by_sample = self.correction is not None and self.correction.level != "token"
        return by_sample or self.policy_loss.kind == "gspo"

    @property
    def aggregation(self) -> Aggregation:
        """Aggregation of per-token losses: the setting, or the default of the algorithm."""
        return self._aggregation()[0]

    def table_row(self) -> tuple[str, str, str]:
        """Return (name, value, origin) of the aggregation, for the table printed at start."""
        return ("loss_aggregation", *self._aggregation())

    def _aggregation(self) -> tuple[Aggregation, str]:
        if self.loss_aggregation is not None:
            return self.loss_aggregation, "as set"
        if self.policy_loss.kind == "gspo":
            return "sequence_mean", "of policy_loss=gspo"
        if self.advantage.kind == "dr_grpo":
            return "sequence_sum_constant", "of advantage=dr_grpo"
        return "token_mean", "the default"


class DpoLoss(Node):
    """Direct preference optimization (arXiv 2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""


class CdpoLoss(Node):
    """DPO for noisy labels (https://ericmitchell.ai/cdpo.pdf)."""

    kind: Literal["cdpo"]
    beta: float = Field(0.1, gt=0)
    """As in dpo."""
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Probability that a pair's label is wrong."""


class IpoLoss(Node):
    """Identity preference optimization (arXiv 2310.12036)."""

    kind: Literal["ipo"]
    beta: float = Field(0.1, gt=0)
    """The target of the gap between the two log-ratios is 1 / (2 beta)."""
    mean_logprobs: bool = False
    """Use mean log-probs per token instead of sums, as in some other libraries."""


class SimpoLoss(Node):
    """Simple preference optimization: mean log-probs and a margin, no reference model (arXiv
    2405.14734)."""

    kind: Literal["simpo"]
    beta: float = Field(2.0, gt=0)
    """Scale of the difference of mean log-probs."""
    gamma: float = Field(1.0, ge=0)
    """Margin of the chosen response over the rejected one."""


class OrpoLoss(Node):
    """Odds-ratio preference optimization: the chosen response's language-model loss plus a penalty,
    no reference model (arXiv 2403.07691)."""

    kind: Literal["orpo"]
    beta: float = Field(0.1, gt=0)
    """Weight of the odds-ratio term (the paper's lambda)."""


class KtoLoss(Node):
    """Kahneman-Tversky optimization of single labeled responses (arXiv 2402.01306)."""

    kind: Literal["kto"]
    beta: float = Field(0.1, gt=0)
    """As in dpo."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable responses. The paper recommends a ratio (desirable_weight x number of
    desirable) / (undesirable_weight x number of undesirable) of 1 to 1.33."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable responses."""


PreferenceLossConfig = Annotated[
    Annotated[
        DpoLoss | CdpoLoss | IpoLoss | SimpoLoss | OrpoLoss | KtoLoss, Field(discriminator="kind")
    ],
    BeforeValidator(name_to_node),
]
