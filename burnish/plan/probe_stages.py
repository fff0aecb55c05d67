"""Stages of a probe, with their planned memory. They go from short rows and small micro-batches to
the recipe's sizes, then from one rank to all ranks that this machine can run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from burnish.config.arithmetic import BatchPlan
from burnish.config.job import JobConfig
from burnish.config.load import changed_if_valid
from burnish.config.placement import placement_groups
from burnish.config.roles import JobSpec, RolloutRole, TrainRole
from burnish.plan.hardware import Hardware
from burnish.plan.model_state import Item
from burnish.plan.role_base import Context, RoleMemory
from burnish.plan.rollout_role import rollout_role
from burnish.plan.shapes import PlanError
from burnish.plan.train_role import train_role

LENGTHS = (0.25, 0.5, 1.0)
"""Shares of the recipe's lengths to probe."""


@dataclass(frozen=True)
class ProbeStage:
    """One stage of a probe."""

    name: str
    overrides: tuple[str, ...]
    config: JobConfig
    ranks: int
    separate_engine: bool = False
    """True if the stage also measures the rollout engine of :func:`separate_rollout`."""


def probe_stages(config: JobConfig, hardware: Hardware) -> list[ProbeStage]:
    """Return all stages, smallest first. Raises PlanError if the job cannot be probed."""
    job = config.resolve()
    role = job.trained
    if role is None or job.batch is None:
        raise PlanError(
            f"--probe measures training, but the job {job.job} trains no model; remove --probe to "
            "get the plan"
        )
    devices = hardware.gpus_per_node if hardware.gpu is not None else os.cpu_count() or 1
    most = min(role.ranks, devices)  # that this machine can run
    sizes = list(_sizes(role, job.batch))
    cases = [
        (f"{share:.0%} of the row length", (*_lengths(role, share), *_one_rank(config), *sizes[0]))
        for share in LENGTHS
    ]
    cases += [("larger micro-batch", (*_one_rank(config), *size)) for size in sizes[1:]]
    counts = [2**k for k in range(1, most.bit_length()) if 2**k < most] + [most] * (most > 1)
    cases += [(f"{n} ranks", (*_on_ranks(n), *sizes[-1])) for n in counts]
    stages = []
    for name, overrides in cases:
        smaller = changed_if_valid(config, overrides)
        trained = None if smaller is None else smaller.resolve().trained
        if smaller is not None and trained is not None:
            stages.append(ProbeStage(name, overrides, smaller, trained.ranks))
    if stages and separate_rollout(stages[-1].config.resolve()) is not None:
        stages[-1] = replace(stages[-1], separate_engine=True)
    return stages


def _one_rank(config: JobConfig) -> list[str]:
    return [] if config.cluster.runtime == "inline" else _on_ranks(1)


def _on_ranks(count: int) -> list[str]:
    """Return overrides that put all roles on ``count`` ranks. Colocated roles must have the same
    number."""
    more = ("cluster.reference_ranks=null", "cluster.critic_ranks=null")
    return [f"cluster.policy_ranks={count}", *more]


def _lengths(role: TrainRole, share: float) -> list[str]:
    prompt, rest, episodes = role.lengths.prompt, role.lengths.rest, role.lengths.episodes
    if episodes is not None:
        return [
            f"rollout.episodes.max_tokens={max(2, int(share * episodes.max_tokens))}",
            f"data.prompt_max_len={max(1, int(share * prompt))}",
        ]
    if prompt:
        return [
            f"rollout.generate_max_len={max(1, int(share * rest))}",
            f"data.prompt_max_len={max(1, int(share * prompt))}",
        ]
    return [f"data.max_len={max(2, int(share * rest))}"]


def _sizes(role: TrainRole, batch: BatchPlan) -> Iterator[list[str]]:
    """Yield overrides for micro-batches from the smallest to the recipe's own."""
    budget = role.train.max_tokens_per_micro_batch
    if budget is not None:
        for part in (4, 2, 1):
            yield [f"train.max_tokens_per_micro_batch={max(1, budget // part)}"]
        return
    micro = batch.micro_train_batch_size or 1
    for size in (n for n in range(1, micro + 1) if micro % n == 0):
        yield [f"train.micro_train_batch_size={size}", "train.gradient_accumulation_steps=null"]


