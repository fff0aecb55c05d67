"""The balance of experts: by hand, finite differences, and transformers' own loss."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from burnish.algorithms.experts import expert_loads, load_balancing_loss


def logits(seed: int, layers: int = 2, tokens: int = 5, experts: int = 4) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(layers, tokens, experts, generator=g)


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.topk(k, dim=-1).indices


def test_loads_by_hand() -> None:
    """Two layers of two tokens, four experts, top 1. Layer 0: both tokens to expert 2: 2 of an even
    1/2, so 4. Layer 1: experts 0 and 3: 1 of 1/2, so 2 each."""
    x = torch.tensor([[[0.0, 1, 3, 2], [0, 1, 3, 2]], [[3.0, 0, 1, 2], [0, 1, 2, 3]]])
    assert expert_loads(top(x, 1), 4).tolist() == [[0, 0, 4, 0], [2, 0, 0, 2]]
    assert expert_loads(top(x, 2), 4).tolist() == [[0, 0, 2, 2], [1, 0, 1, 2]]
    assert expert_loads(top(x, 2).int(), 4).equal(expert_loads(top(x, 2), 4))


def test_the_loss_counts_the_experts_that_were_chosen_not_those_with_the_largest_logits() -> None:
    """Two tokens with probabilities 3/4 and 1/4, both sent to expert 1: f = (0, 1), so
    2 x 1/4 = 0.5."""
    x = torch.tensor([[[3.0, 1.0], [3.0, 1.0]]]).log()
    chosen = torch.ones(1, 2, 1, dtype=torch.int64)
    assert load_balancing_loss(x, chosen).item() == pytest.approx(0.5, abs=1e-6)  # fp32
    assert expert_loads(chosen, 2).tolist() == [[0, 2]]


def test_the_loss_by_hand() -> None:
    """One layer, one token, two experts with probabilities 3/4 and 1/4, top 1: f = (1, 0), so
    2 x 3/4 = 1.5. Even probabilities and top k give k."""
    x = torch.tensor([[[3.0, 1.0]]]).log()
    # 1e-6: fp32
    assert load_balancing_loss(x, top(x, 1)).item() == pytest.approx(1.5, abs=1e-6)
    even = torch.zeros(3, 4, 6)
    assert load_balancing_loss(even, top(even, 2)).item() == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_it_is_transformers_own_loss(top_k: int) -> None:
    x = logits(top_k)
    theirs = load_balancing_loss_func(tuple(x), 4, top_k)
    # 1e-6: fp32 means in another order
    torch.testing.assert_close(load_balancing_loss(x, top(x, top_k)), theirs, atol=1e-6, rtol=1e-6)


def test_the_gradient_agrees_with_finite_differences_if_no_choice_changes() -> None:
    x = logits(7).double().requires_grad_()
    assert gradcheck(lambda v: load_balancing_loss(v, top(v, 2)), (x,))


def test_half_precision_routers_are_computed_in_fp32() -> None:
    x = logits(3).bfloat16()
    out = load_balancing_loss(x, top(x, 2))
    assert out.dtype == torch.float32 and torch.equal(
        out, load_balancing_loss(x.float(), top(x, 2))
    )
