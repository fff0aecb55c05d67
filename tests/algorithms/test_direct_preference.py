"""DPO and its family: each by hand, gradients, and invariances."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.preference import (
    cdpo,
    centering,
    dpo,
    ipo,
    kto,
    mismatched_kl,
    orpo,
    simpo,
)

LN2 = math.log(2)
PAIRED: dict[str, Callable[..., Tensor]] = {
    "dpo": partial(dpo, beta=0.3),
    "cdpo": partial(cdpo, beta=0.3, label_smoothing=0.1),
    "ipo": partial(ipo, beta=0.3),
}


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sums(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four log-probs of five responses each, fp64."""
    g = torch.Generator().manual_seed(seed)
    return tuple(-10 + 2 * torch.randn(4, 5, generator=g, dtype=torch.float64))  # type: ignore[return-value]


def test_the_registry_has_exactly_the_documented_names() -> None:
    assert set(PREFERENCE_LOSSES) == {
        *("bradley_terry", "log_exp", "dpo", "cdpo", "ipo", "simpo", "orpo", "kto")
    }


def test_dpo_begins_at_ln_2_and_falls_with_the_gap() -> None:
    """h = 0: ln 2. h = (-4 + 5) - (-9 + 6) = 4, beta 0.5: ln(1 + e^-2) = 0.126928."""
    out = dpo(t(-4, -4), t(-9, -9), t(-4, -5), t(-9, -6), beta=0.5)
    # 1e-6: six written decimals
    assert out.tolist() == pytest.approx([LN2, 0.126928], abs=1e-6)


def test_cdpo_is_minimal_if_the_preference_probability_equals_the_label_probability() -> None:
    """e 0.2: h = 0 gives ln 2. beta h = 2: 0.8 x 0.126928 + 0.2 x 2.126928 = 0.526928. The gradient
    in h is 0 at beta h = ln(0.8 / 0.2)."""
    out = cdpo(t(-4, -4), t(-9, -9), t(-4, -5), t(-9, -6), beta=0.5, label_smoothing=0.2)
    assert out.tolist() == pytest.approx([LN2, 0.526928], abs=1e-6)
    x = t(math.log(4.0)).requires_grad_()
    loss = cdpo(x, t(0), t(0), t(0), beta=1.0, label_smoothing=0.2)
    # 1e-12: fp64
    assert torch.autograd.grad(loss.sum(), x)[0].item() == pytest.approx(0, abs=1e-12)


def test_ipo_pulls_the_gap_to_one_over_two_beta() -> None:
    """beta 0.25: target 2. h = 0: 4. h = 4: 4. h = 2: 0."""
    out = ipo(t(0, 4, 2), t(0, 0, 0), t(0, 0, 0), t(0, 0, 0), beta=0.25)
    assert out.tolist() == [4, 4, 0]


def test_simpo_requires_a_margin_between_mean_logprobs() -> None:
    """beta 2, gamma 1: d = 0.5 gives -log sigmoid(0) = ln 2; d = 0: ln(1 + e) = 1.313262."""
    out = simpo(t(-0.5, -1.0), t(-1.0, -1.0), beta=2.0, gamma=1.0)
    assert out.tolist() == pytest.approx([LN2, 1.313262], abs=1e-6)


def test_orpo_adds_the_log_of_the_odds_ratio_to_the_language_model_loss() -> None:
    """e^m = 1/2 and 1/4: odds 1 and 1/3, log ratio ln 3: -log sigmoid(ln 3) = ln(4/3) = 0.287682.
    With beta 0.5: ln 2 + 0.5 x 0.287682 = 0.836988. Equal: ln 2 + 0.5 ln 2 = 1.039721."""
    out = orpo(t(-LN2, -LN2), t(-2 * LN2, -LN2), beta=0.5)
    assert out.tolist() == pytest.approx([0.836988, 1.039721], abs=1e-6)


def test_kto_by_hand() -> None:
    """beta 0.5, z 2. Liked: r 2 gives 1/2, r 4: 1 - sigmoid(1) = 0.268941. Disliked, weight 2: r 2
    gives 1; r 0: 2 (1 - sigmoid(1)) = 0.537883. A negative estimate counts as 0."""
    liked = torch.tensor([True, True, False, False])
    args = (t(-3, -1, -3, -5), t(-5, -5, -5, -5), liked)
    out = kto(*args, kl=2.0, beta=0.5, undesirable_weight=2.0)
    assert out.tolist() == pytest.approx([0.5, 0.268941, 1.0, 0.537883], abs=1e-6)
    below, zero = (kto(*args, kl=kl, beta=0.5) for kl in (-3.0, 0.0))
    assert torch.equal(below, zero)