# ---- planned memory --------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedPeak:
    """Planned bytes of one rank in a phase."""

    tensors: float
    """Tensors in the memory that the rank computes in."""
    overhead: float
    """Memory other than tensors in the same place: contexts, processes."""
    host: float
    """Host memory, in addition to a GPU's."""
    disk: float = 0.0
    """Bytes of the files that all ranks write together."""
    alone: bool = False
    """True if the phase runs in one process, after the others have ended."""


@dataclass(frozen=True)
class RolePhase:
    """The work of one role in one phase."""

    role: str
    phase: str

    def __str__(self) -> str:
        return self.phase if self.role in ("policy", "rollout") else f"{self.phase} ({self.role})"


def probed_roles(config: JobConfig) -> tuple[TrainRole, ...]:
    """Return the roles with a train engine that are colocated with the trained role."""
    job = config.resolve()
    first = job.trained
    assert first is not None, "probe_stages rejects jobs that train no model"
    if job.inline:
        return job.train_roles
    together = next(place.roles for place in placement_groups(config) if first.name in place.roles)
    return tuple(role for role in job.train_roles if role.name in together)


def planned(stage: ProbeStage, hardware: Hardware) -> dict[str, PlannedPeak]:
    """Return the planned memory of the probed roles, by role and phase (:class:`RolePhase`, as
    text). All probed roles are resident, except with a separate rollout engine. Raises
    PlanError."""
    job = stage.config.resolve()
    context = Context(job, hardware, frozenset())
    roles = [train_role(context, role) for role in probed_roles(stage.config)]
    phases: dict[str, PlannedPeak] = {}
    rollout = probed_rollout(job)
    if rollout is not None:
        passing = rollout_role(context, rollout).passing["rollout"]
        phases["rollout"] = _sum((*_resident(roles, "rollout"), *passing))
    for role in roles:
        for phase in ("log-probs", "forward/backward", "step", "checkpoint"):
            if phase in role.passing:
                work = RolePhase(role.role, phase)
                peak = _sum((*_resident(roles, phase), *role.passing[phase]))
                files = role.disk if phase == "checkpoint" else 0.0
                phases[str(work)] = replace(peak, disk=files)
    if stage.separate_engine:
        engine = separate_rollout(job)
        assert engine is not None
        memory = rollout_role(context, engine)
        items = (*memory.resident["rollout"], *memory.passing.get("rollout", ()))
        phases["rollout"] = replace(_sum(items), alone=True)
    return phases


def _resident(roles: Sequence[RoleMemory], phase: str) -> list[Item]:
    """Return the resident items of all roles in one process. Process overhead is counted once."""
    first, *others = (role.resident[phase] for role in roles)
    return [*first, *(i for items in others for i in items if i.name != "overhead")]


def _sum(items: Iterable[Item]) -> PlannedPeak:
    rows = list(items)

    def total(where: str, *, overhead: bool) -> float:
        return sum(i.bytes for i in rows if i.where == where and (i.name == "overhead") is overhead)

    host = total("host", overhead=False) + total("host", overhead=True)
    return PlannedPeak(total("device", overhead=False), total("device", overhead=True), host)


def separate_rollout(job: JobSpec) -> RolloutRole | None:
    """Return the rollout role if it is one process of vLLM, which is probed without the trainer.
    Several processes (``tensor_parallel_size``) are not measured."""
    role = job.rollout
    if role is None or role.engine.uses_transformers or role.engine.on_servers:
        return None
    return role if role.tensor_parallel == 1 else None


def probed_rollout(job: JobSpec) -> RolloutRole | None:
    """Return the rollout role if it samples with the trainer's own weights: the local engine, in
    the same format, with unsharded weights. Otherwise return None."""
    role, policy = job.rollout, job.trained
    if role is None or policy is None:
        return None
    return role if role.shares_weights and not policy.train.engine.shards_weights else None
