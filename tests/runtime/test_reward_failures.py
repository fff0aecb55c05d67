"""A reward that raises anything, or never returns, ends a run with its name. It never hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import burnish
from burnish import user_calls
from burnish.config import load_config
from burnish.rewards.base import RewardError

REWARDS = """
import asyncio, threading

class Own(BaseException):
    pass

def cancelled(responses): raise asyncio.CancelledError
async def awaits_cancelled(response): raise asyncio.CancelledError
def generator_exit(response): raise GeneratorExit
def interrupted(responses): raise KeyboardInterrupt
def own(responses): raise Own("mine")
async def awaits_own(responses): raise Own("mine")
def never(responses): threading.Event().wait()
async def never_awaits(response): await asyncio.Event().wait()
"""
LATE = ("never", "never_awaits")


def run(folder: Path, function: str, bound: int | None, then: str) -> None:
    (folder / "rewards.py").write_text(REWARDS)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(20)))
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 2}
    if bound is not None:
        rollout |= {"asynchronous": {"max_staleness": bound}, "engine": {"own_weights": True}}
    reward = {"kind": "function", "function": f"{folder}/rewards.py:{function}"}
    tree = {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "max_steps": 2,
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [str(prompts)], "prompt_max_len": 8},
        "rollout": rollout,
        "rewards": [reward | ({"timeout_s": 0.3} if function in LATE else {})],
        "on_reward_failure": {"then": then},
        "algorithm": {} if bound is None else {"old_policy": "sampler"},
        "train": {"train_batch_size": 4, "lr": 5e-3},
    }
    burnish.run(load_config(tree))


@pytest.mark.parametrize("bound", [None, 1])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("cancelled", "raised CancelledError"),
        ("awaits_cancelled", "raised CancelledError"),
        ("generator_exit", "raised GeneratorExit"),
        ("interrupted", "raised KeyboardInterrupt"),
        ("own", "raised Own: mine"),
        ("awaits_own", "raised Own: mine"),
        ("never", r"did not return within 0.3 s \(timeout_s\)"),
        ("never_awaits", r"did not return within 0.3 s \(timeout_s\)"),
    ],
)
def test_a_run_ends_with_the_name_of_the_reward(
    tmp_path: Path, function: str, reason: str, bound: int | None
) -> None:
    with pytest.raises(RewardError, match=reason) as failure:
        run(tmp_path, function, bound, "fail")
    assert f"function {function} at {tmp_path}/rewards.py" in str(failure.value)
    user_calls.ABANDONED.clear()


@pytest.mark.parametrize("function", ["cancelled", "never"])
def test_such_groups_are_dropped_if_the_recipe_says_so(tmp_path: Path, function: str) -> None:
    """All groups fail in each refill, so none is left."""
    with pytest.raises(RewardError, match="only 0 of 2 groups have a reward"):
        run(tmp_path, function, None, "drop_group")
    user_calls.ABANDONED.clear()
