"""What dies in which call, one after the other, in one run; what a dead controller leaves; and
clusters that cannot be joined."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import burnish
from burnish.config import JobConfig
from burnish.jobs.evaluate import Evaluator
from burnish.observe.samples import read_samples
from burnish.runtime.base import ClusterError
from burnish.runtime.ray import connect as ray_connect
from burnish.runtime.ray.cluster import RayCluster
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine
from burnish.runtime.ray.train_engine import RemoteTrainEngine
from burnish.runtime.ray.weight_sync import ConnectionSync, ObjectStoreSync
from burnish.runtime.ray.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Recipe = Callable[..., JobConfig]
TWO_EACH = (
    "cluster.runtime=ray",
    "cluster.policy_ranks=2",
    "cluster.rollout_workers=2",
    "cluster.heartbeat_timeout_s=15",
)
"""Two ranks and two rollout workers, on a Ray of the run's own."""


# ---- one after the other -------------------------------------------------------------------------


class Saboteur:
    """Kills workers right before chosen calls of the controller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.cluster: RayCluster | None = None
        self.done: list[str] = []
        connect = RayCluster._connect

        def remember(cluster: RayCluster, placements: Any) -> None:
            self.cluster = cluster
            connect(cluster, placements)

        monkeypatch.setattr(RayCluster, "_connect", remember)

    def kill(self, *names: str) -> None:
        """End worker processes by name ("rank 1 of the policy")."""
        assert self.cluster is not None
        for name in names:
            known = [w.name for w in self.cluster.monitor._workers.values()]
            (full,) = [k for k in known if k.startswith(f"{name} (")]
            os.kill(int(re.search(r"pid (\d+)", full)[1]), signal.SIGKILL)
        time.sleep(0.05)

    def before(
        self, owner: type, method: str, call: int, *victims: str, role: str | None = None
    ) -> None:
        """Kill ``victims`` before the ``call``-th call of a method (of engines in a role)."""
        original = next(vars(c)[method] for c in owner.__mro__ if method in vars(c))
        calls = 0

        def sabotaged(this: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if role is None or this.role == role:
                calls += 1
                if calls == call:
                    self.done.append(f"{owner.__name__}.{method}")
                    self.kill(*victims)
            return original(this, *args, **kwargs)

        self.monkeypatch.setattr(owner, method, sabotaged)


def assert_no_ray_is_left() -> None:
    """No process of a Ray that this process started, within half a minute."""
    deadline = time.monotonic() + 30
    while True:
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                left += [line] * (line.startswith("ray::") or "raylet" in line)
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_death_in_any_call_does_not_change_the_results(
    recipe: Recipe,
    tmp_path: Path,
    same_numbers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PPO with a critic and a reference, evaluation every second step. What dies, and where:
    a rank while a checkpoint is written; a rollout worker and a rank as weights are handed over,
    both at once; a rank of the critic; of the frozen reference, which costs no step; a rollout
    worker in an evaluation; and, when a group has just come back, one of its ranks again.
    """
    evaluation = ("eval.every_n_steps=2", f"eval.data.sources=[{tmp_path / 'rows.jsonl'}]")
    common = ("max_steps=6", *evaluation, "eval.num_prompts=4")
    whole = recipe("gae", *common, name="whole")
    burnish.run(whole)
    config = recipe("gae", *common, *TWO_EACH, "cluster.max_restarts=12", name="disturbed")
    run_dir = Path(config.run_dir)
    saboteur = Saboteur(monkeypatch)
    # calls count on through what is done again, so each comes a little later than the last
    saboteur.before(RemoteTrainEngine, "save", 2, "rank 1 of the policy", role="policy")
    saboteur.before(RemoteTrainEngine, "load", 1, "rank 0 of the policy", role="policy")
    both = ("rollout worker 1", "rank 0 of the policy")
    saboteur.before(ObjectStoreSync, "push", 6, *both)
    saboteur.before(RemoteTrainEngine, "values", 4, "rank 1 of the critic", role="critic")
    saboteur.before(RemoteTrainEngine, "logprobs", 6, "rank 0 of the reference", role="reference")
    saboteur.before(Evaluator, "evaluate", 3, "rollout worker 0")
    burnish.run(config)
    assert len(saboteur.done) == 6, saboteur.done
    # an explained variance near 0 is 1 minus a ratio near 1: its sums differ by 1e-5 of that
    same_numbers(Path(whole.run_dir), run_dir, absolute=2e-5)
    train = [s for s in read_samples(run_dir) if s["split"] == "train"]
    ids = Counter(sample["prompt_id"] for sample in train)
    assert len(ids) == 24 and set(ids.values()) == {2}
    log = (run_dir / "run.log").read_text()
    for name in ("rollout worker 0", "rollout worker 1", "rank 1 of the critic"):
        assert re.search(rf"{name} \(node \S+, pid \d+\) died: .*; replaced", log), name
    frozen = re.findall(r".*rank 0 of the reference .*", log)
    assert frozen and not any("going back" in line for line in frozen)
    assert_no_ray_is_left()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "rollout.asynchronous.max_staleness=1",
            "rollout.asynchronous.run_ahead=0",
            "algorithm.correction={}",
        ),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_a_rank_that_dies_while_it_sends_weights_to_a_new_rollout_worker_is_replaced(
    overrides: tuple[str, ...], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only rollout worker dies while the trainer waits for groups. Weights of a connection have
    no copy, so the policy sends them to the new worker, and its rank dies at that moment. The run
    continues from its checkpoint; 3 steps of 4 prompts train each prompt once."""
    ray = ("cluster.runtime=ray", "cluster.policy_ranks=1", "cluster.rollout_workers=1")
    ray = (*ray, "cluster.layout=separate")
    sync = "sync={kind: collective, timeout_s: 5}"
    config = recipe("grpo", "max_steps=3", sync, *ray, *overrides)
    saboteur = Saboteur(monkeypatch)
    saboteur.before(RemoteRolloutEngine, "submit", 2, "rollout worker 0")
    saboteur.before(ConnectionSync, "_send_to_new", 1, "rank 0 of the policy")
    burnish.run(config)
    assert saboteur.done == ["RemoteRolloutEngine.submit", "ConnectionSync._send_to_new"]
    run_dir = Path(config.run_dir)
    ids = Counter(sample["prompt_id"] for sample in read_samples(run_dir))
    assert len(ids) == 12 and set(ids.values()) == {4}
    log = (run_dir / "run.log").read_text()
    assert re.search(r"rank 0 of the policy .* \(during a weight transfer\); rolling back", log)
    assert_no_ray_is_left()


def test_ranks_that_die_at_every_start_end_the_run_after_max_restarts(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    saboteur = Saboteur(monkeypatch)
    each = WorkerGroup._each

    def dying(group: WorkerGroup, call: Any, **kwargs: Any) -> Any:
        saboteur.kill("rank 1 of the policy")
        return each(group, call, **kwargs)

    monkeypatch.setattr(WorkerGroup, "_each", dying)
    config = recipe("grpo", *TWO_EACH, "cluster.max_restarts=1")
    with pytest.raises(ClusterError, match=r"rank 1 of the policy .* died: .*max_restarts=1 "):
        burnish.run(config)
    assert_no_ray_is_left()


# ---- what a dead controller leaves ---------------------------------------------------------------


def test_a_killed_controller_leaves_nothing_on_a_joined_cluster_not_even_a_stopped_worker(
    recipe: Recipe, children: Any, on_ray: tuple[str, ...], ray_cluster: Any
) -> None:
    config = recipe("grpo", "max_steps=500", *on_ray, "cluster.heartbeat_timeout_s=600")
    process = children.start(config, environment=ray_cluster.environment)
    _wait_for_lines(Path(config.run_dir), 2, process)
    assert len(ray_cluster.workers("TrainWorker")) == 2
    os.kill(ray_cluster.workers("RolloutWorker")[0].pid, signal.SIGSTOP)
    os.kill(ray_cluster.workers("TrainWorker")[0].pid, signal.SIGSTOP)
    process.kill()
    process.join()
    ray_cluster.assert_nothing_is_left()


def test_a_ray_that_a_run_started_ends_with_its_killed_controller(
    recipe: Recipe, children: Any
) -> None:
    """All but two agents of Ray's own, which try to report its end for a minute or two."""
    before, older = set(glob.glob("/dev/shm/*")), set(_processes_of_ray())
    config = recipe("grpo", "max_steps=500", "cluster.runtime=ray", "cluster.policy_ranks=2")
    process = children.start(config)
    _wait_for_lines(Path(config.run_dir), 2, process)
    workers = set(_processes_of_ray()) - older
    below = [*workers, *psutil.Process(process.pid).children(recursive=True)]
    assert sum("ray::TrainWorker" in " ".join(p.cmdline()) for p in workers) == 2
    agents = [p for p in below if "Agent" in " ".join(p.cmdline())]
    process.kill()
    process.join()
    _, alive = psutil.wait_procs([p for p in below if p not in agents], timeout=30)
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()
    assert not alive
    mine = {p for p in set(glob.glob("/dev/shm/*")) - before if str(process.pid) in p}
    assert not mine


def _processes_of_ray() -> Iterator[psutil.Process]:
    """Workers, which are forks of the server of this process, and agents."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::"):
                yield process


def _wait_for_lines(run_dir: Path, count: int, process: Any) -> None:
    log = run_dir / "metrics.jsonl"
    while not (log.is_file() and len(log.read_bytes().splitlines()) >= count):
        assert process.is_alive()
        time.sleep(0.02)


# ---- clusters that cannot be joined --------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[str]:
    """A port that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _joined(recipe: Recipe, address: str) -> str:
    """What a run on that cluster says."""
    config = recipe("grpo", "cluster.runtime=ray", f"cluster.ray_address={address}")
    with pytest.raises(ClusterError) as caught:
        burnish.run(config)
    said = str(caught.value)
    assert f"cluster.ray_address={address!r}" in said
    return said


def test_an_unreachable_address_is_an_error_at_once(recipe: Recipe) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert "cannot connect" in _joined(recipe, address)
    assert "'ray start --head'" in _joined(recipe, address)


def test_a_port_of_another_program_is_an_error_within_the_timeout(
    recipe: Recipe, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_connect, "PROBE_S", 6.0)
    assert "no response from Ray within 6 s; another program may use this port" in _joined(
        recipe, listener
    )


@pytest.mark.parametrize(
    ("address", "said"),
    [("ray://127.0.0.1:10001", "Ray Client"), ("nowhere", "neither 'auto' nor host:port")],
)
def test_addresses_of_another_kind_are_rejected(address: str, said: str, recipe: Recipe) -> None:
    assert said in _joined(recipe, address)


def test_a_cluster_of_another_version_is_rejected_with_both_versions(
    recipe: Recipe, ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cluster, looked at by a Ray that takes itself for 0.0.1."""
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '0.0.1'\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name, value in ray_cluster.environment.items():
        monkeypatch.setenv(name, value)
    version = subprocess.run(
        [sys.executable, "-c", "import ray; print(ray.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() == "0.0.1", "the disguise works"
    said = _joined(recipe, ray_cluster.address)
    assert "0.0.1" in said and "ersion mismatch" in said
    assert "install the cluster's versions here, or restart the cluster with these" in said
