"""docs/algorithms.md: every registered name is in its tables, every recipe and
option is valid, and every file and test that is named exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.algorithms import (
    ADVANTAGES,
    DIVERGENCES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
)
from burnish.config import JOBS, load_config
from burnish.config.docs import fields_table
from burnish.config.yaml_text import RecipeLoader

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Algorithm, paper, function")[2].partition("\n## ")[0]

RM = ("bradley_terry", "log_exp")
SECTIONS = {
    "Advantages": (ADVANTAGES, "advantage"),
    "Policy losses": (POLICY_LOSSES, "policy_loss"),
    "KL": (KL_ESTIMATORS, "kl.estimator"),
    "Preferences": (PREFERENCE_LOSSES, "loss"),
    "Distillation": (DIVERGENCES, "loss"),
}
BASE = {
    "sft": "tiny_1_sft",
    "rm": "tiny_2_rm",
    "preference": "tiny_dpo",
    "distill": "tiny_distill",
    "rl": "tiny_grpo",
    "generate": "tiny_iterative_1_pairs",
}
"""The recipe of a job to which an option is added."""


def table(section: str) -> list[list[str]]:
    """The cells of a section's table, row by row."""
    text = PAGE.partition(f"\n## {section} ")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section's table: name -> the other cells."""
    return {row[0].strip("`"): row[1:] for row in table(section)}


def recipe_of(name: str) -> dict[str, Any]:
    path = ROOT / "recipes" / f"{name}.yaml"
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=RecipeLoader)
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_registered_name_has_its_row_and_no_other_has_one(section: str) -> None:
    assert set(rows(section)) == set(SECTIONS[section][0])


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_has_a_recipe_or_an_option_that_selects_the_name(section: str) -> None:
    _, key = SECTIONS[section]
    for name, (_, _, choice, _) in rows(section).items():
        choice = choice.strip("`")
        if choice.startswith("recipes/"):
            recipe = recipe_of(Path(choice).stem)
            settings = recipe.get("algorithm", recipe)
            chosen = settings.get(key, {"bradley_terry": "bradley_terry", "ppo": "ppo"}.get(name))
            kind = chosen["kind"] if isinstance(chosen, dict) else chosen
            assert kind == name, f"{choice} has {key}: {kind}"
            continue
        assert choice.endswith(f"{key}={name}")
        job = "distill" if section == "Distillation" else "preference" if key == "loss" else "rl"
        job = "rm" if name in RM else job
        drop = {"reference": None} if job == "preference" else {}
        load_config(recipe_of(BASE[job]) | drop, [choice])


def test_every_row_about_something_else_has_valid_recipes_and_options_and_a_test() -> None:
    """Options follow their job: ``job`` ``key=value`` ... or ``job`` ``key``."""
    found = table("Other terms and")
    assert len(found) >= 15
    for what, formula, choices, oracle in found:
        assert what and formula and ".py" in oracle
        words = re.findall(r"`([^`]+)`", choices)
        assert words, f"{what}: no recipe and no option"
        for recipe in (word for word in words if word.startswith("recipes/")):
            load_config(ROOT / recipe)
        options = [word for word in words if not word.startswith("recipes/")]
        if options:
            job, *keys = options
            assert job in JOBS and keys, what
            load_config(recipe_of(BASE[job]), [key for key in keys if "=" in key])
            known = {row.path for row in fields_table(job)}
            assert {key for key in keys if "=" not in key} <= known, what


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_names_a_test(section: str) -> None:
    for name, (*_, oracle) in rows(section).items():
        assert re.search(r"`[\w/]+\.py::test_\w+`", oracle), f"{name} names no test"


def named_on(page: str) -> Iterator[tuple[str, str | None]]:
    """(file, test in it or None) of all that the page puts between backticks; ``::test`` alone is
    in the file before it."""
    last = ""
    for file, test in re.findall(r"`([\w/]*\.py|)(?:::(\w+))?`", page):
        last = file or last
        if file or test:
            yield last, test or None


def test_every_file_and_test_that_the_page_names_exists() -> None:
    homes = (ROOT / "tests", ROOT, ROOT / "burnish" / "algorithms")
    found = list(named_on(PAGE))
    assert len([test for _, test in found if test]) > 40
    for file, test in found:
        paths = [home / file for home in homes if (home / file).is_file()]
        assert paths, f"{file} is not there"
        text = paths[0].read_text(encoding="utf-8")
        assert test is None or f"def {test}(" in text, f"{file} has no {test}"


def test_a_missing_file_or_test_is_detected() -> None:
    told = "`a/b.py::test_x`, `::test_y` and `c.py`, not `x` or ``"
    assert list(named_on(told)) == [("a/b.py", "test_x"), ("a/b.py", "test_y"), ("c.py", None)]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_registered_name_is_in_the_readmes_table(section: str) -> None:
    registry, key = SECTIONS[section]
    for name in registry:
        own = f"`{key}: {name}`" in TABLE or f"`loss: {name}`" in TABLE
        assert own or re.search(rf"`{re.escape(key)}: k1`.*`{name}`", TABLE), name


CHOICES = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "loss": PREFERENCE_LOSSES}


def pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of each ``key: value`` whose key selects an algorithm."""
    found = (re.fullmatch(r"(\w+): (\w+)", word) for word in words)
    return ((m[1], m[2]) for m in found if m and m[1] in CHOICES)


def test_the_page_that_leads_to_an_algorithm_names_valid_recipes_keys_and_choices() -> None:
    """docs/choose.md: linked recipes load; ``section.key`` and ``key: value`` exist in a job."""
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    recipes = set(re.findall(r"\(\.\./(recipes/\w+\.yaml)\)", page))
    assert len(recipes) > 20
    for recipe in recipes:
        load_config(ROOT / recipe)
    words = re.findall(r"`([^`]+)`", page)
    keys = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)}
    known = {row.path for job in JOBS for row in fields_table(job)}
    assert len(keys) > 8 and keys - known <= {"metrics.jsonl"}
    assert {key: value for key, value in pairs(words) if value not in CHOICES[key]} == {}
