"""PPO from its recipe: the critic's own rate and clip, and the same numbers on ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
PPO = [
    "algorithm.advantage.kind=gae",
    "algorithm.advantage.gamma=0.99",
    "algorithm.kl.init_kl_coef=0.05",
    "train.train_batch_size=8",  # two updates per rollout
    "train.epochs_per_rollout=2",
]


def steps(config: JobConfig, reward: Reward) -> list[dict[str, float]]:
    burnish.run(config, rewards=reward)
    return [line for line in read_metrics(Path(config.run_dir)) if line["step"] > 0]


def test_the_critic_has_its_own_rate_and_clip(rl: MakeConfig, reward: Reward) -> None:
    """A clip of 1e-4 around values of 0 counts for many tokens from the second update on; without
    one none is clipped."""
    found = {}
    for clip in ("1e-4", "null"):
        own = ["critic.lr=2e-2", f"critic.value_clip={clip}", f"run_dir={rl().run_dir}-{clip}"]
        found[clip] = steps(rl(*PPO, *own, "max_steps=3"), reward)
    for lines in found.values():
        assert {line["critic/lr"] for line in lines} == {0.02}
        assert {line["train/lr"] for line in lines} == {0.001}
    assert {line["critic/clip_frac"] for line in found["null"]} == {0.0}
    assert all(line["critic/clip_frac"] > 0.1 for line in found["1e-4"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_ppo_with_other_text_is_the_same_on_zero(
    stage: int, rl: MakeConfig, reward: Reward, write_rows: Callable[..., str]
) -> None:
    """Policy, critic, reference and the text of ptx; one rank. Another order of sums: 1e-4."""
    text = write_rows("text", [{"text": f"{i}+{i}={2 * i}"} for i in range(10)])
    ptx = [f"ptx.data.sources=[{text}]", "ptx.data.max_len=16", "ptx.ptx_coef=0.5"]
    more = [*PPO, *ptx, "ptx.batch_size=3", "algorithm.entropy_coef=0.0"]
    engine = ["train.engine.kind=deepspeed", f"train.engine.zero_stage={stage}"]
    plain = steps(rl(*more), reward)
    zero = steps(rl(*more, *engine, f"run_dir={rl().run_dir}-zero"), reward)
    names = [
        *("train/loss", "train/grad_norm", "train/ptx_nll", "train/kl", "train/ratio_max"),
        *("critic/value_loss", "critic/grad_norm", "critic/explained_variance", "reward/mean"),
    ]
    for ours, theirs in zip(zero, plain, strict=True):
        assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, abs=1e-4)
