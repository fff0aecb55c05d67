"""The same recipes on Ray workers: the same numbers, and what happens when workers die or hang.

One local Ray serves all tests of this file; every process in it has one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import burnish
from burnish.config import ConfigError, JobConfig
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.runtime.base import ClusterError
from burnish.runtime.ray.cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]

MakeConfig = Callable[..., JobConfig]
Lines = list[dict[str, float]]
Compare = Callable[[Lines, Lines], None]
RAY = ["cluster.runtime=ray", "cluster.policy_ranks=2"]
"""All roles share two places: ``cluster.layout=colocate_all``, the default."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each run its workers are gone and their places are free again."""
    yield
    deadline = time.monotonic() + 30
    while workers("") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers("")
    while ray.available_resources().get("CPU") != 16 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ray.available_resources()["CPU"] == 16


def workers(kind: str) -> list[psutil.Process]:
    """Worker processes of this process' Ray that hold one of our classes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if line.startswith(("ray::TrainWorker", "ray::RolloutWorker")) and kind in line:
                found.append(process)
    return found


GAE = [
    "algorithm.advantage=gae",
    "algorithm.kl.init_kl_coef=0.1",
    "algorithm.kl.placement=reward",
    "algorithm.kl.estimator=k1",
    "train.train_batch_size=8",
]

MASKED = ["rollout.top_p=0.9", "rollout.top_k=9", "algorithm.correction={}"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["algorithm.kl.init_kl_coef=0.1", "train.max_tokens_per_micro_batch=40", *MASKED],
            id="grpo with a reference, a token budget and masks",
        ),
        pytest.param(GAE, id="ppo with critic and reference"),
    ],
)
def test_rl_matches_one_process(
    options: list[str], rl: MakeConfig, reward: Any, evaluation: list[str], compare: Compare
) -> None:
    common = [*options, *evaluation, "max_steps=3", "train.lr=1e-2"]
    inline = rl(*common, f"run_dir={rl().run_dir}-inline")
    remote = rl(*common, *RAY, f"run_dir={rl().run_dir}-ray")
    assert remote.cluster.layout == "colocate_all"
    lines = [read_metrics(burnish.run(c, rewards=reward).run_dir) for c in (inline, remote)]
    compare(*lines)


def test_a_lora_policy_and_its_base_share_workers(
    rl: MakeConfig, reward: Any, compare: Compare
) -> None:
    """And begins with the adapters that it has in one process."""
    options = ["model.lora.lora_rank=4", "algorithm.kl.init_kl_coef=0.1", "train.lr=1e-2", "seed=3"]
    inline = rl(*options, "max_steps=3", f"run_dir={rl().run_dir}-inline")
    config = rl(*options, *RAY, "max_steps=3")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    compare(read_metrics(burnish.run(inline, rewards=reward).run_dir), lines)
    assert lines[0]["train/kl"] == 0.0 and lines[-1]["train/kl"] > 1e-4
    assert all(line["train/mismatch_max"] < 1e-5 for line in lines), "merged weights arrived"


def test_layouts_do_not_change_the_numbers(rl: MakeConfig, reward: Any, compare: Compare) -> None:
    """Nor do roles that are in host memory between their phases."""
    runs, moved = [], "cluster.offload_between_phases"
    layouts = {
        "colocate_all": [f"{moved}=[policy, critic, reference]"],
        "colocate_actor_ref": [f"{moved}=[reference]"],
        "separate": [],
    }
    for layout, more in layouts.items():
        name = f"run_dir={rl().run_dir}-{layout}"
        config = rl(*RAY, *GAE, f"cluster.layout={layout}", *more, name)
        runs.append(read_metrics(burnish.run(config, rewards=reward).run_dir))
    compare(runs[0], runs[1])
    compare(runs[0], runs[2])
    assert runs[0][-1]["time/offload_s"] > 0 and "time/offload_s" not in runs[2][-1]


@pytest.mark.parametrize("job", ["rm", "preference"])
def test_supervised_jobs_match_one_process(
    job: str, write_rows: Callable[..., str], tmp_path: Path, compare: Compare
) -> None:
    rows = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "+"}
        for i in range(16)
    ]
    data = write_rows("rows", rows)
    tree = {
        "job": job,
        "max_epochs": 2,
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [data]},
        "eval": {"data": {"sources": [data]}},
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    lines = []
    one_reference = ["cluster.layout=separate", "cluster.reference_ranks=1"]
    remote = [*RAY, *(one_reference if job == "preference" else [])]
    for name, more in (("inline", []), ("ray", remote)):
        config = burnish.load_config({**tree, "run_dir": str(tmp_path / name)}, more)
        lines.append(read_metrics(burnish.run(config).run_dir))
    compare(*lines)


def test_reward_models_score_on_their_own_workers(
    rl: MakeConfig, tmp_path: Path, compare: Compare
) -> None:
    """Two of them, in the places of policy and rollout, then on one rank each, as the critic of a
    policy on two."""
    rows = [{"prompt": f"{i}=", "chosen": str(i), "rejected": "+"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    rm = {
        "job": "rm",
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": {"sources": [str(tmp_path / "pairs.jsonl")]},
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    models = []
    for seed in (0, 1):
        config = burnish.load_config({**rm, "seed": seed, "run_dir": str(tmp_path / f"rm {seed}")})
        run_dir, folder = burnish.run(config).run_dir, tmp_path / f"reward {seed}"
        burnish.export(run_dir, folder, model="reward")
        models.append(f"{{kind: model, name: model{seed}, model: {{path: '{folder}'}}}}")
    rewards = f"rewards=[{', '.join(models)}]"
    lines = []
    own = [*RAY, "cluster.layout=separate", "cluster.critic_ranks=1", "cluster.reward_ranks=1"]
    for name, more in (("inline", []), ("ray", RAY), ("own", own)):
        config = rl(rewards, *GAE, *more, f"run_dir={rl().run_dir}-{name}")
        lines.append(read_metrics(burnish.run(config).run_dir))
    compare(*lines[:2])
    compare(*lines[1:])
    assert lines[0][0]["reward/model0"] != lines[0][0]["reward/model1"]


# ---- failures ------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Sends a signal to a worker of a kind, a moment after the log has grown to some lines."""

    def __init__(
        self, run_dir: Path, kind: str, *, lines: int, seed: int, number: int = signal.SIGKILL
    ) -> None:
        super().__init__(daemon=True)
        self.log, self.kind, self.lines, self.number = (
            run_dir / "metrics.jsonl",
            kind,
            lines,
            number,
        )
        self.rng = random.Random(seed)
        self.hit: int | None = None

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.log.is_file() and len(self.log.read_text().splitlines()) >= self.lines:
                time.sleep(self.rng.uniform(0, 0.2))
                found = workers(self.kind)
                if found:
                    victim = self.rng.choice(found)
                    self.hit = victim.pid
                    os.kill(victim.pid, self.number)
                    return
            time.sleep(0.005)


