"""When evaluation happens, what it reports, and which checkpoint it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples

MakeConfig = Callable[..., JobConfig]


def _steps_with(run_dir: Path, metric: str) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir) if metric in line]


def test_evaluation_is_at_step_0_every_n_steps_and_at_the_end(
    rl: MakeConfig, reward: Callable[[str], float], evaluation: list[str]
) -> None:
    config = rl(*evaluation, "eval.every_n_steps=2", "max_steps=5")
    run_dir = burnish.run(config, rewards=reward).run_dir
    assert _steps_with(run_dir, "eval/pass@2") == [0, 2, 4, 5]
    assert _steps_with(run_dir, "reward/mean") == [1, 2, 3, 4, 5]


def test_without_every_n_steps_evaluation_is_at_step_0_and_at_the_end(
    rl: MakeConfig, reward: Callable[[str], float], evaluation: list[str]
) -> None:
    run_dir = burnish.run(rl(*evaluation, "max_steps=3"), rewards=reward).run_dir
    assert _steps_with(run_dir, "eval/pass@1") == [0, 3]


def test_each_of_several_rewards_is_reported_as_it_came(
    rl: MakeConfig, reward: Callable[[str], float], evaluation: list[str]
) -> None:
    """Also the one that counts nothing in the sum."""
    rewards = "rewards=[{kind: function, name: a}, {kind: function, name: b, weight: 0}]"
    functions = {"a": reward, "b": lambda response: 7.0 + len(response)}
    run_dir = burnish.run(rl(*evaluation, rewards, "max_steps=1"), rewards=functions).run_dir
    for line in read_metrics(run_dir):
        assert line["eval/reward/a"] == pytest.approx(line["eval/reward"])
        assert line["eval/reward/b"] >= 7.0


def test_a_single_reward_passes_by_its_plain_score_whatever_its_weight(
    rl: MakeConfig, evaluation: list[str]
) -> None:
    """Weight 0.2 used to keep pass@1 at 0: 0.2 is below the threshold of 0.5. A second reward
    that counts nothing changes nothing; two that count are a weighted sum."""
    one, none = "{kind: function, name: a, weight: 0.2}", "{kind: function, name: b, weight: 0}"
    two = "{kind: function, name: b, weight: 0.1}"
    functions = {"a": lambda response: 1.0, "b": lambda response: 1.0}
    for i, (entries, passed) in enumerate([((one,), 1.0), ((one, none), 1.0), ((one, two), 0.0)]):
        given = {name: functions[name] for name in ("a", "b")[: len(entries)]}
        config = rl(*evaluation, f"rewards=[{', '.join(entries)}]", "max_steps=1")
        config = config.model_copy(update={"run_dir": f"{config.run_dir}-{i}"})
        metrics = burnish.run(config, rewards=given).metrics
        assert metrics["eval/pass@1"] == passed
        assert metrics["eval/reward"] == pytest.approx(0.3 if two in entries else 0.2)


def test_an_evaluation_job_reports_pass_at_k_of_its_own_samples(
    tmp_path: Path, sums: str, reward: Callable[[str], float]
) -> None:
    """pass@1 is the share of passing samples, pass@n the share of prompts with one that passes."""
    config = burnish.load_config(
        {
            "job": "evaluate",
            "run_dir": str(tmp_path / "eval"),
            "model": {"scratch": {"alphabet": "0123456789+="}},
            "eval": {
                "data": {"sources": [sums]},
                "n_samples_per_prompt": 4,
                "temperature": 1.0,
                "pass_k": [2, 4],
                "pass_threshold": 0.75,
                "generate_max_len": 4,
            },
        }
    )
    result = burnish.run(config, rewards=reward)
    samples = read_samples(result.run_dir)
    assert len(samples) == 16 * 4
    passed: dict[str, list[bool]] = {}
    for sample in samples:
        passed.setdefault(sample["prompt_id"], []).append(sample["reward"] >= 0.75)
    share = sum(map(sum, passed.values())) / 64
    assert 0 < share < 1, "the threshold tells samples apart"
    metrics = result.metrics
    # 1e-12: sums of a few dozen simple fractions.
    assert metrics["eval/pass@1"] == pytest.approx(share, abs=1e-12)
    assert metrics["eval/pass@4"] == pytest.approx(sum(map(any, passed.values())) / 16, abs=1e-12)
    assert metrics["eval/pass@1"] < metrics["eval/pass@2"] < metrics["eval/pass@4"]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_the_score_says_what_the_threshold_is_compared_with(
    weight: float,
    tmp_path: Path,
    sums: str,
    reward: Callable[[str], float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = burnish.load_config(
        {
            "job": "evaluate",
            "run_dir": str(tmp_path / "eval"),
            "model": {"scratch": {"alphabet": "0123456789+="}},
            "eval": {"data": {"sources": [sums]}, "generate_max_len": 4, "num_prompts": 1},
            "rewards": [{"kind": "function", "weight": weight}],
        }
    )
    burnish.run(config, rewards=reward)
    passed_by = "reward" if weight == 1 else "score without its weight"
    assert f"(passed: {passed_by} of at least 1)" in capsys.readouterr().out


def test_an_evaluation_job_prints_its_score_and_leaves_log_metrics_timeline_and_report(
    tmp_path: Path,
    sums: str,
    reward: Callable[[str], float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = burnish.load_config(
        {
            "job": "evaluate",
            "run_dir": str(tmp_path / "eval"),
            "model": {"scratch": {"alphabet": "0123456789+="}},
            "eval": {"data": {"sources": [sums]}, "generate_max_len": 4, "pass_threshold": 0.5},
        }
    )
    result = burnish.run(config, rewards=reward)
    (logged,) = read_metrics(result.run_dir)
    score = f"pass@1        {logged['eval/pass@1']:.4f}  (passed: reward of at least 0.5"
    assert result.metrics["eval/pass@1"] == logged["eval/pass@1"]
    assert score in capsys.readouterr().out
    assert score in (result.run_dir / "run.log").read_text(encoding="utf-8")
    assert logged["time/step_s"] >= logged["time/rollout_s"] > 0
    timeline = json.loads((result.run_dir / "timeline.json").read_text(encoding="utf-8"))
    assert set(timeline["otherData"]["totals_s"]) == {"rollout", "reward"}
    assert "rollout" in (result.run_dir / "memory.txt").read_text(encoding="utf-8")
    assert (result.run_dir / "report.html").is_file()


def _scripted(values: list[float], *, evaluated: int) -> Callable[[list[str]], list[float]]:
    """A batch reward: calls with ``evaluated`` responses give the next value, others are mixed."""
    script: Iterator[float] = iter(values)

    def score(responses: list[str]) -> list[float]:
        if len(responses) == evaluated:
            return [next(script)] * evaluated
        return [i % 4 / 4 for i in range(len(responses))]

    return score


def _kept(run_dir: Path) -> dict[int, float | None]:
    """step -> the metric in its manifest, of every checkpoint that is still there."""
    kept = {}
    for manifest in sorted((run_dir / "checkpoints").glob("step_*/manifest.json")):
        content = json.loads(manifest.read_text(encoding="utf-8"))
        kept[content["step"]] = content["extra"]["metric"]
    return kept


def test_the_checkpoint_with_the_best_evaluation_is_kept(
    rl: MakeConfig, sums: str, tmp_path: Path
) -> None:
    """pass@1 is 0, 1, 0, 0, 0 at steps 0, 1, 2, 3, 4: step 1 stays beside the newest."""
    config = rl(
        f"eval.data.sources=[{sums}]",
        "eval.num_prompts=8",
        "eval.every_n_steps=1",
        "max_steps=4",
        "checkpoint.every_n_steps=1",
        "checkpoint.keep_last=1",
    )
    script = _scripted([0, 1, 0, 0, 0], evaluated=8)
    run_dir = burnish.run(config, rewards=script).run_dir
    assert _kept(run_dir) == {1: 1.0, 4: 0.0}


def test_a_checkpoint_between_two_evaluations_does_not_pass_for_the_best(
    rl: MakeConfig, sums: str
) -> None:
    """pass@1 is 1 at step 2. Steps 3 and 5 save without measuring, so step 2 stays the best."""
    config = rl(
        f"eval.data.sources=[{sums}]",
        "eval.num_prompts=8",
        "eval.every_n_steps=2",
        "max_steps=5",
        "checkpoint.every_n_steps=1",
        "checkpoint.keep_last=1",
    )
    script = _scripted([0, 1, 0, 0], evaluated=8)
    run_dir = burnish.run(config, rewards=script).run_dir
    assert _kept(run_dir) == {2: 1.0, 5: 0.0}


def test_the_smallest_loss_is_the_best_of_a_supervised_run(
    tmp_path: Path, write_rows: Callable[..., str]
) -> None:
    """Training on one answer and measuring on another: the held-out loss is lowest at first."""
    train = write_rows("train", [{"prompt": "1=", "response": "2"}] * 8)
    held_out = write_rows("held_out", [{"prompt": "1=", "response": "777"}])
    config = burnish.load_config(
        {
            "job": "sft",
            "run_dir": str(tmp_path / "sft"),
            "model": {"scratch": {"alphabet": "0123456789+="}},
            "data": {"sources": [train]},
            "eval": {"data": {"sources": [held_out]}, "every_n_steps": 1},
            "max_epochs": 4,
            "train": {"train_batch_size": 8, "lr": 3e-3},
            "checkpoint": {"every_n_steps": 1, "keep_last": 1},
        }
    )
    run_dir = burnish.run(config).run_dir
    losses = {line["step"]: line["eval/loss"] for line in read_metrics(run_dir) if line["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best != 4, "the run gets worse at the end, or the test shows nothing"
    assert set(_kept(run_dir)) == {best, 4}
