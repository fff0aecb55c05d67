"""Rewards of the sorting recipes: plain functions whose parameter names say what they get."""

from __future__ import annotations


def sorted_right(response: str, label: str) -> float:
    """1 for exactly the right answer, else 0."""
    return float(response == label)


def ascending(prompt: str, response: str) -> float:
    """1 for the digits of the prompt in ascending order, else 0. Needs no label."""
    return float(response == "".join(sorted(prompt.rstrip(">"))))
