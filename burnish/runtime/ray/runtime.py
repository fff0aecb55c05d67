"""Runtime with engines as groups of Ray workers.

A group of train workers is a train engine. Each call goes to all ranks. The controller splits a
batch; each rank reads only its own rows from Ray's object store and returns the results of these
rows. A group of rollout workers is a rollout engine. Requests are distributed over the workers, and
those of a worker that dies are repeated by its replacement. The training loops and their results
are therefore the same as in one process. If running servers sample, the rollout engine is their
client, in the controller's process.

The processes are in ``cluster.py``, the engines made of them in ``train_engine.py`` and
``rollout_engine.py``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from transformers import PreTrainedTokenizerBase

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.placement import PlacementGroupSpec
from burnish.config.roles import free_name
from burnish.config.sync import LinkSync, SyncConfig
from burnish.distributed.process_group import SINGLE
from burnish.environments.worker_set import EnvironmentWorker
from burnish.observe.memory import ProcessPeaks
from burnish.observe.timeline import Timeline, timed
from burnish.rollout.base import RolloutEngine, Sync
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.servers.engine import VllmServerEngine
from burnish.runtime.base import SYNC_SPANS, WorkerLostError
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.phases import Phases
from burnish.runtime.ray.cluster import RayCluster, UsageCollector
from burnish.runtime.ray.environment_workers import start_remote_worker
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine
from burnish.runtime.ray.train_engine import BatchStore, RemoteTrainEngine
from burnish.runtime.ray.weight_sync import ray_sync
from burnish.runtime.ray.worker_group import WorkerGroup
from burnish.train.base import CRITIC_SPANS, POLICY_SPANS, HasLogprobs, TrainEngine
from burnish.train.spec import EngineSpec

_USAGE_TIMEOUT_S = 10.0
"""Timeout for the memory peaks and spans of workers that do not sample. The answers of workers that
exceed it come with those of the next call."""


class RayRuntime:
    """Implementation of ``runtime.base.Runtime`` on a Ray cluster."""

    loop_ranks = SINGLE

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

        Raises ClusterError if the cluster is too small or cannot be reached."""
        self.tokenizer, self.precision, self.timeline = tokenizer, precision, timeline
        self.phases = Phases(config)
        self.here = InlineRuntime(tokenizer, precision=precision, device="cpu", timeline=timeline)
        """Makes the engine that samples with running servers, in this process."""
        self.attention: dict[str, str] = {}
        self.groups: list[WorkerGroup] = []
        self.rollouts: list[RemoteRolloutEngine] = []
        placed_model = model.with_absolute_paths()
        self.cluster = RayCluster(placed_model, config, placements=placements, precision=precision)
        self._waited_for = UsageCollector(self.cluster.ray, timeline)
        self._sampling = UsageCollector(self.cluster.ray, timeline)
        """Asks workers that sample while the policy is trained."""
        self.batches = BatchStore(self.cluster.ray)

    def recover(self, lost: WorkerLostError) -> None:
        """Replace all train groups with lost workers; the new ones have the initial weights. Raises
        ClusterError once ``cluster.max_restarts`` is exceeded."""
        self.cluster.count_restart(str(lost))
        for group in self.groups:
            if not group.is_complete():
                group.restart()

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> RemoteTrainEngine:
        group = self._group(spec, scalar=False, seed=spec.seed, spans=spans)
        return self._engine(group, spans)

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> RemoteTrainEngine:
        group = self._group(spec, scalar=True, seed=seed, spans=spans)
        return self._engine(group, spans)

    def _engine(self, group: WorkerGroup, spans: Mapping[str, str]) -> RemoteTrainEngine:
        named = timed(
            RemoteTrainEngine(group, self.batches),
            self.timeline,
            self.phases.spans(group.role, spans),
        )
        return self.phases.train_engine(named, group.role)

    def _group(
        self, spec: EngineSpec, *, scalar: bool, seed: int, spans: Mapping[str, str]
    ) -> WorkerGroup:
        name = free_name(spec.role.engine_role, [group.name for group in self.groups])
        placed_spec = with_absolute_paths(spec)
        group = WorkerGroup(
            self.cluster, placed_spec, scalar=scalar, seed=seed, spans=spans, name=name
        )
        self.groups.append(group)
        self.attention[spec.role.name] = group.attention
        return group

    def rollout(
        self, policy: TrainEngine, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """Return rollout workers that get their weights from ``policy``, or an engine in this
        process for running servers."""
        base = cast(RemoteTrainEngine, policy).group.spec.role.model.model_copy(
            update={"lora": None}
        )
        if config.on_servers:
            return self.here.standalone_rollout(base, config, max_len=max_len, ready=False)
        engine = self._rollout(base, config, max_len=max_len, ready=False)
        return self.phases.rollout(engine)

    def standalone_rollout(
        self, model: ModelConfig, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """Return rollout workers with a model's own weights, or an engine in this process that has
        sent them to running servers."""
        if config.on_servers:
            return self.here.standalone_rollout(model, config, max_len=max_len)
        return self._rollout(model.with_absolute_paths(), config, max_len=max_len, ready=True)

    def _rollout(
        self, model: ModelConfig, config: RolloutEngineConfig, *, max_len: int | None, ready: bool
    ) -> RemoteRolloutEngine:
        engine = RemoteRolloutEngine(self.cluster, model, config, max_len=max_len, ready=ready)
        self.rollouts.append(engine)
        return engine

    def sync(
        self, policy: TrainEngine, rollout: RolloutEngine, config: SyncConfig = LinkSync()
    ) -> Sync:
        assert config.kind != "inproc", "validation rejects this"
        config = config.with_absolute_paths()
        engine = cast("RemoteRolloutEngine | VllmServerEngine", rollout)
        ends = cast(RemoteTrainEngine, policy), engine
        while True:
            try:
                weight_sync = ray_sync(*ends, config, self.precision.sampler_dtype)
                break
            except WorkerLostError as lost:  # nothing is trained yet: new ranks are equivalent
                self.recover(lost)
        return self.phases.sync(timed(weight_sync, self.timeline, SYNC_SPANS))

    async def start_worker(self, python: str | None) -> EnvironmentWorker:
        """Start a process for user code in an actor on one of the cluster's nodes."""
        return await start_remote_worker(self.cluster.ray, python)

    def release(self, engine: HasLogprobs) -> None:
        """End the engine's workers. An engine that uses another engine's workers has none of its
        own."""
        self.phases.release(engine)
        for group in self.groups:
            if isinstance(engine, RemoteTrainEngine) and engine.group is group:
                group.end()
        self.groups = [group for group in self.groups if group.workers]

    def peaks(self) -> list[ProcessPeaks]:
        """Return the peaks of all workers and of this process, whose phases are combined as
        ``controller``, and add the spans of the workers to the timeline. Workers that sample while
        the policy is trained are not waited for: their peaks and spans are those at the time of the
        previous call."""
        for group in self.groups:
            self._waited_for.ask(group.name, group.workers)
        for rollout in self.rollouts:
            if not rollout.staged:
                self._waited_for.ask("rollout", rollout.workers)
        of_workers = self._waited_for.collect(timeout_s=_USAGE_TIMEOUT_S)
        of_workers += self._sampling.collect()
        for rollout in self.rollouts:
            if rollout.staged:
                self._sampling.ask("rollout", rollout.workers)
        peaks = self.timeline.peaks
        if peaks is not None and (phases := peaks.collect()):
            most = functools.reduce(operator.or_, phases.values())
            of_workers.append(ProcessPeaks("controller", 0, {"controller": most}))
        return of_workers

    def close(self) -> None:
        """Close the connections to servers, end the workers and leave the cluster."""
        self.here.close()
        if not self.cluster.ray.is_initialized():
            return
        for group in self.groups:
            group.end()
        for rollout in self.rollouts:
            rollout.close()
        self.groups, self.rollouts = [], []
        self.cluster.close()


def with_absolute_paths(spec: EngineSpec) -> EngineSpec:
    """Return the spec with absolute paths, because workers on a running cluster have another
    working directory."""
    distill_target = spec.distill_target
    if distill_target is not None:
        distill_target = replace(
            distill_target, teacher=distill_target.teacher.with_absolute_paths()
        )
    role = replace(spec.role, model=spec.role.model.with_absolute_paths())
    return replace(spec, role=role, recipe_model=spec.role.model, distill_target=distill_target)
