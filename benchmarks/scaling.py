"""Measure the cost of the controller per RL step, from 1 to 1,000 simulated rollout workers.

    python benchmarks/scaling.py [--workers 1 10 100 1000] [--samples 100000] [--tokens 128]
    python benchmarks/scaling.py --ray 2      # workers simulated in two real Ray processes
    python benchmarks/scaling.py --sync       # then benchmarks/sync.py: weights against the link

No model: workers answer at once, with completions that were pickled beforehand, and what they
take is not counted. Everything else is the code of a run: requests are split over workers, parcels
of completions collected (unpickled, checked for doubles), groups built and scored, the batch made,
advantages assigned, minibatches cut and handed to the ranks, new weights announced to every worker,
every worker asked what memory it held.
Reported are user-CPU seconds and wall seconds, and their share of a step of ``--step-s`` seconds.

Without ``--ray`` Ray's own work in the controller's process is not in the figures; with it, it is.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import markdown_table, versions

from burnish.batches import groups_to_batch
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.driver.base import rare_garbage_collection
from burnish.observe.memory import MemoryPeak, peak_metrics
from burnish.observe.timeline import Drained, Span, Timeline
from burnish.rewards.base import RewardInput
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.base import Completion, Sampling, VersionSpan
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.runner import Runner
from burnish.runtime.heartbeat import HeartbeatMonitor, HeartbeatRegistry
from burnish.runtime.ray.cluster import UsageCollector
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine
from burnish.runtime.ray.rollout_worker import Orders, answer_seconds
from burnish.runtime.worker import pack_share
from burnish.steps.credit import assign_advantages
from burnish.steps.rl import advantage_by_sample
from burnish.train.batching import RowSplit
from burnish.types import Prompt

SAMPLES_PER_PROMPT = 8
PROMPT_TOKENS = 64
ROLLOUT_S = 60.0
"""How long the workers would take, which says in how many parcels their completions come."""


def user_seconds() -> float:
    """User-CPU seconds of this process, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


