"""Worker processes on Ray: placement groups, start, heartbeats, shutdown and the restart budget.

This is the only file that imports ray.

The engines made of workers (``worker_group.py``, ``rollout_engine.py``) request processes from the
cluster and report lost ones. They do not choose the placement of a process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.placement import PlacementGroupSpec
from burnish.messages import library_text
from burnish.observe.memory import ProcessPeaks
from burnish.observe.timeline import Timeline
from burnish.runtime.base import ClusterError, WorkerLostError
from burnish.runtime.heartbeat import HeartbeatMonitor, HeartbeatRegistry
from burnish.runtime.ray.connect import join_ray, start_ray
from burnish.runtime.ray.errors import constructor_error, failure, is_worker_loss
from burnish.runtime.worker import WorkerInfo
from burnish.secret import is_secret

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class _Reserved:
    """Ray's placement groups of one placement."""

    groups: Sequence[Any]
    """One, or one per rollout engine that spans several places, ordered by their nodes."""
    spec: PlacementGroupSpec

    def strategy(self, place: int) -> Any:
        """Return the scheduling strategy of processes in a place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle = divmod(place, self.spec.count // len(self.groups))
        return PlacementGroupSchedulingStrategy(
            self.groups[group], placement_group_bundle_index=bundle
        )


class RayCluster:
    """Workers of one job on a Ray cluster, which is joined or started by this process."""

    def __init__(
        self,
        model: ModelConfig,
        config: ClusterConfig,
        *,
        placements: Sequence[PlacementGroupSpec],
        precision: PrecisionConfig,
    ) -> None:
        """Join or start Ray and reserve ``placements``. ``model``: the policy's config, which is
        sent to all workers.

        Raises ClusterError if the cluster is too small or cannot be reached."""
        self.model, self.config, self.precision = model, config, precision
        self.ray = _import_ray()
        self.restarts = 0
        """Number of workers that were replaced."""
        self._counting = threading.Lock()
        """Protects ``restarts``: train groups and rollout workers are replaced by two threads."""
        self._first_heartbeats: dict[int, Any] = {}
        self._connected_here = False
        self._restore: Callable[[], None] = lambda: None
        self._registry: Any = None
        self._placements: dict[str, _Reserved] = {}
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

    # ---- Ray and placement groups ----------------------------------------------------------

    def _connect(self, placements: Sequence[PlacementGroupSpec]) -> None:
        if self.ray.is_initialized():
            return
        environment = {"OMP_NUM_THREADS": str(self._threads())}
        if self.config.ray_address is not None:
            limit = self.config.start_timeout_s
            join_ray(self.ray, self.config.ray_address, timeout_s=limit, environment=environment)
        else:
            cpus = sum(p.cpus * p.count for p in placements)
            # Ray's CPU count limits scheduling, not use. A local run may have more workers than
            # cores (tests, laptops), which is slow but works.
            most = max(os.cpu_count() or 1, int(cpus + 0.999))
            self._restore = start_ray(self.ray, num_cpus=most, environment=environment)
        self._connected_here = True

    def _threads(self) -> int:
        return max(1, int(self.config.cpus_per_worker))

    def _reserve(self, placements: Sequence[PlacementGroupSpec]) -> None:
        """Reserve the placement groups, after checking them against the resources of the
        cluster."""
        from ray.util.placement_group import placement_group, placement_group_table

        have = self.ray.cluster_resources()
        for kind, need in (
            ("GPU", sum(p.gpus * p.count for p in placements)),
            ("CPU", sum(p.cpus * p.count for p in placements)),
        ):
            if need > have.get(kind, 0.0):
                raise ClusterError(
                    f"the layout {self.config.layout} needs {need:g} {kind}s "
                    f"({'; '.join(map(str, placements))}), but the cluster has "
                    f"{have.get(kind, 0.0):g}; use fewer ranks or workers, a layout that shares "
                    "more GPUs, or a larger cluster"
                )
        self._check_nodes(placements)
        for placement in placements:
            bundle = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})
            size, strategy = placement.count, "PACK"
            if placement.span > 1:  # PACK may divide the places of an engine between nodes
                size, strategy = placement.span, "STRICT_PACK"
            groups = [
                placement_group([bundle] * size, strategy=strategy)
                for _ in range(placement.count // size)
            ]
            reserved = _Reserved(groups, placement)
            self._placements |= dict.fromkeys(placement.roles, reserved)
            limit, refs = self.config.start_timeout_s, [group.ready() for group in groups]
            if self.ray.wait(refs, num_returns=len(refs), timeout=limit)[1]:
                raise ClusterError(
                    f"no free resources for {placement} within {self.config.start_timeout_s:g} s "
                    f"(cluster.start_timeout_s): the cluster has {have} in total, which other "
                    "jobs may use; wait for them, or use a larger cluster"
                )
            nodes = {id(g): placement_group_table(g)["bundles_to_node_id"][0] for g in groups}
            groups.sort(key=lambda g: str(nodes[id(g)]))  # consecutive ranks are on the same node

    def _check_nodes(self, placements: Sequence[PlacementGroupSpec]) -> None:
        """Raise ClusterError if places that must be on one node (a bundle, or the bundles of one
        rollout engine) do not fit into the nodes, because they would never be ready."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        largest = " or ".join(
            sorted({f"{n.get('GPU', 0):g} GPUs and {n.get('CPU', 0):g} CPUs" for n in nodes})
        )
        for placement in placements:
            span = placement.span
            need = {"CPU": placement.cpus * span, "GPU": placement.gpus * span}
            room = sum(
                int(min(n.get(kind, 0.0) / size for kind, size in need.items() if size) + 1e-9)
                for n in nodes
            )
            if room >= (placement.count // span if span > 1 else 1):
                continue
            if span > 1:
                raise ClusterError(
                    f"{placement}: each rollout engine needs {need['GPU']:g} GPUs and "
                    f"{need['CPU']:g} CPUs of one node (rollout.engine.tensor_parallel_size="
                    f"{span}), so the nodes of this cluster ({largest}) have room for {room} of "
                    f"{placement.count // span} engines; use a tensor_parallel_size that divides "
                    "the GPUs of a node, more nodes, or cluster.layout=separate"
                )
            raise ClusterError(
                f"one worker of {placement} needs {placement.gpus:g} GPUs and {placement.cpus:g} "
                f"CPUs on one node, but the nodes of this cluster have {largest}; use a smaller "
                "tensor_parallel_size, cluster.gpus_per_worker or cluster.cpus_per_worker, or "
                "larger nodes"
            )

    def _start_registry(self) -> Any:
        """Start the process that receives the workers' heartbeats, on the controller's node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = self.ray.get_runtime_context().get_node_id()
        return (
            self.ray.remote(HeartbeatRegistry)
            .options(
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote()
        )

    # ---- workers ---------------------------------------------------------------------------

    def start(self, group: str, worker_class: type, size: int) -> list[Any]:
        """Start all workers of a group and wait until they respond. If some do not, end all and
        raise WorkerLostError with their names."""
        workers = [self.start_one(group, worker_class, i, size) for i in range(size)]
        try:
            lost = self.wait_started(workers)
        except BaseException:
            self.end(workers)
            raise
        if lost:
            reasons = ", ".join(f"{self.monitor.name(worker)} {why}" for worker, why in lost)
            self.end(workers)
            raise WorkerLostError(f"{len(lost)} of {size} workers did not start: {reasons}")
        return workers

    def start_one(self, group: str, worker_class: type, rank: int, size: int) -> Any:
        """Start one worker process. :meth:`wait_started` waits until it responds."""
        reserved = self._placements[group]
        placement = reserved.spec
        gpus = placement.gpus / len(placement.roles)
        device = "cuda" if gpus else "cpu"
        environment = worker_environment(on_gpu=bool(gpus))
        if gpus and group == "rollout" and placement.span > 1:
            environment |= visible_devices(self._devices(reserved, rank))
        remote = self.ray.remote(worker_class).options(
            num_cpus=placement.cpus / len(placement.roles),
            num_gpus=gpus,
            max_restarts=0,  # no automatic restart, which would lose the worker's state
            scheduling_strategy=reserved.strategy(placement.place(group, rank)),
            runtime_env={"env_vars": environment},
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

    def _devices(self, reserved: _Reserved, rank: int) -> list[str]:
        """Return the ids of the GPUs in all places of rollout engine ``rank``, in the order of the
        train ranks. Raises ClusterError if they do not respond or are not on one node."""
        spec = reserved.spec

        def own() -> tuple[str, list[str]]:  # a local function, so that it imports nothing
            import ray

            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

        share = {"num_cpus": 0, "num_gpus": spec.gpus / len(spec.roles)}
        first = spec.place("rollout", rank)
        refs = [
            self.ray.remote(own).options(**share, scheduling_strategy=reserved.strategy(i)).remote()
            for i in range(first, first + spec.span)
        ]
        limit = self.config.start_timeout_s
        if self.ray.wait(refs, num_returns=len(refs), timeout=limit)[1]:
            raise ClusterError(
                f"the GPUs of rollout engine {rank} did not respond within {limit:g} s "
                "(cluster.start_timeout_s); check the nodes, and continue with --resume"
            )
        reports = self.ray.get(refs)
        devices = [device for _, own_ids in reports for device in own_ids]
        if len({node for node, _ in reports}) != 1 or len(set(devices)) != spec.span:
            raise ClusterError(
                f"rollout engine {rank} needs {spec.span} GPUs of one node, but Ray assigned "
                f"{reports} (node, GPUs); please report it"
            )
        return devices

    def wait_started(self, workers: Sequence[Any]) -> list[tuple[Any, str]]:
        """Wait until new workers respond, and monitor them from then on. Return those that do not
        respond, with the reason. Raises ClusterError if a worker's constructor fails."""
        refs = [self.first_response(worker) for worker in workers]
        limit = self.config.start_timeout_s
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=limit)
        lost: list[tuple[Any, str]] = []
        for worker, ref in zip(workers, refs, strict=True):
            why = self.check_started(worker, ref) if ref in ready else self.late_reason
            if why is not None:
                lost.append((worker, why))
        return lost

    def first_response(self, worker: Any) -> Any:
        """Return the reference that is ready once a new worker responds, for
        :meth:`check_started`. May be called once for each worker."""
        return self._first_heartbeats.pop(id(worker))

    def check_started(self, worker: Any, ref: Any) -> str | None:
        """Monitor a new worker from its first response on. Return the reason if it died instead.
        Raises ClusterError if its constructor failed."""
        failed = failure(self.ray, ref)
        if failed is None:
            self.monitor.mark_started(worker, self.ray.get(ref))
            return None
        if never := constructor_error(self.ray, failed, self.monitor.name(worker)):
            raise never from failed
        if not is_worker_loss(self.ray, failed):
            raise failed
        return f"died during startup: {library_text(failed)}"

    @property
    def late_reason(self) -> str:
        """Error message for a worker that does not start."""
        limit = self.config.start_timeout_s
        return f"did not start within {limit:g} s (cluster.start_timeout_s)"

    @property
    def unresponsive_reason(self) -> str:
        """Error message for a worker without heartbeats."""
        limit = self.config.heartbeat_timeout_s
        return f"is unresponsive: no heartbeat for {limit:g} s (cluster.heartbeat_timeout_s)"

    def end(self, workers: Iterable[Any]) -> None:
        """End workers immediately, including stopped ones."""
        for worker in workers:
            self.monitor.drop(worker)
            self.ray.kill(worker)

    def count_restart(self, what: str) -> None:
        """Count a replacement. Raises ClusterError once ``cluster.max_restarts`` is exceeded."""
        with self._counting:
            self.restarts += 1
            restarts = self.restarts
        if restarts > self.config.max_restarts:
            raise ClusterError(
                f"{what}, after cluster.max_restarts={self.config.max_restarts} replaced "
                "workers; find out why they die (memory? the driver's log?), then continue with "
                "--resume"
            )
        log.warning("%s; replaced (%d of %d)", what, restarts, self.config.max_restarts)

    def close(self) -> None:
        """Remove the placement groups, and end Ray if it was started here."""
        from ray.util.placement_group import remove_placement_group

        if not self.ray.is_initialized():
            return
        groups = [group for reserved in self._placements.values() for group in reserved.groups]
        for group in {id(group): group for group in groups}.values():
            remove_placement_group(group)
        if self._registry is not None:
            self.ray.kill(self._registry)
        self._placements, self._registry = {}, None
        if self._connected_here:  # end Ray only if it was started here
            self.ray.shutdown()
            self._connected_here = False
            self._restore()


