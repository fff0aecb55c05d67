"""build_rewards: from the recipe's entries to rewards."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from burnish.rewards.base import RewardError
from burnish.rewards.build import build_rewards
from burnish.rewards.environment.config import EnvironmentReward
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.kinds import RewardConfig
from burnish.rewards.math.config import MathReward
from burnish.rewards.model.config import ModelReward


def one(response: str) -> float:
    return 1.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text("def exact(response, label):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_relative_to_the_working_directory_is_loaded(folder: Path) -> None:
    config = FunctionReward(function="my_rewards.py:exact", weight=2.0)
    ((reward, weight),) = build_rewards([config])
    assert (reward.name, weight) == ("function", 2.0)


def test_a_module_function_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    ((reward, _),) = build_rewards([FunctionReward(function="my_rewards:exact")])
    assert reward.name == "function"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_reward.py:exact", "nearest: my_rewards.py"),
        ("my_rewards.py:exakt", "nearest: exact"),
        ("my_rewards.py", "not of the form"),
        ("burnish.rewrds:f", "nearest: burnish.rewards"),
        ("burnish.rewards.shaping:shapd", "nearest: shaped"),
    ],
)
def test_a_function_that_cannot_be_loaded_names_the_nearest(
    folder: Path, spec: str, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        build_rewards([FunctionReward(function=spec)])
    assert message in str(caught.value)


def test_a_file_that_raises_is_named_with_its_error(folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        build_rewards([FunctionReward(function="broken.py:f")])


def test_a_given_function_is_taken_by_name_or_as_the_only_one() -> None:
    named = build_rewards(
        [FunctionReward(name="a"), FunctionReward(name="b")], functions={"b": one, "a": one}
    )
    assert [reward.name for reward, _ in named] == ["a", "b"]
    ((only, _),) = build_rewards([FunctionReward()], functions={"anything": one})
    assert only.name == "function"


@pytest.mark.parametrize("functions", [None, {"x": one, "exacd": one}])
def test_a_missing_function_is_an_error_with_a_fix(functions: Any) -> None:
    with pytest.raises(RewardError) as caught:
        build_rewards([FunctionReward(name="exact")], functions=functions)
    assert "rewards.0.function=path/to/file.py:name" in str(caught.value)


def test_a_given_function_that_no_reward_uses_is_an_error() -> None:
    with pytest.raises(RewardError, match="'spare'"):
        build_rewards([MathReward()], functions={"spare": one})


def test_names_are_made_unique_and_kinds_are_built() -> None:
    built = build_rewards([MathReward(), EnvironmentReward(), MathReward(), MathReward()])
    assert [reward.name for reward, _ in built] == ["math", "environment", "math_2", "math_3"]


def test_a_model_reward_comes_from_its_factory_with_its_name() -> None:
    config = ModelReward.model_validate({"kind": "model", "model": {"path": "somewhere"}})
    seen: list[str | None] = []

    def factory(entry: ModelReward) -> Any:
        seen.append(entry.name)
        return build_rewards([EnvironmentReward(name=entry.name)])[0][0]

    build_rewards([config, config], model_reward=factory)
    assert seen == ["model", "model_2"]
    with pytest.raises(RewardError, match="model_reward"):
        build_rewards([config])


def test_every_kind_of_a_recipe_can_be_built() -> None:
    union, _ = get_args(RewardConfig)
    for config in get_args(union):
        module = import_module(f"burnish.rewards.{config.model_fields['kind'].default}.reward")
        assert callable(module.make_reward)
        assert hasattr(module, "check_label") == config.reads_label
        assert hasattr(module, "check") == config.has_check
