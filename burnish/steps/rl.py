"""Reinforcement learning. Start here: :func:`rl_step` is the algorithm.

A rollout source (``rollout/source.py``) provides the groups of each step: it samples them when the
step asks for them, or all the time. The formulas are in ``algorithms``. ``objectives.py`` combines
them into losses and ``credit.py`` into advantages. ``jobs/rl.py`` builds the components.
``driver/trainer.py`` adds metrics and checkpoints around each step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.algorithms.advantages import top_entropy
from burnish.algorithms.correction import LAST_AGE, age_name
from burnish.algorithms.kl import KL_ESTIMATORS, KlController
from burnish.batches import groups_to_batch
from burnish.checkpoint.save import PendingSave
from burnish.checkpoint.state import load_state, save_state
from burnish.config import RLConfig
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.rewards import reward_names
from burnish.data.batches import BatchStream
from burnish.driver.base import Metrics, save_engines
from burnish.rollout.runner import Rollout
from burnish.rollout.source import RolloutSource
from burnish.steps.credit import RewardParts, assign_advantages
from burnish.steps.moving_reference import MovingReference, load_reference
from burnish.steps.no_signal import NoSignalMonitor, reward_signal
from burnish.steps.teacher import Teacher, teacher_stats
from burnish.steps.updates import Updates
from burnish.train.base import HasLogprobs, Loss, TrainEngine
from burnish.types import Batch, Group, Stats

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class Ptx:
    """PPO-ptx: pre-training rows, whose language-model loss is added to the policy loss of every
    update."""

    stream: BatchStream
    batch_size: int
    """Rows per optimizer step."""
    loss: Loss

    def forward_backward(self, policy: TrainEngine) -> Stats:
        """Add the gradient of the loss on the next rows to the gradient accumulated in
        ``policy``."""
        batch = self.stream.next(self.batch_size).with_global_counts()
        return policy.forward_backward(batch, self.loss)

    def metrics(self) -> dict[str, float]:
        """Return the row counts (seen, dropped, truncated, ...) of the stream."""
        return {f"data/ptx_{name}": float(value) for name, value in self.stream.counts.items()}


@dataclass(frozen=True)
class RL:
    """The components of an RL run."""

    config: RLConfig
    source: RolloutSource
    policy: TrainEngine
    policy_loss: Loss
    kl: KlController
    keep_samples: Callable[[int, Rollout, Batch], object]
    """Write samples for inspection, given (step, rollout, its batch before the update)."""
    reference: HasLogprobs | None = None
    moving: MovingReference | None = None
    """Updates of the reference with the policy's weights. None: it is frozen."""
    teacher: Teacher | None = None
    critic: TrainEngine | None = None
    value_loss: Loss | None = None
    freeze_policy_steps: int = 0
    """Steps at the start of the run that train the critic alone."""
    ptx: Ptx | None = None
    signal: NoSignalMonitor = field(default_factory=lambda: NoSignalMonitor(None))
    """Counter of steps without learning signal."""
    record: Callable[[int, Rollout], object] = lambda step, rollout: None
    """Write the groups of a step, before it is trained, to the files of ``driver/records.py``."""


def rl_step(run: RL, step: int) -> Metrics:
    """Run one RL step: get scored groups, compute reference log-probs, assign credit, update, and
    announce the new weights."""
    rollout = run.source.next(step)
    run.record(step, rollout)
    batch = groups_to_batch(rollout.groups, rollout.ages)
    ages = age_metrics(
        batch,
        rollout.ages,
        version=run.policy.version,
        max_staleness=run.config.rollout.max_staleness,
    )
    batch = with_reference(batch, run.reference)
    batch = batch if run.teacher is None else run.teacher.add_teacher_logprobs(batch)
    batch = with_old_policy(batch, run)
    parts = parts_of(rollout.groups, run.config)
    batch = assign_advantages(batch, run.config.algorithm, kl_coef=run.kl.coef, parts=parts)
    run.keep_samples(step, rollout, batch)

    updates = Updates()
    for minibatch in minibatches(trained_part(batch, rollout.groups, run), run.config, step):
        if run.critic is not None and run.value_loss is not None:
            updates.add("critic", run.critic.forward_backward(minibatch, run.value_loss))
            updates.step("critic", run.critic)
        if step <= run.freeze_policy_steps:
            continue
        updates.add("train", run.policy.forward_backward(minibatch, run.policy_loss))
        if run.ptx is not None:
            updates.add("train", run.ptx.forward_backward(run.policy))
        updates.step("train", run.policy)
    metrics = updates.metrics() | run.source.update_weights()

    metrics |= rollout.stats.floats() | ages | metrics_of(run, batch, rollout.groups)
    if updates.steps and step > run.freeze_policy_steps:
        run.kl.update(metrics.get("rollout/kl", metrics.get("train/kl", 0.0)), batch.num_samples)
    return run.signal.checked(updates.checked(metrics))


