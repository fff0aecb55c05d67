"""Environments: made once, the same for the same seed, scored by their own rules."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.environments.base import Environment, EnvironmentSetupError
from burnish.environments.make import make_environment
from burnish.environments.reasoning_gym import ReasoningGym

OWN = """
class Own:
    name = "own"
    def __init__(self, options, *, size, seed):
        self.made_with = (options, size, seed)
    def __len__(self):
        return self.made_with[1]
    def item(self, i):
        return {"prompt": "?", "label": "!"}
    def step(self, i, response):
        raise NotImplementedError

class Half:
    name = "half"
    def __init__(self, options, *, size, seed):
        pass
"""


def _chain(seed: int = 1, **options: Any) -> ReasoningGym:
    return ReasoningGym({"dataset": "chain_sum", **options}, size=20, seed=seed)


def _rows(environment: Environment) -> list[Any]:
    return [environment.item(i) for i in range(len(environment))]


def test_items_depend_on_the_seed_and_not_on_access_order() -> None:
    first, second = _chain(), _chain()
    backwards = [second.item(i) for i in reversed(range(20))][::-1]
    assert _rows(first) == backwards
    assert _rows(_chain(seed=2)) != backwards


def test_chain_sum_scores_right_1_wrong_0_and_around_it_partly() -> None:
    """reasoning-gym's rule: len(answer) / len(response) where the response contains the answer."""
    environment = _chain()
    answer = environment.item(0)["label"]
    wordy = f"It is {answer}"
    assert environment.step(0, f"  {answer}\n").reward == 1.0
    assert environment.step(0, "none").reward == 0.0
    assert environment.step(0, wordy).reward == len(answer) / len(wordy)
    assert environment.step(0, answer).done


def test_exact_removes_partial_credit() -> None:
    environment = _chain(exact=True)
    answer = environment.item(0)["label"]
    assert environment.step(0, answer).reward == 1.0
    assert environment.step(0, f"It is {answer}").reward == 0.0


def test_a_scorer_that_raises_is_0_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """game_of_life reads row 0 of the JSON ``{}`` and raises KeyError."""
    environment = ReasoningGym({"dataset": "game_of_life"}, size=2, seed=1)
    with caplog.at_level(logging.WARNING):
        rewards = [environment.step(0, "{}").reward for _ in range(3)]
    assert rewards == [0.0, 0.0, 0.0]
    assert environment.scorer_failures == 3
    assert len([r for r in caplog.records if "scorer raised" in r.message]) == 1


def test_an_item_out_of_range_is_an_error_and_not_a_score() -> None:
    with pytest.raises(IndexError, match="0 to 19"):
        _chain().step(20, "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_summ"}, "nearest: chain_sum"),
        ({}, "options.dataset is not set"),
        ({"dataset": "chain_sum", "min_term": 2}, "nearest: min_terms"),
        ({"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}, "rejects"),
        ({"dataset": "chain_sum", "seed": 2}, "field of the source"),
    ],
)
def test_option_errors_name_the_valid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        make_environment("reasoning_gym", options, size=5, seed=1)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(EnvironmentSetupError, match=r"burnish\[demo\]"):
        _chain()


def test_the_same_arguments_share_one_environment() -> None:
    options = {"dataset": "chain_sum", "min_terms": 2}
    again = dict(reversed(options.items()))
    first = make_environment("reasoning_gym", options, size=5, seed=1)
    assert make_environment("reasoning_gym", again, size=5, seed=1) is first
    assert make_environment("reasoning_gym", options, size=5, seed=2) is not first


def test_a_custom_class_gets_options_size_and_seed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    environment = make_environment(f"{tmp_path}/own.py:Own", {"a": [1]}, size=3, seed=4)
    assert (environment.name, len(environment)) == ("own", 3)
    assert vars(environment)["made_with"] == ({"a": [1]}, 3, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gim", "nearest: reasoning_gym"),
        ("{folder}/own.py:Owm", "nearest: Own"),
        ("{folder}/own.py:Half", "step"),
    ],
)
def test_an_object_that_is_not_an_environment_is_rejected(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(EnvironmentSetupError, match=message):
        make_environment(name.format(folder=tmp_path), {}, size=3, seed=4)


def test_options_that_are_not_json_are_rejected() -> None:
    with pytest.raises(EnvironmentSetupError, match="JSON"):
        make_environment("reasoning_gym", {"dataset": object()}, size=3, seed=4)
