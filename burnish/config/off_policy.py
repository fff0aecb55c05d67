"""Rules for samples that another policy than the trained one has drawn: stale samples, several
updates, a sampler with other log-probs, and the asynchronous runs that sample while they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burnish.config.algorithm import AlgorithmConfig, GspoLoss
from burnish.config.cluster import ClusterConfig
from burnish.config.roles import Role, RolloutRole, TrainRole, colocated, with_workers
from burnish.config.rollout import EvalConfig, RolloutConfig
from burnish.config.sync import DiskSync, SyncConfig

MAX_KEPT = 1024
"""Maximum ``rollout.top_k`` if the tokens that it keeps are recorded: 4 KiB per token."""
_ALONE = "layout=separate or layout=colocate_actor_ref"
"""Layouts in which rollout workers have places of their own."""


def cut_sampling(rollout: RolloutConfig) -> str | None:
    """Return the setting that restricts sampling to a part of the distribution, or None."""
    if rollout.top_p < 1:
        return "top_p<1"
    return "top_k>0" if rollout.top_k else "min_p>0" if rollout.min_p else None


def _uncut(rollout: RolloutConfig) -> str:
    """Return the settings with which all tokens can be sampled."""
    return "top_p=1 and top_k=0" + (" and min_p=0" if rollout.min_p else "")


def off_policy_rules(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, *, several_updates: bool
) -> Iterator[str]:
    """Yield an error for each setting whose gradient would be wrong for the samples of a run.
    ``several_updates``: a rollout is used for several optimizer steps."""
    yield from _ratio_rules(algorithm, several_updates=several_updates)
    yield from _stale_rules(algorithm, rollout)
    yield from _mask_rules(algorithm, rollout)


def records_sampling_mask(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> bool:
    """Return whether the tokens that top_p, top_k and min_p keep are recorded, and all log-probs of
    the run are over them."""
    if rollout.sampling_mask is not None:
        return rollout.sampling_mask
    return cut_sampling(rollout) is not None and _divides_by_sampler(algorithm) is not None


def max_kept_ids(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> int:
    """Return the maximum number of ids that are recorded per token; 0 if none are."""
    return rollout.top_k if records_sampling_mask(algorithm, rollout) else 0


def _divides_by_sampler(algorithm: AlgorithmConfig) -> str | None:
    """Return the setting that divides by the sampler's probabilities, or None."""
    if algorithm.correction is not None:
        return "correction"
    return "old_policy=sampler" if algorithm.old_policy == "sampler" else None


