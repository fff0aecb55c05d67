"""Divergences of a student from its teacher: hand-worked sums, finite differences, their slopes,
TRL's generalised JSD; and the on-policy advantage."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms import ADVANTAGES, DIVERGENCES
from burnish.algorithms.distill import (
    SLOPES,
    distill_loss,
    forward_kl,
    forward_kl_slope,
    jsd,
    jsd_slope,
    reverse_kl,
)

LN2, LN3 = math.log(2), math.log(3)
ALL: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    name: (DIVERGENCES[name], SLOPES[name]) for name in ("forward_kl", "reverse_kl")
} | {f"jsd {b}": (partial(jsd, beta=b), partial(jsd_slope, beta=b)) for b in (0.1, 0.5, 0.9)}


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def pair(seed: int, *, rows: int = 4, size: int = 7) -> tuple[Tensor, Tensor]:
    """Logits of a student, log-probs of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, rows, size, generator=generator, dtype=torch.float64) * 2
    return student, teacher.log_softmax(-1)


HALVES, QUARTER = logs(0.5, 0.5), logs(0.25, 0.75)


def test_forward_kl_by_hand() -> None:
    """Teacher 1/2, 1/2; student 1/4, 3/4: (ln 2 + ln 2/3) / 2 = (ln 4/3) / 2 = 0.143841."""
    # 1e-12: fp64
    assert forward_kl(QUARTER, HALVES).item() == pytest.approx(math.log(4 / 3) / 2, abs=1e-12)


def test_reverse_kl_by_hand() -> None:
    """Student 1/4, 3/4; teacher 1/2, 1/2: (ln 1/2) / 4 + 3 (ln 3/2) / 4 = 0.130812."""
    expected = -LN2 / 4 + 3 * math.log(1.5) / 4
    assert reverse_kl(QUARTER, HALVES).item() == pytest.approx(expected, abs=1e-12)


def test_jsd_by_hand() -> None:
    """Student 1, 0 (nearly), teacher 0, 1, beta 1/2: m = 1/2, 1/2 and both KLs are ln 2. Beta 1/4:
    m = 3/4 for the student's token, 1/4 for the teacher's: ln(4) / 4 + 3 ln(4/3) / 4 = 0.562335."""
    student, teacher = logs(1.0, 1e-200), logs(1e-200, 1.0)
    assert jsd(student, teacher, beta=0.5).item() == pytest.approx(LN2, abs=1e-12)
    expected = math.log(4) / 4 + 3 * math.log(4 / 3) / 4
    assert jsd(student, teacher, beta=0.25).item() == pytest.approx(expected, abs=1e-12)
    # student 1/4 3/4, teacher 1/2 1/2, beta 1/2: m = 3/8 5/8
    by_hand = 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(0.8))
    by_hand += 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(1.2))
    assert jsd(QUARTER, HALVES, beta=0.5).item() == pytest.approx(by_hand, abs=1e-12)


def test_slopes_by_hand() -> None:
    """Forward: p - q = -1/4, 1/4. JSD at beta 1/2, with p = 1/4, 3/4 and m = 3/8, 5/8: a = ln 2/3,
    ln 6/5; KL(p || m) = a.p = 0.035376; slope p (a - KL) / 2 = -0.055105, 0.055105."""
    assert forward_kl_slope(QUARTER, HALVES).tolist() == [pytest.approx([-0.25, 0.25], abs=1e-12)]
    mean = 0.25 * math.log(2 / 3) + 0.75 * math.log(1.2)
    first = 0.25 * (math.log(2 / 3) - mean) / 2
    found = jsd_slope(QUARTER, HALVES, beta=0.5)
    assert found.tolist() == [pytest.approx([first, -first], abs=1e-12)]
    assert first == pytest.approx(-0.055105, abs=1e-6)  # six written decimals


@pytest.mark.parametrize("name", ALL)
def test_a_student_that_is_its_teacher_has_divergence_and_slope_zero(name: str) -> None:
    value, slope = ALL[name]
    _, log_q = pair(0)
    # 1e-15: sums of rounding errors of fp64 numbers of size 1
    assert value(log_q, log_q).abs().max() <= 1e-15
    assert slope(log_q, log_q).abs().max() <= 1e-15


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences_and_the_slope(name: str, seed: int) -> None:
    value, slope = ALL[name]
    logits, log_q = pair(seed)
    logits.requires_grad_()
    assert gradcheck(lambda z: value(z.log_softmax(-1), log_q), (logits,))
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((weights * value(logits.log_softmax(-1), log_q)).sum(), logits)
    ours = weights[:, None] * slope(logits.detach().log_softmax(-1), log_q)
    torch.testing.assert_close(ours, grad, atol=1e-12, rtol=0)  # fp64


@pytest.mark.parametrize("name", ALL)
def test_every_divergence_is_positive_and_the_order_of_tokens_does_not_matter(name: str) -> None:
    value, _ = ALL[name]
    logits, log_q = pair(5)
    log_p = logits.log_softmax(-1)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    found = value(log_p, log_q)
    assert bool((found > 0).all())
    torch.testing.assert_close(value(log_p[:, order], log_q[:, order]), found)  # fp64
    assert not torch.allclose(value(log_p, log_q[:, order]), found)


