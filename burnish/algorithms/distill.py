"""Divergences of a student's distribution from a teacher's: [K, V] in, [K] out, no denominators.

``log_p``, ``log_q`` [K, V]: log-probs of student and teacher at the same temperature, over the same
tokens. The teacher is a constant. Every divergence is 0 where the two are equal, positive
elsewhere, and has a *slope*: its gradient in the student's logits z, log p = log softmax(z). As
p sums to 1, the slope of D is p (g - sum_j p_j g_j) with g = dD/dp. It is implemented explicitly,
because the tensors that autograd saves are too large for a vocabulary; ``models/distill.py`` uses
both in chunks of tokens. A token that a distribution excludes (log-prob -inf, such as entries that
only pad a vocabulary) contributes 0 to a sum over that distribution, whatever its probability in
the other one.

Which one to choose: with forward KL the student covers all likely outputs of the teacher, with
reverse KL it avoids outputs that are unlikely for the teacher. The Jensen-Shannon divergence is
between the two, and is bounded (arXiv 2306.13649).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(teacher || student) [K] = sum q (log q - log p), in nats.

    The cross-entropy to the teacher's distribution minus the teacher's entropy, so with the
    gradient of the cross-entropy. Source: arXiv 1503.02531, section 2.
    """
    return _expected(log_q.exp(), log_q - log_p)


def forward_kl_slope(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[K, V] p - q."""
    return log_p.exp().sub_(log_q.exp())


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(student || teacher) [K] = sum p (log p - log q), in nats. Source: arXiv 2306.08543 (there
    of whole responses)."""
    return _expected(log_p.exp(), log_p - log_q)


def reverse_kl_slope(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[K, V] p (log p - log q - D)."""
    return _centred(log_p.exp(), log_p - log_q)


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence [K] = beta KL(q || m) + (1 - beta) KL(p || m), with
    m = beta q + (1 - beta) p.

    Symmetric for ``beta`` 1/2, where it is at most ln 2. Near the ends it goes to 0, and its
    direction to that of forward KL (divided by beta, beta to 0) or of reverse KL (divided by
    1 - beta, beta to 1). Source: arXiv 2306.13649, section 2.
    """
    log_m = _log_mixture(log_p, log_q, beta)
    teachers = _expected(log_q.exp(), log_q - log_m)
    return beta * teachers + (1 - beta) * _expected(log_p.exp(), log_p - log_m)


def jsd_slope(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """[K, V] (1 - beta) p (log p - log m - KL(p || m)): in dD/dp the terms that come by way of m
    add up to a constant."""
    log_m = _log_mixture(log_p, log_q, beta)
    return _centred(log_p.exp(), torch.sub(log_p, log_m, out=log_m)).mul_(1 - beta)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
}
"""Divergences by the name in ``loss`` of the job ``distill``. ``jsd`` has the option ``beta``."""

SLOPES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl_slope,
    "reverse_kl": reverse_kl_slope,
    "jsd": jsd_slope,
}
"""The gradient of each in the student's logits."""


def distill_loss(
    divergence: Tensor, logprobs: Tensor, *, temperature: float, nll_weight: float
) -> Tensor:
    """(1 - w) T^2 D - w log p(token), per token.

    ``divergence`` [M]: of the distributions at ``temperature`` T; ``logprobs`` [M]: of the data's
    own tokens, at temperature 1; w = ``nll_weight``. T^2 keeps the size of the gradient, which
    shrinks with 1/T^2. Source: arXiv 1503.02531, section 2.
    """
    taught = (1 - nll_weight) * temperature**2 * divergence
    return taught - nll_weight * logprobs if nll_weight else taught


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def _expected(p: Tensor, g: Tensor) -> Tensor:
    """[K] sum_j p_j g_j, over the tokens that have a probability. In the memory of ``g``."""
    return g.masked_fill_(p == 0, 0.0).mul_(p).sum(-1)


def _centred(p: Tensor, g: Tensor) -> Tensor:
    """p (g - sum_j p_j g_j), in the memory of both; 0 if p is 0."""
    g.masked_fill_(p == 0, 0.0)
    mean = (p * g).sum(-1, keepdim=True)
    return p.mul_(g.sub_(mean))