class Clock:
    """User-CPU and wall seconds per stage, without what simulated workers take."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self._others = (0.0, 0.0)

    def stage(self, name: str, work: Callable[[], Any]) -> Any:
        """Time ``work``."""
        self._others = (0.0, 0.0)
        cpu, wall = user_seconds(), time.perf_counter()
        result = work()
        cpu, wall = user_seconds() - cpu, time.perf_counter() - wall
        self.stages[name] = cpu - self._others[0], wall - self._others[1]
        return result

    def not_ours(self, work: Callable[[], Any]) -> Any:
        """Do what a worker would do elsewhere."""
        cpu, wall = user_seconds(), time.perf_counter()
        result = work()
        others = self._others
        self._others = others[0] + user_seconds() - cpu, others[1] + time.perf_counter() - wall
        return result


class SimulatedWorker:
    """Answers at once."""

    def __init__(self, tokens: int, workers: int) -> None:
        self.parcels = max(1, int(ROLLOUT_S / answer_seconds(workers)[0]))
        self.left: list[Completion] = []
        self.size = 1
        self.tokens, self.logprobs = tuple(range(tokens)), (-0.5,) * tokens
        self._made_of = tokens, workers
        self._others: dict[int, SimulatedWorker] = {}

    def build(self, *_: Any, ready: bool) -> None:
        """Do nothing: there is no model."""

    def receive_snapshot(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model."""

    def usage(self) -> tuple[dict[str, MemoryPeak], Drained]:
        """Return the memory peaks and the spans of its two phases."""
        names = ("rollout", "rollout_sync")
        spans = [Span(name, 1e9, 1.0) for name in names]
        return {name: MemoryPeak(1e9, 2e9, 3e9) for name in names}, Drained(spans)

    def heartbeat(self, *_: Any) -> tuple[str, int]:
        """Is always there."""
        return "node", 0

    def advance_of(self, index: int, orders: Orders) -> list[Completion]:
        """The next parcel of worker ``index``, one of several in this process."""
        worker = self._others.setdefault(index, SimulatedWorker(*self._made_of))
        return worker.advance(orders)

    def advance(self, orders: Orders) -> list[Completion]:
        """The next parcel of completions."""
        spans = (VersionSpan(0, 0, len(self.tokens)),)
        self.left += [
            Completion(r.request_id, k, self.tokens, self.logprobs, "stop", "text", spans)
            for r, _ in orders.submit
            for k in range(r.n)
        ]
        if orders.submit:
            self.size = -(-len(self.left) // self.parcels)
        parcel, self.left = self.left[: self.size], self.left[self.size :]
        return parcel


class FakeRay:
    """As much of Ray as the controller uses; calls are done at once, in this process."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

        class ObjectLostError(RayError): ...

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(
        self, refs: list[Any], *, num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        """Everything is ready."""
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: Any) -> Any:
        """Unpickle the object, as Ray would."""
        return pickle.loads(ref.data) if isinstance(ref, _Parcel) else ref

    def put(self, value: Any) -> Any:
        """Ray pickles what it is given; arrays are copied once."""
        return _Parcel(pickle.dumps(value, protocol=5))

    def actor(self, worker: SimulatedWorker) -> Any:
        """A handle whose methods have ``remote``."""
        kind = SimulatedWorker
        plain = (kind.build, kind.receive_snapshot, kind.heartbeat, kind.usage)
        methods = {m.__name__: SimpleNamespace(remote=_called(m, worker)) for m in plain}
        advance = SimpleNamespace(remote=lambda orders: self._advance(worker, orders))
        return SimpleNamespace(advance=advance, **methods)

    def _advance(self, worker: SimulatedWorker, orders: Orders) -> Any:
        data = pickle.dumps(orders)
        return self.clock.not_ours(
            lambda: _Parcel(pickle.dumps(worker.advance(pickle.loads(data))))
        )


class _Parcel:
    def __init__(self, data: bytes) -> None:
        self.data = data


def _called(method: Callable[..., Any], worker: SimulatedWorker) -> Callable[..., Any]:
    return lambda *arguments, **options: _Parcel(
        pickle.dumps(method(worker, *arguments, **options))
    )


class SimulatedCluster:
    """In the place of ``RayCluster``: nothing is placed, nothing dies."""

    unresponsive_reason = "hangs"

    def __init__(self, ray: Any, registry: Any, handles: Sequence[Any], *, workers: int) -> None:
        self.ray, self.handles = ray, handles
        self.config = ClusterConfig(
            runtime="ray", rollout_workers=workers, layout="separate", heartbeat_timeout_s=600
        )
        self.monitor = HeartbeatMonitor(ray, registry, timeout_s=self.config.heartbeat_timeout_s)

    def start_one(self, role: str, kind: type, index: int, size: int) -> Any:
        """One of the handles that are there."""
        handle = self.handles[index % len(self.handles)]
        self.monitor.add(handle, f"{role} worker {index}")
        return handle

    def first_response(self, worker: Any) -> Any:
        """A call that is answered at once."""
        return worker.heartbeat.remote()

    def check_started(self, worker: Any, ref: Any) -> str | None:
        """All are there."""
        return None

    def end(self, workers: Sequence[Any]) -> None:
        """Do nothing: no process was started."""


class OneReward:
    """As cheap as a reward can be: what is measured is what surrounds it."""

    name = "length"

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """A number for each."""
        return [float(i % 7) for i in range(len(items))]

    def close(self) -> None:
        """Do nothing: no process was started."""


def step(engine: RemoteRolloutEngine, clock: Clock, args: argparse.Namespace) -> None:
    """The controller's work of one step, stage by stage; see ``loops.rl.rl_step``."""
    prompts = [
        Prompt(f"rows:{i}@0", tuple(range(PROMPT_TOKENS)), "text")
        for i in range(max(1, args.samples // SAMPLES_PER_PROMPT))
    ]
    rewards = RewardSet(
        [(OneReward(), 1.0)],
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(),
        generate_max_len=args.tokens,
    )
    runner = Runner(engine, rewards, Sampling(args.tokens), num_samples=SAMPLES_PER_PROMPT, seed=0)
    drawn = clock.stage("requests, completions, groups", lambda: runner.draw_all(prompts))
    groups = clock.stage(
        "rewards", lambda: runner.finish(runner.measure(drawn), len(prompts))
    ).groups
    batch = clock.stage("batch", lambda: groups_to_batch(groups))
    algorithm = AlgorithmConfig()
    batch = clock.stage("advantages", lambda: assign_advantages(batch, algorithm, kl_coef=0))
    clock.stage("advantage by sample", lambda: advantage_by_sample(groups, batch))

    def send_minibatches() -> None:
        quarter = -(-batch.num_rows // 4)
        split = RowSplit(args.ranks, None, max_tokens=16384, layout="shared_prefix")
        for begin in range(0, batch.num_rows, quarter):
            rows = range(begin, min(begin + quarter, batch.num_rows))
            minibatch = batch.select(rows, copy=False).with_global_counts()
            for share in split.shares(minibatch):
                engine.cluster.ray.put(pack_share(share))

    clock.stage("four minibatches, to the ranks", send_minibatches)
    few = [("weight", torch.zeros(1))]  # the bytes are the ranks' work
    clock.stage("weights announced", lambda: engine.load_weights(1, few))

    def collect_usage() -> None:
        collector = UsageCollector(engine.cluster.ray, Timeline())
        collector.ask("rollout", engine.workers)
        peak_metrics(collector.collect(timeout_s=10))

    clock.stage("memory peaks", collect_usage)


def connect(clock: Clock, workers: int, args: argparse.Namespace) -> SimulatedCluster:
    """Return the cluster of one measurement."""
    if not args.ray:
        ray = FakeRay(clock)
        handles = [ray.actor(SimulatedWorker(args.tokens, workers)) for _ in range(workers)]
        registry = SimpleNamespace(read=SimpleNamespace(remote=dict))
        return SimulatedCluster(ray, registry, handles, workers=workers)
    import ray as real

    if not real.is_initialized():
        here = str(Path(__file__).parent)
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        paths = {"env_vars": {"PYTHONPATH": f"{here}:{Path(here).parent}", "OMP_NUM_THREADS": "1"}}
        options |= {"logging_level": "ERROR", "runtime_env": paths}
        real.init(address="local", num_cpus=args.ray + 1, **options)
    kind = real.remote(SimulatedWorker).options(num_cpus=0)
    processes: list[Any] = [
        kind.remote(args.tokens, workers) for _ in range(min(args.ray, workers))
    ]
    real.get([h.heartbeat.remote() for h in processes])
    handles = [_hosted(processes[i % len(processes)], i) for i in range(workers)]
    return SimulatedCluster(
        real, real.remote(HeartbeatRegistry).options(num_cpus=0).remote(), handles, workers=workers
    )


def _hosted(process: Any, index: int) -> Any:
    """A handle of worker ``index``, one of several in a process."""
    advance = SimpleNamespace(remote=lambda orders: process.advance_of.remote(index, orders))
    return SimpleNamespace(
        build=process.build,
        receive_snapshot=process.receive_snapshot,
        heartbeat=process.heartbeat,
        usage=process.usage,
        advance=advance,
    )


def measure(workers: int, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Stage -> (user-CPU, wall) seconds."""
    clock = Clock()
    cluster: Any = connect(clock, workers, args)
    model = ModelConfig(scratch=ScratchConfig(alphabet="01"))
    engine = RemoteRolloutEngine(cluster, model, LocalEngine(), max_len=None)
    with rare_garbage_collection():
        step(engine, clock, args)
    return clock.stages


def main(args: argparse.Namespace) -> None:
    """Measure and print the table."""
    measured = {n: measure(n, args) for n in args.workers}
    print(versions("torch", "ray"))
    print(
        f"{args.samples} samples of {PROMPT_TOKENS} + {args.tokens} tokens; user-CPU s (wall s); "
        f"share of a step of {args.step_s:g} s; "
        + (f"Ray with {args.ray} processes" if args.ray else "without Ray's own work")
    )
    stages = list(next(iter(measured.values())))
    rows = []
    for name in stages:
        rows.append([name, *(f"{m[name][0]:.2f} ({m[name][1]:.2f})" for m in measured.values())])
    ours = [s for s in stages if not s.startswith("(")]
    totals = [[sum(m[s][i] for s in ours) for m in measured.values()] for i in range(2)]
    both = zip(*totals, strict=True)
    rows.append(["controller, all", *(f"{cpu:.2f} ({wall:.2f})" for cpu, wall in both)])
    shares = [[f"{100 * t / args.step_s:.2f}%" for t in kind] for kind in totals]
    rows.append(["share of a step", *(f"**{c}** ({w})" for c, w in zip(*shares, strict=True))])
    print("\n".join(markdown_table(["workers", *map(str, args.workers)], rows)))
    if args.sync:
        subprocess.run([sys.executable, str(Path(__file__).parent / "sync.py")], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=300.0, help="assumed time of a step")
    parser.add_argument("--ray", type=int, default=0, help="use real Ray with this many processes")
    parser.add_argument(
        "--sync", action="store_true", help=("also measure weight sync and the link")
    )
    main(parser.parse_args())
