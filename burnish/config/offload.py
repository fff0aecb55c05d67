"""Phases of the roles that share a device, and the rules of ``cluster.offload_between_phases``.

A phase is a time in which the roles of one entry of :data:`PHASE_OF` compute. An offloaded role is
moved to host memory when another phase begins, and back before its next computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.roles import Role, RolloutRole, TrainRole, placed

PHASE_OF: Mapping[ClusterRole, str] = MappingProxyType(
    {
        "rollout": "rollout",
        "reward": "rollout",
        "reference": "reference",
        "teacher": "teacher",
        "policy": "update",
        "critic": "update",
    }
)
"""Role -> its phase. Responses are scored while others are sampled, and each optimizer step updates
policy and critic, so these pairs share a phase."""


def offload_rules(cluster: ClusterConfig, roles: Sequence[Role]) -> Iterator[str]:
    """Yield an error, prefixed with its key, for each role that cannot be offloaded between
    phases."""
    if not cluster.offload_between_phases:
        return
    placements = placed(cluster, roles)
    shared = [role for role in placements if role.kind in cluster.shared_roles]
    phases = {PHASE_OF[role.kind] for role in shared}
    for kind in cluster.offload_between_phases:
        roles_of_kind = [
            role for role in roles if isinstance(role, TrainRole) and role.kind == kind
        ]
        key = f"cluster.offload_between_phases: {kind}"
        if not roles_of_kind:
            yield f"{key} is not a model of this job with a train engine of its own; remove it"
        elif kind not in cluster.shared_roles or phases == {PHASE_OF[kind]}:
            yield (
                f"{key} shares no device with a role of another phase (phases: rollout and "
                "reward, reference, teacher, policy and critic), so there is nothing to make room "
                "for; remove it, or use a cluster.layout in which they share GPUs"
            )
        elif (setting := roles_of_kind[0].train.engine.keeps_weights_on_host) is not None:
            yield f"{key} is always in host memory with {setting}; remove one of the two"
    yield from _rollout_rules(cluster, roles, shared)


def _rollout_rules(
    cluster: ClusterConfig, roles: Sequence[Role], shared: Sequence[Role]
) -> Iterator[str]:
    """Yield an error if the rollout needs tensors that would be offloaded, or if sampling or
    scoring runs during the update on the same devices."""
    rollout = next((role for role in roles if isinstance(role, RolloutRole)), None)
    if rollout is None:
        return
    samples = [role.name for role in shared if PHASE_OF[role.kind] == "rollout"]
    if rollout.asynchronous is not None and samples:
        yield (
            f"cluster.offload_between_phases: in an asynchronous run {samples[0]} may compute "
            "during the update, so the roles on its device have no phases; remove "
            "offload_between_phases, or rollout.asynchronous, or use cluster.runtime=ray with a "
            "layout that gives it GPUs of its own"
        )
    policy = "policy" in cluster.offload_between_phases
    if policy and rollout.shares_weights and cluster.runtime == "inline":
        yield (
            "cluster.offload_between_phases: policy cannot be offloaded during the rollout, "
            f"because {rollout.key} samples with the policy's own tensors; set "
            f"{rollout.key}.own_weights=true, or remove policy"
        )
