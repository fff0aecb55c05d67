"""The tiny chain of recipes/, run once for all tests that need a part of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

import burnish
from burnish.config import load_config

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Step:
    """A finished recipe."""

    run_dir: Path
    model: Path
    """Its export."""


@pytest.fixture(scope="session")
def run_recipe() -> object:
    """``run_recipe("tiny_1_sft", "run_dir=...")``: as the command line does, from the root."""

    def run(name: str, *overrides: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            config = load_config(ROOT / "recipes" / f"{name}.yaml", overrides)
            return burnish.run(config).run_dir

    return run


@pytest.fixture(scope="session")
def sft(run_recipe: object, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """recipes/tiny_1_sft.yaml and its export. Four of its six epochs, to save time. Processes of
    pytest-xdist share one run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    step, done = Step(folder / "sft" / "run", folder / "sft" / "model"), folder / "sft-done"
    with FileLock(folder / "sft.lock"):
        if not done.exists():
            run_recipe(  # type: ignore[operator]
                "tiny_1_sft", f"run_dir={step.run_dir}", "max_epochs=4"
            )
            burnish.export(step.run_dir, step.model, model="policy")
            done.touch()
    return step
