"""Reinforcement learning, one synchronous step at a time. Start here: :func:`rl_step` is the
algorithm.

The formulas are in ``algorithms``, put together by ``objectives.py`` (losses) and ``credit.py``
(advantages); ``rl_job.py`` puts the parts together; ``trainer.py`` surrounds each step with metrics
and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.algorithms.kl import KL_ESTIMATORS, KlController
from burnish.checkpoint.state import load_state, save_state
from burnish.config import RLConfig
from burnish.config.algorithm import AlgorithmConfig
from burnish.data.prompts import PromptStream
from burnish.jobs.base import Metrics
from burnish.jobs.credit import assign_advantages
from burnish.jobs.degenerate import NoSignalMonitor, reward_signal
from burnish.jobs.distill import Teacher, teacher_stats
from burnish.jobs.ptx import Ptx
from burnish.jobs.saving import save_engines
from burnish.jobs.updates import Updates
from burnish.rollout.runner import Runner
from burnish.runtime.base import Sync
from burnish.train.base import HasLogprobs, Loss, TrainEngine
from burnish.types import Batch, Group, PendingSave, groups_to_batch


@dataclass(frozen=True)
class RL:
    """The parts of an RL run."""

    config: RLConfig
    prompts: PromptStream
    runner: Runner
    policy: TrainEngine
    policy_loss: Loss
    kl: KlController
    sync: Sync
    keep_samples: Callable[[int, Sequence[Group], dict[str, float]], object]
    """(step, groups, sample id -> advantage): where samples are written for people to see."""
    reference: HasLogprobs | None = None
    teacher: Teacher | None = None
    critic: TrainEngine | None = None
    value_loss: Loss | None = None
    ptx: Ptx | None = None
    signal: NoSignalMonitor = field(default_factory=lambda: NoSignalMonitor(None))
    """Counts steps that teach nothing."""


def rl_step(run: RL, step: int) -> Metrics:
    """Sample, score, compare with the reference, assign credit, update, hand the weights over."""
    rollout = run.runner.fill(run.prompts.next, run.config.rollout.rollout_batch_size)
    release_sampler(run)
    batch = groups_to_batch(rollout.groups)
    batch = with_reference(batch, run.reference)
    batch = batch if run.teacher is None else run.teacher.add_teacher_logprobs(batch)
    batch = with_old_policy(batch, run)
    batch = assign_advantages(batch, run.config.algorithm, kl_coef=run.kl.coef)
    run.keep_samples(step, rollout.groups, advantage_by_sample(rollout.groups, batch))

    updates = Updates()
    for minibatch in minibatches(batch, run.config, step):
        if run.critic is not None and run.value_loss is not None:
            updates.add("critic", run.critic.forward_backward(minibatch, run.value_loss))
            updates.step("critic", run.critic)
        updates.add("train", run.policy.forward_backward(minibatch, run.policy_loss))
        if run.ptx is not None:
            updates.add("train", run.ptx.forward_backward(run.policy))
        updates.step("train", run.policy)
    handed_over = run.sync.push()

    metrics = rollout.stats.floats() | batch_metrics(batch) | updates.metrics()
    metrics |= handed_over | stream_metrics(run) | {"train/kl_coef": run.kl.coef}
    metrics |= teacher_stats(batch) | kl_of_rollout(batch, run.config.algorithm)
    metrics |= signal_metrics(run, rollout.groups)
    run.kl.update(metrics.get("rollout/kl", metrics.get("train/kl", 0.0)), batch.num_rows)
    return run.signal.checked(updates.checked(metrics))


def release_sampler(run: RL) -> None:
    """Free the memory of the rollout engine, if it sleeps while the others work."""
    if run.config.rollout.engine.sleep_between_rollouts:
        run.runner.engine.sleep(new_weights_follow=True)


def with_reference(batch: Batch, reference: HasLogprobs | None) -> Batch:
    """The batch with the reference model's log-probs, if there is a reference."""
    if reference is None:
        return batch
    return replace(batch, ref_logprobs=reference.logprobs(batch))


def with_old_policy(batch: Batch, run: RL) -> Batch:
    """The batch with what the models say before the update.

    ``old_logprobs`` are computed only if ``RLConfig.needs_old_logprobs``; ``values`` if there is a
    critic.
    """
    if run.config.needs_old_logprobs:
        batch = replace(batch, old_logprobs=run.policy.logprobs(batch))
    if run.critic is not None:
        batch = replace(batch, values=run.critic.values(batch))
    return batch


def minibatches(batch: Batch, config: RLConfig, step: int) -> Iterator[Batch]:
    """The rollout cut into optimizer steps of ``train_batch_size`` rows, ``epochs_per_rollout``
    times.

    Groups stay together and keep their order where the whole rollout is one step; otherwise their
    order is drawn anew for every epoch, from the seed and the step alone.
    """
    size = config.batch_plan().train_batch_size
    for epoch in range(config.train.epochs_per_rollout):
        rows = list(range(batch.num_rows))
        if size < batch.num_rows:
            rows = _shuffled_by_group(batch, seed=[config.seed, step, epoch])
        for begin in range(0, len(rows), size):
            yield batch.select(rows[begin : begin + size]).with_global_counts()


