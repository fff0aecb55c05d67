"""Samples round-trip, in complete groups only, and are truncated to a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from burnish.environments.base import EpisodeInfraError
from burnish.observe.samples import DROPPED, drop_samples_after, read_samples, write_samples
from burnish.rollout.runner import GroupResult, SampledGroup
from burnish.transcript import Episode
from burnish.types import Group, Prompt, Sample


def _group(number: int, size: int = 2, *, text: str = "2", reward: float = 1.0) -> Group:
    prompt = Prompt(f"train:{number}@0", (5, 9), f"1+{number}=", label={"answer": number})
    samples = tuple(
        Sample(
            sample_id=f"{prompt.id}/{i}",
            prompt_id=prompt.id,
            group_id=number,
            prompt_ids=(5, 9),
            response_ids=(7, 8, 1),
            sampler_logprobs=(-0.1, -0.2, -0.3),
            action_mask=(True, True, True),
            versions=(3, 4, 4),
            text=text,
            finish_reason="stop",
            reward=reward,
            reward_parts={"exact": reward, "length": -0.25},
        )
        for i in range(size)
    )
    return Group(number, prompt, samples)


def test_a_sample_round_trips_with_every_column(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 12, [_group(1, 1)], {"train:1@0/0": 0.5}, limit=8)
    assert path == tmp_path / "samples" / "step_000012.parquet"
    (row,) = read_samples(tmp_path)
    assert json.loads(row.pop("reward_parts")) == {"exact": 1.0, "length": -0.25}
    assert row == {
        "step": 12,
        "split": "train",
        "prompt_id": "train:1@0",
        "group_id": 1,
        "sample_id": "train:1@0/0",
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "stop",
        "response_tokens": 3,
        "label": "{'answer': 1}",
        "version": 4,
        "episode": None,
        "dropped": None,
    }


def test_only_complete_groups_up_to_the_limit_are_kept_and_at_least_one(tmp_path: Path) -> None:
    """Groups of 3, limit 8: two groups (6 samples) fit, a third would make 9."""
    groups = [_group(i, 3) for i in range(5)]
    write_samples(tmp_path, 1, groups, None, limit=8)
    assert [row["group_id"] for row in read_samples(tmp_path)] == [0, 0, 0, 1, 1, 1]
    write_samples(tmp_path, 1, groups, None, limit=2)
    assert [row["group_id"] for row in read_samples(tmp_path)] == [0, 0, 0]


def test_no_file_is_written_at_limit_zero_or_without_groups(tmp_path: Path) -> None:
    assert write_samples(tmp_path, 1, [_group(1)], None, limit=0) is None
    assert write_samples(tmp_path, 1, [], None, limit=8) is None
    assert read_samples(tmp_path) == []


def test_train_and_eval_samples_of_a_step_are_in_two_files_in_step_order(tmp_path: Path) -> None:
    for step in (1_000_000, 2):
        write_samples(tmp_path, step, [_group(1, 1)], None, limit=8)
    write_samples(tmp_path, 2, [_group(2, 1)], None, limit=8, split="eval")
    assert (tmp_path / "samples" / "eval_000002.parquet").is_file()
    rows = [(row["step"], row["split"]) for row in read_samples(tmp_path)]
    assert rows == [(2, "eval"), (2, "train"), (1_000_000, "train")]


def test_nan_and_non_text_values_do_not_stop_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [_group(1, 1, text="a\ud800b\x00é", reward=math.nan)], None, limit=8)
    (row,) = read_samples(tmp_path)
    assert row["response"] == "a?b\x00é"
    assert row["reward"] is None and row["advantage"] is None
    assert json.loads(row["reward_parts"])["exact"] is None


def test_later_steps_are_dropped_on_resume_and_scratch_files_are_no_samples(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_samples(tmp_path, step, [_group(1, 1)], None, limit=8)
        write_samples(tmp_path, step, [_group(1, 1)], None, limit=8, split="eval")
    (tmp_path / "samples" / ".step_000009.parquet.77.tmp").write_bytes(b"half")
    drop_samples_after(tmp_path, 2)
    assert {row["step"] for row in read_samples(tmp_path)} == {1, 2}
    drop_samples_after(tmp_path / "nowhere", 2)


def test_episodes_without_a_result_are_saved_with_their_records(tmp_path: Path) -> None:
    """A group of two episodes, whose environment ended. No tokens are known."""
    start = ({"role": "user", "content": "1+1="},)
    episodes = tuple(Episode("infra_error", start, error="the process ended") for _ in range(2))
    sampled = SampledGroup(Prompt("p", (5,), "1+1="), None, episodes, EpisodeInfraError("it ended"))
    lost = GroupResult(sampled, None, "failed", "failed episodes: 2 infra_error").dropped(None)
    reasons = {"p": lost.reason}
    write_samples(tmp_path, 1, [lost.group], None, limit=8, split=DROPPED, dropped=reasons)
    rows = read_samples(tmp_path)
    assert [row["sample_id"] for row in rows] == ["p/0", "p/1"]
    for row in rows:
        assert json.loads(row["episode"])["status"] == "infra_error"
        assert (row["reward"], row["version"], row["response_tokens"]) == (None, None, 0)
        assert row["dropped"] == lost.reason and row["finish_reason"] == "aborted"


def test_reasons_of_dropped_groups_contain_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-hunter2-hunter2")
    reasons = {_group(1).prompt.id: "failed reward: 401 for key hunter2-hunter2-hunter2"}
    write_samples(tmp_path, 1, [_group(1)], None, limit=8, split=DROPPED, dropped=reasons)
    assert "hunter2" not in (row := read_samples(tmp_path)[0])["dropped"]
    assert row["dropped"].startswith("failed reward: 401")
