"""Config of the losses of the job preference: one class per group of kinds with equal options."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node, named_kind

PairKind = Literal["hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"]
"""Preference losses without an option of their own besides beta."""


class _Loss(Node):
    """Facts of a loss that the job and its rules ask for."""

    is_paired: ClassVar[bool] = True
    """False for a loss of single responses with labels."""
    needs_reference: ClassVar[bool] = True
    ranks_pairs: ClassVar[bool] = False
    """True if it compares log-ratios of equal rank in the step, instead of those of one pair."""

    @property
    def by_mean(self) -> bool:
        """Return whether it takes mean log-probs per token instead of sums."""
        return False


class DpoLoss(_Loss):
    """Direct preference optimization (arXiv 2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    mean_logprobs: bool = False
    """Use mean log-probs per token instead of sums (length-normalized DPO)."""

    @property
    def by_mean(self) -> bool:
        return self.mean_logprobs


class PairLoss(_Loss):
    """Losses of a pair and a reference whose only option is beta."""

    kind: PairKind
    """hinge: SLiC, arXiv 2305.10425. nca_pair: noise contrastive alignment, arXiv 2402.05369.
    bco_pair: binary classifier, arXiv 2404.04656. sppo_hard: self-play, arXiv 2405.00675. apo_zero,
    apo_down: anchored, for chosen responses better or worse than the model's, arXiv 2408.06266."""
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""


class NoisyPairLoss(_Loss):
    """DPO for noisy labels (https://ericmitchell.ai/cdpo.pdf, arXiv 2403.00409)."""

    kind: Literal["cdpo", "robust"]
    """cdpo: cross-entropy of the noisy label. robust: an unbiased estimate of DPO's loss on labels
    without noise."""
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Probability that a pair's label is wrong."""


class ExoLoss(_Loss):
    """Efficient exact optimization (arXiv 2402.00856)."""

    kind: Literal["exo_pair"]
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    label_smoothing: float = Field(1e-3, gt=0, lt=0.5)
    """Probability that a pair's label is wrong. Above 0: the loss divides by it."""


class AotLoss(_Loss):
    """Alignment by optimal transport: compares the distributions of a step rank by rank (arXiv
    2406.05882)."""

    ranks_pairs: ClassVar[bool] = True

    kind: Literal["aot", "aot_unpaired"]
    """aot: the gaps of the policy and of the reference. aot_unpaired: the log-ratios of chosen and
    rejected responses."""
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a comparison of equal rank is wrong."""


class DiscopopLoss(_Loss):
    """DiscoPOP, a mixture of the logistic and the exponential loss (arXiv 2406.08414)."""

    kind: Literal["discopop"]
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    tau: float = Field(0.05, gt=0, le=1)
    """Temperature of the mixture: the exponential loss has the weight sigmoid(beta h / tau), h the
    gap of log-ratios."""


class IpoLoss(_Loss):
    """Identity preference optimization (arXiv 2310.12036)."""

    kind: Literal["ipo"]
    beta: float = Field(0.1, gt=0)
    """The target of the gap between the two log-ratios is 1 / (2 beta)."""
    mean_logprobs: bool = False
    """Use mean log-probs per token instead of sums, as in some other libraries."""

    @property
    def by_mean(self) -> bool:
        return self.mean_logprobs


class SimpoLoss(_Loss):
    """Simple preference optimization: mean log-probs and a margin, no reference model (arXiv
    2405.14734)."""

    needs_reference: ClassVar[bool] = False

    kind: Literal["simpo"]
    beta: float = Field(2.0, gt=0)
    """Scale of the difference of mean log-probs."""
    gamma: float = Field(1.0, ge=0)
    """Margin of the chosen response over the rejected one."""

    @property
    def by_mean(self) -> bool:
        return True


class OrpoLoss(_Loss):
    """Odds-ratio preference optimization: the chosen response's language-model loss plus a penalty,
    no reference model (arXiv 2403.07691)."""

    needs_reference: ClassVar[bool] = False

    kind: Literal["orpo"]
    beta: float = Field(0.1, gt=0)
    """Weight of the odds-ratio term (the paper's lambda)."""

    @property
    def by_mean(self) -> bool:
        return True


class KtoLoss(_Loss):
    """Kahneman-Tversky optimization of single labeled responses (arXiv 2402.01306)."""

    is_paired: ClassVar[bool] = False

    kind: Literal["kto"]
    beta: float = Field(0.1, gt=0)
    """KL weight of the implicit reward. Larger values keep the policy closer to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable responses. The paper recommends a ratio (desirable_weight x number of
    desirable) / (undesirable_weight x number of undesirable) of 1 to 1.33."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable responses."""


class FDivergence(Node):
    """A divergence without settings. reverse_kl: DPO's own. js: Jensen-Shannon."""

    short_key = "kind"
    alpha: ClassVar[float] = 0.5

    kind: Literal["reverse_kl", "forward_kl", "js"] = "reverse_kl"


class AlphaDivergence(Node):
    """The alpha-divergence."""

    short_key = "kind"

    kind: Literal["alpha"]
    alpha: float = Field(0.5, gt=0, lt=1)
    """Order, between 0 (reverse_kl) and 1 (forward_kl)."""


DivergenceConfig = Annotated[
    Annotated[FDivergence | AlphaDivergence, Field(discriminator="kind")],
    named_kind(),
]


PreferenceLossConfig = Annotated[
    Annotated[
        DpoLoss
        | NoisyPairLoss
        | IpoLoss
        | PairLoss
        | ExoLoss
        | DiscopopLoss
        | AotLoss
        | SimpoLoss
        | OrpoLoss
        | KtoLoss,
        Field(discriminator="kind"),
    ],
    named_kind(),
]
