"""RL runs whose updates also learn other text, and whose rewards are measured in their own spread:
the formulas at work, and runs that stop and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.algorithms.running import RunningMoments
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.steps.objectives import ptx_objective, sft_objective
from burnish.steps.rl import Ptx
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
NOT_COMPARED = ("time", "memory/")


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """What every step measured, but clocks and memory."""
    lines = read_metrics(run_dir)
    keep = [[n for n in x if not n.startswith(NOT_COMPARED) and "per_s" not in n] for x in lines]
    return [{n: line[n] for n in names} for line, names in zip(lines, keep, strict=True)]


@pytest.fixture
def ptx(write_rows: Callable[..., str]) -> list[str]:
    """Overrides: 10 rows of text, 3 in every update."""
    text = write_rows("text", [{"text": f"{i}+{i}={2 * i}"} for i in range(10)])
    return [
        f"ptx.data.sources=[{text}]",
        "ptx.data.max_len=16",
        "ptx.ptx_coef=0.5",
        "ptx.batch_size=3",
    ]


def two(response: str) -> float:
    """Another reward, on another scale."""
    return 100.0 + 10.0 * response.count("2") + len(response)


TWO = [
    "rewards=[{kind: function, name: digits, weight: 1.0, running_norm: mean_std}, "
    "{kind: function, name: twos, weight: 0.5, running_norm: std}]"
]


def test_the_gradient_is_that_of_both_losses_each_over_its_own_tokens(
    make_engine: Callable[..., TorchTrainEngine], ragged_batch: Batch, nll: Any
) -> None:
    """d(L + c x mean nll) = dL + c x d(mean nll), in whatever micro-batches."""
    others = ragged_batch.select([3, 5, 6]).with_global_counts()

    class Rows:
        counts = {"rows_seen": 3}

        def next(self, num_rows: int) -> Batch:
            return others.select(range(num_rows))

    def gradients(engine: TorchTrainEngine) -> list[torch.Tensor]:
        assert engine.optimizer is not None
        found = [p.grad.clone() for p in engine.model.parameters() if p.grad is not None]
        engine.optimizer.zero_grad()
        return found

    alone = make_engine()
    alone.forward_backward(ragged_batch, nll)
    policy = gradients(alone)
    alone.forward_backward(others, sft_objective())
    text = gradients(alone)
    for micro in (None, 2):
        engine = make_engine(micro=micro)
        mixed = Ptx(Rows(), 3, ptx_objective(0.3))  # type: ignore[arg-type]
        engine.forward_backward(ragged_batch, nll)
        stats = mixed.forward_backward(engine).floats()
        assert stats["ptx_loss"] == pytest.approx(0.3 * stats["ptx_nll"], rel=1e-6)
        for both, one, other in zip(gradients(engine), policy, text, strict=True):
            # fp32 sums in another order
            torch.testing.assert_close(both, one + 0.3 * other, rtol=1e-4, atol=1e-6)


def test_text_is_learned_beside_the_reward(rl: MakeConfig, reward: Reward, ptx: list[str]) -> None:
    lines = numbers(burnish.run(rl(*ptx, "max_steps=25", "train.lr=1e-2"), rewards=reward).run_dir)
    assert lines[-1]["train/ptx_nll"] < 0.7 * lines[0]["train/ptx_nll"]
    assert lines[-1]["data/ptx_rows_seen"] == 75 and lines[-1]["data/ptx_epoch"] == 7
    assert lines[-1]["train/ptx_loss"] == pytest.approx(0.5 * lines[-1]["train/ptx_nll"])


def test_several_updates_of_a_rollout_each_take_new_rows(
    rl: MakeConfig, reward: Reward, ptx: list[str]
) -> None:
    """16 samples in updates of 4, twice over: 8 updates x 3 rows per step, 2 steps."""
    options = ["train.train_batch_size=4", "train.epochs_per_rollout=2"]
    (*_, last) = numbers(burnish.run(rl(*ptx, *options), rewards=reward).run_dir)
    assert last["data/ptx_rows_seen"] == 48


def test_a_run_that_stopped_goes_on_with_the_same_rows_and_statistics(
    rl: MakeConfig, reward: Reward, ptx: list[str], tmp_path: Path
) -> None:
    """Bit for bit, on one thread."""
    rewards = {"digits": reward, "twos": two}
    whole = burnish.run(rl(*ptx, *TWO, "max_steps=5"), rewards=rewards).run_dir
    folder = f"run_dir={tmp_path / 'part'}"
    part = burnish.run(rl(*ptx, *TWO, "max_steps=2", folder), rewards=rewards).run_dir
    burnish.run(rl(*ptx, *TWO, "max_steps=5", folder), rewards=rewards, resume=part)
    assert numbers(part) == numbers(whole)


def test_a_run_may_take_up_both_on_the_way(rl: MakeConfig, reward: Reward, ptx: list[str]) -> None:
    plain = [TWO[0].replace(", running_norm: mean_std", "").replace(", running_norm: std", "")]
    rewards = {"digits": reward, "twos": two}
    part = burnish.run(rl(*plain, "max_steps=1"), rewards=rewards).run_dir
    burnish.run(rl(*ptx, *TWO, "max_steps=2"), rewards=rewards, resume=part)
    assert numbers(part)[-1]["data/ptx_rows_seen"] == 3


def test_each_reward_is_logged_plain_and_trained_on_in_its_own_spread(
    rl: MakeConfig, reward: Reward
) -> None:
    """Every sample of both steps, by hand from the samples that were written: z-scores in the
    statistics of all scores so far."""
    run_dir = burnish.run(rl(*TWO), rewards={"digits": reward, "twos": two}).run_dir
    lines = read_metrics(run_dir)
    digits, twos = RunningMoments(), RunningMoments()
    for step, line in enumerate(lines, start=1):
        samples = [s for s in read_samples(run_dir) if s["step"] == step]
        assert len(samples) == 16
        parts = [json.loads(sample["reward_parts"]) for sample in samples]
        digits.update([p["digits"] for p in parts])
        twos.update([p["twos"] for p in parts])
        for sample, part in zip(samples, parts, strict=True):
            expected = (part["digits"] - digits.mean) / (digits.std or 1) + 0.5 * (
                part["twos"] / (twos.std or 1)
            )
            assert sample["reward"] == pytest.approx(expected, rel=1e-5)  # kept as fp32
        assert line["reward/digits"] == pytest.approx(sum(p["digits"] for p in parts) / 16)
        assert line["reward/twos"] == pytest.approx(sum(p["twos"] for p in parts) / 16)
        assert line["reward/twos/running_mean"] == pytest.approx(twos.mean)
        assert line["reward/twos/running_std"] == pytest.approx(twos.std)
    assert twos.count == 32


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_both_give_the_numbers_of_one_process_on_ray(
    rl: MakeConfig, reward: Reward, ptx: list[str]
) -> None:
    ray = [
        "cluster.runtime=ray",
        "cluster.layout=separate",
        "cluster.policy_ranks=2",
        "cluster.rollout_workers=1",
    ]
    rewards = {"digits": reward, "twos": two}
    one, other = (
        numbers(burnish.run(rl(*ptx, *TWO, *more), rewards=rewards).run_dir)
        for more in ([f"run_dir={rl().run_dir}-one"], ray)
    )
    for first, second in zip(one, other, strict=True):
        for name in first:
            # fp32 sums over two ranks instead of one
            assert second[name] == pytest.approx(first[name], rel=1e-4, abs=2e-6), name
