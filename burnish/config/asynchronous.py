"""Rules of asynchronous runs between rollout, engine, placement and weight transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burnish.config.cluster import ClusterConfig
from burnish.config.roles import Role, RolloutRole, placed, sharing
from burnish.config.rollout import EvalConfig, RolloutConfig
from burnish.config.sync import DiskSync, SyncConfig

ALONE = "layout=separate or layout=colocate_actor_ref"
"""Layouts in which rollout workers have places of their own."""


def asynchronous_rules(
    rollout: RolloutConfig, roles: Sequence[Role], cluster: ClusterConfig, sync: SyncConfig
) -> Iterator[str]:
    """Yield an error for each setting of a recipe that cannot sample while its policy trains, or
    cannot continue responses under newer weights."""
    role = next(role for role in roles if isinstance(role, RolloutRole))
    asynchronous = rollout.asynchronous
    if asynchronous is None or not asynchronous.overlaps:
        return
    bound = f"rollout.asynchronous.max_staleness={asynchronous.max_staleness}"
    if cluster.runtime == "inline" and role.shares_weights:
        yield (
            f"{bound} samples while the policy is trained, but with cluster.runtime=inline the "
            "rollout engine uses the policy's own weights, which the update changes; set "
            "cluster.runtime=ray, or rollout.engine.own_weights=true (a copy), or "
            "rollout.asynchronous.partial=true (sampling pauses in the update)"
        )
    if shares_with_policy(cluster, roles) and cluster.gpus_per_worker:
        yield (
            f"{bound} samples while the policy is trained, but cluster.layout={cluster.layout} "
            "puts each rollout worker on the GPU of a policy rank, where they take turns; use "
            f"{ALONE}, or rollout.asynchronous.partial=true (sampling pauses in the update)"
        )
    if asynchronous.in_flight == "continue" and not rollout.engine.keeps_cache_on_update:
        yield (
            "rollout.asynchronous.in_flight=continue keeps the cache of older weights, which the "
            "engine "
            f"{rollout.engine.kind} cannot; use in_flight=recompute (the default) or finish, or "
            "another rollout.engine"
        )
    if isinstance(sync, DiskSync) and sync.keep == 1:
        yield (
            f"{bound} with sync.keep=1: the trainer continues while the workers read the weights, "
            "so the next version could delete the files that are read; use sync.keep=2 or more"
        )


def asynchronous_advice(
    rollout: RolloutConfig,
    roles: Sequence[Role],
    cluster: ClusterConfig,
    held_out: EvalConfig | None,
) -> Iterator[str]:
    """Yield one sentence for each setting that is valid but loses the purpose of an asynchronous
    run."""
    asynchronous, groups = rollout.asynchronous, rollout.rollout_batch_size
    overlaps = asynchronous is not None and asynchronous.overlaps
    if asynchronous is not None and overlaps and asynchronous.capacity(groups) == groups:
        yield (
            "rollout.asynchronous.run_ahead=0 with oversample=1 starts no group ahead of the step "
            "that it is "
            "for, so sampling and training never overlap; use run_ahead=1"
        )
    if overlaps and shares_with_policy(cluster, roles) and not cluster.gpus_per_worker:
        yield (
            f"cluster.layout={cluster.layout}: a rollout worker uses the CPUs of a policy rank at "
            f"the same time, so both get slower; use {ALONE} for CPUs of their own"
        )
    waits = held_out is not None and held_out.training_groups == "wait"
    if waits and asynchronous and rollout.episodes and rollout.episodes.has_agent:
        yield (
            "eval.training_groups=wait: an agent's episode waits while an evaluation runs, and "
            "episodes.timeout_s counts that time; raise timeout_s by the time of an evaluation, or "
            "use training_groups=continue"
        )
    if waits and asynchronous is None:
        yield (
            "eval.training_groups=wait has no effect: without rollout.asynchronous no group is "
            "sampled during an evaluation; remove it"
        )


def shares_with_policy(cluster: ClusterConfig, roles: Sequence[Role]) -> bool:
    """Return whether rollout workers are in the places of policy ranks."""
    together = sharing(cluster, [role.name for role in placed(cluster, roles)])
    return cluster.runtime == "ray" and {"policy", "rollout"} <= set(together)