def _shuffled_by_group(batch: Batch, *, seed: Sequence[int]) -> list[int]:
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    order = np.random.default_rng(list(seed)).permutation(len(groups)).tolist()
    members = list(groups.values())
    return [row for g in order for row in members[g]]


def advantage_by_sample(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """sample id -> mean advantage of its action tokens, for people to read."""
    assert batch.advantages is not None
    rows, mask = batch.row_ids, batch.action_mask
    sums = torch.zeros(batch.num_rows).index_add_(0, rows, batch.advantages * mask)
    counts = torch.zeros(batch.num_rows).index_add_(0, rows, mask.float()).clamp(min=1)
    samples = [s.sample_id for g in groups for s in g.samples]
    return dict(zip(samples, (sums / counts).tolist(), strict=True))


def batch_metrics(batch: Batch) -> Metrics:
    """Mean and spread of the rewards that are trained on: ``reward/trained_mean``, ``reward/std``.
    (``reward/mean``, which comes with the scores, is over all that were sampled: dynamic sampling
    leaves groups out.) Nothing if there are none."""
    assert batch.rewards is not None
    if bool(batch.rewards.isnan().any()):
        return {}
    return {
        "reward/trained_mean": float(batch.rewards.double().mean()),
        "reward/std": float(batch.rewards.std()) if batch.num_rows > 1 else 0.0,
    }


def signal_metrics(run: RL, groups: Sequence[Group]) -> Metrics:
    """Share of the groups that teach nothing; nothing if there are no rewards to learn from."""
    run.signal.look_for_labels([group.prompt for group in groups], run.runner.rewards)
    found = reward_signal(groups, run.config.algorithm, run.runner.rewards)
    return {} if found is None else run.signal.see(found)


def kl_of_rollout(batch: Batch, algorithm: AlgorithmConfig) -> Metrics:
    """Mean KL per action token of the policy that sampled, by the run's estimator; nothing where
    its log-probs are those of the one update (whose ``train/kl`` is this number then).

    With several updates ``train/kl`` is of a policy that moves away from the one whose samples
    these are: no mean over its own.
    """
    if batch.ref_logprobs is None or batch.old_logprobs is None:
        return {}
    kl = KL_ESTIMATORS[algorithm.kl.estimator](batch.old_logprobs, batch.ref_logprobs)
    return {"rollout/kl": float(kl[batch.action_mask].double().mean())}


def stream_metrics(run: RL) -> Metrics:
    """Position and losses of the streams that the run reads."""
    prompts = {f"data/{name}": float(value) for name, value in run.prompts.counts.items()}
    return prompts | ({} if run.ptx is None else run.ptx.metrics())


class RLState:
    """What a checkpoint of an RL run holds beside the trainer's own. Implements
    ``base.State``."""

    def __init__(self, run: RL) -> None:
        self.run = run

    @property
    def num_bytes(self) -> int:
        """About how many bytes a checkpoint takes."""
        engines = [e for e in (self.run.policy, self.run.critic) if e is not None]
        return int(1.02 * sum(e.state_bytes for e in engines)) + (16 << 20)

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
        return self.run.policy.version

    def position(self) -> dict[str, Any]:
        """The positions of the streams, KL controller, reward statistics."""
        found = {"prompts": self.run.prompts.state_dict(), "kl": self.run.kl.state_dict()}
        found["rewards"] = self.run.runner.rewards.state_dict()
        if self.run.ptx is not None:
            found["ptx"] = self.run.ptx.stream.state_dict()
        return found

    def save(
        self, folder: Path, position: Mapping[str, Any], *, in_background: bool = False
    ) -> Sequence[PendingSave]:
        """Write policy, critic and ``position``."""
        engines = {"policy": self.run.policy, "critic": self.run.critic}
        named = {folder / role: engine for role, engine in engines.items() if engine is not None}
        pending = save_engines(named, in_background=in_background)
        save_state(folder, "rl", position)
        return pending

    def load(self, folder: Path) -> None:
        """Take back what :meth:`save` wrote, and hand the weights to the rollout engine."""
        self.run.policy.load(folder / "policy")
        if self.run.critic is not None:
            self.run.critic.load(folder / "critic")
        state = load_state(folder, "rl")
        self.run.prompts.load_state_dict(state["prompts"])
        self.run.kl.load_state_dict(state["kl"])
        self.run.runner.rewards.load_state_dict(state.get("rewards", {}))
        if self.run.ptx is not None and "ptx" in state:  # else it is new in this run
            self.run.ptx.stream.load_state_dict(state["ptx"])
        self.run.sync.push()
