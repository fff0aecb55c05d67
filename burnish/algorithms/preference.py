"""Losses on preferences: [N] in, [N] out, no denominators.

They compare two responses to a prompt: ``bradley_terry`` takes a reward model's scores, the others
take log-probs of responses, summed over their tokens. ``kto`` takes single responses labeled as
desirable or not. Outputs of the reference model are constants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from burnish.tensors import at_least_fp32


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of the preference [N]: L = -log sigmoid(chosen - rejected - margin).

    ``chosen``, ``rejected`` [N]: scores of a reward model; ``margins`` [N]: by how much the chosen
    one should win (None: 0). ln 2 where both score the same. Sources: Bradley and Terry 1952; arXiv
    2203.02155 (equation 1); margins: arXiv 2307.09288 (equation 2).
    """
    difference = at_least_fp32(chosen) - at_least_fp32(rejected)
    return -logsigmoid(difference if margins is None else difference - margins)


def log_exp(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Bradley-Terry without margins, as it is often written [N]:
    L = log(1 + exp(rejected - chosen))."""
    return softplus(at_least_fp32(rejected) - at_least_fp32(chosen))


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The square of the pair's sum [N], which Bradley-Terry leaves open: keeps scores around 0.

    Source: arXiv 2312.09244 (equation 2)."""
    return (at_least_fp32(chosen) + at_least_fp32(rejected)).square()


def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Direct preference optimization [N]: L = -log sigmoid(beta h).

    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected), of log-probs summed over
    the response [N]. ln 2 while the policy is the reference. Source: arXiv 2305.18290 (equation 7).
    """
    return -logsigmoid(beta * _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected))


def cdpo(  # house: ok the terms of the equation
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Conservative DPO [N]: labels are wrong with probability e = ``label_smoothing``.

    L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h as in :func:`dpo`. Least where
    sigmoid(beta h) = 1 - e. Source: https://ericmitchell.ai/cdpo.pdf (equation 3).
    """
    scaled = beta * _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)


def ipo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Identity preference optimization [N]: L = (h - 1 / (2 beta))^2, h as in :func:`dpo`.

    Pulls h towards a gap of 1 / (2 beta), while DPO increases it without bound. Some use log-probs
    that are means over the response instead of sums. Source: arXiv 2310.12036 (equation 17).
    """
    gap = _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (gap - 1 / (2 * beta)).square()


def simpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Simple preference optimization [N], without a reference: L = -log sigmoid(beta d - gamma).

    d = mean_chosen - mean_rejected, of log-probs that are MEANS over the response [N]; ``gamma`` is
    the margin to win by. Source: arXiv 2405.14734 (equation 6).
    """
    difference = at_least_fp32(mean_chosen) - at_least_fp32(mean_rejected)
    return -logsigmoid(beta * difference - gamma)


def orpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float) -> Tensor:
    """Odds-ratio preference optimization [N], without a reference:
    L = -m_c - beta log sigmoid(log odds(m_c) - log odds(m_r)), odds(m) = e^m / (1 - e^m).

    m: log-probs that are MEANS over the response [N], below 0. The first term is the language-model
    loss of the chosen response. Source: arXiv 2403.07691 (equations 4 to 7; beta is its lambda).
    """
    chosen, rejected = at_least_fp32(mean_chosen), at_least_fp32(mean_rejected)
    return -chosen - beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(  # house: ok the terms of the equation
    policy: Tensor,
    ref: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization [N], of single responses labeled as desirable or not.

    r = policy - ref (sums over the response); desirable: w_d (1 - sigmoid(beta (r - z)));
    undesirable: w_u (1 - sigmoid(beta (z - r))), z = max(``kl``, 0), a constant.

    ``desirable`` [N] bool. ``kl``: estimate of KL(policy, reference) in nats per response, see
    :func:`mismatched_kl`. Source: arXiv 2402.01306 (equation 8).
    """
    ratio = at_least_fp32(policy) - at_least_fp32(ref.detach())
    point = kl.to(ratio) if isinstance(kl, Tensor) else ratio.new_full((), kl)
    point = point.detach().clamp(min=0)
    liked = desirable_weight * (1 - torch.sigmoid(beta * (ratio - point)))
    disliked = undesirable_weight * (1 - torch.sigmoid(beta * (point - ratio)))
    return torch.where(desirable, liked, disliked)


def mismatched_kl(policy: Tensor, ref: Tensor) -> Tensor:
    """KTO's reference point, a scalar: max(0, mean of policy - ref) over responses [N] to
    mismatched prompts (log-probs summed over the response). No gradient. 0 if N is 0. Source: arXiv
    2402.01306 (section 4.1)."""
    difference = at_least_fp32(policy.detach()) - at_least_fp32(ref.detach())
    return difference.sum().div(max(difference.numel(), 1)).clamp(min=0)


PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "bradley_terry": bradley_terry,
    "log_exp": log_exp,
    "dpo": dpo,
    "cdpo": cdpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}
"""Losses by name. The keywords are the fields of the config node except for ``kind`` and
``mean_logprobs``. The positional arguments, all [N] over pairs, are

============== ===================================================================================
dpo, cdpo, ipo ``policy_chosen, policy_rejected, ref_chosen, ref_rejected``: log-probs summed
               over the response (ipo with ``mean_logprobs``: means)
simpo, orpo    ``mean_chosen, mean_rejected``: means over the response, no reference
bradley_terry  ``chosen, rejected``: scores of a reward model; keyword ``margins``
log_exp        ``chosen, rejected``: the same, no keyword
kto            ``policy, ref, desirable``, [N] over single responses; keyword ``kl`` besides
============== ===================================================================================
"""


def _gap(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    """Return the policy's log-ratio of the pair minus that of the reference, in nats."""
    chosen = at_least_fp32(policy_chosen) - at_least_fp32(ref_chosen.detach())
    return chosen - (at_least_fp32(policy_rejected) - at_least_fp32(ref_rejected.detach()))


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0; log p = 0 counts as the nearest number below."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return below - torch.log(-torch.expm1(below))
