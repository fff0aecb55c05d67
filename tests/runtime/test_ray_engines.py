"""Every train engine inside Ray workers: jobs give the numbers of one process with the plain
torch engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.driver.records import read_group_log
from burnish.models.cache_attention import least_rows
from burnish.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]

MakeConfig = Callable[..., JobConfig]
ROOT = Path(__file__).parents[2]
Lines = list[dict[str, float]]
Compare = Callable[[Lines, Lines], None]
RAY = [
    "cluster.runtime=ray",
    "cluster.layout=separate",
    "cluster.policy_ranks=2",
    "cluster.rollout_workers=1",  # each worker takes seconds to start
]
SHARDED = {
    "fsdp2": ["train.engine.sharding=full", "checkpoint.in_background=true"],
    **{
        f"zero-{n}": ["train.engine.kind=deepspeed", f"train.engine.zero_stage={n}"]
        for n in (1, 2, 3)
    },
}
GAE = [
    "algorithm.advantage=gae",
    "algorithm.kl.init_kl_coef=0.1",
    "algorithm.kl.placement=reward",
    "algorithm.kl.estimator=k1",
    "train.train_batch_size=8",
]


def lines_of(config: JobConfig, reward: Any = None, **more: Any) -> Lines:
    rewards = {} if reward is None else {"rewards": reward}
    return read_metrics(burnish.run(config, **rewards, **more).run_dir)


def test_grpo_matches_one_process_while_the_engine_changes_at_every_step(
    rl: MakeConfig, reward: Any, evaluation: list[str], compare: Compare
) -> None:
    """Each engine takes a step on two ranks and saves, and the next resumes from that: FSDP2, ZeRO
    1, 2 and 3, one rank of torch, and FSDP2 again."""
    common = ["algorithm.kl.init_kl_coef=0.1", *evaluation, "train.lr=1e-2"]
    one = lines_of(rl(*common, "max_steps=6", f"run_dir={rl().run_dir}-one"), reward)
    two_ranks = [*RAY, "cluster.reference_ranks=1"]
    turns = [[*two_ranks, *SHARDED[name]] for name in ("zero-1", "zero-2", "zero-3", "fsdp2")]
    first = rl(*common, *two_ranks, *SHARDED["fsdp2"], "max_steps=1")
    run_dir = burnish.run(first, rewards=reward).run_dir
    for step, turn in enumerate([*turns[:3], [], turns[3]], start=2):
        config = rl(*common, *turn, f"max_steps={step}")
        lines = lines_of(config, reward, resume=run_dir)
    compare(one, lines)


def test_a_checkpoint_of_one_rank_resumes_on_two_with_the_same_numbers(
    rl: MakeConfig, reward: Any, compare: Compare
) -> None:
    """Two of four steps on one rank, then two on two ranks, from the same checkpoint: replicas and
    ZeRO-1. (The test above has FSDP2.)"""
    common = ["algorithm.kl.init_kl_coef=0.1", "train.lr=1e-2"]
    one = lines_of(rl(*common, "max_steps=4", f"run_dir={rl().run_dir}-one"), reward)
    half = burnish.run(rl(*common, "max_steps=2"), rewards=reward).run_dir
    engines = {"replicas": ["train.engine.sharding=none"], **SHARDED}
    for name in ("replicas", "zero-1"):
        run_dir = half.with_name(name)
        shutil.copytree(half, run_dir)
        two_ranks = [*RAY, "cluster.reference_ranks=1", *engines[name]]
        config = rl(*common, *two_ranks, "max_steps=4", f"run_dir={run_dir}")
        compare(one, lines_of(config, reward, resume=run_dir))


def test_ppo_with_a_critic_and_a_reference_matches_one_process(
    rl: MakeConfig, reward: Any, compare: Compare
) -> None:
    one = lines_of(rl(*GAE, "train.lr=1e-2", f"run_dir={rl().run_dir}-one"), reward)
    compare(one, lines_of(rl(*GAE, "train.lr=1e-2", *RAY, *SHARDED["zero-3"]), reward))


@pytest.mark.parametrize("engine", ["fsdp2", "zero-3"])
def test_a_lora_policy_and_its_base_share_shards(
    engine: str, rl: MakeConfig, reward: Any, compare: Compare
) -> None:
    options = ["model.lora.lora_rank=4", "algorithm.kl.init_kl_coef=0.1", "train.lr=1e-2", "seed=3"]
    one = lines_of(rl(*options, "max_steps=3", f"run_dir={rl().run_dir}-one"), reward)
    at_end = ["checkpoint.export_at_end=true", "checkpoint.export_at_end.lora=adapter"]
    config = rl(*options, *RAY, *SHARDED[engine], *at_end, "max_steps=3")
    lines = lines_of(config, reward)
    compare(one, lines)
    assert (Path(config.run_dir) / "export" / "adapter_model.safetensors").is_file()
    assert lines[0]["train/kl"] == 0.0 and lines[-1]["train/kl"] > 1e-4
    assert all(line["train/mismatch_max"] < 1e-5 for line in lines), "merged weights arrived"


def test_a_reward_model_trains_in_shards_and_scores_from_them(
    rl: MakeConfig, tmp_path: Path, compare: Compare
) -> None:
    """It trains with ZeRO-3, and another run loads its export into shards of FSDP2."""
    rows = [{"prompt": f"{i}=", "chosen": str(i), "rejected": "+"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tree = {
        "job": "rm",
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [str(tmp_path / "pairs.jsonl")]},
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    one = lines_of(burnish.load_config({**tree, "run_dir": str(tmp_path / "one")}, []))
    run_dir, folder = tmp_path / "two", tmp_path / "exported"
    more = [*RAY, *SHARDED["zero-3"], f"checkpoint.export_at_end={folder}"]
    compare(one, lines_of(burnish.load_config({**tree, "run_dir": str(run_dir)}, more)))
    rewards = f"rewards=[{{kind: model, model: {{path: '{folder}'}}}}]"
    scored = rl(rewards, *RAY, *SHARDED["fsdp2"], f"run_dir={run_dir} rl")
    assert all(abs(line["reward/mean"]) < 100 for line in lines_of(scored))


@pytest.mark.skipif(least_rows(1) is None, reason="decoding on this CPU depends on the batch")
def test_asynchronous_rl_with_two_rollout_workers(rl: MakeConfig, reward: Any) -> None:
    """A bound of 0 gives the synchronous numbers, and a bound of 2 holds, on two workers that load
    staged weights."""
    two_workers = [*RAY, "cluster.policy_ranks=1", "cluster.rollout_workers=2", "train.lr=1e-2"]
    runs = {
        "sync": [],
        "0": ["rollout.asynchronous.max_staleness=0"],
        "2": ["rollout.asynchronous.max_staleness=2", "algorithm.correction={}", "max_steps=6"],
    }
    found = {
        name: lines_of(rl(*two_workers, *own, f"run_dir={rl().run_dir}-{name}"), reward)
        for name, own in runs.items()
    }
    for one, other in zip(found["sync"], found["0"], strict=True):
        left_out = ("time", "memory", "sync", "rollout/tokens_per_s")
        kept = {name for name in one if not name.startswith(left_out)}
        assert {name: other.get(name) for name in kept} == {name: one[name] for name in kept}
    ages = [line["rollout/age_max"] for line in found["2"] if "rollout/age_max" in line]
    assert len(ages) == 6 and 1 <= max(ages) <= 2


def test_the_asynchronous_recipe_trains_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 8 groups, at most 2 RL steps older than the weights that they train. The first
    step trains samples of its own weights."""
    monkeypatch.chdir(ROOT)  # the recipe's environment
    short = ["max_steps=2", f"run_dir={tmp_path / 'run'}", "eval.num_prompts=4"]
    run_dir = burnish.run(load_config(ROOT / "recipes/tiny_async.yaml", short)).run_dir
    lines = [line for line in read_metrics(run_dir) if "train/loss" in line]
    records = read_group_log(run_dir)
    assert [line["step"] for line in lines] == [r["step"] for r in records] == [1, 2]
    for line, record in zip(lines, records, strict=True):
        ages = list(record["trained"].values())
        assert len(ages) == 8 and max(ages) <= 2
        assert line["rollout/age_max"] == max(ages)
        assert line["rollout/age_mean"] <= max(ages) and line["train/grad_norm"] > 0
    assert lines[0]["rollout/age_max"] == 0
    trained = [name for record in records for name in record["trained"]]
    assert len(set(trained)) == 16
