"""The gap between the trainer's and the sampler's log-probs: its meter, and weights against it."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.correction import (
    age_name,
    age_stats,
    correction_weights,
    effective_sample_frac,
    mismatch_stats,
    off_policy_mask,
    sampler_ratio,
    weight_moments,
)


def test_mismatch_by_hand() -> None:
    """Gaps g = trainer - sampler: ln 2, -ln 4, 0. |g|: (0.693147 + 1.386294) / 3 = 0.693147,
    largest 1.386294. exp(g) - 1 - g: 1 - 0.693147, -3/4 + 1.386294, 0: sum 0.943147, mean
    0.314382."""
    sampler = torch.tensor([-1.0, -2.0, -3.0]).double()
    trainer = sampler + torch.tensor([math.log(2), -math.log(4), 0.0]).double()
    found = mismatch_stats(trainer, sampler, torch.ones(3, dtype=torch.bool)).floats()
    expected = {"mismatch_abs": 0.693147, "mismatch_k3": 0.314382, "mismatch_max": 1.386294}
    # 1e-6: six written decimals
    assert found == pytest.approx(expected, abs=1e-6)


def test_equal_logprobs_have_no_mismatch() -> None:
    x = torch.tensor([-0.3, -7.0])
    found = mismatch_stats(x, x, x < 0).floats()
    assert found == {"mismatch_abs": 0, "mismatch_k3": 0, "mismatch_max": 0}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_is_ignored(garbage: float) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    trainer = torch.tensor([[-1.0, garbage], [-2.0, -3.0]])
    sampler = torch.tensor([[-1.5, garbage], [-2.0, -3.25]])
    found = mismatch_stats(trainer, sampler, mask).floats()
    # the gaps are 0.5, 0 and 0.25, exact in fp32
    assert found["mismatch_abs"] == 0.25 and found["mismatch_max"] == 0.5
    assert math.isfinite(found["mismatch_k3"])


def test_stats_of_parts_add_up_and_carry_no_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    trainer, sampler = torch.randn(2, 6, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=g) < 0.7
    trainer.requires_grad_()
    whole = mismatch_stats(trainer, sampler, mask)
    parts = [mismatch_stats(trainer[i], sampler[i], mask[i]) for i in range(6)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    # 1e-12: fp64 sums in another order
    assert total.floats() == pytest.approx(whole.floats(), abs=1e-12)
    assert not whole.maxima["mismatch_max"].requires_grad
    assert not any(number.requires_grad for number, _ in whole.means.values())


def test_bf16_logprobs_are_subtracted_in_fp32() -> None:
    """-1 and -1.0078125 are bf16 numbers; their gap 2^-7 comes out exactly."""
    trainer = torch.tensor([-1.0]).bfloat16()
    found = mismatch_stats(trainer, torch.tensor([-1.0078125]), trainer < 0).floats()
    assert found["mismatch_max"] == 2.0**-7


GAPS = torch.tensor([[4.0, 0.5, 1.0], [0.25, 1.0, 1.0]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, False], [True, True, True]])
"""Row 0: weights 4 and 1/2, product 2, geometric mean sqrt 2. Row 1: 1/4, 1, 1; product 1/4,
geometric mean (1/4)^(1/3) = 0.629961."""
ROOT, CUBE = 2**0.5, 0.25 ** (1 / 3)


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [[1.5, 0.5, 1], [0.25, 1, 1]]),
        ("token", "clip", [[1.5, 0.6, 1], [0.6, 1, 1]]),
        ("token", "mask", [[0, 0, 1], [0, 1, 1]]),
        ("sequence", "truncate", [[1.5, 1.5, 1], [0.25] * 3]),
        ("sequence", "clip", [[1.5, 1.5, 1], [0.6] * 3]),
        ("sequence", "mask", [[0, 0, 1], [0, 0, 0]]),
        ("geometric", "truncate", [[ROOT, ROOT, 1], [CUBE] * 3]),
        ("geometric", "clip", [[ROOT, ROOT, 1], [CUBE] * 3]),
        ("geometric", "mask", [[ROOT, ROOT, 1], [CUBE] * 3]),
    ],
)
def test_every_level_and_mode_by_hand(level: str, mode: str, expected: list[list[float]]) -> None:
    """Band [0.6, 1.5]."""
    options = {"level": level, "mode": mode, "low": 0.6, "high": 1.5}
    weights, stats = correction_weights(GAPS, torch.zeros(2, 3), MASK, **options)
    wanted = torch.tensor(expected, dtype=torch.float64)
    # 1e-12: exp(log w) in fp64
    torch.testing.assert_close(weights, wanted, atol=1e-12, rtol=0)
    packed, found = correction_weights(
        GAPS[MASK],
        torch.zeros(5),
        MASK[MASK],
        row_ids=torch.tensor([3, 3, 1, 1, 1]),
        **options,
    )
    torch.testing.assert_close(packed, wanted[MASK], atol=1e-12, rtol=0)
    assert found.floats() == pytest.approx(stats.floats(), abs=1e-12)
    assert stats.floats()["correction_weight"] == pytest.approx(float(wanted[MASK].mean()))


def test_stats_contain_the_changed_share_and_the_largest_unbounded_weight() -> None:
    """Token weights 4, 1/2, 1/4, 1, 1 in [0.6, 1.5]: three of five change."""
    options = {"level": "token", "mode": "clip", "low": 0.6, "high": 1.5}
    found = correction_weights(GAPS, torch.zeros(2, 3), MASK, **options)[1].floats()
    assert found["correction_frac"] == pytest.approx(0.6)
    assert found["correction_max"] == pytest.approx(4.0)


def test_without_a_gap_every_weight_is_one_and_has_no_gradient() -> None:
    x = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -3.0, -9.0]], requires_grad=True)
    for level in ("token", "sequence", "geometric"):
        weights, _ = correction_weights(
            x, x.detach(), MASK, level=level, mode="mask", low=0.9, high=1.1
        )
        assert torch.equal(weights, torch.ones(2, 3)) and not weights.requires_grad


def test_an_infinite_gap_is_bounded() -> None:
    options = {"level": "sequence", "mode": "truncate", "low": 0.5, "high": 2.0}
    gap = torch.full((1, 4), 500.0)
    weights, stats = correction_weights(gap, torch.zeros(1, 4), gap > 0, **options)
    assert torch.equal(weights, torch.full((1, 4), 2.0))
    assert math.isfinite(stats.floats()["correction_max"])


def test_unknown_levels_and_modes_are_refused() -> None:
    for level, mode, message in (("word", "clip", "use token"), ("token", "cut", "use truncate")):
        with pytest.raises(ValueError, match=message):
            correction_weights(GAPS, GAPS, MASK, level=level, mode=mode, low=0.5, high=2.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_garbage_outside_the_mask_changes_neither_weights_nor_stats(
    garbage: float, level: str, mode: str
) -> None:
    """Outside the mask the weight is 1, even if the bounds exclude 1."""
    options = {"level": level, "mode": mode, "low": 0.1, "high": 0.9}
    clean, stats = correction_weights(GAPS, torch.zeros(2, 3), MASK, **options)
    dirty = GAPS.masked_fill(~MASK, garbage)
    weights, found = correction_weights(dirty, torch.zeros(2, 3), MASK, **options)
    assert torch.equal(weights, clean) and weights[~MASK].eq(1).all()
    assert found.floats() == stats.floats()


def test_a_weight_on_a_bound_is_inside() -> None:
    """exp(0) = 1 in a band [1, 1]."""
    x = torch.zeros(1, 2)
    weights, _ = correction_weights(x, x, x == 0, level="token", mode="mask", low=1.0, high=1.0)
    assert weights.tolist() == [[1, 1]]


def test_neither_side_of_the_gap_gets_a_gradient() -> None:
    old, sampler = torch.zeros(2, 2, 3).requires_grad_()
    options = {"level": "token", "mode": "truncate", "low": 0.5, "high": 2.0}
    weights, stats = correction_weights(old, sampler, MASK, **options)
    assert not weights.requires_grad
    assert not any(number.requires_grad for number, _ in stats.means.values())


def test_two_bf16_sides_are_subtracted_in_fp32() -> None:
    """-5 and -0.0078125 are bf16 numbers; their difference, 4.9921875, would be rounded to 5."""
    x, y = torch.tensor([-0.0078125]).bfloat16(), torch.tensor([-5.0]).bfloat16()
    assert mismatch_stats(x, y, x < 0).floats()["mismatch_max"] == 4.9921875
    options = {"level": "token", "mode": "truncate", "low": 0.0, "high": 1e9}
    weights, _ = correction_weights(x, y, x < 0, **options)
    # 1e-6: fp32 exp
    assert weights.item() == pytest.approx(math.exp(4.9921875), rel=1e-6)


def test_an_infinite_ratio_stops_at_exp_20() -> None:
    """exp(20) = 485,165,195."""
    x = torch.tensor([[500.0]])
    options = {"level": "token", "mode": "truncate", "low": 0.0, "high": 1e12}
    weights, _ = correction_weights(x, torch.zeros(1, 1), x > 0, **options)
    # 1e-6: fp32 exp
    assert weights.item() == pytest.approx(485_165_195, rel=1e-6)


def test_ratio_and_kl_by_age_by_hand() -> None:
    """Gaps ln 2 (age 0), -ln 4 and 0 (age 1), ln 9 (age 2), ln 3 (age 8), ln 5 (age 11), and a
    token that is not an action. Ratios: 2; (1/4 + 1) / 2; 9; (3 + 5) / 2. exp(g) - 1 - g: 1 -
    0.693147; (-3/4 + 1.386294 + 0) / 2; 8 - 2.197225; (2 - 1.098612 + 4 - 1.609438) / 2. All ages
    up to 8 are there, also without tokens; those above a limit of 2 are not."""
    ratios = torch.tensor([2.0, 0.25, 1.0, 3.0, 5.0, 7.0, 9.0]).double()
    mask = torch.tensor([True] * 5 + [False, True])
    sampler = torch.full((7,), -3.0).double().requires_grad_()
    trainer = (sampler.detach() + ratios.log()).requires_grad_()
    ages = torch.tensor([0, 1, 1, 8, 11, 1, 2])
    stats = age_stats(trainer, sampler, mask, ages=ages, max_age=30)
    expected = {
        **{"age_0_behavior_ratio": 2, "age_0_behavior_kl": 0.306853},
        **{"age_1_behavior_ratio": 0.625, "age_1_behavior_kl": 0.318147},
        **{"age_2_behavior_ratio": 9, "age_2_behavior_kl": 5.802775},
        **{"age_8_up_behavior_ratio": 4, "age_8_up_behavior_kl": 1.645975},
    }
    found = {name: value for name, value in stats.floats().items() if not math.isnan(value)}
    # 1e-6: six written decimals
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(stats.means) == 18
    few = age_stats(trainer, sampler, mask, ages=ages, max_age=2).floats()
    assert list(few) == list(expected)[:6] and few == {name: found[name] for name in few}
    assert not any(number.requires_grad for number, _ in stats.means.values())
    assert [age_name(age) for age in (0, 7, 8, 9)] == ["age_0", "age_7", "age_8_up", "age_8_up"]


def test_the_ratio_to_the_sampler_is_that_of_fp32_and_bounded() -> None:
    """bf16 log-probs -5 and -0.0078125 differ by 4.9921875, which bf16 rounds to 5; exp(20)."""
    x, y = torch.tensor([-0.0078125]).bfloat16(), torch.tensor([-5.0]).bfloat16()
    # 1e-6: fp32 exp
    assert sampler_ratio(x, y).item() == pytest.approx(math.exp(4.9921875), rel=1e-6)
    assert sampler_ratio(x + 500, x).item() == pytest.approx(math.exp(20), rel=1e-6)
    kl = age_stats(x, y, x < 0, ages=torch.tensor([0]), max_age=0).floats()["age_0_behavior_kl"]
    assert kl == pytest.approx(math.exp(4.9921875) - 1 - 4.9921875, rel=1e-6)


def test_the_effective_sample_size_by_hand() -> None:
    """Weights 4, 1/2, 1/4, 1, 1: sum 6.75, squares 18.3125: 45.5625 / (5 x 18.3125). In two parts,
    in fp32 (bf16 rounds the square of 1.0078125). Equal weights: 1; one of four: 1/4; none: 0."""
    total = weight_moments(GAPS[0].exp(), MASK[0]) + weight_moments(GAPS[1].exp(), MASK[1])
    assert effective_sample_frac(total) == pytest.approx(45.5625 / 91.5625, abs=1e-12)
    narrow = torch.full((3,), 1.0078125).bfloat16().requires_grad_()
    stats = weight_moments(narrow, narrow > 0)
    assert effective_sample_frac(stats) == pytest.approx(1, abs=1e-6)  # fp32 sums
    assert not stats.means["weight"][0].requires_grad  # type: ignore[union-attr]
    one, every = torch.tensor([0.0, 3.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool)
    assert effective_sample_frac(weight_moments(one, every)) == 0.25
    assert effective_sample_frac(weight_moments(one, one == 0)) == 0.0
    assert math.isnan(effective_sample_frac(weight_moments(one, one < 0)))


def test_corrections_report_the_moments_of_the_bounded_weights() -> None:
    """Weights 4, 1/2, 1/4, 1, 1 in [0.6, 1.5]: 1.5, 0.6, 0.6, 1, 1: sum 4.7, squares 4.97."""
    options = {"level": "token", "mode": "clip", "low": 0.6, "high": 1.5}
    stats = correction_weights(GAPS, torch.zeros(2, 3), MASK, **options)[1]
    assert effective_sample_frac(stats) == pytest.approx(4.7**2 / (5 * 4.97), abs=1e-12)


def test_negative_tokens_of_sequences_far_from_the_sampler_are_masked() -> None:
    """Means of sampler - policy over four rows of two tokens: 0.5, 0.5, 0.1, 0.5; the threshold is
    0.3 (0.5: at the limit, kept). A: -1, 0.5, -1, 0. A token outside the mask counts for nothing. A
    sampler's NaN is no difference: of 0.2 and 0.8, 0.8 leaves a mean of 0.4, and 0.2 one of 0.1."""
    policy = torch.full((4, 3), -1.0, dtype=torch.float64, requires_grad=True)
    far = [[0.2, 0.8, 9.0], [0.5, 0.5, 9.0], [0.1, 0.1, 9.0], [0.2, 0.8, 9.0]]
    gaps = torch.tensor(far, dtype=torch.float64)
    advantages = torch.tensor([[-1.0], [0.5], [-1.0], [0.0]]).expand(4, 3)
    mask = torch.tensor([[True, True, False]]).expand(4, 3)
    args = (policy, policy.detach() + gaps, advantages, mask)
    keep, stats = off_policy_mask(*args, threshold=0.3)
    assert keep.tolist() == [[False, False, True], *[[True] * 3] * 3]
    assert stats.floats() == {"off_policy_mask_frac": pytest.approx(2 / 8)}
    assert off_policy_mask(*args, threshold=0.5)[0].all()
    ids = torch.tensor([[7], [1], [2], [0]]).expand(4, 3)
    packed, _ = off_policy_mask(*(x[mask] for x in args), threshold=0.3, row_ids=ids[mask])
    assert packed.equal(keep[mask])
    for unknown, kept in ((0, False), (1, True)):
        lost = gaps.clone()
        lost[0, unknown] = math.nan
        found, _ = off_policy_mask(policy, policy + lost, advantages, mask, threshold=0.3)
        assert found[0, :2].all() == kept
