"""Every exception of the project derives from BurnishError and knows its exit code."""

import ast
import builtins
import importlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import burnish
from burnish.driver.errors import Interrupted, RunError, StoppedError
from burnish.errors import BurnishError

PACKAGE = Path(burnish.__file__).parent
CONTROL_FLOW = {"_Found", "_BadAnswer", "_OtherWeightsError"}
"""Always caught in the module that raises them; their messages are not for users."""
STANDALONE = {
    "BadTests",
    "CannotSend",
    "Ended",
    "OutOfTime",
    "EpisodeEndedError",
    "RepeatedKeyError",
}
"""In files that run under other interpreters and import nothing of Burnish."""


def classes() -> Iterator[tuple[str, set[str]]]:
    """(name, names of the bases) of every class of the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def exceptions() -> dict[str, set[str]]:
    """Name -> names of all bases, of every exception class of the package. Found in the source, so
    that files count whose imports are not installed."""
    bases = dict(classes())

    def above(name: str) -> set[str]:
        return {name}.union(*map(above, bases.get(name, ())))

    def is_exception(name: str) -> bool:
        found = vars(builtins).get(name)
        return name.endswith("Error") or (
            isinstance(found, type) and issubclass(found, BaseException)
        )

    return {name: above(name) for name in bases if any(map(is_exception, above(name) - {name}))}


def test_every_exception_derives_from_the_root_exception():
    found = exceptions()
    assert len(found) > 40
    outside = {name for name, bases in found.items() if "BurnishError" not in bases}
    assert outside == CONTROL_FLOW | STANDALONE


@pytest.mark.parametrize(
    ("home", "name", "builtin", "exit_code"),
    [
        ("checkpoint", "CheckpointError", RuntimeError, 2),
        ("config.arithmetic", "BatchError", ValueError, 2),
        ("config.load", "ConfigError", ValueError, 2),
        ("data.sources", "DataError", ValueError, 2),
        ("environments.base", "EnvironmentSetupError", ValueError, 2),
        ("driver.errors", "RunError", RuntimeError, 2),
        ("driver.errors", "StoppedError", RuntimeError, 3),
        ("plan.launch", "DoesNotFitError", RuntimeError, 2),
        ("plan.oom", "RunOutOfMemoryError", RuntimeError, 2),
        ("models.paths", "ModelError", ValueError, 2),
        ("observe.errors", "TrackerError", RuntimeError, 2),
        ("report.build", "ReportError", ValueError, 2),
        ("rewards.base", "RewardError", RuntimeError, 2),
        ("rollout.base", "SamplingError", ArithmeticError, 2),
        ("runtime.base", "ClusterError", RuntimeError, 2),
        ("serve.base", "ServeError", RuntimeError, 2),
        ("sync.base", "SyncError", RuntimeError, 2),
        ("train.base", "NonFiniteError", ArithmeticError, 2),
    ],
)
def test_the_errors_that_end_commands_keep_their_builtin_base_and_exit_code(
    home, name, builtin, exit_code
):
    error = vars(importlib.import_module(f"burnish.{home}"))[name]
    assert issubclass(error, BurnishError) and issubclass(error, builtin)
    assert error.exit_code == exit_code


def test_the_text_of_an_error_is_its_message():
    assert RunError("the folder is full").text_for("rl") == "error: the folder is full"
    stopped = StoppedError("the loss is not finite", {"train/loss": 1.0})
    assert stopped.exit_code == 3 and stopped.metrics == {"train/loss": 1.0}


def test_an_interrupted_run_names_the_command_that_resumes_it():
    error = Interrupted(Path("runs/x"), signal.SIGTERM)
    assert error.exit_code == 143
    assert error.text_for("generate") == (
        "stopped by SIGTERM; the run is saved. Resume with: burnish generate --resume runs/x"
    )
