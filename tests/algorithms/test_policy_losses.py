"""Policy losses: each branch of the clip by hand, gradients, and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms import POLICY_LOSSES, reduce
from burnish.algorithms.policy_losses import (
    BY_ROW,
    MAX_LOG_RATIO,
    cispo,
    gspo,
    ppo,
    reinforce,
    sapo,
    token_ratio,
    vespo,
)

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = {
    "ppo": lambda *args: ppo(*args, **CLIP),
    "ppo with dual clip": lambda *args: ppo(*args, **CLIP, dual_clip=1.5),
    "reinforce": reinforce,
    "sapo": lambda *args: sapo(*args, tau_pos=2.0, tau_neg=4.0),
}
WHOLE_GRADIENT = list(LOSSES.values())
"""Those without a part that is held constant, so that differences show their gradient."""
LOSSES["cispo"] = lambda *args: cispo(*args, **CLIP)
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def tokens(seed: int, n: int = 3, t: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, advantages (fp64) and a mask with at least one true entry."""
    g = torch.Generator().manual_seed(seed)
    logprobs, moved, advantages = torch.randn(3, n, t, generator=g, dtype=torch.float64)
    mask = torch.rand(n, t, generator=g) < 0.7
    mask[0, 0] = True
    return logprobs - 2, logprobs - 2 + 0.4 * moved, advantages, mask


def ratios(*values: float) -> Tensor:
    """Log-probs whose ratio to log-probs of 0 is the given one."""
    return torch.tensor(values, dtype=torch.float64).log()


def test_the_registry_has_exactly_the_documented_names() -> None:
    expected = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "sapo": sapo, "vespo": vespo}
    assert expected | {"reinforce": reinforce} == POLICY_LOSSES and {"gspo", "vespo"} == BY_ROW


def test_ppo_takes_the_pessimistic_side_of_the_clip() -> None:
    """clip 0.2 below, 0.3 above; loss = -min(r A, clip(r) A):

    A 2:   r 1.1 inside, -2.2.   r 1.5 clipped to 1.3, -2.6.   r 0.5, -min(1, 1.6) = -1.0.
    A -2:  r 1.5, -min(-3, -2.6) = 3.0.   r 0.5 clipped to 0.8, 1.6.   r 0.9 inside, 1.8.
    Clipped: 2 of 6. Mean ratio (1.1 + 1.5 + 0.5 + 1.5 + 0.5 + 0.9) / 6 = 1.0; largest 1.5.
    """
    logprobs = ratios(1.1, 1.5, 0.5, 1.5, 0.5, 0.9)
    advantages = torch.tensor([2.0, 2, 2, -2, -2, -2])
    mask = torch.ones(6, dtype=torch.bool)
    loss, stats = ppo(logprobs, torch.zeros(6), advantages, mask, **CLIP)
    expected = torch.tensor([-2.2, -2.6, -1.0, 3.0, 1.6, 1.8], dtype=torch.float64)
    # 1e-12: exp(log r) in fp64
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    found = stats.floats()
    assert set(found) == {"clip_frac", "ratio", "approx_kl", "ratio_max"}
    assert found["clip_frac"] == pytest.approx(2 / 6)
    assert found["ratio"] == pytest.approx(1.0)
    assert found["ratio_max"] == pytest.approx(1.5)


def test_dual_clip_bounds_the_loss_for_negative_advantages() -> None:
    """c = 3. r 5, A -2: 10 becomes 3 x 2 = 6. r 2, A -2: 4 stays. r 5, A 2: at 1.3, -2.6 stays."""
    args = (ratios(5, 2, 5), torch.zeros(3), torch.tensor([-2.0, -2, 2]), torch.ones(3).bool())
    loss, stats = ppo(*args, **CLIP, dual_clip=3.0)
    # 1e-12: exp(log r) in fp64
    torch.testing.assert_close(
        loss, torch.tensor([6.0, 4.0, -2.6], dtype=torch.float64), atol=1e-12, rtol=0
    )
    assert stats.floats()["dual_clip_frac"] == pytest.approx(1 / 3)


