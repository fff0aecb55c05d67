"""What a recipe leaves out of a step: groups without signal, and samples that were cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.rollout import DynamicSampling
from burnish.observe.metrics import read_metrics
from burnish.rewards.reward_set import RewardSet, ScoredGroup
from burnish.rollout.runner import GroupFilter
from burnish.types import Group, Prompt

SCRATCH = {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}
Make = Callable[..., JobConfig]


@pytest.fixture
def recipe(tmp_path: Path) -> Make:
    """8 prompts, 4 a step, 2 samples each. No response ends by itself."""
    rows = [{"prompt": f"{i}=", "label": str(i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def odd(response):\n    return float(len(response) > 0 and response[0] in '13579')\n\n\n"
        "def even(response):\n    return 1.0 - odd(response)\n\n\n"
        "def ones(response):\n    return 1.0\n"
    )

    def make(*overrides: str, **more: Any) -> JobConfig:
        tree: dict[str, Any] = {
            "job": "rl",
            "run_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "model": {"scratch": {**SCRATCH, "max_position_embeddings": 32}},
            "data": {"sources": [str(tmp_path / "rows.jsonl")]},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 2,
                "generate_max_len": 4,
            },
            "rewards": [{"kind": "function", "function": f"{tmp_path / 'own.py'}:odd"}],
            "train": {"train_batch_size": 4, "lr": 1e-2},
            "checkpoint": {"every_n_steps": 1, "keep_last": 9},
        }
        return load_config(tree | more, overrides)

    return make


def weights(run_dir: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """All tensors of a model in a checkpoint."""
    from safetensors.torch import load_file

    folder = run_dir / f"checkpoints/step_{step:06d}/{role}"
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {f"{f.name}/{k}": v for f in files for k, v in load_file(f).items()}


@pytest.mark.parametrize("with_critic", [False, True])
def test_a_step_whose_samples_were_all_cut_off_has_no_update(
    recipe: Make, with_critic: bool
) -> None:
    """Neither policy loss nor entropy bonus, KL or value loss act: the weights and the optimizer's
    state are the same bits after the step, and the adaptive KL coefficient does not move."""
    algorithm: dict[str, Any] = {
        "mask_truncated": True,
        "entropy_coef": 0.1,
        "advantage": "gae" if with_critic else "grpo",
        "kl": {"init_kl_coef": 0.1, "adaptive": {"target": 0.02, "horizon": 40}},
    }
    config = recipe("rollout.generate_max_len=1", "max_steps=6", algorithm=algorithm)
    burnish.run(config)
    run_dir = Path(config.run_dir)
    lines = read_metrics(run_dir)
    cut = [n for n, line in enumerate(lines) if n and line["reward/truncated_frac"] == 1]
    assert 0 < len(cut) < 5
    roles = ("policy", "critic") if with_critic else ("policy",)
    for n, line in enumerate(lines[1:], start=1):
        same = [
            torch.equal(first[name], second[name])
            for role in roles
            for first, second in [(weights(run_dir, n, role), weights(run_dir, n + 1, role))]
            for name in first
        ]
        assert all(same) == (n in cut)
        assert ("train/loss" in line) == (n not in cut)
        if n in cut and n + 1 < len(lines):
            assert lines[n + 1]["train/kl_coef"] == line["train/kl_coef"]


@pytest.mark.parametrize(
    ("normalize_each", "running_norm", "weights", "by_each"),
    [
        (False, None, (1.0, 1.0), False),
        (True, None, (1.0, 1.0), True),
        (False, "mean_std", (1.0, 1.0), True),
        (False, "std", (1.0, 1.0), True),
        (False, "std", (0.0, 0.0), False),  # no normalized reward is trained
    ],
)
def test_groups_are_compared_by_the_rewards_that_are_trained(
    recipe: Make,
    normalize_each: bool,
    running_norm: str | None,
    weights: tuple[float, float],
    by_each: bool,
) -> None:
    """odd + even is 1 for every response, so all plain sums are equal; the rewards are not, nor is
    the sum of a normalized and a plain one."""
    odd = recipe().model_dump()["rewards"][0]["function"]
    one, other = ({"kind": "function", "function": odd, "weight": w} for w in weights)
    rewards = [
        one | ({"running_norm": running_norm} if running_norm else {}),
        other | {"function": odd.replace(":odd", ":even")},
        {"kind": "function", "function": odd.replace(":odd", ":ones")},
    ]
    config = recipe(
        "max_steps=1",
        "rollout.dynamic_sampling={max_refills: 1}",
        "rollout.n_samples_per_prompt=8",
        "train.train_batch_size=16",
        rewards=rewards,
        algorithm={"advantage": {"kind": "grpo", "normalize_each": normalize_each}},
    )
    burnish.run(config)
    (line,) = read_metrics(Path(config.run_dir))
    counts = (line["rollout/groups_kept_anyway"], line["rollout/groups_filtered"])
    assert counts == ((0, 0) if by_each else (4, 4))
    assert (line["train/no_signal_frac"] < 1) == by_each


class Sums(RewardSet):
    """Rewards a (weight 1), b (weight 1) and c (weight 0)."""

    def __init__(self) -> None:
        self._rewards = tuple(
            (type("R", (), {"name": n})(), w) for n, w in zip("abc", (1, 1, 0), strict=True)
        )
        self._shaping = type("S", (), {"reward_clip": None})()


@pytest.mark.parametrize(
    ("scores", "by_sum", "by_each"),
    [
        ({"a": [0, 1], "b": [1, 0], "c": [0, 0]}, False, True),
        ({"a": [1, 1], "b": [1, 1], "c": [0, 1]}, False, False),  # c has no weight
        ({"a": [1, 1], "b": [0, 1], "c": [0, 0]}, True, True),
        ({"a": [0.5, 0.5], "b": [0.25, 0.25], "c": [1, 1]}, False, False),
    ],
)
def test_the_filter_by_hand(scores: dict[str, list[float]], by_sum: bool, by_each: bool) -> None:
    measured = ScoredGroup(Group(0, Prompt("p", (1,), ""), ()), scores)
    for each, kept in ((False, by_sum), (True, by_each)):
        assert GroupFilter(DynamicSampling(), each_reward=each).keeps(measured, Sums()) is kept
        band = DynamicSampling(above=5.0)
        assert not GroupFilter(band, each_reward=each).keeps(measured, Sums())
