"""Running mean and spread against hand-worked sums, statistics of all values, and any order."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.running import RunningMoments

batches = st.lists(st.lists(st.floats(-1e3, 1e3), max_size=7), max_size=7)


def fed(*parts: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for part in parts:
        moments.update(part)
    return moments


def test_two_batches_by_hand() -> None:
    """{1, 3}: mean 2, m2 = 1 + 1 = 2. {6}: mean 6, m2 0. Joined: delta 4,
    mean 2 + 4 x 1/3 = 10/3, m2 = 2 + 0 + 16 x 2 x 1 / 3 = 38/3, std = sqrt(38/9) = 2.054805."""
    moments = fed([1.0, 3.0])
    assert (moments.count, moments.mean, moments.m2) == (2, 2.0, 2.0)
    moments.update([6.0])
    assert moments.count == 3
    assert moments.mean == pytest.approx(10 / 3, rel=1e-15)  # fp64 rounding
    assert moments.m2 == pytest.approx(38 / 3, rel=1e-15)
    assert moments.std == pytest.approx(2.054805, abs=1e-6)  # six written decimals
    assert moments.normalized(6.0, center=True) == pytest.approx((6 - 10 / 3) / 2.0548047, abs=1e-6)
    assert moments.normalized(6.0, center=False) == pytest.approx(6 / 2.0548047, abs=1e-6)


@settings(max_examples=50)
@given(parts=batches)
def test_batches_give_the_same_moments_as_all_numbers_at_once(parts: list[list[float]]) -> None:
    moments, whole = fed(*parts), [x for part in parts for x in part]
    assert moments.count == len(whole)
    if whole:
        # 1e-9 of the largest number: a few fp64 roundings per batch
        assert moments.mean == pytest.approx(statistics.fmean(whole), abs=1e-6, rel=1e-9)
        assert moments.std == pytest.approx(statistics.pstdev(whole), abs=1e-5, rel=1e-9)


def test_a_small_spread_around_a_large_mean_is_kept() -> None:
    """Around 1e9 with deviations of 1: E[x^2] - E[x]^2 in fp64 has no digit left of the 1."""
    moments = fed(*[[1e9 + 1, 1e9 - 1] for _ in range(500)])
    assert moments.std == pytest.approx(1.0, rel=1e-9)


def test_equal_numbers_are_not_divided_by_their_spread() -> None:
    moments = fed([0.5, 0.5, 0.5])
    assert moments.normalized(0.5, center=True) == 0.0
    assert moments.normalized(0.5, center=False) == 0.5
    assert fed().normalized(2.0, center=True) == 2.0


def test_the_state_goes_through_json_bit_by_bit() -> None:
    first = fed([0.1, 0.7, -3.3])
    again = RunningMoments()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for moments in (first, again):
        moments.update([1 / 3, 2e-17])
    assert vars(first) == vars(again)


def test_without_values_the_moments_are_unchanged() -> None:
    moments = RunningMoments()
    assert (moments.std, moments.normalized(3.0, center=True)) == (0.0, 3.0)


@pytest.mark.parametrize(("spread", "divided"), [(0.7e-8, False), (1.5e-8, True)])
def test_values_with_a_std_below_1e_8_are_not_divided(spread: float, divided: bool) -> None:
    """{-d, d} has std d."""
    moments = fed([-spread, spread])
    # 1e-9: fp64 square root
    expected = 1.0 if divided else spread
    assert moments.normalized(spread, center=True) == pytest.approx(expected, rel=1e-9)


def test_values_with_a_std_on_the_bound_are_not_divided() -> None:
    assert fed([-2.0, 2.0]).normalized(2.0, center=True, eps=2.0) == 2.0


def test_a_loaded_state_is_converted_to_a_count_and_two_floats() -> None:
    moments = RunningMoments()
    moments.load_state_dict({"count": 2.0, "mean": 2, "m2": 2})
    assert [type(x) for x in (moments.count, moments.mean, moments.m2)] == [int, float, float]


def test_values_up_to_the_bound_are_accepted() -> None:
    """{-1e150, 1e150} has std 1e150: its squares 1e300 fit into fp64."""
    moments = fed([-1e150, 1e150])
    # 1e-12: fp64 square root
    assert moments.std == pytest.approx(1e150, rel=1e-12)