def test_the_kl_of_the_stats_is_k3_from_old_to_new() -> None:
    """r = 2: r - 1 - ln r = 0.306853; r = 4: 3 - 1.386294 = 1.613706; mean 0.960279.

    The other direction would be 1/r - 1 + ln r: 0.193147 and 0.636294.
    """
    logprobs = ratios(2.0, 4.0)
    args = (logprobs, torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool))
    for _, stats in (ppo(*args, **CLIP), reinforce(*args)):
        # 1e-6: six written decimals
        assert stats.floats()["approx_kl"] == pytest.approx(0.960279, abs=1e-6)


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    """-(2)(-0.5) = 1 and -(-1)(-3) = -3; the third token is masked."""
    loss, stats = reinforce(
        torch.tensor([-0.5, -3.0, -1.0]),
        torch.tensor([-0.5, -3.0, -9.0]),
        torch.tensor([2.0, -1.0, 5.0]),
        torch.tensor([True, True, False]),
    )
    assert loss.tolist() == [1, -3, 0]
    assert stats.floats() == {"ratio": 1.0, "approx_kl": 0.0, "ratio_max": 1.0}


def test_before_the_first_step_every_loss_has_the_policy_gradient() -> None:
    """At r = 1 the gradient of -r A is -A r = -A, the same as that of -A log p."""
    logprobs, _, advantages, mask = tokens(1)
    for loss in LOSSES.values():
        x = logprobs.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(x, logprobs, advantages, mask)[0].sum(), x)
        assert torch.equal(grad, torch.where(mask, -advantages, 0.0))


def test_a_clipped_token_has_no_gradient() -> None:
    x = ratios(1.5, 0.5, 1.5).requires_grad_()
    loss, _ = ppo(x, torch.zeros(3), torch.tensor([1.0, -1, -1]), torch.ones(3).bool(), **CLIP)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    # d(-r A) / d log p = -r A = 1.5 for the third; 1e-12: exp(log r) in fp64
    torch.testing.assert_close(grad, torch.tensor([0, 0, 1.5]).double(), atol=1e-12, rtol=0)


