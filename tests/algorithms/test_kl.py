"""KL estimators against exact divergences, and controllers that move and resume."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from burnish.algorithms import KL_ESTIMATORS
from burnish.algorithms.kl import AdaptiveKl, FixedKl, k1, k2, k3

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def two_distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [7] of two distributions over 7 tokens, fp64."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 7, generator=g, dtype=torch.float64).log_softmax(-1))


def test_estimators_by_hand() -> None:
    """p 1/2, reference 1/4: d = ln 2 = 0.693147; d^2 / 2 = 0.240227; 1/2 - 1 + d = 0.193147."""
    logprobs, ref = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    found = {name: f(logprobs, ref).item() for name, f in KL_ESTIMATORS.items()}
    # 1e-6: six written decimals
    assert found == pytest.approx({"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}, abs=1e-6)


@pytest.mark.parametrize("f", [k1, k2, k3])
def test_equal_logprobs_have_kl_zero(f) -> None:
    x = torch.tensor([-1.5, -0.1, -20.0])
    assert f(x, x).tolist() == [0, 0, 0]


@quick
@given(seed=seeds)
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(seed: int) -> None:
    """The sum over all tokens of p(token) x estimate is the exact KL."""
    p, q = two_distributions(seed)
    exact = (p.exp() * (p - q)).sum()
    for f in (k1, k3):
        # 1e-12: fp64 rounding of 7 terms
        torch.testing.assert_close((p.exp() * f(p, q)).sum(), exact, atol=1e-12, rtol=0)
    assert (k3(p, q) >= 0).all()


def test_the_mean_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero() -> None:
    """E_p[grad d] = sum p grad log p = 0; E_p[d grad d] = sum p d grad log p = grad KL."""
    _, q = two_distributions(3)
    logits = torch.randn(7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logits.requires_grad_()
    p = logits.log_softmax(-1)
    weights = p.detach().exp()
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((weights * k2(p, q)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((weights * k1(p, q)).sum(), logits)
    # 1e-12: fp64 rounding of 7 terms
    torch.testing.assert_close(of_k2, exact, atol=1e-12, rtol=0)
    torch.testing.assert_close(of_k1, torch.zeros_like(exact), atol=1e-12, rtol=0)


def test_k3_is_accurate_for_close_policies() -> None:
    """d = 2^-12: d^2 / 2 - d^3 / 6 = 2.9800e-8 - 2.4e-12; fp32 exp(-d) is rounded at 6e-8."""
    d = 2.0**-12
    found = k3(torch.tensor([d]), torch.zeros(1)).item()
    # 1e-3: expm1 is rounded at 6e-8 of d, which is 5e-4 of d^2 / 2
    assert found == pytest.approx(d * d / 2 - d**3 / 6, rel=1e-3)


@pytest.mark.parametrize("f", [k1, k2, k3])
def test_bf16_logprobs_are_subtracted_in_fp32(f) -> None:
    x, y = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0078125]).bfloat16()
    assert f(x, y).dtype == torch.float32
    assert torch.equal(f(x, y), f(x.float(), y.float()))


@pytest.mark.parametrize("f", [k1, k2, k3])
def test_gradients_agree_with_finite_differences(f) -> None:
    p, q = two_distributions(5)
    assert gradcheck(f, (p.requires_grad_(), q.requires_grad_()))


def test_a_fixed_weight_is_constant() -> None:
    kl = FixedKl(0.05)
    kl.update(100.0, 1000)
    assert kl.coef == 0.05


def test_the_adaptive_weight_by_hand() -> None:
    """Target 6, horizon 1000, 100 samples: KL 6.6 is an error of 0.1, so x 1.01; KL 60 is clipped
    to 0.2, so x 1.02; KL 3 is clipped to -0.2, so x 0.98; KL 6 does not change the weight."""
    kl = AdaptiveKl(0.2, target=6.0, horizon=1000)
    expected = 0.2
    for measured, factor in [(6.6, 1.01), (60.0, 1.02), (3.0, 0.98), (6.0, 1.0)]:
        kl.update(measured, 100)
        expected *= factor
        # 1e-12: fp64 rounding
        assert kl.coef == pytest.approx(expected, rel=1e-12)


def test_the_adaptive_weight_brings_the_kl_to_its_target() -> None:
    """A policy whose KL is 0.01 / coef is on target 0.1 at coef 0.1."""
    kl = AdaptiveKl(1.0, target=0.1, horizon=1000)
    for _ in range(200):
        kl.update(0.01 / kl.coef, 100)
    # 1e-3: 200 updates of at most 2 % bring it from 1.0 to near 0.1, then it closes in by 10 % each
    assert kl.coef == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_a_non_finite_kl_does_not_change_the_weight(measured: float) -> None:
    kl = AdaptiveKl(0.2, target=6.0, horizon=1000)
    kl.update(measured, 100)
    assert kl.coef == 0.2


def test_a_horizon_too_short_for_the_rollout_is_refused() -> None:
    """1 - 0.2 x 50 / 10 = 0 would end the penalty for good."""
    kl = AdaptiveKl(0.2, target=6.0, horizon=10)
    with pytest.raises(ValueError, match=r"adaptive\.horizon above 10"):
        kl.update(6.0, 50)
    AdaptiveKl(0.2, target=6.0, horizon=11).update(0.0, 50)


def adaptive(coef: float, target: float = 6.0) -> AdaptiveKl:
    return AdaptiveKl(coef, target=target, horizon=1000)


def test_a_resumed_adaptive_weight_continues_exactly() -> None:
    first, second = adaptive(0.2), adaptive(0.2)
    first.update(7.3, 10)
    second.load_state_dict(first.state_dict())
    assert second.coef != 0.2
    for controller in (first, second):
        controller.update(5.1, 10)
    assert first.coef == second.coef


def test_a_resumed_adaptive_weight_follows_a_new_target() -> None:
    """The weight is the saved one, 0.2 x 1.02; target 60 is far above a KL of 6, so x 0.98."""
    first, second = adaptive(0.2), adaptive(0.2, target=60.0)
    first.update(60.0, 100)
    second.load_state_dict(first.state_dict())
    second.update(6.0, 100)
    assert second.coef == pytest.approx(0.2 * 1.02 * 0.98, rel=1e-12)


@pytest.mark.parametrize("resumed", [FixedKl, adaptive])
@pytest.mark.parametrize("saved", [FixedKl(0.0), FixedKl(0.2), adaptive(0.2)])
def test_a_weight_changed_in_the_recipe_overrides_the_checkpoint(saved, resumed) -> None:
    """For any saved kind of weight, even if the resumed one has changed since (as in a rollback to
    a checkpoint)."""
    saved.update(60.0, 100)
    controller = resumed(0.1)
    controller.update(60.0, 100)
    controller.load_state_dict(saved.state_dict())
    assert controller.coef == 0.1


def test_a_fixed_weight_overrides_a_saved_adaptive_one() -> None:
    """Even if the recipe has the initial value of the adaptive one."""
    saved, controller = adaptive(0.2), FixedKl(0.2)
    saved.update(60.0, 100)
    controller.load_state_dict(saved.state_dict())
    assert controller.coef == 0.2
