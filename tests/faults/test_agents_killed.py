"""Agents that send parameters and call in parallel, in recorded asynchronous runs that are killed:
samples, rewards and weights are the same bits as without kills.

With ``max_staleness: 0`` the runs are equal step by step. With 1, a step takes the groups that are
finished, so their order depends on times; the learning rate is then too small to change a weight,
and each prompt has the same samples whenever it is trained, also those that a checkpoint had.
``BURNISH_AGENT_KILLS=10 pytest tests/faults/test_agents_killed.py`` kills ten times instead of
twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config import JobConfig, load_config
from burnish.driver.records import read_rollout, rollout_folders
from burnish.observe.samples import read_samples
from burnish.types import Sample

KILLS = int(os.environ.get("BURNISH_AGENT_KILLS", "2"))
STEPS = 6 + 2 * KILLS


def recipe(folder: Path, name: str, staleness: int) -> JobConfig:
    agent = Path(__file__).with_name("parallel_agent.py")
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(folder / name),
        "max_steps": STEPS,
        "model": {"scratch": {"alphabet": "0123456789?<>=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [{"kind": "seeds", "size": 50}], "prompt_max_len": 8},
        "rollout": {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "generate_max_len": 4,
            # finish: keys that are computed again differ in their last bits
            "asynchronous": {"max_staleness": staleness, "in_flight": "finish"},
            "engine": {"own_weights": True},
            "episodes": {"agent": f"{agent}:agent", "max_turns": 9, "max_tokens": 64, "workers": 2},
        },
        "rewards": [{"kind": "episode", "name": "low", "reward": "low"}],
        "algorithm": {"correction": {}} if staleness else {},
        "train": {"train_batch_size": 4, "lr": 1e-30 if staleness else 1e-2},
        "checkpoint": {"every_n_steps": 1, "keep_last": 2},
        "observe": {"record_rollouts": True},
    }
    return load_config(tree)


def content(sample: Sample) -> str:
    """Everything of a sample but times, the engine's cache, and what says when it was trained."""
    clocks = ("seconds", "engine_s", "environment_s", "cached_tokens")
    order = ("episode", "versions", "group_id", "earlier_rows")
    episode = sample.episode
    assert episode is not None and len(episode.turns) == 7
    counts = episode.turns[-1].counts
    assert counts["ignored_seed"] == counts["ignored_temperature"] == 7
    turns = [{k: v for k, v in vars(t).items() if k not in clocks} for t in episode.turns]
    own = {k: v for k, v in vars(sample).items() if k not in order}
    rows = [{k: v for k, v in vars(row).items() if k not in order} for row in sample.rows]
    return repr((own, rows, episode.status, episode.start, episode.tools, turns))


def samples_of(run_dir: Path) -> dict[str, str]:
    """Sample id -> content, in the order of training."""
    return {
        sample.sample_id: content(sample)
        for step in range(1, STEPS + 1)
        for group in read_rollout(run_dir, step).rollout.groups
        for sample in group.samples
    }


@pytest.mark.slow
@pytest.mark.timeout(120 + 40 * KILLS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_agents_train_the_same_bits(
    staleness: int, tmp_path: Path, children: Any, measured: Any
) -> None:
    quiet, killed = (recipe(tmp_path, name, staleness) for name in ("quiet", "killed"))
    children.run(quiet)
    seen = children.run_with_kills(killed, kills=KILLS, seed=3)
    assert len(seen) == KILLS, "the run ended before all kills were tried"
    runs = first, second = Path(quiet.run_dir), Path(killed.run_dir)
    assert [*rollout_folders(first)] == [*rollout_folders(second)] == [*range(1, STEPS + 1)]
    one, other = map(samples_of, runs)
    assert len(one) == len(other) == 4 * STEPS
    both = one.keys() & other.keys()
    assert len(both) >= 4 * STEPS - 8 * staleness  # the last groups may be other ones
    for name in both:
        assert one[name] == other[name], name
    rewards = [{s["sample_id"]: s["reward"] for s in read_samples(run)} for run in runs]
    assert all(rewards[0][name] == rewards[1][name] for name in both)
    assert len(set(rewards[0].values())) > 2
    for path in sorted((first / f"checkpoints/step_{STEPS:06d}/policy").rglob("*.safetensors")):
        if staleness and "model" not in path.name:
            continue  # the optimizer has seen the groups in another order
        twin = load_file(second / path.relative_to(first))
        assert all(torch.equal(tensor, twin[n]) for n, tensor in load_file(path).items()), path
    if not staleness:
        assert list(one) == list(other)
        ages = [[line["rollout/age_max"] for line in measured(run)] for run in runs]
        assert ages[0] == ages[1]
