"""Config of the RL update: advantage, loss and KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node, OlderKeys, named_kind, switched_by

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_constant"]
Discount = Literal["token", "turn"]


class _Advantage(Node):
    """Facts of an advantage that rules and steps ask for."""

    uses_rewards: ClassVar[bool] = True
    """False if rewards are only measured."""
    needs_critic: ClassVar[bool] = False

    @property
    def compares_groups(self) -> bool:
        """Return whether the baseline of a sample is made of the other samples of its group."""
        return False

    @property
    def normalizes_each(self) -> bool:
        """Return whether each reward is normalized in its group, instead of their sum."""
        return False

    @property
    def takes_turn_rewards(self) -> bool:
        """Return whether samples may have rewards of single turns."""
        return True


class GroupAdvantage(_Advantage):
    """Advantages from the rewards of one prompt's samples. Needs n_samples_per_prompt > 1, no
    critic."""

    kind: Literal["grpo", "dr_grpo", "rloo", "opo"]
    """grpo: (R - mean) / (std + eps), arXiv 2402.03300. dr_grpo: R - mean, arXiv 2503.20783. rloo:
    R - mean of the others, arXiv 2402.14740. opo: R - length-weighted mean, arXiv 2505.23585."""
    eps: float = Field(1e-6, gt=0)
    """Added to the standard deviation (grpo)."""
    normalize_each: bool = False
    """With several rewards and grpo: normalize each reward in its group, then normalize their
    weighted sum over the batch (GDPO, arXiv 2601.05242)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token. Must be 1: a group compares entire responses, each with one reward."""

    @property
    def compares_groups(self) -> bool:
        return True

    @property
    def normalizes_each(self) -> bool:
        return self.normalize_each

    @property
    def takes_turn_rewards(self) -> bool:
        return self.kind != "rloo"

    def rules(self) -> Iterator[str]:
        if self.kind != "grpo" and self.eps != _default(self, "eps"):
            yield (
                f"eps={self.eps:g} is added to a standard deviation, but {self.kind} does not "
                "divide by one; remove it"
            )
        if self.kind != "grpo" and self.normalize_each:
            yield (
                f"normalize_each divides by standard deviations, but {self.kind} does not; use "
                "grpo, or remove it"
            )
        if self.gamma != 1.0:
            yield (
                f"gamma={self.gamma:g} with the group baseline {self.kind}: the baseline "
                "compares complete responses and is not discounted; use gamma=1, or an advantage "
                "with returns per token (gae, reinforce_pp)"
            )


class GaeAdvantage(_Advantage):
    """Generalized advantage estimation with a critic (PPO): arXiv 1506.02438, 1707.06347."""

    needs_critic: ClassVar[bool] = True

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


class ReinforceAdvantage(_Advantage):
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

    @property
    def compares_groups(self) -> bool:
        return self.kind == "reinforce_pp_baseline"

    @property
    def takes_turn_rewards(self) -> bool:
        return self.kind == "reinforce_pp"

    def rules(self) -> Iterator[str]:
        if self.discount == "turn" and self.gamma == 1.0:
            yield (
                "discount=turn does nothing with gamma=1, which discounts nothing; lower gamma, or "
                "remove it"
            )


class OnPolicyDistillAdvantage(_Advantage):
    """Per token, the teacher's log-prob minus the policy's. Needs a ``teacher``, no rewards, no
    groups."""

    uses_rewards: ClassVar[bool] = False

    kind: Literal["on_policy_distill"]


def _default(node: Node, name: str) -> Any:
    """Return the default of a field."""
    return type(node).model_fields[name].default


AdvantageConfig = Annotated[
    Annotated[
        GroupAdvantage | GaeAdvantage | ReinforceAdvantage | OnPolicyDistillAdvantage,
        Field(discriminator="kind"),
    ],
    named_kind(),
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
    """Bound c on the loss of tokens with a negative advantage (arXiv 1912.09729). None: no
    bound."""


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


class SapoLoss(Node):
    """-(4 / tau) sigmoid(tau (ratio - 1)) x advantage: a smooth gate instead of the clip (arXiv
    2511.20347)."""

    kind: Literal["sapo"]
    tau_pos: float = Field(1.0, gt=0)
    """tau for tokens with a positive advantage. Larger values bound the ratio more tightly."""
    tau_neg: float = Field(1.05, gt=0)
    """tau for all other tokens."""


class VespoLoss(Node):
    """-w^k exp(lambda (1 - w)) x advantage x log-prob, where w is the ratio of the entire sequence
    and the weight has no gradient (arXiv 2602.10693)."""

    kind: Literal["vespo"]
    k_pos: float = Field(2.0, gt=0)
    """k for advantages >= 0."""
    lambda_pos: float = Field(3.0, gt=0)
    """lambda for advantages >= 0."""
    k_neg: float = Field(3.0, gt=0)
    """k for negative advantages."""
    lambda_neg: float = Field(2.0, gt=0)
    """lambda for negative advantages."""


class ReinforceLoss(Node):
    """-advantage x log-prob, without a ratio. Needs one optimizer step per rollout."""

    kind: Literal["reinforce"] = "reinforce"


PolicyLossConfig = Annotated[
    Annotated[
        PpoLoss | GspoLoss | CispoLoss | SapoLoss | VespoLoss | ReinforceLoss,
        Field(discriminator="kind"),
    ],
    named_kind(),
]


class TruncatedWeights(Node):
    """truncate: w is at most ``high`` (with level=token: TIS)."""

    short_key = "kind"
    low: ClassVar[float] = 0.0

    kind: Literal["truncate"] = "truncate"
    """Bound of w."""


class BoundedWeights(Node):
    """clip: w is bounded to [low, high]. mask: it is 0 outside [low, high] (with level=token:
    IcePop; with geometric: masked importance sampling)."""

    short_key = "kind"

    kind: Literal["clip", "mask"]
    """Bounds of w."""
    low: float = Field(0.5, ge=0, lt=1)
    """Lower bound."""


CorrectionMode = Annotated[
    Annotated[TruncatedWeights | BoundedWeights, Field(discriminator="kind")],
    named_kind(),
]


class CorrectionConfig(Node):
    """Off-policy correction if sampler and trainer disagree, or if samples are stale (decoupled
    PPO): each token's loss is multiplied by w = exp(trainer's log-prob - sampler's log-prob),
    bounded. The trainer's log-prob is that of the start of the update."""

    older_keys = (OlderKeys("mode", "mode", switched_by("kind"), {"low": ("low", 0.5)}),)

    level: Literal["token", "sequence", "geometric"] = "token"
    """Scope of w. token: per token. sequence: the product over the sampled tokens of the response
    or episode. geometric: its geometric mean."""
    mode: CorrectionMode = TruncatedWeights()
    """Bounds of w: a kind, or a mapping with ``kind`` and ``low``."""
    high: float = Field(2.0, ge=1)
    """Upper bound."""


