"""The built package contains the recipes, and they run in any working directory."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.shipped import SHIPPED, existing_path, shipped_recipes

ROOT = Path(__file__).resolve().parents[1]


def test_the_package_has_every_recipe_and_file_of_the_repository():
    assert SHIPPED.resolve() == ROOT / "recipes" and len(shipped_recipes()) > 30


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory without recipes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_loads_elsewhere_with_files_of_the_package(elsewhere, caplog):
    for path in shipped_recipes():
        config = load_config(f"recipes/{path.name}")
        assert "recipes/" not in config.model_dump_json().replace(f"{SHIPPED}/", "")
    assert (
        f"notice: read from the installed package ({SHIPPED}): recipes/{path.name}" in caplog.text
    )


def test_files_of_the_working_directory_take_precedence(elsewhere):
    (elsewhere / "recipes" / "data").mkdir(parents=True)
    rows, recipe = Path("recipes/data/sort_demos.jsonl"), Path("recipes/tiny_1_sft.yaml")
    rows.write_text("{}")
    config = load_config(recipe)
    assert config.data.sources[0].path == str(rows)
    assert config.eval.data.sources[0].path == str(SHIPPED / "data/sort_demos_heldout.jsonl")
    recipe.write_text("job: sft\n")
    assert existing_path(recipe) == recipe
    with pytest.raises(ConfigError, match="data: is required"):
        load_config(recipe)
    with pytest.raises(ConfigError, match=r"nearest: recipes/tiny_dpo\.yaml"):
        load_config("recipes/tiny_dpoo.yaml")
    for name in (
        "recipes/../cli.py",
        "recipes/\0",
        "recipes/" + "x" * 300,
        "recipes",
        "tiny_1_sft",
    ):
        assert existing_path(Path(name)) == Path(name)


@pytest.mark.slow
def test_a_wheel_has_the_recipes_and_runs_one_of_them(tmp_path):
    """Built from a copy, which keeps build/ out of the repository, and without a network."""
    if tuple(map(int, metadata.version("setuptools").split(".")[:1])) < (77,):
        pytest.skip("the build needs setuptools 77")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("burnish", "recipes"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    package = {str(p.relative_to(source)) for p in (source / "burnish").rglob("*.*")}
    recipes = {f"burnish/{p.relative_to(source)}" for p in (source / "recipes").rglob("*.*")}
    installed = {str(p.relative_to(site)) for p in (site / "burnish").rglob("*.*")}
    assert installed == package | recipes and len(recipes) > 50

    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "sft", "recipes/tiny_1_sft.yaml", "max_steps=2"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(site / "burnish" / "recipes") in done.stderr
    assert (tmp_path / "runs" / "tiny-sft" / "metrics.jsonl").is_file()