def _mask_rules(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield an error if a sampler's log-prob would be of another distribution than the trainer's,
    or if the recorded tokens are not bounded."""
    cut, divides = cut_sampling(rollout), _divides_by_sampler(algorithm)
    if cut is None:
        if rollout.sampling_mask:
            yield (
                "rollout.sampling_mask records the tokens that top_p and top_k keep, and with "
                "top_p=1 and top_k=0 these are all; set top_k, or remove sampling_mask"
            )
        return
    if not records_sampling_mask(algorithm, rollout):
        if divides is not None:
            yield (
                f"algorithm.{divides} divides by the sampler's probabilities, and with "
                f"rollout.{cut} and sampling_mask=false these are not the ones that tokens are "
                f"drawn with; remove sampling_mask, or use {_uncut(rollout)}"
            )
        return
    if not 1 <= rollout.top_k <= MAX_KEPT:
        needed = "" if rollout.sampling_mask else f" for algorithm.{divides}"
        yield (
            f"rollout.{cut} records the tokens that it keeps{needed}, and without a bound "
            f"these may be the entire vocabulary (top_k={rollout.top_k}); set rollout.top_k to at "
            f"most {MAX_KEPT}"
        )


def _ratio_rules(algorithm: AlgorithmConfig, *, several_updates: bool) -> Iterator[str]:
    """Yield an error for each inconsistency of ratio, correction and number of updates."""
    no_ratio = algorithm.policy_loss.kind == "reinforce"
    by_sampler = algorithm.old_policy == "sampler"
    if no_ratio and several_updates:
        yield (
            "algorithm.policy_loss=reinforce has no ratio, so it is correct only for one "
            "optimizer step per rollout; use ppo, or train_batch_size = rollout_batch_size x "
            "n_samples_per_prompt with epochs_per_rollout=1"
        )
    if no_ratio and by_sampler:
        yield (
            "algorithm.old_policy=sampler is the denominator of a ratio, and "
            "policy_loss=reinforce has no ratio; use ppo, or a correction instead of old_policy"
        )
    if algorithm.policy_loss.kind == "vespo" and algorithm.correction is not None:
        yield (
            "algorithm.correction with policy_loss=vespo: the loss has its own weight of the "
            "sequence, of which the correction would be a second one; use old_policy=sampler, "
            "whose ratio contains the age and the mismatch, or another loss"
        )
    if by_sampler and algorithm.correction is not None:
        yield (
            "algorithm.correction multiplies the loss by the trainer's probability over the "
            "sampler's, and with old_policy=sampler the ratio of the loss contains the same "
            "factor, so it would count twice; remove one of the two"
        )


def _stale_rules(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield an error for each setting that is wrong for samples of an older policy."""
    stale, by_sampler = rollout.max_staleness, algorithm.old_policy == "sampler"
    if not stale:
        return
    if algorithm.correction is None and not by_sampler:
        no_ratio = algorithm.policy_loss.kind == "reinforce"
        other = "" if no_ratio else ", or algorithm.old_policy=sampler"
        if algorithm.policy_loss.kind == "vespo":
            other = " with another loss, or algorithm.old_policy=sampler"
        yield (
            f"rollout.asynchronous.max_staleness={stale} trains on tokens of older policies, and "
            "nothing weights them by the probability with which they were sampled: "
            "old_policy=trainer compares the policy with itself at the start of the update; set "
            f"algorithm.correction={{mode: truncate}} (decoupled PPO){other}"
        )
    if algorithm.advantage.kind == "on_policy_distill" and by_sampler:
        yield (
            "algorithm.advantage=on_policy_distill with "
            f"rollout.asynchronous.max_staleness={stale} and old_policy=sampler: the advantage "
            "contains the log-probs of the older policy, and its gradient moves the policy away "
            "from that policy; use old_policy=trainer with a correction"
        )


def off_policy_advice(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield one sentence for each combination that is valid but biased or without effect."""
    kind, cut = algorithm.advantage.kind, cut_sampling(rollout)
    if cut and not records_sampling_mask(algorithm, rollout):
        yield (
            f"rollout.{cut} without sampling_mask: tokens are drawn from another distribution than "
            "the one that is trained, so the gradient also changes the probability of the tokens "
            "that are never drawn"
            + (", and the loss is not the reverse KL" if kind == "on_policy_distill" else "")
            + f"; set rollout.sampling_mask=true (with top_k), or {_uncut(rollout)}"
        )
    loss, correction = algorithm.policy_loss, algorithm.correction
    if isinstance(loss, GspoLoss) and correction is not None and correction.level == "token":
        yield (
            "algorithm.correction.level=token with policy_loss=gspo: the loss has one ratio per "
            "sequence, and weights per token make it differ within the sequence again; use "
            "level=geometric or level=sequence"
        )
    if rollout.max_staleness:
        yield from _stale_advice(algorithm, rollout.max_staleness)


def _stale_advice(algorithm: AlgorithmConfig, stale: int) -> Iterator[str]:
    loss, kl, by_sampler = algorithm.policy_loss, algorithm.kl, algorithm.old_policy == "sampler"
    if isinstance(loss, GspoLoss) and not loss.is_own("clip_low") and by_sampler:
        yield (
            f"algorithm.policy_loss.clip_low={loss.clip_low:g} of gspo bounds the change of one "
            f"update, but with old_policy=sampler and rollout.asynchronous.max_staleness={stale} "
            "the ratio also contains the change of earlier steps, so most sequences may be "
            "clipped (train/clip_frac); use old_policy=trainer with correction.level=geometric, "
            "or wider bounds"
        )
    if kl.init_kl_coef and kl.placement == "reward" and by_sampler:
        yield (
            "algorithm.kl.placement=reward with old_policy=sampler and "
            f"rollout.asynchronous.max_staleness={stale}: the penalty is the KL of the policies "
            "that sampled, not that of the trained one; use old_policy=trainer with a "
            "correction, or placement=loss"
        )
    if algorithm.advantage.kind == "gae":
        yield (
            f"algorithm.advantage=gae with rollout.asynchronous.max_staleness={stale}: returns "
            "are those of older policies, so the critic learns their values, and no weight "
            "corrects that; keep max_staleness small, or use a group advantage"
        )


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
    if any(isinstance(r, TrainRole) and r.train.deterministic for r in roles):
        yield (
            f"train.deterministic=true with {bound}: which weights sample a token depends on the "
            "time, so runs differ in any case; remove rollout.asynchronous, or use "
            "train.deterministic=false"
        )
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
            f"{_ALONE}, or rollout.asynchronous.partial=true (sampling pauses in the update)"
        )
    if asynchronous.in_flight == "continue" and not rollout.engine.keeps_cache_on_update:
        yield (
            "rollout.asynchronous.in_flight=continue keeps the cache of older weights, which the "
            f"engine {rollout.engine.kind} cannot; use in_flight=recompute (the default) or "
            "finish, or another rollout.engine"
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
            "that it is for, so sampling and training never overlap; use run_ahead=1"
        )
    if overlaps and shares_with_policy(cluster, roles) and not cluster.gpus_per_worker:
        yield (
            f"cluster.layout={cluster.layout}: a rollout worker uses the CPUs of a policy rank at "
            f"the same time, so both get slower; use {_ALONE} for CPUs of their own"
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
    together = colocated(cluster, [role.name for role in with_workers(cluster, roles)])
    return cluster.runtime == "ray" and {"policy", "rollout"} <= set(together)
