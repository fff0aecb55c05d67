"""Reinforcement learning on Ray with DeepSpeed and vLLM: what is sampled comes from the weights
that were trained, at every step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.rollout.vllm import INSTALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL),
    pytest.mark.usefixtures("ray_cluster"),
]
MakeConfig = Callable[..., JobConfig]
VLLM = [
    "rollout.engine.kind=vllm",
    "model.scratch.num_heads=1",
    "model.scratch.num_kv_heads=1",  # heads of 32
    "train.lr=1e-2",
]
RAY = [
    "cluster.runtime=ray",
    "cluster.layout=separate",
    "cluster.policy_ranks=2",
    "cluster.rollout_workers=1",
]


def test_ten_steps_of_grpo_through_ray_zero_2_and_vllm(
    rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    """After each step the engine has verified the checksum of every bucket on the way, the weights
    that vLLM holds, and that it computes with them; a step's log-probs of what was sampled agree
    with the sampler's."""
    zero = ["train.engine.kind=deepspeed", "train.engine.zero_stage=2"]
    config = rl(*VLLM, *RAY, *zero, "max_steps=10")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    assert [line["step"] for line in lines] == list(range(1, 11))
    for line in lines:
        # fp32: log-probs of up to 5 by other kernels. Stale weights would be off by 1e-2 and more
        # after the first step of 1e-2.
        assert line["train/mismatch_max"] < 1e-5
        assert line["sync/version"] == line["step"], "the engine took the weights of this step"
        assert line["sync/bytes"] > 0 and line["sync/buckets"] >= 1
        assert line["train/grad_norm"] > 0
