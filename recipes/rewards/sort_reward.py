"""Rewards of the sorting recipes: plain functions; the names of the parameters say what they get."""

from __future__ import annotations


def sorted_right(response: str, label: str) -> float:
    """1 for exactly the right answer, else 0."""
    return float(response == label)
