"""Runs that cannot learn from what they get: one warning with the cause, counts, and an end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.config import JobConfig, load_config
from burnish.driver.errors import StoppedError
from burnish.driver.trainer import STOPPED_FILE
from burnish.observe.metrics import read_metrics
from burnish.rewards.base import RewardError
from burnish.steps.no_signal import label_signal, pair_signal
from burnish.types import rows_to_batch

MakeConfig = Callable[..., JobConfig]
WriteRows = Callable[..., str]


def _right(response: str, label: str | None) -> float:
    """What such functions look like: a row without a label is wrong."""
    return float(label is not None and response.startswith(label))


def _warnings(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in told if all(word in text for word in words)]


@pytest.mark.parametrize("column", ["missing", "null"])
@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp"])
def test_a_reward_that_gets_no_labels_is_said_at_once_and_ends_the_run(
    column: str,
    advantage: str,
    rl: MakeConfig,
    write_rows: WriteRows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It used to score 0 for all steps, without a word."""
    rows = [
        {"prompt": f"{a}+1="} | ({} if column == "missing" else {"label": None}) for a in range(8)
    ]
    config = rl(
        f"data.sources=[{write_rows('bare', rows)}]",
        *(f"algorithm.advantage={advantage}", "max_steps=9", "train.max_steps_without_signal=3"),
    )
    with pytest.raises(
        StoppedError, match="stopped at step 3 of 9: 3 consecutive steps had no learning signal"
    ) as stopped:
        burnish.run(config, rewards=_right)
    run_dir = Path(config.run_dir)
    why = (run_dir / STOPPED_FILE).read_text(encoding="utf-8")
    assert why.strip() == str(stopped.value) and "The run is saved" in why
    assert "reward 'function' requires a label but receives None; set data.label_key" in why
    assert len(_warnings(caplog, "none of 4 prompts has a label")) == 1
    assert len(_warnings(caplog, "(train.max_steps_without_signal). This is logged once")) == 1
    assert len(_warnings(caplog, "3 of 3 steps of this run had no learning signal")) == 1
    assert [line["train/no_signal_frac"] for line in read_metrics(run_dir)] == [1.0] * 3


def test_a_run_may_go_on_without_signal_if_it_is_told_to(
    rl: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = rl("max_steps=12", "train.max_steps_without_signal=null")
    burnish.run(config, rewards=lambda response: 0.25)
    (said,) = _warnings(caplog, "This is logged once")
    assert (
        "4 of 4 groups whose rewards are all equal: every response in them has the reward 0.25"
        in said
    )
    assert "none of" not in caplog.text, "this reward takes no label"


def test_one_group_with_signal_begins_the_count_anew(
    rl: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(100))

    def every_third(responses: list[str]) -> list[float]:
        odd = next(calls) % 3 == 2
        return [float(odd and i == 0) for i in range(len(responses))]

    config = rl("max_steps=9", "train.max_steps_without_signal=3")
    metrics = read_metrics(burnish.run(config, rewards=every_third).run_dir)
    assert [line["train/no_signal_frac"] for line in metrics] == [1.0, 1.0, 0.75] * 3
    assert not _warnings(caplog, "This is logged once")


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (lambda response: 1e9 + len(response), "fp32"),
        (
            lambda prompt, response: float(prompt[0]),
            "responses",
        ),
    ],
    ids=["below fp32", "by prompt"],
)
def test_the_cause_is_told(reward: Any, cause: str, rl: MakeConfig) -> None:
    """1e9 + 1 and 1e9 + 4 are the same fp32 number."""
    config = rl("max_steps=2", "train.max_steps_without_signal=1")
    with pytest.raises(StoppedError, match=cause):
        burnish.run(config, rewards=reward)


def test_a_sum_of_rewards_beyond_fp32_is_an_error_and_not_an_infinity(rl: MakeConfig) -> None:
    config = rl("rewards=[{kind: function, weight: 1e30}]")
    with pytest.raises(RewardError, match=r"the total reward 1e\+60 is beyond fp32's range"):
        burnish.run(config, rewards=lambda response: 1e30)


