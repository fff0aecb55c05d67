"""Rules for the places of a job's groups of workers: equal numbers in shared places, GPUs of
rollout engines, vLLM servers, which have no workers, and roles that are offloaded.

A phase is a time in which the roles of one entry of :data:`PHASE_OF` compute. An offloaded role
(``cluster.offload_between_phases``) is moved to host memory when another phase begins, and back
before its next computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.roles import Role, RolloutRole, TrainRole, colocated, with_workers


def placement_rules(cluster: ClusterConfig, roles: Sequence[Role]) -> Iterator[str]:
    """Yield an error, prefixed with its key, for each problem in the placement of a job's
    groups."""
    names = colocated(cluster, [role.name for role in with_workers(cluster, roles)])
    together = [role for role in roles if role.name in names]
    rollout = next((role for role in roles if isinstance(role, RolloutRole)), None)
    if rollout is not None and rollout.on_servers:
        yield from _server_rules(cluster, rollout, roles)
    size = 1 if rollout is None or cluster.runtime != "ray" else rollout.tensor_parallel
    spanning = rollout if rollout in together and size > 1 and len(together) > 1 else None
    equal = [role for role in together if role is not spanning]
    for role in equal[1:]:
        first = equal[0]
        if first.ranks != role.ranks:
            yield (
                f"cluster: layout={cluster.layout} puts {first.name} and {role.name} on the same "
                f"GPUs, but they have {first.ranks} and {role.ranks} workers; set equal numbers, "
                "or use a layout that gives one of them GPUs of its own (critic and reward models: "
                "layout=colocate_actor_ref or separate)"
            )
    if spanning is not None:
        yield from _spanning_rules(cluster, spanning, equal[0])
    scored = next((role for role in roles if role.kind == "reward"), None)
    if cluster.reward_ranks is not None and (
        scored is None or (isinstance(scored, TrainRole) and scored.trainable)
    ):
        yield (
            f"cluster: reward_ranks={cluster.reward_ranks} is for a reward model that scores "
            "responses, and this job has none; remove it (the model that a job trains has "
            "policy_ranks)"
        )
    if size > 1 and cluster.gpus_per_worker not in (0, 1):
        yield (
            f"recipe: cluster.gpus_per_worker={cluster.gpus_per_worker:g} with "
            f"tensor_parallel_size={size}: a rollout worker takes gpus_per_worker x "
            "tensor_parallel_size GPUs, one for each part; use gpus_per_worker=1"
        )
    if cluster.runtime == "ray" and cluster.gpus_per_worker and rollout in together:
        yield from _shared_gpu_rules(rollout, together)


def _server_rules(
    cluster: ClusterConfig, rollout: RolloutRole, roles: Sequence[Role]
) -> Iterator[str]:
    """Yield an error for each setting that a run with running servers cannot have."""
    kind = rollout.engine.kind
    if cluster.runtime == "spmd":
        yield (
            f"{rollout.key}: kind={kind} on the ranks of a launcher (cluster.runtime=spmd): each "
            "rank would load weights into the same servers; start one process without the "
            "launcher, with cluster.runtime=ray for several ranks, or with cluster.runtime=inline"
        )
    if cluster.runtime != "ray":
        return
    if not with_workers(cluster, roles):
        yield (
            f"{rollout.key}: kind={kind} with cluster.runtime=ray: the servers sample, and this "
            "job has no other model, so Ray would start no worker; use cluster.runtime=inline"
        )
    if cluster.rollout_workers is not None:
        yield (
            f"cluster: rollout_workers={cluster.rollout_workers} with {rollout.key}.kind="
            f"{kind}: the servers sample, and Ray starts no rollout workers; remove "
            f"rollout_workers, and list all servers in {rollout.key}.urls"
        )
    syncs = [role.sync for role in roles if isinstance(role, TrainRole) and role.sync is not None]
    for transfer in (sync.kind for sync in syncs if sync.kind in ("collective", "ipc", "disk")):
        yield (
            f"sync: kind={transfer} transfers weights to rollout workers, and with "
            f"{rollout.key}.kind={kind} there are none: the controller reads the weights from "
            "Ray's object store and writes files for the servers; remove sync.kind, or use "
            "sync.kind=object_store"
        )


def _spanning_rules(cluster: ClusterConfig, rollout: RolloutRole, first: Role) -> Iterator[str]:
    """Yield an error if rollout engines with tensor parallelism do not span exactly the places of
    ``first``."""
    size = rollout.tensor_parallel
    rule = (
        f"cluster: layout={cluster.layout} puts each rollout engine on the places of {size} "
        f"consecutive ranks ({rollout.key}.tensor_parallel_size={size})"
    )
    if first.ranks % size:
        fits = [n for n in range(1, first.ranks + 1) if first.ranks % n == 0]
        yield (
            f"{rule}, but {first.name} has {first.ranks} ranks, which {size} does not divide; use "
            f"a multiple of {size} ranks, a tensor_parallel_size of {fits}, or layout=separate"
        )
    elif rollout.ranks * size != first.ranks:
        yield (
            f"{rule}, so the {first.ranks} ranks of {first.name} have room for "
            f"{first.ranks // size} engines, not {rollout.ranks}; set "
            f"cluster.rollout_workers={first.ranks // size}, or use layout=separate"
        )


def _shared_gpu_rules(rollout: RolloutRole, together: Sequence[Role]) -> Iterator[str]:
    """Yield an error if weights cannot be transferred to engines on the GPUs of the policy."""
    kinds = [role.sync.kind for role in together if isinstance(role, TrainRole) and role.sync]
    instead = "remove sync.kind (Ray's object store), or use sync.kind=disk"
    if "collective" in kinds:
        yield (
            "sync: kind=collective uses NCCL, which refuses a group with two processes on one GPU, "
            f"but the policy's rank 0 and a rollout engine share one; {instead}, or "
            "cluster.layout=separate"
        )
    gpus = rollout.ranks * rollout.tensor_parallel
    if "ipc" in kinds and gpus > 1:
        yield (
            "sync: kind=ipc passes handles to memory of one GPU, that of the policy's rank 0, but "
            f"the rollout engines are on {gpus} GPUs; {instead}"
        )


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
    placements = with_workers(cluster, roles)
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
    yield from _offload_rollout_rules(cluster, roles, shared)


def _offload_rollout_rules(
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