def slowly(reward: Any) -> Any:
    """``reward``, and 20 ms for each sample: on a quick machine a run would be over before anything
    can happen to it."""

    def slow(response: str) -> float:
        time.sleep(0.02)
        return float(reward(response))

    return slow


def trained_once(run_dir: Path, *, prompts: int, samples: int) -> None:
    found = Counter(sample["prompt_id"] for sample in read_samples(run_dir))
    assert len(found) == prompts and set(found.values()) == {samples}


def test_killed_workers_are_replaced_without_changing_the_numbers(
    rl: MakeConfig, reward: Any, compare: Compare
) -> None:
    """16 prompts, 4 a step, 8 steps: two epochs. A rollout worker dies, then a rank of the policy.
    (At other moments: tests/faults.)"""
    common = ["max_steps=8", "train.lr=1e-2", "checkpoint.every_n_steps=2"]
    whole = rl(*common, f"run_dir={rl().run_dir}-whole")
    expected = read_metrics(burnish.run(whole, rewards=reward).run_dir)
    config = rl(*common, *RAY, f"run_dir={rl().run_dir}-killed")
    run_dir = Path(config.run_dir)
    killers = [
        Killer(run_dir, kind, lines=lines, seed=1)
        for kind, lines in (("RolloutWorker", 2), ("TrainWorker", 4))
    ]
    for killer in killers:
        killer.start()
    burnish.run(config, rewards=slowly(reward))
    for killer in killers:
        killer.join(60)
        assert killer.hit is not None, f"no {killer.kind} was killed, so nothing was tried"
    compare(expected, read_metrics(run_dir))
    trained_once(run_dir, prompts=32, samples=4)
    log = (run_dir / "run.log").read_text()
    assert "replaced (1 of 3)" in log and "replaced (2 of 3)" in log


