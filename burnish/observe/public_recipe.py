"""The recipe of a run as it is published: in trackers, reports, logs and model cards.

Only ``config.yaml`` of the run folder, which resumes the run, contains the secrets of a recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from burnish.config import dump_yaml
from burnish.config.job import WITHOUT_RULES, JobConfig
from burnish.config.registry import JOBS
from burnish.config.yaml_text import load, read_text
from burnish.observe.errors import SavedRecipeError
from burnish.observe.files import write_text
from burnish.secret import secret_texts, without_secret_values

CONFIG_FILE = "config.yaml"
"""File of a run folder with the resolved recipe."""


def public_recipe(config: JobConfig) -> dict[str, Any]:
    """Return the resolved recipe with its secrets replaced by ``***``."""
    recipe: dict[str, Any] = without_secret_values(config.model_dump(mode="json"))
    return recipe


def recipe_secrets(config: JobConfig) -> set[str]:
    """Return the texts that :func:`public_recipe` replaces."""
    return secret_texts(config.model_dump(mode="json"))


def write_recipe(config: JobConfig, run_dir: Path) -> None:
    """Write the resolved recipe to ``config.yaml`` of the run folder. Only this user can read the
    file if it contains secrets."""
    write_text(run_dir / CONFIG_FILE, dump_yaml(config), private=bool(recipe_secrets(config)))


def read_recipe(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return the saved recipe of a run folder, as text and as a tree. Its size and depth are
    limited like those of a recipe. Raises SavedRecipeError if it cannot be read."""
    path = run_dir / CONFIG_FILE
    try:
        text = read_text(path, errors="replace")
        recipe = load(text)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SavedRecipeError(
            f"{path} is not valid YAML ({error}); correct it, or move it away to continue without "
            "it"
        ) from error
    if not isinstance(recipe, dict):
        raise SavedRecipeError(
            f"{path} must contain a mapping of keys to values, not {type(recipe).__name__}"
        )
    return text, recipe


def saved_settings(run_dir: Path) -> dict[str, Any]:
    """Return the saved recipe of a run folder with the present keys and their defaults, as
    ``model_dump`` of its config; as it was saved if the present version has no such keys. Raises
    SavedRecipeError if it cannot be read."""
    recipe = read_recipe(run_dir)[1]
    job = JOBS.get(str(recipe.get("job")))
    if job is None:
        return recipe
    try:
        return job.model_validate(recipe, context=WITHOUT_RULES).model_dump(mode="json")
    except ValidationError:
        return recipe


def public_yaml(recipe: dict[str, Any], text: str) -> str:
    """Return ``text``, the YAML of ``recipe``, if it contains no secrets, else the YAML of the
    recipe without them."""
    public = without_secret_values(recipe)
    if public == recipe:
        return text
    return yaml.safe_dump(public, sort_keys=False, allow_unicode=True, width=100)