def test_an_error_does_not_advise_what_the_recipe_has_set(rl: MakeConfig) -> None:
    def fails(response: str) -> float:
        raise ValueError("no judge")

    config = rl("on_reward_failure.then=drop_group")
    with pytest.raises(RewardError, match="no judge") as raised:
        burnish.run(config, rewards=fails)
    assert "set on_reward_failure.then=drop_group" not in str(raised.value)
    assert "raise on_reward_failure.retries" in str(raised.value)


@pytest.mark.parametrize(
    ("job", "rows", "cause"),
    [
        (
            "rm",
            [{"prompt": f"{a}+1=", "chosen": "2", "rejected": "2"} for a in range(6)],
            "identical",
        ),
        (
            "preference",
            [{"prompt": f"{a}+1=", "chosen": "2", "rejected": "2"} for a in range(6)],
            "identical",
        ),
        (
            "kto",
            [{"prompt": f"{a}+1=", "response": "2", "label": False} for a in range(6)],
            "undesirable",
        ),
    ],
    ids=["rm", "dpo", "kto"],
)
def test_preferences_without_a_difference_end_the_run(
    job: str,
    rows: list[dict[str, Any]],
    cause: str,
    tmp_path: Path,
    write_rows: WriteRows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kto = {"loss": "kto", "reference": {"model": {"scratch": {"alphabet": "0123456789+="}}}}
    tree: dict[str, Any] = {
        "job": "preference" if job == "kto" else job,
        "run_dir": str(tmp_path / "run"),
        "max_epochs": 3,
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [write_rows("pairs", rows)], "max_len": 16},
        "train": {"train_batch_size": 2, "lr": 1e-3, "max_steps_without_signal": 4},
        **(kto if job == "kto" else {}),
    }
    if job == "kto":
        tree["data"]["label_key"] = "label"
    with pytest.raises(StoppedError, match=cause):
        burnish.run(load_config(tree))
    assert len(_warnings(caplog, cause, "This is logged once")) == 1
    assert len(read_metrics(tmp_path / "run")) == 4


def test_what_counts_as_a_pair_or_label_without_signal() -> None:
    """Rows 2 and 3 are equal; one of two verdicts differs."""
    rows = [[1, 2], [1, 3], [4, 5, 6], [4, 5, 6]]
    masks = [[False] + [True] * (len(row) - 1) for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[1] * 4)
    found = pair_signal(batch)
    assert (found.num_units, found.num_empty, found.frac) == (2, 1, 0.5)
    for labels, empty in (([True, False, True, True], 0), ([True] * 4, 1), ([False] * 4, 1)):
        assert label_signal(replace(batch, labels=torch.tensor(labels))).num_empty == empty


def test_an_evaluation_and_a_generation_without_labels_are_warned_of(
    tmp_path: Path, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"sources": [write_rows("bare", [{"prompt": f"{a}+1="} for a in range(3)])]}
    model = {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}}
    evaluate: dict[str, Any] = {
        "job": "evaluate",
        "run_dir": str(tmp_path / "evaluate"),
        "model": model,
        "eval": {"data": data, "generate_max_len": 2},
    }
    generate = {
        "job": "generate",
        "run_dir": str(tmp_path / "generate"),
        "model": model,
        "data": data,
        "rewards": [{"kind": "function"}],
        "rollout": {"rollout_batch_size": 2, "generate_max_len": 2},
    }
    for tree, count in ((evaluate, 3), (generate, 2)):
        caplog.clear()
        burnish.run(load_config(tree), rewards=_right)
        assert len(_warnings(caplog, f"none of {count} prompts has a label")) == 1


def test_a_step_of_one_sample_has_signal_where_nothing_is_compared(rl: MakeConfig) -> None:
    config = rl(
        *("algorithm.advantage={kind: reinforce_pp, whiten: false}", "train.train_batch_size=1"),
        *("rollout.rollout_batch_size=1", "rollout.n_samples_per_prompt=1"),
        *("max_steps=3", "train.max_steps_without_signal=2"),
    )
    metrics = read_metrics(burnish.run(config, rewards=lambda response: 1.0).run_dir)
    assert [line["train/no_signal_frac"] for line in metrics] == [0.0] * 3