class AdaptiveKlConfig(Node):
    """Adaptive weight of the KL term (Ziegler 2019, arXiv 1909.08593)."""

    target: float = Field(gt=0)
    """Target mean KL per token, in nats."""
    horizon: int = Field(10_000, ge=1)
    """Time scale of the weight, in samples."""


class KlConfig(Node):
    """KL divergence from the reference model, as a term of the loss or of the rewards."""

    older_keys = (
        OlderKeys(
            "adaptive", "kl_target", switched_by("target"), {"kl_horizon": ("horizon", 10_000)}
        ),
    )

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
    bias_correction: bool = False
    """With placement loss: multiply the KL of each token by its importance ratio, so that several
    updates per rollout or stale samples do not bias the gradient (DeepSeek-V3.2, arXiv
    2512.02556)."""
    adaptive: AdaptiveKlConfig | None = None
    """Adapt the weight to a target. None: it is fixed."""

    def rules(self) -> Iterator[str]:
        if self.adaptive is not None and not self.init_kl_coef:
            yield (
                "adaptive changes init_kl_coef, which is 0; set init_kl_coef (0.01 is a usual "
                "start)"
            )
        if self.bias_correction and (not self.init_kl_coef or self.placement == "reward"):
            yield (
                "bias_correction multiplies the KL in the loss by the ratio, but "
                + ("init_kl_coef is 0" if not self.init_kl_coef else "placement is reward")
                + "; remove it, or set init_kl_coef with placement=loss"
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
    None: sequence_mean for policy_loss gspo and sapo, sequence_sum_constant for advantage dr_grpo,
    else token_mean; printed at start."""
    mask_truncated: bool = False
    """Leave samples that were cut off at a length limit out of the loss (overlong filtering of
    DAPO). They still count in the baselines of their groups. A step whose samples were all cut off
    has no update."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. 0: no bonus."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Fraction of the rollout's tokens that have a policy loss, the tokens with the highest entropy
    (arXiv 2506.01939; 0.2 there). 1: all."""
    kl: KlConfig = KlConfig()
    """KL term."""
    correction: CorrectionConfig | None = None
    """Off-policy correction. None: none."""
    old_policy: Literal["trainer", "sampler"] = "trainer"
    """Policy in the denominator of the loss's ratio. trainer: the one before the update, whose
    log-probs the trainer computes. sampler: the one that sampled the tokens, by its own log-probs,
    which saves the trainer's pass; the ratio then includes the age of the tokens, and replaces the
    correction. KL in the reward and a teacher are also compared with it."""
    off_policy_mask: float | None = Field(None, ge=0)
    """Threshold in nats per token. Tokens with a negative advantage have no policy loss if the mean
    over their sequence of (sampler's log-prob - policy's log-prob) exceeds it (DeepSeek-V3.2, arXiv
    2512.02556). None: no mask."""

    @property
    def reduces_over_samples(self) -> bool:
        """True if the loss of a token depends on all tokens of its sample, so that the rows of a
        sample must be in one micro-batch."""
        by_sample = self.correction is not None and self.correction.level != "token"
        by_sample = by_sample or self.off_policy_mask is not None
        return by_sample or self.policy_loss.kind in ("gspo", "vespo")

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
        if self.policy_loss.kind in ("gspo", "sapo"):
            return "sequence_mean", f"of policy_loss={self.policy_loss.kind}"
        if self.advantage.kind == "dr_grpo":
            return "sequence_sum_constant", "of advantage=dr_grpo"
        return "token_mean", "the default"
