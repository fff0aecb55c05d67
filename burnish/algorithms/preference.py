"""Losses on preferences: [N] in, [N] out, no denominators.

They compare two responses to a prompt: ``bradley_terry`` takes a reward model's scores, the others
take log-probs of responses, summed over their tokens. ``kto`` takes single responses labeled as
desirable or not. Outputs of the reference model are constants.

Losses of DPO's form use c = policy_chosen - ref_chosen, r = policy_rejected - ref_rejected and
h = c - r, in nats.
"""

from __future__ import annotations

import math
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
    gap = _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return _smoothed(beta * gap, label_smoothing)


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


def hinge(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Hinge loss of the scaled gap [N]: L = max(0, 1 - beta h), with a gradient of 0 at the kink.

    Arguments as :func:`dpo`. Sources: SLiC, arXiv 2305.10425; with a reference: arXiv 2309.06657.
    """
    gap = _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return torch.relu(1 - beta * gap)


def robust(  # house: ok the terms of the equation
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Provably robust DPO [N]: an unbiased estimate of the DPO loss on labels without noise, if a
    label is wrong with probability e = ``label_smoothing`` < 1/2.

    L = (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e). Not bounded below: L
    falls by e beta / (1 - 2 e) per nat of a large h. Source: arXiv 2403.00409.
    """
    scaled = beta * _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    kept, flipped = (
        (1 - label_smoothing) * logsigmoid(scaled),
        label_smoothing * logsigmoid(-scaled),
    )
    return (flipped - kept) / (1 - 2 * label_smoothing)


def exo_pair(  # house: ok the terms of the equation
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Efficient exact optimization of a pair [N]: the reverse KL between the policy's preference
    (q, 1 - q), q = sigmoid(beta h), and the label's (1 - e, e), e = ``label_smoothing`` > 0.

    L = q log(q / (1 - e)) + (1 - q) log((1 - q) / e). 0 if q = 1 - e. Source: arXiv 2402.00856
    (equation 16).
    """
    scaled = beta * _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    won = torch.sigmoid(scaled) * (logsigmoid(scaled) - math.log1p(-label_smoothing))
    return won + torch.sigmoid(-scaled) * (logsigmoid(-scaled) - math.log(label_smoothing))


def nca_pair(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Noise contrastive alignment of a pair [N]:
    L = -log sigmoid(beta c) - (log sigmoid(-beta c) + log sigmoid(-beta r)) / 2.

    The likelihood of the chosen response does not fall without bound. Source: arXiv 2402.05369.
    """
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, scale=beta)
    return -logsigmoid(c) - 0.5 * (logsigmoid(-c) + logsigmoid(-r))


def bco_pair(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Binary classifier optimization of a pair, without the shift of rewards [N]:
    L = -log sigmoid(beta c) - log sigmoid(-beta r). Source: arXiv 2404.04656."""
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, scale=beta)
    return -logsigmoid(c) - logsigmoid(-r)


def sppo_hard(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Self-play preference optimization with win probabilities 1 and 0 [N]:
    L = (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2. Source: arXiv 2405.00675 (equation 4.7; eta is
    1 / beta)."""
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()


def apo_zero(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Anchored preference optimization [N], for chosen responses better than the model's own:
    L = 1 - sigmoid(beta c) + sigmoid(beta r). Source: arXiv 2408.06266 (equation 7)."""
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, scale=beta)
    return torch.sigmoid(-c) + torch.sigmoid(r)


def apo_down(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Anchored preference optimization [N], for chosen responses worse than the model's own:
    L = sigmoid(beta c) + 1 - sigmoid(beta h). Source: arXiv 2408.06266 (equation 8)."""
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, scale=beta)
    return torch.sigmoid(c) + torch.sigmoid(r - c)


def discopop(  # house: ok the terms of the equation
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    tau: float,
) -> Tensor:
    """Discovered preference optimization [N], the log-ratio modulated loss: a mixture of the
    logistic and the exponential loss, with weight m = sigmoid(beta h / tau) of the latter.

    L = -(1 - m) log sigmoid(beta h) + m exp(-beta h), 0 < tau <= 1. Not convex: L has a maximum
    near 0 and falls again for small negative h. m exp(-beta h) is one exponential, because the
    factors overflow. Source: arXiv 2406.08414 (equation 5; tau 0.05).
    """
    scaled = beta * _gap(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    mixture = scaled / tau
    return torch.exp(logsigmoid(mixture) - scaled) - torch.sigmoid(-mixture) * logsigmoid(scaled)


def aot(gaps: Tensor, matched: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Alignment by optimal transport of pairs [N]: the distribution of the policy's gaps exceeds
    that of the reference's, rank by rank.

    L_i = -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), d = gaps_i - matched_i, e =
    ``label_smoothing``. ``gaps`` [N]: policy_chosen - policy_rejected; ``matched`` [N], constants:
    the reference's gap of the same rank in the entire step (``pair_ratios.of_equal_rank``).
    Source: arXiv 2406.05882.
    """
    return _smoothed(beta * (at_least_fp32(gaps) - matched.detach()), label_smoothing)


def aot_unpaired(  # house: ok the terms of the equation
    chosen: Tensor,
    rejected: Tensor,
    matched_rejected: Tensor,
    matched_chosen: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Alignment by optimal transport without pairs [N]: the distribution of the chosen responses'
    log-ratios exceeds that of the rejected ones', rank by rank.

    The form of :func:`aot` with d = c - the r of the same rank. ``chosen``, ``rejected`` [N]: c and
    r; ``matched_rejected`` [N]: for each c the r of the same rank in the entire step, and
    ``matched_chosen`` [N]: for each r the c. The matched numbers are constants, so each response
    has its own gradient, wherever its match is; the value of the second term is 0. Source: arXiv
    2406.05882.
    """
    of_chosen = _smoothed(
        beta * (at_least_fp32(chosen) - matched_rejected.detach()), label_smoothing
    )
    of_rejected = _smoothed(
        beta * (matched_chosen.detach() - at_least_fp32(rejected)), label_smoothing
    )
    return of_chosen + of_rejected - of_rejected.detach()


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
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}
"""Losses by name. The keywords are the fields of the config node except for ``kind`` and
``mean_logprobs``. The positional arguments, all [N] over pairs, are

============= ====================================================================================
dpo to        ``policy_chosen, policy_rejected, ref_chosen, ref_rejected``: log-probs summed over
discopop      the response (dpo and ipo with ``mean_logprobs``: means)
aot           ``gaps, matched``: the policy's gap and the reference's of the same rank
aot_unpaired  ``chosen, rejected, matched_rejected, matched_chosen``: log-ratios, and those of the
              same rank
simpo, orpo   ``mean_chosen, mean_rejected``: means over the response, no reference
bradley_terry ``chosen, rejected``: scores of a reward model; keyword ``margins``
log_exp       ``chosen, rejected``: the same, no keyword
kto           ``policy, ref, desirable``, [N] over single responses; keyword ``kl`` besides
============= ====================================================================================
"""


def _ratios(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return ``scale`` times the log-ratios c and r of policy and reference, in nats."""
    chosen = at_least_fp32(policy_chosen) - at_least_fp32(ref_chosen.detach())
    rejected = at_least_fp32(policy_rejected) - at_least_fp32(ref_rejected.detach())
    return scale * chosen, scale * rejected


def _smoothed(scaled: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross-entropy of a label that is wrong with probability ``label_smoothing``."""
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)


def _gap(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    """Return h: the policy's log-ratio of the pair minus that of the reference, in nats."""
    c, r = _ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return c - r


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p < 0; log p = 0 counts as the nearest number below."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return below - torch.log(-torch.expm1(below))