def test_jsd_is_symmetric_at_one_half_bounded_and_turns_into_both_kls() -> None:
    logits, log_q = pair(2)
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(jsd(log_p, log_q, beta=0.5), jsd(log_q, log_p, beta=0.5))
    assert bool((jsd(log_p, log_q, beta=0.5) <= LN2).all())
    torch.testing.assert_close(jsd(log_p, log_q, beta=0.3), jsd(log_q, log_p, beta=0.7))
    # 1e-4: beta itself, times second derivatives of size up to some tens
    forward, reverse = forward_kl(log_p, log_q), reverse_kl(log_p, log_q)
    torch.testing.assert_close(jsd(log_p, log_q, beta=1e-6) / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(jsd(log_p, log_q, beta=1 - 1e-6) / 1e-6, reverse, rtol=1e-4, atol=0)


def test_the_mix_with_the_data_by_hand() -> None:
    """D 0.5, log-prob -2, T 3, w 1/4: 3/4 x 9 x 0.5 + 2/4 = 3.875. w 0: 4.5."""
    d, logprob = torch.tensor([0.5]), torch.tensor([-2.0])
    assert distill_loss(d, logprob, temperature=3.0, nll_weight=0.25).tolist() == [3.875]
    assert distill_loss(d, logprob, temperature=3.0, nll_weight=0.0).tolist() == [4.5]


def test_the_squared_temperature_keeps_the_gradient_scale() -> None:
    """For high T the gradient of T^2 KL(q_T || p_T) in the logits z goes to (z - z_teacher) / V,
    both of mean 0 (arXiv 1503.02531, section 2.1)."""
    logits, teacher = pair(3)[0], pair(4)[0]
    logits, teacher = (x - x.mean(-1, keepdim=True) for x in (logits, teacher))
    t = 1e4
    slope = forward_kl_slope((logits / t).log_softmax(-1), (teacher / t).log_softmax(-1))
    # d/dz of T^2 D(z / T) is T x slope; 1e-3: the next order is 1/T of numbers of size up to 6
    torch.testing.assert_close(t * slope, (logits - teacher) / 7, atol=1e-3, rtol=0)


def test_the_on_policy_advantage_by_hand() -> None:
    """Policy ln 1/2, teacher ln 1/4: -ln 2. Policy ln 1/3, teacher 1: ln 3. Outside of the mask 0,
    for any value."""
    old = torch.tensor([[-LN2, -LN3, float("nan")]])
    teacher = torch.tensor([[-2 * LN2, 0.0, float("inf")]])
    mask = torch.tensor([[True, True, False]])
    found = ADVANTAGES["on_policy_distill"](old, teacher, mask)
    assert found.tolist() == [pytest.approx([-LN2, LN3, 0.0], abs=1e-6)]  # fp32


def test_the_policy_gradient_of_the_on_policy_advantage_is_that_of_the_reverse_kl() -> None:
    """Summed over all tokens, each with its probability: the expectation without sampling."""
    logits, log_q = pair(6, rows=1)
    logits.requires_grad_()
    log_p = logits.log_softmax(-1)
    everything = torch.ones(7, dtype=torch.bool)
    advantage = ADVANTAGES["on_policy_distill"](log_p[0].detach(), log_q[0], everything)
    surrogate = -(log_p[0].detach().exp() * advantage * log_p[0]).sum()
    (ours,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(reverse_kl(log_p, log_q).sum(), logits)
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=0)  # fp64


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_trl_finds_the_same_value_and_gradient(beta: float, temperature: float) -> None:
    """Beta 0 and 1 are its forward and reverse KL. (It has no T^2.)"""
    pytest.importorskip("trl")
    gkd = pytest.importorskip("trl.experimental.gkd")
    logits, teacher = (torch.randn(1, 5, 9, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[3, 1, -100, 2, 2]])
    kept = labels[0] != -100
    logits.requires_grad_()
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        logits, teacher, labels=labels, beta=beta, temperature=temperature, reduction="sum"
    )
    log_p, log_q = ((x[0] / temperature).log_softmax(-1) for x in (logits, teacher))
    named = {0.0: forward_kl, 1.0: reverse_kl}
    ours = named.get(beta, partial(jsd, beta=beta))(log_p, log_q)[kept].sum()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)  # fp64
    (their_grad,) = torch.autograd.grad(theirs, logits)
    (our_grad,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(our_grad, their_grad, atol=1e-12, rtol=0)


def test_the_registries_have_exactly_the_documented_names() -> None:
    assert set(DIVERGENCES) == set(SLOPES) == {"forward_kl", "reverse_kl", "jsd"}


def test_with_weight_zero_the_data_tokens_are_not_read() -> None:
    """0 x -inf would be NaN. T = 2, D = 0.5: 4 x 0.5."""
    impossible = torch.tensor([-math.inf])
    out = distill_loss(torch.tensor([0.5]), impossible, temperature=2.0, nll_weight=0.0)
    assert out.tolist() == [2.0]
