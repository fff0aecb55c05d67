"""Engines as groups of Ray workers. The only file that imports ray.

A group of train workers is a train engine: each call goes to all ranks, a batch through Ray's
object store once, and rank 0 answers. A group of rollout workers is a rollout engine: requests are
spread over them, and those of a worker that dies are done again by its replacement. So the loops
are the same as in one process, and so are their numbers.

Here: what starts where. The engines made of workers are in ``remote.py``.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.placement import PlacementGroupSpec
from burnish.config.roles import free_name
from burnish.config.rollout import RolloutEngineConfig
from burnish.config.sync import DiskSync, InprocSync, LinkSync, SyncConfig
from burnish.messages import library_text
from burnish.observe.peaks import ProcessPeaks
from burnish.observe.timeline import Timeline, timed
from burnish.rollout.base import RolloutEngine
from burnish.runtime.base import CRITIC_SPANS, POLICY_SPANS, ClusterError, Sync, WorkerLostError
from burnish.runtime.cluster import join_ray, start_ray
from burnish.runtime.errors import constructor_error, failure, is_worker_loss
from burnish.runtime.heartbeat import HeartbeatMonitor, HeartbeatRegistry
from burnish.runtime.remote import (
    RemoteFrozenBase,
    RemoteRolloutEngine,
    RemoteTrainEngine,
    worker_peaks,
)
from burnish.runtime.weight_sync import ray_sync
from burnish.runtime.worker import WorkerInfo
from burnish.runtime.worker_group import WorkerGroup
from burnish.secret import is_secret
from burnish.train.base import HasLogprobs, TrainEngine
from burnish.train.spec import EngineSpec

log = logging.getLogger("burnish")


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody of itself
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            f"cluster.runtime=ray needs the package ray, and importing it failed ({error}); "
            "install it with: pip install 'burnish[ray]'"
        ) from None
    return ray


class RayRuntime:
    """Implements ``runtime.base.Runtime`` and ``Recoverable``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        config: ClusterConfig,
        *,
        placements: Sequence[PlacementGroupSpec],
        precision: PrecisionConfig,
        timeline: Timeline,
    ) -> None:
        """Join or start Ray and reserve ``placements``.

        Raises ClusterError where the cluster is too small or cannot be reached.
        """
        self.tokenizer, self.config = tokenizer, config
        self.model = model.with_absolute_paths()
        self.precision, self.timeline = precision, timeline
        self.ray = _ray()
        self.groups: list[WorkerGroup] = []
        self.rollouts: list[RemoteRolloutEngine] = []
        self.restarts = 0
        self._first_heartbeats: dict[int, Any] = {}
        self._connected_here = False
        self._restore: Callable[[], None] = lambda: None
        self._registry: Any = None
        self._placements: dict[str, tuple[Any, PlacementGroupSpec]] = {}
        self._connect(placements)
        try:
            self._reserve(placements)
            self._registry = self._start_registry()
        except BaseException:
            self.close()
            raise
        self.monitor = HeartbeatMonitor(
            self.ray, self._registry, timeout_s=config.heartbeat_timeout_s
        )

    # ---- the cluster -----------------------------------------------------------------------

    def _connect(self, placements: Sequence[PlacementGroupSpec]) -> None:
        if self.ray.is_initialized():
            return
        environment = {"OMP_NUM_THREADS": str(self._threads())}
        if self.config.ray_address is not None:
            limit = self.config.start_timeout_s
            join_ray(self.ray, self.config.ray_address, timeout_s=limit, environment=environment)
        else:
            cpus = sum(p.cpus * p.count for p in placements)
            # Ray's own count of CPUs is what it hands out, not what it uses; a local run may have
            # more workers than cores (tests, laptops), which is slow and works.
            most = max(os.cpu_count() or 1, int(cpus + 0.999))
            self._restore = start_ray(self.ray, num_cpus=most, environment=environment)
        self._connected_here = True

    def _threads(self) -> int:
        return max(1, int(self.config.cpus_per_worker))

    def _reserve(self, placements: Sequence[PlacementGroupSpec]) -> None:
        """A placement group for every set of places; checked against the whole cluster first."""
        from ray.util.placement_group import placement_group

        have = self.ray.cluster_resources()
        for kind, need in (
            ("GPU", sum(p.gpus * p.count for p in placements)),
            ("CPU", sum(p.cpus * p.count for p in placements)),
        ):
            if need > have.get(kind, 0.0):
                raise ClusterError(
                    f"the layout {self.config.layout} needs {need:g} {kind}s "
                    f"({'; '.join(map(str, placements))}) and the cluster has "
                    f"{have.get(kind, 0.0):g}; use fewer ranks or workers, a layout that shares "
                    "more, or a larger cluster"
                )
        self._check_nodes(placements)
        for placement in placements:
            bundle = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})
            made = placement_group([bundle] * placement.count, strategy="PACK")
            self._placements |= {role: (made, placement) for role in placement.roles}
            ready, _ = self.ray.wait([made.ready()], timeout=self.config.start_timeout_s)
            if not ready:
                raise ClusterError(
                    f"no room for {placement} within {self.config.start_timeout_s:g} s "
                    f"(cluster.start_timeout_s): the cluster has {have} in all, and other jobs may "
                    "hold it"
                )

    def _check_nodes(self, placements: Sequence[PlacementGroupSpec]) -> None:
        """Raise ClusterError where a place is larger than every node: it would be waited for in
        vain."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        for placement in placements:
            need = {"CPU": placement.cpus, "GPU": placement.gpus}
            if any(all(n.get(kind, 0.0) >= size for kind, size in need.items()) for n in nodes):
                continue
            largest = " or ".join(
                sorted({f"{n.get('GPU', 0):g} GPUs and {n.get('CPU', 0):g} CPUs" for n in nodes})
            )
            raise ClusterError(
                f"one place of {placement} needs {placement.gpus:g} GPUs and {placement.cpus:g} "
                f"CPUs of one "
                f"node, and a node of this cluster has {largest}; use a smaller "
                "tensor_parallel_size, cluster.gpus_per_worker or cluster.cpus_per_worker, or "
                "larger nodes"
            )

    def _start_registry(self) -> Any:
        """The process that workers report to, on the controller's node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self.ray.get_runtime_context().get_node_id()
        return (
            self.ray.remote(HeartbeatRegistry)
            .options(
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote()
        )

    def start(self, group: str, worker_class: type, size: int) -> list[Any]:
        """All workers of a group in its places, fresh and answering. Raises WorkerLostError that
        names those that do not, once all are ended."""
        workers = [self.start_one(group, worker_class, i, size) for i in range(size)]
        try:
            lost = self.wait_started(workers)
        except BaseException:
            self.end(workers)
            raise
        if lost:
            said = ", ".join(f"{self.monitor.name(worker)} {why}" for worker, why in lost)
            self.end(workers)
            raise WorkerLostError(f"{len(lost)} of {size} workers did not start: {said}")
        return workers

    def start_one(self, group: str, worker_class: type, rank: int, size: int) -> Any:
        """One worker process, which may not be there yet: :meth:`wait_started` waits for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reserved, placement = self._placements[group]
        gpus = placement.gpus / len(placement.roles)
        device = "cuda" if gpus else "cpu"
        remote = self.ray.remote(worker_class).options(
            num_cpus=placement.cpus / len(placement.roles),
            num_gpus=gpus,
            max_restarts=0,  # a worker without its state is of no use: it is replaced, knowingly
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reserved, placement_group_bundle_index=rank
            ),
            runtime_env={"env_vars": worker_environment(on_gpu=bool(gpus))},
        )
        worker = remote.remote(
            WorkerInfo(group, rank, size, device, self._threads(), shared=len(placement.roles) > 1),
            self.model,
            self.precision,
        )
        kind = "rollout worker" if group == "rollout" else "rank"
        name = f"{kind} {rank}" + ("" if group == "rollout" else f" of the {group}")
        heartbeat = self.monitor.add(worker, name)
        self._first_heartbeats[id(worker)] = worker.heartbeat.remote(
            heartbeat, self.monitor.every_s
        )
        return worker

    def wait_started(self, workers: Sequence[Any]) -> list[tuple[Any, str]]:
        """Wait until fresh workers answer; from then on they are watched. Returns those that do
        not, with the reason. Raises ClusterError where a worker's class cannot be made there."""
        refs = [self._first_heartbeats.pop(id(worker)) for worker in workers]
        limit = self.config.start_timeout_s
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=limit)
        lost: list[tuple[Any, str]] = []
        for worker, ref in zip(workers, refs, strict=True):
            failed = failure(self.ray, ref) if ref in ready else None
            if ref not in ready:
                why = f"did not start within {limit:g} s (cluster.start_timeout_s)"
                lost.append((worker, why))
            elif failed is None:
                self.monitor.mark_started(worker, self.ray.get(ref))
            elif never := constructor_error(self.ray, failed, self.monitor.name(worker)):
                raise never from failed
            elif is_worker_loss(self.ray, failed):
                lost.append((worker, f"died while it started: {library_text(failed)}"))
            else:
                raise failed
        return lost

    @property
    def unresponsive_reason(self) -> str:
        """What is said of a worker that is not heard any more."""
        limit = self.config.heartbeat_timeout_s
        return f"hangs: it was not heard for {limit:g} s (cluster.heartbeat_timeout_s)"

    def end(self, workers: Iterable[Any]) -> None:
        """End workers at once, stopped ones too."""
        for worker in workers:
            self.monitor.drop(worker)
            self.ray.kill(worker)

    def count_restart(self, what: str) -> None:
        """Count a replacement. Raises ClusterError where there were too many."""
        self.restarts += 1
        if self.restarts > self.config.max_restarts:
            raise ClusterError(
                f"{what}, and cluster.max_restarts={self.config.max_restarts} workers were "
                "replaced already; look at why they die (memory? the driver's log?), then go on "
                "by --resume"
            )
        log.warning("%s; replaced (%d of %d)", what, self.restarts, self.config.max_restarts)

    def recover(self, lost: WorkerLostError) -> None:
        """Replace all train groups that are not whole, with fresh weights."""
        self.count_restart(str(lost))
        for group in self.groups:
            if not group.is_complete():
                group.restart()

    # ---- engines ---------------------------------------------------------------------------

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> RemoteTrainEngine:
        """A group of ranks over a causal LM."""
        group = self._group(spec, scalar=False, seed=spec.seed, spans=spans)
        return timed(RemoteTrainEngine(group), self.timeline, spans)

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> RemoteTrainEngine:
        """A group of ranks over a scalar model."""
        group = self._group(spec, scalar=True, seed=seed, spans=spans)
        return timed(RemoteTrainEngine(group), self.timeline, spans)

    def _group(
        self, spec: EngineSpec, *, scalar: bool, seed: int, spans: Mapping[str, str]
    ) -> WorkerGroup:
        name = free_name(spec.role, [group.name for group in self.groups])
        here = with_absolute_paths(spec)
        group = WorkerGroup(self, here, scalar=scalar, seed=seed, spans=spans, name=name)
        self.groups.append(group)
        return group

    def frozen_base(self, policy: TrainEngine) -> HasLogprobs:
        """The reference model inside a LoRA policy."""
        return timed(
            RemoteFrozenBase(cast(RemoteTrainEngine, policy)),
            self.timeline,
            {"logprobs": "reference"},
        )

    def rollout(
        self, policy: TrainEngine, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RemoteRolloutEngine:
        """Workers that get their weights from ``policy``."""
        base = cast(RemoteTrainEngine, policy).group.spec.model.model_copy(update={"lora": None})
        return RemoteRolloutEngine(self, base, config, max_len=max_len, ready=False)

    def standalone_rollout(
        self, model: ModelConfig, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RemoteRolloutEngine:
        """Workers with a model's own weights."""
        own = model.with_absolute_paths()
        return RemoteRolloutEngine(self, own, config, max_len=max_len)

    def sync(
        self, policy: TrainEngine, rollout: RolloutEngine, config: SyncConfig = LinkSync()
    ) -> Sync:
        """What hands the policy's weights to the rollout workers."""
        assert not isinstance(config, InprocSync), "refused when the recipe was read"
        if isinstance(config, DiskSync):
            config = config.model_copy(update={"folder": os.path.abspath(config.folder)})
        ends = cast(RemoteTrainEngine, policy), cast(RemoteRolloutEngine, rollout)
        while True:
            try:
                made = ray_sync(*ends, config, self.precision.sampler_dtype)
                break
            except WorkerLostError as lost:  # nothing is trained yet: fresh ranks are as good
                self.recover(lost)
        return timed(made, self.timeline, {"push": "sync"})

    def release(self, engine: HasLogprobs) -> None:
        """End the engine's workers. (One that lives on another's workers has none of its own.)"""
        for group in self.groups:
            if isinstance(engine, RemoteTrainEngine) and engine.group is group:
                group.end()
        self.groups = [group for group in self.groups if group.workers]

    def peaks(self) -> list[ProcessPeaks]:
        """Of all workers, and of this process (its phases together, as ``controller``)."""
        groups: list[tuple[str, list[Any]]] = [(g.name, g.workers) for g in self.groups]
        groups += [("rollout", rollout.workers) for rollout in self.rollouts]
        found = worker_peaks(self.ray, groups)
        own = self.timeline.peaks
        if own is not None and (phases := own.collect()):
            most = functools.reduce(operator.or_, phases.values())
            found.append(ProcessPeaks("controller", 0, {"controller": most}))
        return found

    def close(self) -> None:
        """End the workers, give their places back, and end Ray where it was started here."""
        from ray.util.placement_group import remove_placement_group

        if not self.ray.is_initialized():
            return
        for group in self.groups:
            group.end()
        for rollout in self.rollouts:
            rollout.close()
        for placements in {id(made): made for made, _ in self._placements.values()}.values():
            remove_placement_group(placements)
        if self._registry is not None:
            self.ray.kill(self._registry)
        self.groups, self.rollouts, self._placements, self._registry = [], [], {}, None
        if self._connected_here:  # a Ray that was started here ends; one that was joined goes on
            self.ray.shutdown()
            self._connected_here = False
            self._restore()


def with_absolute_paths(spec: EngineSpec) -> EngineSpec:
    """The spec for workers, which on a cluster that runs already work in another folder."""
    distill_target = spec.distill_target
    if distill_target is not None:
        distill_target = replace(
            distill_target, teacher=distill_target.teacher.with_absolute_paths()
        )
    here = spec.model.with_absolute_paths()
    return replace(spec, model=here, recipe_model=spec.model, distill_target=distill_target)


_PASSED_ON = ("DS_", "GLOO_", "HF_", "NCCL_", "VLLM_", "TORCHDYNAMO_", "TORCHINDUCTOR_")


def worker_environment(*, on_gpu: bool) -> dict[str, str]:
    """Variables of this process that workers need too: a cluster that runs already has others.

    Without secrets: Ray writes these variables into a log that every user of the machine can read.
    Workers of a local cluster inherit secrets; nodes of another one need their own.
    """
    names = [name for name in os.environ if name.startswith(_PASSED_ON) and not is_secret(name)]
    own = {name: os.environ[name] for name in names}
    return own if on_gpu else {"DS_ACCELERATOR": "cpu", **own}
