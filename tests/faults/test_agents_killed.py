"""Agents that send parameters and call in parallel, in recorded asynchronous runs that are killed:
samples, rewards and weights are the same bits as without kills.

``BURNISH_AGENT_KILLS=10 pytest tests/faults/test_agents_killed.py`` kills ten times instead of
twice. A step trains all groups that were sampled by the weights before it, so that the groups of a
step, and the weights that sampled them, do not depend on times.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config import JobConfig, load_config
from burnish.jobs.rollout_records import read_rollout, rollout_folders
from burnish.observe.samples import read_samples

KILLS = int(os.environ.get("BURNISH_AGENT_KILLS", "2"))
STEPS = 6 + 2 * KILLS


def recipe(folder: Path, name: str) -> JobConfig:
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
            "max_staleness": 1,
            "engine": {"own_weights": True},
            "episodes": {"agent": f"{agent}:agent", "max_turns": 9, "max_tokens": 64, "workers": 2},
        },
        "rewards": [{"kind": "episode", "name": "low", "reward": "low"}],
        "algorithm": {"correction": {}},
        "train": {"train_batch_size": 4, "lr": 1e-2},
        "checkpoint": {"every_n_steps": 1, "keep_last": 2},
        "observe": {"record_rollouts": True},
    }
    return load_config(tree)


def content(sample: Any) -> Any:
    """Everything of a sample but times and the engine's cache."""
    clocks = ("seconds", "engine_s", "environment_s", "cached_tokens")
    episode = sample.episode
    turns = [{k: v for k, v in vars(t).items() if k not in clocks} for t in episode.turns]
    own = {k: v for k, v in vars(sample).items() if k != "episode"}
    return repr((own, episode.status, episode.start, episode.tools, turns))


@pytest.mark.slow
@pytest.mark.timeout(120 + 40 * KILLS)
def test_killed_agents_train_the_same_bits(tmp_path: Path, children: Any) -> None:
    quiet, killed = recipe(tmp_path, "quiet"), recipe(tmp_path, "killed")
    children.run(quiet)
    seen = children.run_with_kills(killed, kills=KILLS, seed=3)
    assert len(seen) == KILLS, "the run ended before all kills were tried"
    first, second = Path(quiet.run_dir), Path(killed.run_dir)
    assert [*rollout_folders(first)] == [*rollout_folders(second)] == [*range(1, STEPS + 1)]
    for step in range(1, STEPS + 1):
        one, other = (read_rollout(run, step).rollout.groups for run in (first, second))
        for group, twin in zip(one, other, strict=True):
            assert group.prompt.id == twin.prompt.id, step
            for sample, same in zip(group.samples, twin.samples, strict=True):
                assert content(sample) == content(same), (step, sample.sample_id)
                assert sample.episode is not None and len(sample.episode.turns) == 7
                counts = sample.episode.turns[-1].counts
                assert counts["ignored_seed"] == counts["ignored_temperature"] == 7
    rewards = [[s["reward"] for s in read_samples(run)] for run in (first, second)]
    assert rewards[0] == rewards[1] and len(set(rewards[0])) > 2
    for path in sorted((first / f"checkpoints/step_{STEPS:06d}/policy").rglob("*.safetensors")):
        twin = load_file(second / path.relative_to(first))
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, twin[name]), name
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (first, second)]
    ages = [[json.loads(line)["rollout/age_max"] for line in run] for run in lines]
    assert ages[0] == ages[1] and max(ages[0]) == 1
