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
from burnish.algorithms.pair_ratios import (
    desensitized,
    divergence_scores,
    likelihood_weights,
    of_equal_rank,
)
from burnish.algorithms.preference import (
    aot,
    aot_unpaired,
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
    **{
        kind: partial(PREFERENCE_LOSSES[kind], beta=0.3)
        for kind in ("hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
    },
    "robust": partial(PREFERENCE_LOSSES["robust"], beta=0.3, label_smoothing=0.1),
    "exo_pair": partial(PREFERENCE_LOSSES["exo_pair"], beta=0.3, label_smoothing=0.1),
    "discopop": partial(PREFERENCE_LOSSES["discopop"], beta=0.3, tau=0.5),
}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


ORACLES: dict[str, Callable[[float, float], float]] = {
    "hinge": lambda c, r: 1 - min(0.3 * (c - r), 1),
    "nca_pair": lambda c, r: math.log(
        (1 + math.exp(-0.3 * c)) * ((1 + math.exp(0.3 * c)) * (1 + math.exp(0.3 * r))) ** 0.5
    ),
    "bco_pair": lambda c, r: -math.log(_sigmoid(0.3 * c) * (1 - _sigmoid(0.3 * r))),
    "sppo_hard": lambda c, r: c * c + r * r - (c - r) / 0.3 + 0.5 / 0.3**2,
    "apo_zero": lambda c, r: 1 / (1 + math.exp(0.3 * c)) + 1 / (1 + math.exp(-0.3 * r)),
    "apo_down": lambda c, r: 1 + (math.tanh(0.15 * c) - math.tanh(0.15 * (c - r))) / 2,
    "robust": lambda c, r: (
        (0.9 * math.log(1 + math.exp(0.3 * (r - c))) - 0.1 * math.log(1 + math.exp(0.3 * (c - r))))
        / 0.8
    ),
    "exo_pair": lambda c, r: _kl(_sigmoid(0.3 * (c - r)), 0.9),
    "discopop": lambda c, r: (
        (1 - _sigmoid(0.6 * (c - r))) * math.log(1 + math.exp(0.3 * (r - c)))
        + _sigmoid(0.6 * (c - r)) * math.exp(0.3 * (r - c))
    ),
}
"""Losses of one pair by its log-ratios c and r, in other forms than the code's. beta 0.3, label
smoothing 0.1, tau 0.5."""


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sums(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four log-probs of five responses each, fp64."""
    g = torch.Generator().manual_seed(seed)
    return tuple(-10 + 2 * torch.randn(4, 5, generator=g, dtype=torch.float64))  # type: ignore[return-value]


def test_the_registry_has_exactly_the_documented_names() -> None:
    assert set(PREFERENCE_LOSSES) == {
        *("bradley_terry", "log_exp", "simpo", "orpo", "kto", "aot", "aot_unpaired", *PAIRED)
    }


@pytest.mark.parametrize("name", ORACLES)
def test_a_loss_of_log_ratios_has_the_value_of_its_equation(name: str) -> None:
    pairs = sums(4)
    expected = [
        ORACLES[name](pc - rc, pr - rr)
        for pc, pr, rc, rr in zip(*map(Tensor.tolist, pairs), strict=True)
    ]
    # 1e-12: fp64
    assert PAIRED[name](*pairs).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ORACLES)
def test_losses_of_tied_and_of_far_responses_are_their_limits(name: str) -> None:
    """c = r = 0, then c = -r = +-1e4 (beta times it: 3,000), in fp32, with finite gradients."""
    limits = {
        "hinge": (1, 0, 6001), "nca_pair": (2 * LN2, 0, 3000), "bco_pair": (2 * LN2, 0, 6000),
        "sppo_hard": (0.5 / 0.09, 2e8, 2e8), "apo_zero": (1, 0, 2), "apo_down": (1, 1, 1),
        "robust": (LN2, -750, 6750), "exo_pair": (-math.log(0.3 / 0.5), -math.log(0.9), 2.302585),
        "discopop": ((LN2 + 1) / 2, 0, 6000),
    }  # fmt: skip
    far = torch.tensor([0.0, 1e4, -1e4])
    chosen, rejected = far.clone().requires_grad_(), (-far).requires_grad_()
    out = PAIRED[name](chosen, rejected, 0 * far, 0 * far)
    if name == "nca_pair":  # -log sigmoid(-3000) / 2 = 1500 of the chosen response stay
        limits[name] = (2 * LN2, 1500, 4500)
    # 1e-3: differences between the limit and 1e4, and fp32
    assert out.tolist() == pytest.approx(limits[name], rel=1e-3, abs=1e-6)
    for gradient in torch.autograd.grad(out.sum(), (chosen, rejected)):
        assert gradient.isfinite().all()


def test_transport_matches_ranks_and_has_the_gradient_of_sorted_numbers() -> None:
    """Ranks of (3, 1, 2) in (10, 30, 20): 30, 10, 20. The gradient of both losses is that of the
    loss of two sorted vectors."""
    assert of_equal_rank(t(3, 1, 2), t(10, 30, 20)).tolist() == [30, 10, 20]
    assert of_equal_rank(t(5, 5), t(2, 1)).tolist() == [1, 2], "ties in their order"
    chosen, rejected, ref_chosen, ref_rejected = (x.requires_grad_() for x in sums(5))

    def smoothed(d: Tensor) -> Tensor:
        return 0.8 * torch.log1p(torch.exp(-0.3 * d)) + 0.2 * torch.log1p(torch.exp(0.3 * d))

    gaps, ref_gaps = chosen - rejected, (ref_chosen - ref_rejected).detach()
    ours = aot(gaps, of_equal_rank(gaps, ref_gaps), beta=0.3, label_smoothing=0.2)
    matched = of_equal_rank(gaps.detach(), ref_gaps).requires_grad_()
    assert torch.autograd.grad(
        aot(gaps, matched, beta=0.3, label_smoothing=0.2).sum(), matched, allow_unused=True
    ) == (None,)
    theirs = smoothed(gaps.sort().values - ref_gaps.sort().values)
    c, r = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    sides = of_equal_rank(c, r), of_equal_rank(r, c)
    unpaired = aot_unpaired(c, r, *sides, beta=0.3, label_smoothing=0.2)
    of_sorted = smoothed(c.sort().values - r.sort().values)
    for found, expected in ((ours, theirs), (unpaired, of_sorted)):
        torch.testing.assert_close(found.sum(), expected.sum(), atol=1e-12, rtol=1e-12)  # fp64
        gradients = (torch.autograd.grad(x.sum(), (chosen, rejected)) for x in (found, expected))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_scores_of_divergences_are_the_derivatives_of_their_generators() -> None:
    """f of reverse_kl: u log u; forward_kl: -log u; js: u log u - (u + 1) log((u + 1) / 2);
    alpha: (u^(1 - a) - (1 - a) u - a) / (a (a - 1)). Scores are f' minus f'(1)."""
    generators: dict[str, Callable[[Tensor], Tensor]] = {
        "reverse_kl": lambda u: u * u.log(),
        "forward_kl": lambda u: -u.log(),
        "js": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
        "alpha": lambda u: (u**0.7 - 0.7 * u - 0.3) / (0.3 * -0.7),
    }
    log_u = t(-2, -0.5, 0, 0.3, 2)
    for name, f in generators.items():
        u = torch.cat([log_u.exp(), t(1)]).requires_grad_()
        (slope,) = torch.autograd.grad(f(u).sum(), u)
        found = divergence_scores(log_u, divergence=name, alpha=0.3)  # type: ignore[arg-type]
        torch.testing.assert_close(found, slope[:-1] - slope[-1], atol=1e-12, rtol=1e-12)
        half = log_u.bfloat16()
        narrow, wide = (divergence_scores(x, divergence=name) for x in (half, half.float()))  # type: ignore[arg-type]
        assert torch.equal(narrow, wide)
        far = torch.tensor([-1e4, -40.0, 1e4]).requires_grad_()
        scores = divergence_scores(far, divergence=name)  # type: ignore[arg-type]
        assert scores.isfinite().all() and scores[0] < scores[1] < scores[2]
        (gradient,) = torch.autograd.grad(
            dpo(scores, 0 * scores, far * 0, far * 0, beta=0.1).sum(), far
        )
        assert gradient.isfinite().all() and (gradient[:2] < 0).all(), "pulled back from afar"


def test_scores_of_unlikely_responses_are_straight_lines() -> None:
    """forward_kl beyond log u = -30: 1 - e^30 (1 - log u - 30); alpha 1/2, the default, beyond -60:
    2 - 2 e^30 (1 - log u / 2 - 30)."""
    far, edge = t(-31, -62), math.exp(30)
    lines = divergence_scores(far, divergence="forward_kl").tolist()
    assert lines == pytest.approx([1 - 2 * edge, 1 - 33 * edge], rel=1e-12)
    lines = divergence_scores(far, divergence="alpha").tolist()
    assert lines == pytest.approx([2 - 2 * math.exp(15.5), 2 - 4 * edge], rel=1e-12)


def test_tokens_beyond_the_shorter_response_count_less() -> None:
    """Responses of 3 and 1, 2 and 3 tokens behind prompts of one: with 0.25 the sums are -1.5, -1,
    -2, -2.25."""
    rows = torch.tensor([0] * 4 + [1] * 2 + [2] * 3 + [3] * 4)
    mask = torch.cat([torch.arange(n + 1) > 0 for n in (3, 1, 2, 3)])
    out = desensitized(-mask.double(), mask, row_ids=rows, num_rows=4, ld_alpha=0.25)
    assert out.tolist() == [0, -1, -0.25, -0.25, 0, -1, 0, -1, -1, 0, -1, -1, -0.25]


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
    for loss in (PAIRED["dpo"], PAIRED["cdpo"], PAIRED["ipo"]):
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
        "orpo": {"beta": 0.1},
        **{name: PAIRED[name].keywords for name in PAIRED},  # type: ignore[attr-defined]
        **{name: PAIRED["cdpo"].keywords for name in ("aot", "aot_unpaired")},  # type: ignore[attr-defined]
        "simpo": {"beta": 2.0, "gamma": 0.5},
        "kto": {"beta": 0.1, "kl": 0.3},
    }.get(name, {})
    count = 4 if name in (*PAIRED, "aot_unpaired") else 2
    verdicts = [torch.arange(6) % 2 == 0] if name == "kto" else []
    narrow = PREFERENCE_LOSSES[name](*sides[:count], *verdicts, **options)
    wide = PREFERENCE_LOSSES[name](*sides[:count].float(), *verdicts, **options)
    assert narrow.dtype == torch.float32 and torch.equal(narrow, wide)


def test_centering_and_the_reference_point_of_half_precision_input_are_computed_in_fp32() -> None:
    x, y = torch.tensor([-5.0, -3.0]).bfloat16(), torch.tensor([-0.0078125, -1.0]).bfloat16()
    for f in (centering, mismatched_kl):
        for a, b in ((x, y), (y, x)):
            assert torch.equal(f(a, b), f(a.float(), b.float()))


def test_pairs_are_weighted_by_the_likelihood_of_both_responses() -> None:
    """Mean log-probs -1 and -2, 0 and 0; mean collision entropies 0.5 and 1.5, 1 and 2: e^-1, e^3.
    No gradient."""
    logprobs, entropies = t(-1, -2, 0, 0).requires_grad_(), t(0.5, 1.5, 1, 2).requires_grad_()
    found = likelihood_weights(logprobs, entropies)
    assert found.tolist() == pytest.approx([math.exp(-1), math.exp(3)], rel=1e-12)
    assert not found.requires_grad
    half = (t(-1, -3.015625).bfloat16(), t(0.0078125, 1).bfloat16())
    assert torch.equal(likelihood_weights(*half), likelihood_weights(*(x.float() for x in half)))
