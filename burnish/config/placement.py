"""Placement of a job's workers on GPUs and CPUs, computed from a recipe. The runtime starts workers
by it, and earlier reports print it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.cluster import ClusterConfig
from burnish.config.job import JobConfig
from burnish.config.roles import RolloutRole, colocated, role_of, with_workers


@dataclass(frozen=True)
class PlacementGroupSpec:
    """Equal places, each with one worker of every group in ``roles``."""

    roles: tuple[str, ...]
    """Groups of workers, by the names of their roles."""
    count: int
    cpus: float
    """CPUs of one place."""
    gpus: float
    """GPUs of one place, shared by its workers."""
    span: int = 1
    """Number of consecutive places, all on one node, that a colocated rollout engine spans. The
    other roles have one worker in each of them."""

    def workers(self, role: str, places: int | None = None) -> int:
        """Return the number of workers of ``role`` in ``places`` consecutive places (None: all)."""
        places = self.count if places is None else places
        return -(-places // self.span) if role == "rollout" else places

    def place(self, role: str, rank: int) -> int:
        """Return the number of the (first) place of a worker.

        >>> PlacementGroupSpec(("policy", "rollout"), 8, cpus=1, gpus=1, span=4).place("rollout", 1)
        4
        """
        return rank * self.span if role == "rollout" else rank

    def __str__(self) -> str:
        """Return the text for tables and messages."""
        bundle = f"{self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else f"{self.cpus:g} CPU"
        each = f"{bundle} each"
        if self.span > 1:
            each += f"; a rollout engine spans {self.span} on one node"
        return f"{self.count} x {'+'.join(self.roles)} ({each})"


def placement_groups(config: JobConfig) -> list[PlacementGroupSpec]:
    """Return every placement group of the job on a cluster."""
    roles = with_workers(config.cluster, config.roles())
    if config.cluster.runtime == "spmd":
        names = tuple(role.name for role in roles)
        cluster = config.cluster
        cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
        return [PlacementGroupSpec(names, cluster.policy_ranks, cpus=cpus, gpus=gpus)]
    size = next((role.tensor_parallel for role in roles if role.kind == "rollout"), 1)
    return placement_groups_for(
        config.cluster, [role.name for role in roles], tensor_parallel_size=size
    )


def placement_groups_for(
    cluster: ClusterConfig, roles: Sequence[str], *, tensor_parallel_size: int = 1
) -> list[PlacementGroupSpec]:
    """Return the placement groups of ``roles``. A rollout engine with ``tensor_parallel_size`` t is
    one worker: alone in its place, which has t times the CPUs and GPUs of the others, or on t
    consecutive places of other roles."""
    together = colocated(cluster, roles)
    sets = [together] if together else []
    sets += [[r] for r in roles if r not in together]
    groups = []
    for group in sets:
        parts = tensor_parallel_size if "rollout" in group else 1
        size, span = (parts, 1) if len(group) == 1 else (1, parts)
        count = max(
            cluster.ranks(role_of(role)) * (span if role == "rollout" else 1) for role in group
        )
        cpus, gpus = cluster.cpus_per_worker * size, cluster.gpus_per_worker * size
        groups.append(PlacementGroupSpec(tuple(group), count, cpus=cpus, gpus=gpus, span=span))
    return groups


def placement_text(config: JobConfig) -> str:
    """Return the placement of a job as a small table, or an empty string if the job is one process.

    Sources: ``cluster.layout`` and the numbers of ranks."""
    if config.cluster.runtime == "inline":
        return ""
    placements = placement_groups(config)
    if config.cluster.runtime == "spmd":
        return f"{placements[0].count} ranks, each with {'+'.join(placements[0].roles)}"
    lines = [f"cluster ({config.cluster.layout}): {total_text(placements)}"]
    lines += [f"  {placement}" for placement in placements]
    for role in config.roles():
        if isinstance(role, RolloutRole) and role.on_servers:
            lines.append(f"  {role.name}: on running servers ({role.key}.urls), no place")
    return "\n".join(lines)


def total_text(placements: Sequence[PlacementGroupSpec]) -> str:
    """Return the total resources of all placement groups, e.g. ``72 GPUs, 65 CPUs``."""
    gpus = sum(p.count * p.gpus for p in placements)
    cpus = sum(p.count * p.cpus for p in placements)
    return (f"{gpus:g} GPUs, " if gpus else "") + f"{cpus:g} CPUs"
