"""Reinforcement learning on Ray with DeepSpeed and vLLM: what is sampled comes from the weights
that were trained, at every step.

``BURNISH_ASYNC_VLLM=1 pytest tests/runtime/test_ray_vllm.py`` adds seven asynchronous runs, 30 s
each.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable

import pytest

import burnish
from burnish.config import JobConfig
from burnish.observe.metrics import read_metrics
from burnish.rollout.vllm.engine import INSTALL

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


def test_grpo_through_ray_zero_2_and_an_engine_that_spans_both_ranks(
    rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    """After each step the engine has verified the checksum of every bucket on the way, the weights
    that vLLM's two processes hold, and that they compute with them; a step's log-probs of what was
    sampled agree with the sampler's. Policy and reference share the places of the engine, and are
    offloaded while it samples."""
    zero = ["train.engine.kind=deepspeed", "train.engine.zero_stage=2"]
    heads = ["model.scratch.hidden_size=64", "model.scratch.num_heads=2"]  # one per process
    together = ["cluster.layout=colocate_all", "cluster.offload_between_phases=[policy,reference]"]
    parts = ["rollout.engine.tensor_parallel_size=2", "model.scratch.num_kv_heads=2"]
    kl = "algorithm.kl.init_kl_coef=0.01"
    config = rl(*VLLM, *RAY, *zero, *heads, *together, *parts, kl, "max_steps=6")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    assert [line["step"] for line in lines] == list(range(1, 7))
    for line in lines:
        # fp32: log-probs of up to 5 by other kernels. Stale weights would be off by 1e-2 and more
        # after the first step of 1e-2.
        assert line["train/mismatch_max"] < 1e-5
        assert line["sync/version"] == line["step"], "the engine took the weights of this step"
        assert line["sync/bytes"] > 0 and line["sync/buckets"] >= 1
        assert line["train/grad_norm"] > 0


_OPTIONAL = pytest.mark.skipif(
    "BURNISH_ASYNC_VLLM" not in os.environ, reason="set BURNISH_ASYNC_VLLM=1"
)
_MODES = ["recompute", "finish", "continue", "partial"]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(mode, kind, marks=[] if (mode, kind) == ("recompute", "vllm") else _OPTIONAL)
        for mode in _MODES
        for kind in ("vllm", "local")
    ],
)
def test_asynchronous_rl_on_ray(
    mode: str, kind: str, rl: MakeConfig, reward: Callable[[str], float]
) -> None:
    """Responses of up to 24 tokens continue across updates. The ages reach the bound and never
    exceed it, every prompt is trained once, and tokens of the trained version have its log-probs
    (except with ``continue``, which keeps caches of older weights)."""
    how = (
        "rollout.asynchronous.partial=true"
        if mode == "partial"
        else f"rollout.asynchronous.in_flight={mode}"
    )
    bound = [
        "rollout.asynchronous.max_staleness=2",
        "rollout.asynchronous.oversample=1.5",
        "algorithm.correction={}",
        how,
    ]
    small = ["rollout.rollout_batch_size=2", "train.train_batch_size=8", "max_steps=8"]
    longer = "rollout.generate_max_len=24"
    engine = f"rollout.engine.kind={kind}"
    config = rl(*VLLM, engine, *RAY, "cluster.policy_ranks=1", *bound, *small, longer)
    run_dir = burnish.run(config, rewards=reward).run_dir
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert max(line["rollout/age_max"] for line in lines) == 2
    now = [line["train/age_0_behavior_kl"] for line in lines if "train/age_0_behavior_kl" in line]
    older = [line["train/age_1_behavior_kl"] for line in lines if "train/age_1_behavior_kl" in line]
    assert max(older) > 1e-4 and now  # with overlap, later tokens of age 0 depend on timing
    assert mode != "partial" or len(now) > 1
    if mode != "continue":
        assert max(now) < 1e-10  # half the square of an fp32 rounding error
    records = [json.loads(line) for line in (run_dir / "groups.jsonl").read_text().splitlines()]
    assert Counter(name for r in records for name in r["trained"]) == {
        f"sums:{row}@0": 1 for row in range(16)
    }
    assert all(age <= 2 for r in records for age in r["trained"].values())
