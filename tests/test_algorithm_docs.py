"""docs/algorithms.md and the README's table: every registered name is there, with a recipe or an
option that is valid and a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from burnish.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from burnish.config import load_config
from burnish.config.overrides import RecipeLoader

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("## Algorithm, paper, function")[2].partition("\n## ")[0]

RM = ("bradley_terry", "log_exp")
SECTIONS = {
    "Advantages": (ADVANTAGES, "advantage"),
    "Policy losses": (POLICY_LOSSES, "policy_loss"),
    "KL": (KL_ESTIMATORS, "kl.estimator"),
    "Preferences": (PREFERENCE_LOSSES, "loss"),
}


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section's table: name -> the other cells."""
    text = PAGE.partition(f"\n## {section} ")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in found}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_registered_name_has_its_row_and_no_other_has_one(section: str) -> None:
    assert set(rows(section)) == set(SECTIONS[section][0])


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_has_a_recipe_or_an_option_that_selects_the_name(section: str) -> None:
    _, key = SECTIONS[section]
    for name, (_, _, choice, _) in rows(section).items():
        choice = choice.strip("`")
        if choice.startswith("recipes/"):
            recipe = yaml.load((ROOT / choice).read_text(encoding="utf-8"), Loader=RecipeLoader)
            settings = recipe.get("algorithm", recipe)
            chosen = settings.get(key, {"bradley_terry": "bradley_terry", "ppo": "ppo"}.get(name))
            kind = chosen["kind"] if isinstance(chosen, dict) else chosen
            assert kind == name, f"{choice} has {key}: {kind}"
        else:
            assert choice.endswith(f"{key}={name}")
            job = "tiny_2_rm" if name in RM else "tiny_dpo" if key == "loss" else "tiny_grpo"
            recipe = yaml.load(
                (ROOT / "recipes" / f"{job}.yaml").read_text(encoding="utf-8"), Loader=RecipeLoader
            )
            drop = {"reference": None} if key == "loss" and name not in RM else {}
            node = recipe | drop
            *path, last = choice.partition("=")[0].split(".")
            for part in path:
                node = node.setdefault(part, {})
            changed = recipe | drop
            if path:
                node[last] = name
            else:
                changed[last] = name
            load_config(changed)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_names_tests_that_exist(section: str) -> None:
    for name, (*_, oracle) in rows(section).items():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", oracle)
        assert named, f"{name} names no test"
        for file, test in named:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {test}(" in text, f"{name}: {file} has no {test}"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_registered_name_is_in_the_readmes_table(section: str) -> None:
    registry, key = SECTIONS[section]
    for name in registry:
        own = f"`{key}: {name}`" in TABLE or f"`loss: {name}`" in TABLE
        assert own or re.search(rf"`{re.escape(key)}: k1`.*`{name}`", TABLE), name
