"""Reward of the recipe. ``python -m doctest rewards.py`` tests it: no output if it passes."""

from __future__ import annotations

import re


def score(response: str, label: str) -> float:
    """Return 1 if the label is the response, or the last number in it, else 0.

    A function gets the parameters that it names: prompt, response, label, metadata (the row's other
    columns). Any finite number is a reward; partial credit helps a model that is rarely right.

    >>> score("7", "7"), score("The largest is 7.", "7"), score("2 or 4", "7"), score("", "7")
    (1.0, 1.0, 0.0, 0.0)
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    return float(str(label).strip() in (response.strip(), *numbers[-1:]))
