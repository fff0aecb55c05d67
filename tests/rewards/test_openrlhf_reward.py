"""A reward file of OpenRLHF runs as it is, by its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.rewards.base import RewardError
from burnish.rewards.build import build_rewards
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.reward_set import RewardSet
from burnish.types import Group

MakeGroup = Callable[..., Group]

EXAMPLE = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    # queries is prompts + responses
    # labels is answers
    reward = torch.tensor([float(len(q) - len(p)) for q, p in zip(queries, prompts)])
    return {
        "rewards": reward,
        "scores": reward / 2,
        "extra_logs": {"dummy_scores": reward * 3, "a\\nb": reward},
    }
"""


@pytest.fixture
def reward_set(tmp_path: Path):
    """``reward_set(source)``: the rewards of a recipe with a file of OpenRLHF."""
    made = []

    def make(source: str) -> RewardSet:
        path = tmp_path / "reward_func.py"
        path.write_text(source, encoding="utf-8")
        config = FunctionReward(name="mine", function=f"openrlhf:{path}")
        assert list(config.rules()) == []
        made.append(
            RewardSet(
                build_rewards([config]),
                on_failure=FailurePolicy(),
                shaping=ShapingConfig(),
                generate_max_len=8,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_example_of_openrlhf_scores_and_its_logs_are_metrics(
    reward_set, make_group: MakeGroup
) -> None:
    """Responses "a" and "bbb": rewards 1 and 3, scores 0.5 and 1.5, logs 3 and 9: means 2, 1, 6."""
    scored = reward_set(EXAMPLE).score([make_group(0, ["a", "bbb"], label="L")])
    assert [sample.reward for sample in scored.groups[0].samples] == [1, 3]
    metrics = scored.stats.floats()
    assert metrics["reward/mine/scores"] == 1 and metrics["reward/mine/dummy_scores"] == 6
    assert metrics["reward/mine/bad_logs"] == 1  # a name with a control character
    assert not any("\n" in name for name in metrics)


@pytest.mark.parametrize(
    "result",
    [
        "torch.ones(len(queries))",
        "torch.ones(len(queries), 1, dtype=torch.bfloat16)",
        "[1.0 for q in queries]",
        "{'rewards': [torch.tensor(1.0) for q in queries]}",
        "{'rewards': __import__('numpy').ones(len(queries)), 'scores': None, 'extra_logs': None}",
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_arrays_and_lists_are_rewards(
    reward_set, make_group: MakeGroup, result: str, is_async: bool
) -> None:
    head = "async def" if is_async else "def"
    source = f"import torch\n{head} reward_func(queries, prompts, labels):\n    return {result}\n"
    scored = reward_set(source).score([make_group(0, ["a", "bb"], label=None)])
    assert [sample.reward for sample in scored.groups[0].samples] == [1, 1]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("{'scores': [1]}", "no 'rewards'"),
        ("[1.0]", "'rewards' has 1 entries"),
        ("'text'", "not a list"),
        ("[float('nan'), 1]", "instead of a finite number"),
        ("[None, object()]", "instead of a finite number"),
        ("1 / 0", "ZeroDivisionError"),
        ("exit()", "SystemExit"),
    ],
)
def test_other_results_are_failures_that_name_the_function(
    reward_set, make_group: MakeGroup, result: str, reason: str
) -> None:
    source = f"def reward_func(queries, prompts, labels):\n    return {result}\n"
    with pytest.raises(RewardError, match=reason) as failure:
        reward_set(source).score([make_group(0, ["a", "bb"], label=None)])
    assert "reward_func at " in str(failure.value)


def test_a_function_of_openrlhf_without_the_prefix_names_it(tmp_path: Path) -> None:
    path = tmp_path / "reward_func.py"
    path.write_text(EXAMPLE, encoding="utf-8")
    with pytest.raises(RewardError, match=r"openrlhf:path/to/file.py"):
        build_rewards([FunctionReward(function=f"{path}:reward_func")])
    with pytest.raises(RewardError, match="has no 'reward_func'"):
        path.write_text("x = 1", encoding="utf-8")
        build_rewards([FunctionReward(function=f"openrlhf:{path}")])
