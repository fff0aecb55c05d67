"""Small valid recipes to break."""

import copy
from typing import Any

import pytest

_MODEL = {"scratch": {}}
_RECIPES: dict[str, dict[str, Any]] = {
    "rl": {
        "job": "rl",
        "model": _MODEL,
        "max_steps": 3,
        "data": {"sources": ["prompts.jsonl"]},
        "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 8},
        "train": {"train_batch_size": 64},
    },
    "sft": {
        "job": "sft",
        "model": _MODEL,
        "data": {"sources": ["demos.jsonl"]},
        "train": {"train_batch_size": 8},
    },
    "rm": {
        "job": "rm",
        "model": _MODEL,
        "data": {"sources": ["pairs.jsonl"]},
        "train": {"train_batch_size": 8},
    },
    "distill": {
        "job": "distill",
        "model": _MODEL,
        "teacher": {"model": _MODEL},
        "data": {"sources": ["demos.jsonl"]},
        "train": {"train_batch_size": 8},
    },
    "evaluate": {
        "job": "evaluate",
        "model": _MODEL,
        "eval": {"data": {"sources": ["prompts.jsonl"]}, "generate_max_len": 8},
    },
    "generate": {
        "job": "generate",
        "model": _MODEL,
        "data": {"sources": ["prompts.jsonl"]},
    },
}


@pytest.fixture
def recipes() -> dict[str, dict[str, Any]]:
    """A valid recipe for every job."""
    return copy.deepcopy(_RECIPES)


@pytest.fixture
def rl_recipe(recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A valid RL recipe: 8 prompts x 8 samples, one optimizer step."""
    return recipes["rl"]
