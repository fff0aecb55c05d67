"""Distance of the policy from the reference: estimators per token, controllers of its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d = logprobs - ref_logprobs per token: unbiased, may be negative. Any one shape.

    Source of all three: http://joschu.net/blog/kl-approx.html. Tokens must have been drawn from the
    policy.
    """
    return at_least_fp32(logprobs) - at_least_fp32(ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2 per token: biased as a number, but its gradient is that of the KL. Any one shape."""
    return 0.5 * k1(logprobs, ref_logprobs).square()


MAX_GAP = 10.0
"""In nats. :func:`k3` is a straight line beyond it: its slope at d = -10 is -22025 already, and
exp(-d) is infinite in fp32 from d = -89 on. (Some libraries clamp the value at 10 instead; its
gradient is then 0 from d = -2.6 on, so the tokens that are furthest away are not pulled back.)"""


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d per token: unbiased and never negative. Any one shape.

    Below d = -:data:`MAX_GAP` the tangent at that point, as a loss and as a metric: the gradient is
    at most exp(MAX_GAP) - 1 in size, and the value is finite and less than that of the estimator.
    ``expm1`` keeps its digits where d is small. Entries outside a mask must be finite if a gradient
    is taken (engines give 0 there).
    """
    d = k1(logprobs, ref_logprobs)
    near = d.clamp(min=-MAX_GAP)
    beyond = near - d  # 0 within the limit; infinite d stays infinite
    return torch.where(beyond > 0, beyond * math.expm1(MAX_GAP), 0.0) + torch.expm1(-near) + near


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name in ``algorithm.kl.estimator``: f(logprobs, ref_logprobs) -> per token."""


class KlController(Protocol):
    """Controls the weight of the KL term over a run. Its state is part of the checkpoint."""

    coef: float

    def update(self, kl: float, num_samples: int) -> None:
        """Update the weight after a rollout with mean KL ``kl`` over ``num_samples`` samples."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return the state for :meth:`load_state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from :meth:`state_dict`."""
        ...


class FixedKl:
    """A constant weight: that of the recipe, even if a run is resumed."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_samples: int) -> None:
        """Do nothing: the weight is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Return no state: the recipe has the weight."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the saved state."""


class AdaptiveKl:
    """A weight that steers the mean KL to ``target``: increased if the KL is above, decreased if
    below.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon).
    Source: Ziegler 2019, arXiv 1909.08593, section 2.2.
    """

    MAX_ERROR = 0.2

    def __init__(self, coef: float, *, target: float, horizon: int) -> None:
        self.coef = self.init_coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Update the weight after a rollout of ``num_samples`` samples with mean KL ``kl``.

        A KL that is not finite (every step of the rollout was skipped) has no effect. Raises
        ValueError if the rollout is so large relative to the horizon that the weight could drop to
        0 or below.
        """
        if self.MAX_ERROR * num_samples >= self.horizon:
            raise ValueError(
                f"the horizon {self.horizon} is too short for rollouts of {num_samples} samples: "
                "one update could bring the KL weight to 0 or below; set "
                "algorithm.kl.adaptive.horizon above "
                f"{math.ceil(self.MAX_ERROR * num_samples)} ({10 * num_samples} is smooth)"
            )
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the current and the initial weight."""
        return {"coef": self.coef, "init_coef": self.init_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the weight if it has the same initial weight.

        Any other state (of a fixed weight, or with another initial weight) comes from another
        recipe and is ignored.
        """
        same = state.get("init_coef") == self.init_coef
        self.coef = state["coef"] if same else self.init_coef
