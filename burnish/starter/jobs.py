"""Jobs that a folder can begin with: template, sample rows, and settings of the tiny model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PairsDataConfig, PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig

NUM_ROWS = 200
"""Rows of a sample: enough for the tiny model to learn the task, which is why it is so simple."""


@dataclass(frozen=True)
class Starter:
    """One choice of ``--job``. Its template is ``files/<name>.yaml``."""

    question: str
    """Line in the list of choices."""
    job: str
    """Job of the recipe."""
    data: type[DataConfig] | None
    """Config of its rows. None: the environment makes the tasks."""
    tiny: Mapping[str, str]
    """Values of the template for the tiny model."""
    full: Mapping[str, str]
    """Values of the template for another model."""
    alphabet: str = " ,0123456789?aefglorst"
    """Characters of the tiny model: those of the sample."""
    columns: tuple[str, ...] = ()
    """Columns of the sample."""
    code: str | None = None
    """Python file of the user, a template in ``files``."""


TINY_RL = {"steps": "40", "passes": "4", "lr": "2e-3", "max_len": "64", "response": "1"}
FULL_RL = {"steps": "200", "passes": "1", "lr": "1e-6", "max_len": "1024", "response": "512"}
TINY_PAIRS = {"epochs": "10", "batch": "16", "lr": "2e-3", "max_len": "64"}
FULL_PAIRS = {"epochs": "1", "batch": "16", "lr": "1e-6", "max_len": "2048"}


STARTERS: dict[str, Starter] = {
    "sft": Starter(
        "imitate demonstrations (supervised fine-tuning)",
        "sft",
        SFTDataConfig,
        columns=("prompt", "response"),
        tiny={"epochs": "10", "batch": "16", "lr": "2e-3", "max_len": "64"},
        full={"epochs": "2", "batch": "16", "lr": "1e-5", "max_len": "2048"},
    ),
    "preference": Starter(
        "prefer better responses to worse ones (DPO and its family)",
        "preference",
        PreferenceDataConfig,
        columns=("prompt", "chosen", "rejected"),
        tiny={**TINY_PAIRS, "loss": "{kind: orpo}  # dpo for a model after sft; orpo needs none"},
        full={
            **FULL_PAIRS,
            "loss": "{kind: dpo, beta: 0.1}  # for a model after sft; others: orpo",
        },
    ),
    "rl": Starter(
        "get right answers, checked by a function (RL)",
        "rl",
        PromptDataConfig,
        columns=("prompt", "label"),
        code="rewards.py",
        tiny=TINY_RL,
        full=FULL_RL,
    ),
    "environment": Starter(
        "succeed in your own environment over several turns (RL)",
        "rl",
        None,
        alphabet=" 123abefghilmnorstuw",
        code="environment.py",
        tiny={**TINY_RL, "steps": "30", "response": "4", "episode": "128"},
        full={**FULL_RL, "episode": "2048"},
    ),
    "rm": Starter(
        "score responses (reward model on pairs)",
        "rm",
        PairsDataConfig,
        columns=("prompt", "chosen", "rejected"),
        tiny=TINY_PAIRS,
        full={**FULL_PAIRS, "lr": "1e-5"},
    ),
}
"""Choices by name, in the order of the question."""


def sample_rows(columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return rows with these columns: which of three digits is the largest?"""
    rng = random.Random(0)
    triples = list(itertools.permutations(range(10), 3))
    rows = []
    for digits in rng.sample(triples, NUM_ROWS):
        answer, *others = sorted(digits, reverse=True)
        row = {
            "prompt": f"largest of {digits[0]}, {digits[1]}, {digits[2]}?",
            "rejected": str(rng.choice(others)),
        }
        rows.append({column: row.get(column, str(answer)) for column in columns})
    return rows
