"""Mixtures of experts: the load balance of experts, and a loss that improves it.

Source: Switch Transformers (arXiv 2101.03961, equations 4 to 6), for top-k routing and with the
tokens of all layers taken together, as in transformers' ``load_balancing_loss_func``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32


def load_balancing_loss(router_logits: Tensor, chosen: Tensor) -> Tensor:
    """E x sum over experts of f_e P_e, a scalar.

    ``router_logits`` [L, M, E]: router outputs of L layers for M tokens, without padding.
    ``chosen`` [L, M, k]: ids of the k experts of every token, which need not have the largest
    logits. f_e: tokens that were sent to expert e, over the L x M tokens (no gradient, sums to k).
    P_e: mean probability of e (gradient, sums to 1). A uniform distribution gives k, the minimum
    for evenly distributed choices; all tokens on the same experts give up to E.
    """
    num_experts = router_logits.shape[-1]
    probs = at_least_fp32(router_logits).softmax(-1)
    share = expert_loads(chosen, num_experts).mean(0) * chosen.shape[-1] / num_experts
    return num_experts * (share * probs.mean((0, 1))).sum()


@torch.no_grad()
def expert_loads(chosen: Tensor, num_experts: int) -> Tensor:
    """[L, E]: tokens of each expert over those of an even spread (M x k / E), from the experts
    ``chosen`` [L, M, k]. 1: even; 0: no token; at most E / k."""
    layers, tokens, each = chosen.shape
    ids = chosen.flatten(1).long()  # [L, M * k]
    counts = torch.zeros(layers, num_experts, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
    return counts * num_experts / (tokens * each)