def with_reference(batch: Batch, reference: HasLogprobs | None) -> Batch:
    """Return the batch with the reference model's log-probs, if there is a reference."""
    if reference is None:
        return batch
    return replace(batch, ref_logprobs=reference.logprobs(batch))


def with_old_policy(batch: Batch, run: RL) -> Batch:
    """Return the batch with the models' outputs from before the update.

    ``old_logprobs`` are those of the sampler with ``old_policy=sampler``. Otherwise they are
    computed only if ``RLConfig.needs_old_logprobs``. ``values`` are computed only if there is a
    critic.
    """
    if run.config.algorithm.old_policy == "sampler":
        batch = replace(batch, old_logprobs=batch.sampler_logprobs)
    elif run.config.needs_old_logprobs:
        batch = replace(batch, old_logprobs=run.policy.logprobs(batch))
    if run.critic is not None:
        batch = replace(batch, values=run.critic.values(batch))
    return batch


def parts_of(groups: Sequence[Group], config: RLConfig) -> RewardParts | None:
    """Return the scores of every reward if the advantage normalizes each, otherwise None."""
    if not config.algorithm.advantage.normalizes_each:
        return None
    weights = [reward.weight for reward in config.rewards]
    return RewardParts.of(groups, dict(zip(reward_names(config.rewards), weights, strict=True)))


def trained_part(batch: Batch, groups: Sequence[Group], run: RL) -> Batch:
    """Return the batch that the update trains: without samples and without advantages of tokens
    that the recipe leaves out. Without samples there is no update, of the critic neither."""
    left = without_truncated(batch, groups, run.config.algorithm)
    if not left.num_rows:
        log.warning(
            "all %d samples of this step were cut off at a length limit and "
            "algorithm.mask_truncated leaves them out, so the step has no update; raise "
            "rollout.generate_max_len if this does not end",
            batch.num_samples,
        )
        return left
    return with_top_entropy(left, run)


def without_truncated(batch: Batch, groups: Sequence[Group], algorithm: AlgorithmConfig) -> Batch:
    """Return the batch without the samples that were cut off at a length limit, if the recipe sets
    ``mask_truncated``; otherwise the batch.

    Their rewards have already been used in the baselines of their groups. The result has no rows if
    all samples were cut off.
    """
    samples = [sample for group in groups for sample in group.samples]
    cut = [sample.finish_reason == "length" for sample in samples]
    if not algorithm.mask_truncated or not any(cut):
        return batch
    of_row = batch.row_samples()[0].tolist()
    return batch.select([row for row, sample in enumerate(of_row) if not cut[sample]])


def with_top_entropy(batch: Batch, run: RL) -> Batch:
    """Return the batch with advantages of 0, and so without a policy loss, on the tokens whose
    entropy is not in ``top_entropy_quantile``; the batch if that is 1. Denominators, KL and entropy
    bonus still count all tokens."""
    quantile = run.config.algorithm.top_entropy_quantile
    if quantile == 1:
        return batch
    assert batch.advantages is not None
    top_tokens = top_entropy(run.policy.entropies(batch), batch.action_mask, quantile=quantile)
    return replace(batch, advantages=torch.where(top_tokens, batch.advantages, 0.0))


def minibatches(batch: Batch, config: RLConfig, step: int) -> Iterator[Batch]:
    """Split the rollout into optimizer steps of ``train_batch_size`` samples,
    ``epochs_per_rollout`` times.

    Groups stay together. They keep their order if the entire rollout is one optimizer step.
    Otherwise, each epoch shuffles them. The shuffle depends only on the recipe's seed, the step and
    the epoch. A rollout with fewer samples than planned (failed episodes are left out) is split
    into as many, nearly equal steps; there are fewer steps only if there are fewer samples, and
    none without samples.
    """
    if not batch.num_rows:
        return
    plan = config.batch_plan()
    num_steps = (plan.samples_per_rollout or 1) // plan.train_batch_size
    together = batch.sample_ids is not None and config.algorithm.reduces_over_samples
    batch = replace(batch, samples_together=together)
    by_group: dict[int, dict[int, list[int]]] = {}  # group -> sample -> rows, in their order
    sample_ids = batch.row_samples()[0].tolist()
    for row, (group, sample) in enumerate(zip(batch.group_ids.tolist(), sample_ids, strict=True)):
        by_group.setdefault(group, {}).setdefault(sample, []).append(row)
    in_order = [list(samples.values()) for samples in by_group.values()]
    for epoch in range(config.train.epochs_per_rollout):
        groups = in_order
        if num_steps > 1:
            order = np.random.default_rng([config.seed, step, epoch]).permutation(len(groups))
            groups = [in_order[g] for g in order.tolist()]
        samples = [rows for group in groups for rows in group]
        ends = _step_ends(groups, num_steps, full=len(samples) == plan.samples_per_rollout)
        for begin, end in itertools.pairwise([0, *ends]):
            rows = [row for rows_of_sample in samples[begin:end] for row in rows_of_sample]
            yield batch.select(rows, copy=False).with_global_counts()


