"""Mixtures of experts: the load balance of experts, and a loss that improves it.

Source: Switch Transformers (arXiv 2101.03961, equations 4 to 6), for top-k routing and with the
tokens of all layers taken together, as in transformers' ``load_balancing_loss_func``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32


def load_balancing_loss(router_logits: Tensor, *, top_k: int) -> Tensor:
    """E x sum over experts of f_e P_e, a scalar.

    ``router_logits`` [L, M, E]: router outputs of L layers for M tokens, without padding.
    f_e: tokens that chose expert e among their ``top_k``, over the L x M tokens (no gradient, sums
    to top_k). P_e: mean probability of e (gradient, sums to 1). A uniform distribution gives top_k,
    the minimum for evenly distributed choices; all tokens on the same experts give up to E.
    """
    probs = at_least_fp32(router_logits).softmax(-1)
    share = expert_loads(router_logits, top_k=top_k).mean(0) * top_k / router_logits.shape[-1]
    return router_logits.shape[-1] * (share * probs.mean((0, 1))).sum()


@torch.no_grad()
def expert_loads(router_logits: Tensor, *, top_k: int) -> Tensor:
    """[L, E]: tokens of each expert over those of an even spread (M x top_k / E). 1: even; 0: no
    token; at most E / top_k."""
    layers, tokens, experts = router_logits.shape
    chosen = router_logits.topk(top_k, dim=-1).indices.flatten(1)  # [L, M * k]
    counts = torch.zeros(layers, experts, device=chosen.device)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
    return counts * experts / (tokens * top_k)