def test_cispo_weighs_the_score_function_and_drops_no_token() -> None:
    """clip 0.2 below, 0.3 above. r 1.5 -> w 1.3; r 0.5 -> 0.8; r 1.1 stays. log p = ln r.

    L = -w A ln r: A 2: -2 x 1.3 x 0.405465 = -1.054209;  A -1: 0.8 x -0.693147 = -0.554518;
    A 1: -1.1 x 0.095310 = -0.104841. The gradient is -w A: -2.6, 0.8, -1.1. Changed: 2 of 3.
    """
    x = ratios(1.5, 0.5, 1.1).requires_grad_()
    advantages = torch.tensor([2.0, -1, 1])
    loss, stats = cispo(x, torch.zeros(3), advantages, torch.ones(3).bool(), **CLIP)
    # 1e-6: six written decimals
    assert loss.tolist() == pytest.approx([-1.054209, -0.554518, -0.104841], abs=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad.tolist() == pytest.approx([-2.6, 0.8, -1.1], abs=1e-12)
    assert stats.floats()["clip_frac"] == pytest.approx(2 / 3)


def test_an_absolute_bound_replaces_the_relative_one() -> None:
    """max_ratio 2: r 3 counts as 2, r 1.5 as it is (1.3 with clip_high)."""
    args = (ratios(3, 1.5), torch.zeros(2), torch.tensor([1.0, 1.0]), torch.ones(2).bool())
    x = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(cispo(x, *args[1:], **CLIP, max_ratio=2.0)[0].sum(), x)
    assert grad.tolist() == pytest.approx([-2.0, -1.5], abs=1e-12)


@pytest.mark.parametrize("loss", WHOLE_GRADIENT)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_with_finite_differences(loss, seed: int) -> None:
    logprobs, old, advantages, mask = tokens(seed)
    x = logprobs.requires_grad_()
    assert gradcheck(lambda t: loss(t, old, advantages, mask)[0], (x,))


def test_old_logprobs_and_advantages_are_constants() -> None:
    logprobs, _, advantages, mask = tokens(4)
    x, a = logprobs.requires_grad_(), advantages.requires_grad_()
    loss, _ = ppo(x, x, a, mask, **CLIP)
    grad_x, grad_a = torch.autograd.grad(loss.sum(), (x, a), allow_unused=True)
    assert grad_a is None
    assert torch.equal(grad_x, torch.where(mask, -advantages, 0.0).detach())


@every_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_outside_the_mask_is_ignored(loss, garbage: float) -> None:
    results = []
    *clean, mask = tokens(2)
    for inputs in (clean, [x.masked_fill(~mask, garbage) for x in clean]):
        x = inputs[0].clone().requires_grad_()
        out, stats = loss(x, *inputs[1:], mask)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results.append((out.detach(), grad, stats.floats()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert results[1][0][~mask].eq(0).all() and results[1][1][~mask].eq(0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_extreme_ratio_gives_finite_losses_and_gradients(loss, dtype) -> None:
    """exp(500) is infinite in fp32 and inf x 0 is NaN; the log-ratio stops at 20 instead."""
    x = torch.tensor([0.0, 0.0, 0.0, -500.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([-500.0, -500.0, -500.0, 0.0], dtype=dtype)
    out, stats = loss(x, old, torch.tensor([0.0, 1.0, -1.0, 1.0]), torch.ones(4).bool())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.dtype == torch.float32
    assert out.isfinite().all() and grad.isfinite().all()
    # 1e-6: fp32 exp
    assert stats.floats()["ratio_max"] == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


@every_loss
def test_a_nan_inside_the_mask_propagates(loss) -> None:
    logprobs, old, advantages, mask = tokens(3)
    logprobs[0, 0] = math.nan
    assert loss(logprobs, old, advantages, mask)[0][0, 0].isnan()


@every_loss
def test_a_micro_batch_without_action_tokens_is_zero(loss) -> None:
    logprobs, old, advantages, mask = tokens(3)
    out, stats = loss(logprobs, old, advantages, torch.zeros_like(mask))
    assert out.abs().sum().item() == 0
    assert (stats + stats).floats()["ratio_max"] == 0


@every_loss
@quick
@given(seed=seeds)
def test_packed_and_padded_tokens_give_equal_losses_and_stats(loss, seed: int) -> None:
    *padded, mask = tokens(seed)
    out, stats = loss(*padded, mask)
    packed, packed_stats = loss(*[x[mask] for x in padded], mask[mask])
    # 1e-15: fp64 sigmoids in another SIMD position; 1e-12: sums in another order
    torch.testing.assert_close(packed, out[mask], atol=0, rtol=1e-15)
    assert packed_stats.floats() == pytest.approx(stats.floats(), abs=1e-12)


@every_loss
@quick
@given(seed=seeds, parts=st.integers(1, 4))
def test_stats_of_micro_batches_add_up_to_the_stats_of_the_batch(
    loss, seed: int, parts: int
) -> None:
    batch = tokens(seed, n=8)
    whole = loss(*batch)[1].floats()
    pieces = [loss(*rows)[1] for rows in zip(*(x.chunk(parts) for x in batch), strict=True)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    # 1e-12: fp64 sums in another order
    assert total.floats() == pytest.approx(whole, abs=1e-12)


@every_loss
@quick
@given(seed=seeds)
def test_permuting_and_padding_rows_changes_neither_loss_nor_gradient(loss, seed: int) -> None:
    *inputs, mask = tokens(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    results = []
    wide = [torch.nn.functional.pad(x[order], (2, 3), value=math.nan) for x in inputs]
    wide_mask = torch.nn.functional.pad(mask[order], (2, 3))
    for (logprobs, *rest), m in ((inputs, mask), (wide, wide_mask)):
        x = logprobs.clone().requires_grad_()
        counts = {"num_tokens": int(mask.sum()), "num_sequences": len(mask)}
        scalar = reduce(loss(x, *rest, m)[0], m, aggregation="sequence_mean", **counts)
        results.append((scalar.item(), torch.autograd.grad(scalar, x)[0]))
    # 1e-12: fp64 sums in another order
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-12)
    torch.testing.assert_close(results[1][1][:, 2:-3], results[0][1][order], atol=1e-12, rtol=0)


VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
EVERY_LOSS = {
    **LOSSES,
    "gspo": lambda *args: gspo(*args, **CLIP),
    "vespo": lambda *args: vespo(*args, **VESPO),
}


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_advantages_and_stats_have_no_gradient(name: str) -> None:
    logprobs, old, advantages, mask = tokens(4)
    inputs = [x.requires_grad_() for x in (logprobs, old, advantages)]
    loss, stats = EVERY_LOSS[name](*inputs, mask)
    grads = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
    assert grads[0] is not None and grads[1] is None and grads[2] is None
    assert not any(number.requires_grad for number, _ in stats.means.values())
    assert not any(number.requires_grad for number in stats.maxima.values())


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_half_precision_inputs_are_computed_in_fp32(name: str) -> None:
    *inputs, mask = (x.bfloat16() if x.is_floating_point() else x for x in tokens(5))
    narrow, stats = EVERY_LOSS[name](*inputs, mask)
    wide, expected = EVERY_LOSS[name](*[x.float() for x in inputs], mask)
    assert narrow.dtype == torch.float32 and torch.equal(narrow, wide)
    assert stats.floats() == expected.floats()


def test_the_log_ratio_stops_at_20() -> None:
    """exp(20) = 485,165,195."""
    x = torch.tensor([[500.0]])
    for loss in EVERY_LOSS.values():
        _, stats = loss(x, torch.zeros(1, 1), torch.ones(1, 1), x > 0)
        # 1e-6: fp32 exp
        assert stats.floats()["ratio_max"] == pytest.approx(485_165_195, rel=1e-6)


def test_the_dual_bound_is_inclusive_and_applies_to_small_advantages() -> None:
    """c = 2, r = 2, A -1: the loss is 2 either way, and not counted. r 4, A -1/2: 2 becomes 1."""
    x = torch.tensor([2.0, 4.0], dtype=torch.float64).log()
    advantages = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    args = (x, torch.zeros(2, dtype=torch.float64), advantages, torch.ones(2).bool())
    loss, stats = ppo(*args, **CLIP, dual_clip=float(x[0].exp()))
    # 1e-12: exp(log r) in fp64
    assert loss.tolist() == pytest.approx([2.0, 1.0], abs=1e-12)
    assert stats.floats()["dual_clip_frac"] == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_cispo_gradients_agree_with_finite_differences_at_constant_weight(
    seed: int,
) -> None:
    """L(x) = -w A x with w as at the start: clip(exp(x0 - old), 0.8, 1.3)."""
    logprobs, old, advantages, mask = tokens(seed)
    x = logprobs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cispo(x, old, advantages, mask, **CLIP)[0].sum(), x)
    weight = (logprobs - old).exp().clamp(0.8, 1.3)

    def total(x: Tensor) -> float:
        return float((-weight * advantages * x)[mask].sum())

    for i, j in mask.nonzero().tolist():
        step = torch.zeros_like(logprobs)
        step[i, j] = 1e-6
        difference = (total(logprobs + step) - total(logprobs - step)) / 2e-6
        # 1e-8: differences in fp64 over 2e-6
        assert grad[i, j].item() == pytest.approx(difference, abs=1e-8)
    assert grad[~mask].eq(0).all()


def test_sapo_by_hand() -> None:
    """tau 2 above, 1 below 0. r = 1: -(4 / tau) A / 2. A 3, r 1: -3; r 2: -6 sigmoid(2) =
    -5.284782. A -0.5, r 1: 1; r 0.5: 2 sigmoid(-0.5) = 0.755081. Gates 4 q (1 - q): 1, 0.419974, 1,
    0.940015."""
    args = (ratios(1, 2, 1, 0.5), torch.zeros(4), torch.tensor([3.0, 3, -0.5, -0.5]))
    loss, stats = sapo(*args, torch.ones(4).bool(), tau_pos=2.0, tau_neg=1.0)
    # 1e-6: six written decimals
    assert loss.tolist() == pytest.approx([-3, -5.284782, 1, 0.755081], abs=1e-6)
    assert stats.floats()["gate"] == pytest.approx((1 + 0.419974 + 1 + 0.940015) / 4, abs=1e-6)


def test_vespo_weighs_the_sequence_by_a_gamma_curve() -> None:
    """Rows of two tokens and one outside the mask, log-probs -2 and 0. Ratios 2 x 1.5: w = 3; A 0.5
    and 0: phi = 3^2 e^(3 (1 - 3)) = 9 e^-6; A -1: 3^3 e^(2 (1 - 3)) = 27 e^-4. Packed rows with ids
    are the same, and the gradient of a token is -phi A. Far away, phi is 0."""
    x = torch.tensor([[-2.0, 0, math.nan]] * 3, dtype=torch.float64, requires_grad=True)
    old = x.detach() - torch.tensor([[2.0, 1.5, 1]] * 3).double().log()
    advantages = torch.tensor([[0.5, 0.5, math.nan], [-1, -1, math.nan], [0, 0, math.nan]])
    mask = torch.tensor([[True, True, False]] * 3)
    loss, stats = vespo(x, old, advantages, mask, **VESPO)
    phi = [9 * math.exp(-6), 27 * math.exp(-4), 9 * math.exp(-6)]
    # 1e-12: fp64
    assert loss[:, 0].tolist() == pytest.approx([phi[0], -2 * phi[1], 0], rel=1e-12)
    assert loss[:, 1:].eq(0).all()
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient[:, 0].tolist() == pytest.approx([-phi[0] / 2, phi[1], 0], rel=1e-12)
    assert gradient[:, 2].eq(0).all()
    assert stats.floats()["sequence_weight"] == pytest.approx(sum(phi) / 3)
    flat = (t.detach()[mask] for t in (x, old, advantages, mask))
    ids = torch.tensor([5, 5, 2, 2, 7, 7])
    packed, _ = vespo(*flat, **VESPO, row_ids=ids)  # type: ignore[arg-type]
    torch.testing.assert_close(packed, loss.detach()[mask], atol=1e-12, rtol=0)
    for far in (-1e4, 1e4):
        inputs = torch.full((1, 1), -1.0), torch.full((1, 1), -1.0 - far), torch.ones(1, 1)
        assert vespo(*inputs, inputs[2] > 0, **VESPO)[0].abs().item() < 1e-12


def test_token_ratios_by_hand() -> None:
    """New over old probability, differentiable in the new one: d r / d log p = r. Outside the mask
    1, also of NaN, without gradient."""
    new = torch.tensor([0.5, 0.25, 0.5, 0.1]).log().requires_grad_()
    old = torch.tensor([0.25, 0.5, 0.1, math.nan]).log().requires_grad_()
    mask = torch.tensor([True, True, False, False])
    ratio = token_ratio(new, old, mask)
    torch.testing.assert_close(ratio, torch.tensor([2.0, 0.5, 1, 1]))
    ratio.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([2.0, 0.5, 0, 0]))
    assert old.grad is None
    far = token_ratio(torch.zeros(1), torch.full((1,), -200.0), mask[:1])
    torch.testing.assert_close(far, torch.tensor([math.exp(MAX_LOG_RATIO)]))
