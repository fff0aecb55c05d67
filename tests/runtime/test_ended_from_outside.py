"""A step that something outside of the run ends: a reward, a row of data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig
from burnish.data.sources import DataError
from burnish.observe.metrics import read_metrics
from burnish.rewards.base import RewardError

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
NEVER = "checkpoint.every_n_steps=0"


def measured(run_dir: Path) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    timed = ("time", "memory/")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed) and "per_s" not in k}
        for line in read_metrics(run_dir)
    ]


def steps_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("options", [[], ["rewards=[{kind: function, running_norm: mean_std}]"]])
def test_a_run_that_a_reward_ended_is_saved_and_goes_on_as_if_nothing_had_been(
    options: list[str],
    rl: MakeConfig,
    reward: Reward,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ["max_steps=5", NEVER, *options]
    whole = burnish.run(rl(*settings, f"run_dir={tmp_path / 'whole'}"), rewards=reward).run_dir
    calls = 0

    def out_of_quota(response: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 2 * 16 + 5:  # 16 samples a step: in the middle of the third
            raise ConnectionError("out of quota")
        return reward(response)

    config, run_dir = rl(*settings), tmp_path / "run"
    with pytest.raises(RewardError, match="out of quota"):
        burnish.run(config, rewards=out_of_quota)
    assert steps_of(run_dir) == ["step_000002"]
    assert f"step 2 is saved; correct the cause and resume with --resume {run_dir}" in caplog.text
    burnish.run(config, rewards=reward, resume=run_dir)
    assert measured(run_dir) == measured(whole)


def test_nothing_is_saved_of_a_run_that_has_done_no_step(rl: MakeConfig, tmp_path: Path) -> None:
    def broken(response: str) -> float:
        raise ConnectionError("out of quota")

    with pytest.raises(RewardError):
        burnish.run(rl(NEVER), rewards=broken)
    assert steps_of(tmp_path / "run") == []


def test_a_supervised_run_is_saved_where_a_row_ends_it(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    data, whole = tmp_path / "rows.jsonl", tmp_path / "whole"
    recipe = {
        "job": "sft",
        "max_steps": 4,
        "model": {"scratch": {"alphabet": "0123456789+="}},
        "data": {"sources": [str(data)], "shuffle": False, "max_len": 32, "validate": "off"},
        "train": {"train_batch_size": 2},
        "checkpoint": {"every_n_steps": 0},
    }

    def run(folder: Path, changed: dict[int, Any], resume: Path | None = None) -> None:
        lines = [json.dumps(changed.get(i, row)) for i, row in enumerate(rows)]
        data.write_text("".join(line.ljust(60) + "\n" for line in lines))
        burnish.run(burnish.load_config({**recipe, "run_dir": str(folder)}), resume=resume)

    run(whole, {})
    with pytest.raises(DataError, match="response"):
        run(tmp_path / "run", {5: {"prompt": "5+1=", "answer": "6"}})
    assert steps_of(tmp_path / "run") == ["step_000002"]
    run(tmp_path / "run", {}, resume=tmp_path / "run")
    assert measured(tmp_path / "run") == measured(whole)
