"""``burnish.load_config`` and ``burnish.run`` as a notebook uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.rewards.base import RewardError

MakeConfig = Callable[..., JobConfig]


def test_a_run_with_a_plain_callable_leaves_a_whole_run_folder(
    rl: MakeConfig, reward: Callable[[str], float], evaluation: list[str]
) -> None:
    result = burnish.run(rl(*evaluation), rewards=reward)
    made = {path.name for path in result.run_dir.iterdir()}
    assert made >= {"config.yaml", "metrics.jsonl", "samples", "checkpoints", "report.html"}
    assert made >= {"timeline.json", "run.log"}
    lines = read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert result.metrics["reward/mean"] == lines[-1]["reward/mean"]
    assert "<html" in (result.run_dir / "report.html").read_text(encoding="utf-8")
    phases = {"time/rollout_s", "time/train_s", "time/optim_s", "time/reward_s", "time/eval_s"}
    assert phases <= lines[-1].keys()


def test_the_written_recipe_reads_back_to_the_same_config(
    rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    config = rl("max_steps=1")
    result = burnish.run(config, rewards=reward)
    assert burnish.load_config(result.run_dir / "config.yaml") == config


def test_a_callable_gets_the_label_and_the_prompt_of_its_own_row(rl: MakeConfig) -> None:
    def right(prompt: str, response: str, label: str) -> float:
        a, b = prompt.rstrip("=").split("+")
        assert label == str(int(a) + int(b))
        return float(response.startswith(label))

    burnish.run(rl(), rewards=right)


def test_named_callables_are_weighted_and_reported_by_name(rl: MakeConfig) -> None:
    """2 x length/4 - 1 x share of ones, so reward/mean = 2 reward/long - reward/ones."""
    config = rl(
        "max_steps=1",
        "rewards=[{kind: function, name: long, weight: 2}, "
        "{kind: function, name: ones, weight: -1}]",
    )

    def long(responses: list[str]) -> list[float]:
        return [len(r) / 4 for r in responses]

    def ones(response: str) -> float:
        return response.count("1") / 4

    metrics = burnish.run(config, rewards={"long": long, "ones": ones}).metrics
    expected = 2 * metrics["reward/long"] - metrics["reward/ones"]
    # 1e-12: sums of sixteen multiples of 1/4, taken in another order.
    assert metrics["reward/mean"] == pytest.approx(expected, abs=1e-12)


def test_samples_hold_reward_parts_and_advantages_that_sum_to_zero_in_a_group(
    rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    result = burnish.run(rl("max_steps=1"), rewards=reward)
    samples = read_samples(result.run_dir)
    assert len(samples) == 16
    assert all(json.loads(s["reward_parts"]) == {"function": s["reward"]} for s in samples)
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample["prompt_id"], []).append(sample["advantage"])
    assert len(groups) == 4
    for advantages in groups.values():
        # 1e-5: fp32 means of numbers up to 1.5.
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    rl: MakeConfig, reward: Callable[[str], float], tmp_path: Path
) -> None:
    def losses(name: str, seed: int) -> list[float]:
        config = rl(f"run_dir={tmp_path / name}", f"seed={seed}")
        result = burnish.run(config, rewards=reward)
        return [line["train/grad_norm"] for line in read_metrics(result.run_dir)]

    first = losses("a", 0)
    assert losses("b", 0) == first
    assert losses("c", 1) != first


def test_a_function_reward_without_a_callable_is_refused_with_what_to_give(rl: MakeConfig) -> None:
    with pytest.raises(RewardError, match=r"pass a callable to burnish\.run"):
        burnish.run(rl())


def test_a_callable_that_no_entry_takes_is_refused(
    rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    config = rl("rewards=[{kind: function, name: a}, {kind: function, name: b}]")
    with pytest.raises(RewardError, match="'c'"):
        burnish.run(config, rewards={"a": reward, "b": reward, "c": reward})
