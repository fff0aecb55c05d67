"""pass@k: hand-worked numbers, and the definition itself by enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest

from burnish.jobs.evaluate import pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 1 - 3 / 6),  # C(3, 2) / C(4, 2)
        (5, 2, 3, 1 - 1 / 10),  # C(3, 3) / C(5, 3)
        (10, 3, 1, 0.3),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 3, 2, 1.0),  # any two of four include one of the three
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    # 1e-15: one division.
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_draws_that_include_a_pass() -> None:
    """Every n up to 7, every number of passes, every k, against all C(n, k) draws."""
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                share = sum(any(draw) for draw in draws) / len(draws)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_stays_exact_for_many_samples() -> None:
    """C(1000, 500) has 300 digits: a quotient of floats would overflow."""
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, abs=1e-12)