def test_the_reference_point_is_a_mean_clamped_at_zero() -> None:
    assert mismatched_kl(t(-1, -2), t(-2, -5)).item() == 2.0
    assert mismatched_kl(t(-2, -5), t(-1, -2)).item() == 0.0
    assert mismatched_kl(t(), t()).item() == 0.0


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences_and_none_is_the_references(
    name: str, seed: int
) -> None:
    chosen, rejected, *reference = (x.requires_grad_() for x in sums(seed))
    loss = PAIRED[name]
    assert gradcheck(lambda c, r: loss(c, r, *reference), (chosen, rejected))
    out = loss(chosen, rejected, *reference).sum()
    grads = torch.autograd.grad(out, reference, allow_unused=True)
    assert grads == (None, None)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_the_losses_without_pairs_of_references(seed: int) -> None:
    chosen, rejected, ref, _ = sums(seed)
    small = [(x / 10).requires_grad_() for x in (chosen, rejected)]
    assert gradcheck(lambda c, r: simpo(c, r, beta=2.0, gamma=1.0), small)
    assert gradcheck(lambda c, r: orpo(c, r, beta=0.3), small)
    liked = torch.tensor([True, False, True, False, False])
    policy = chosen.requires_grad_()
    assert gradcheck(lambda p: kto(p, ref, liked, kl=0.4, beta=0.3), (policy,))


@pytest.mark.parametrize("name", PAIRED)
def test_losses_are_invariant_to_a_common_shift_of_policy_and_reference(name: str) -> None:
    inputs = sums(7)
    chosen, rejected = inputs[0::2], inputs[1::2]
    shifted = (chosen[0] + 3, rejected[0] - 2, chosen[1] + 3, rejected[1] - 2)
    # 1e-12: fp64 sums of numbers near 10
    torch.testing.assert_close(
        PAIRED[name](*shifted), PAIRED[name](*inputs), atol=1e-12, rtol=1e-12
    )


def test_extremes_stay_finite_and_half_precision_is_compared_in_fp32() -> None:
    far = torch.tensor([-2000.0, 2000.0])
    for loss in PAIRED.values():
        assert loss(far, -far, 0 * far, 0 * far).isfinite().all()
    near_one = torch.tensor([0.0, -1e-9, -700.0], requires_grad=True)
    out = orpo(near_one, near_one.detach(), beta=0.1)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), near_one)[0].isfinite().all()
    half = torch.tensor([-1.0]).bfloat16()
    assert dpo(half, half, half, half, beta=0.1).dtype == torch.float32


def test_a_nan_propagates() -> None:
    nan = t(math.nan)
    assert dpo(nan, t(0), t(0), t(0), beta=0.1).isnan().all()
    assert kto(nan, t(0), torch.tensor([True]), kl=0.0, beta=0.1).isnan().all()


def test_ktos_weights_are_those_of_the_two_labels() -> None:
    """r = 0, z = 0: each loss is its weight / 2. Without weights 1/2. z = 0.5, beta 1, r = 0: liked
    1 - sigmoid(-0.5) = 0.622459, disliked 1 - sigmoid(0.5) = 0.377541."""
    liked, zero = torch.tensor([True, False]), t(0, 0)
    weights = {"desirable_weight": 3.0, "undesirable_weight": 5.0}
    assert kto(zero, zero, liked, kl=0.0, beta=1.0, **weights).tolist() == [1.5, 2.5]
    assert kto(zero, zero, liked, kl=0.0, beta=1.0).tolist() == [0.5, 0.5]
    out = kto(zero, zero, liked, kl=0.5, beta=1.0)
    # 1e-6: six written decimals
    assert out.tolist() == pytest.approx([0.622459, 0.377541], abs=1e-6)


def test_ktos_reference_and_reference_point_are_constants() -> None:
    policy, ref, kl = (t(-1, -2).requires_grad_() for _ in range(3))
    liked = torch.tensor([True, False])
    loss = kto(policy, ref, liked, kl=kl[0].abs(), beta=1.0).sum()
    grads = torch.autograd.grad(loss, (policy, ref, kl), allow_unused=True)
    assert grads[0] is not None and grads[1] is None and grads[2] is None
    assert not mismatched_kl(policy, ref).requires_grad


def test_the_reference_point_of_a_single_response_is_its_own() -> None:
    assert mismatched_kl(t(-1), t(-4)).item() == 3.0


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_loss_of_half_precision_input_is_computed_in_fp32(name: str) -> None:
    """Sums like -10.0625 + 3.015625 are no bf16 numbers."""
    g = torch.Generator().manual_seed(3)
    sides = (-5 * torch.rand(4, 6, generator=g) - 0.01).bfloat16()
    options = {
        **{name: {"beta": 0.1} for name in ("dpo", "ipo", "orpo")},
        "cdpo": {"beta": 0.1, "label_smoothing": 0.2},
        "simpo": {"beta": 2.0, "gamma": 0.5},
        "kto": {"beta": 0.1, "kl": 0.3},
    }.get(name, {})
    count = 4 if name in PAIRED else 2
    verdicts = [torch.arange(6) % 2 == 0] if name == "kto" else []
    narrow = PREFERENCE_LOSSES[name](*sides[:count], *verdicts, **options)
    wide = PREFERENCE_LOSSES[name](*sides[:count].float(), *verdicts, **options)
    assert narrow.dtype == torch.float32 and torch.equal(narrow, wide)


def test_centering_and_the_reference_point_of_half_precision_input_are_computed_in_fp32() -> None:
    x, y = torch.tensor([-5.0, -3.0]).bfloat16(), torch.tensor([-0.0078125, -1.0]).bfloat16()
    for f in (centering, mismatched_kl):
        for a, b in ((x, y), (y, x)):
            assert torch.equal(f(a, b), f(a.float(), b.float()))