def _step_ends(groups: Sequence[Sequence[object]], num_steps: int, *, full: bool) -> list[int]:
    """Return the end of each optimizer step, in samples, of a rollout of ``groups`` of samples.

    Steps are equal up to one sample. If the rollout is not ``full``, each end then moves to the
    nearest end of a group, unless a step would be empty.
    """
    total = sum(map(len, groups))
    ends = [total * k // num_steps for k in range(1, num_steps + 1)]
    if not full:
        borders = list(itertools.accumulate(map(len, groups)))
        moved = [min(borders, key=lambda border: abs(border - end)) for end in ends]
        ends = moved if len(set(moved)) == num_steps else sorted(set(ends) - {0})
    return ends


def advantage_by_sample(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """Return sample id -> mean advantage of its action tokens, for sample files."""
    assert batch.advantages is not None
    of_row, first = batch.row_samples()
    sample, mask = of_row[batch.row_ids], batch.action_mask
    sums = torch.zeros(first.numel()).index_add_(0, sample, batch.advantages * mask)
    counts = torch.zeros(first.numel()).index_add_(0, sample, mask.float()).clamp(min=1)
    samples = [s.sample_id for g in groups for s in g.samples]
    return dict(zip(samples, (sums / counts).tolist(), strict=True))


def metrics_of(run: RL, batch: Batch, groups: Sequence[Group]) -> Metrics:
    """Return the metrics of a step's batch, of its groups, and of the data."""
    metrics = batch_metrics(batch) | teacher_stats(batch)
    metrics |= kl_of_rollout(batch, run.config.algorithm) | signal_metrics(run, groups)
    return metrics | stream_metrics(run) | {"train/kl_coef": run.kl.coef}


def age_metrics(
    batch: Batch, ages: Mapping[int, int] | None, *, version: int, max_staleness: int
) -> Metrics:
    """Return the ages of a rollout's groups and action tokens; empty in a synchronous run.

    Of the groups, whose age is that of their oldest token, in RL steps: ``rollout/age_<k>_frac``,
    the share of each age up to ``max_staleness`` (:func:`age_name`), ``rollout/age_mean`` and
    ``rollout/age_max``. Of the tokens: ``rollout/age_of_tokens_mean`` in RL steps,
    ``rollout/age_optimizer_steps_mean`` and ``_max`` in optimizer steps. ``ages`` maps versions of
    the policy to ages in RL steps, as for ``groups_to_batch``; ``version``: that of the policy
    before the update.
    """
    if batch.ages is None or ages is None or not bool(batch.action_mask.any()):
        return {}
    index = torch.unique(batch.group_ids, return_inverse=True)[1]
    of_actions = torch.where(batch.action_mask, batch.ages, 0)
    groups = torch.zeros(int(index.max()) + 1, dtype=torch.int64)
    groups = groups.scatter_reduce(0, index[batch.row_ids], of_actions, "amax")
    tokens = batch.ages[batch.action_mask]
    apart = min(max_staleness, LAST_AGE) + 1
    shares = torch.bincount(groups.clamp(max=LAST_AGE), minlength=apart) / groups.numel()
    counts = torch.bincount(tokens).double()
    known = torch.arange(counts.numel())
    optimizer_steps = torch.zeros(counts.numel())
    for sampled_by, age in ages.items():
        if age < counts.numel():
            optimizer_steps[age] = version - sampled_by
    return {
        **{f"rollout/{age_name(age)}_frac": share for age, share in enumerate(shares.tolist())},
        "rollout/age_mean": float(groups.double().mean()),
        "rollout/age_max": float(groups.max()),
        "rollout/age_of_tokens_mean": float((counts * known).sum()) / tokens.numel(),
        "rollout/age_optimizer_steps_mean": float((counts * optimizer_steps).sum())
        / tokens.numel(),
        "rollout/age_optimizer_steps_max": float(optimizer_steps[counts > 0].max()),
    }


def batch_metrics(batch: Batch) -> Metrics:
    """Return mean and standard deviation of the rewards used for training, one per sample:
    ``reward/trained_mean``, ``reward/std``; empty if there are none. (``reward/mean``, which the
    scoring reports, covers all samples, including groups that dynamic sampling drops.)"""
    assert batch.rewards is not None
    rewards = batch.rewards[batch.row_samples()[1]]
    if bool(rewards.isnan().any()):
        return {}
    return {
        "reward/trained_mean": float(rewards.double().mean()),
        "reward/std": float(rewards.std()) if rewards.numel() > 1 else 0.0,
    }


def signal_metrics(run: RL, groups: Sequence[Group]) -> Metrics:
    """Return the share of groups without learning signal; empty if the advantage does not use
    rewards."""
    rewards = run.source.rewards
    run.signal.observe_labels([group.prompt for group in groups], rewards)
    signal = reward_signal(groups, run.config.algorithm, rewards)
    return {} if signal is None else run.signal.observe(signal)


def kl_of_rollout(batch: Batch, algorithm: AlgorithmConfig) -> Metrics:
    """Return the mean KL per action token of the sampling policy, by the run's estimator. The
    result is empty if no ``old_logprobs`` were computed: with a single update, ``train/kl`` is the
    same number.

    With several updates, ``train/kl`` measures a policy that moves away from the one that sampled
    the tokens. It is therefore not a mean over that policy's own samples.
    """
    if batch.ref_logprobs is None or batch.old_logprobs is None:
        return {}
    kl = KL_ESTIMATORS[algorithm.kl.estimator](batch.old_logprobs, batch.ref_logprobs)
    return {"rollout/kl": float(kl[batch.action_mask].double().mean())}


def stream_metrics(run: RL) -> Metrics:
    """Return the row counts (seen, dropped, truncated, ...) of the run's data streams."""
    prompts = {f"data/{name}": float(value) for name, value in run.source.counts.items()}
    return prompts | ({} if run.ptx is None else run.ptx.metrics())


class RLState:
    """State of an RL run in a checkpoint, in addition to the trainer's own. Implements
    ``base.State``."""

    def __init__(self, run: RL) -> None:
        self.run = run

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes of a checkpoint."""
        engines = [e for e in (self.run.policy, self.run.critic) if e is not None]
        reference_bytes = 0 if self.run.moving is None else self.run.moving.num_bytes
        return int(1.02 * sum(e.state_bytes for e in engines)) + reference_bytes + (16 << 20)

    @property
    def version(self) -> int:
        """Number of policy updates so far."""
        return self.run.policy.version

    def position(self) -> dict[str, Any]:
        """Return the state of the source, the KL controller, and the reward statistics."""
        position = self.run.source.position() | {"kl": self.run.kl.state_dict()}
        position["rewards"] = self.run.source.rewards.state_dict()
        if self.run.ptx is not None:
            position["ptx"] = self.run.ptx.stream.state_dict()
        return position

    def save(self, folder: Path, *, in_background: bool = False) -> Sequence[PendingSave]:
        """Write policy, critic, and a reference that is not frozen."""
        if self.run.moving is not None:
            self.run.moving.save(folder)
        engines = {"policy": self.run.policy, "critic": self.run.critic}
        named = {folder / role: engine for role, engine in engines.items() if engine is not None}
        return save_engines(named, in_background=in_background)

    def save_position(self, folder: Path, position: Mapping[str, Any]) -> None:
        """Write ``position``."""
        save_state(folder, "rl", self.run.source.plain(position))

    def restart(self) -> None:
        """Push the weights to the rollout engine, which may have stopped."""
        self.run.source.restart()

    def load(self, folder: Path) -> None:
        """Restore the state that :meth:`save` wrote, and push the weights to the rollout engine."""
        self.run.policy.load(folder / "policy")
        if self.run.critic is not None:
            self.run.critic.load(folder / "critic")
        if self.run.reference is not None:
            load_reference(self.run.moving, folder)
        state = load_state(folder, "rl")
        self.run.kl.load_state_dict(state["kl"])
        self.run.source.rewards.load_state_dict(state.get("rewards", {}))
        if self.run.ptx is not None and "ptx" in state:  # else ptx is new in this run
            self.run.ptx.stream.load_state_dict(state["ptx"])
        self.run.source.load(state)