def test_a_hung_rank_is_named_and_replaced(rl: MakeConfig, reward: Any) -> None:
    common = ["max_steps=4", "checkpoint.every_n_steps=1"]
    config = rl(*common, *RAY, "cluster.heartbeat_timeout_s=6")
    killer = Killer(Path(config.run_dir), "TrainWorker", lines=1, seed=5, number=signal.SIGSTOP)
    killer.start()
    burnish.run(config, rewards=slowly(reward))
    log = (Path(config.run_dir) / "run.log").read_text()
    named = re.findall(r"rank \d of the policy \(node \S+, pid (\d+)\) is unresponsive", log)
    assert named and set(named) == {str(killer.hit)}, "the hung one, not the one that waits for it"
    assert "is unresponsive: no heartbeat for 6 s" in log and "replaced (1 of 3)" in log
    assert [line["step"] for line in read_metrics(Path(config.run_dir))] == [1, 2, 3, 4]


def test_exceeding_max_restarts_ends_the_run_with_the_reason(rl: MakeConfig, reward: Any) -> None:
    config = rl(*RAY, "max_steps=4", "cluster.max_restarts=0")
    Killer(Path(config.run_dir), "TrainWorker", lines=1, seed=6).start()
    with pytest.raises(ClusterError, match=r"of the policy .* died: .*max_restarts=0"):
        burnish.run(config, rewards=slowly(reward))


def test_errors_of_a_worker_reach_the_user_unchanged(rl: MakeConfig, reward: Any) -> None:
    long = ["rollout.generate_max_len=60", "model.scratch.max_position_embeddings=62"]
    said = []
    for name, more in (("inline", []), ("ray", RAY)):
        one = rl(*long, *more, f"run_dir={rl().run_dir}-{name}")
        with pytest.raises(Exception) as caught:
            burnish.run(one, rewards=reward)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


# ---- places --------------------------------------------------------------------------------------


def test_an_engine_sees_the_gpus_of_the_ranks_that_it_spans() -> None:
    """4 ranks and 2 engines on 4 GPUs that exist only as numbers. Engine 1 sees the GPUs of ranks 2
    and 3, in their order."""
    gpus = {"policy_ranks": 4, "rollout_workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 2}
    config = ClusterConfig(runtime="ray", **gpus)
    places = placement_groups_for(config, ["policy", "rollout"], tensor_parallel_size=2)
    model = ModelConfig(scratch=ScratchConfig())
    cluster = RayCluster(model, config, placements=places, precision=PrecisionConfig())

    class Seen:
        def __init__(self, info: Any, *_: Any) -> None:
            self.device = info.device

        def heartbeat(self, *_: Any) -> tuple[str, int]:
            return "node", os.getpid()

        def seen(self) -> tuple[str, str | None]:
            return self.device, os.environ.get("CUDA_VISIBLE_DEVICES")

    def visible(group: str, index: int, size: int) -> list[str]:
        worker = cluster.start_one(group, Seen, index, size)
        device, ids = ray.get(worker.seen.remote(), timeout=60)
        assert device == "cuda" and ids
        cluster.end([worker])
        return ids.split(",")

    try:
        third, fourth = visible("rollout", 1, 2)
        assert third != fourth and [fourth] == visible("policy", 3, 4)
    finally:
        cluster.close()


# ---- bad input -----------------------------------------------------------------------------------


def test_needing_more_than_the_cluster_has_is_rejected_at_once(rl: MakeConfig, reward: Any) -> None:
    gpus = rl(*RAY, "cluster.gpus_per_worker=4")
    with pytest.raises(ClusterError, match=r"needs 8 GPUs .*the cluster has 4"):
        burnish.run(gpus, rewards=reward)
    many = rl(*RAY, "cluster.layout=separate", "cluster.rollout_workers=20")
    with pytest.raises(ClusterError, match=r"needs 22 CPUs .*the cluster has 16"):
        burnish.run(many, rewards=reward)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.policy_ranks=2"], "runtime=ray"),
        (["cluster.ray_address=auto"], "with runtime=inline"),
        (
            ["cluster.runtime=ray", "cluster.policy_ranks=2", "cluster.rollout_workers=3"],
            "GPUs",
        ),
        (
            ["cluster.runtime=ray", "cluster.policy_ranks=3"],
            "multiple",
        ),
    ],
)
def test_invalid_clusters_are_rejected(overrides: list[str], said: str, rl: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        rl(*overrides)
    assert said in str(caught.value)
