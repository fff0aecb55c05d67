"""Small valid recipes to break."""

import copy
from typing import Any

import pytest
from refusals import BASES


@pytest.fixture
def recipes() -> dict[str, dict[str, Any]]:
    """A valid recipe for every job."""
    return copy.deepcopy(BASES)


@pytest.fixture
def rl_recipe(recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A valid RL recipe: 8 prompts x 8 samples, one optimizer step."""
    return recipes["rl"]