def _import_ray() -> Any:
    """Return the package ray. Raises ClusterError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable usage reports
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            f"cluster.runtime=ray needs the package ray, which cannot be imported ({error}); "
            "install it with: pip install 'burnish[ray]'"
        ) from None
    return ray


class UsageCollector:
    """Requests for the memory peaks and the spans of workers. Workers that are sampling answer
    later."""

    def __init__(self, ray: Any, timeline: Timeline) -> None:
        """``timeline`` gets the spans."""
        self.ray, self.timeline = ray, timeline
        self._asked: dict[Any, tuple[str, int]] = {}
        """Reference to an answer -> group and rank of the worker."""

    def ask(self, name: str, workers: Sequence[Any]) -> None:
        """Ask the workers of a group that owe no answer."""
        asked = set(self._asked.values())
        for rank, worker in enumerate(workers):
            if (name, rank) not in asked:
                self._asked[worker.usage.remote()] = name, rank

    def collect(self, *, timeout_s: float = 0.0) -> list[ProcessPeaks]:
        """Return the answers after at most ``timeout_s``: the peak memory of each worker in each
        phase, from its previous answer until it was asked."""
        if not self._asked:
            return []
        ready, _ = self.ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
        answers = [(self._asked.pop(ref), ref) for ref in ready]
        processes = []
        for (name, rank), ref in answers:
            if failure(self.ray, ref) is None:
                peaks, drained = self.ray.get(ref)
                self.timeline.add(f"{name} {rank}", drained)
                processes.append(ProcessPeaks(name, rank, peaks))
        return processes


_FORWARDED_PREFIXES = ("DS_", "GLOO_", "HF_", "NCCL_", "VLLM_", "TORCHDYNAMO_", "TORCHINDUCTOR_")


def visible_devices(devices: Sequence[str]) -> dict[str, str]:
    """Return the variables of a worker that uses ``devices``, although Ray counts only a share of
    one of them as its own."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # else Ray overwrites it
    }


def worker_environment(*, on_gpu: bool) -> dict[str, str]:
    """Return the variables of this process that workers also need, because a running cluster has a
    different environment.

    Secrets are excluded: Ray writes these variables to a log that every user of the machine can
    read. Workers of a local cluster inherit secrets; nodes of another cluster need their own."""
    names = [
        name for name in os.environ if name.startswith(_FORWARDED_PREFIXES) and not is_secret(name)
    ]
    environment = {name: os.environ[name] for name in names}
    return environment if on_gpu else {"DS_ACCELERATOR": "cpu", **environment}
