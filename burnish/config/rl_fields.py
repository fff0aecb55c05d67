"""Fields of the job ``rl``, with the roles and batch sizes derived from them."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, model_validator

from burnish.config.algorithm import AlgorithmConfig, GaeAdvantage
from burnish.config.arithmetic import BatchError, BatchPlan, check_rollout
from burnish.config.data import PromptDataConfig
from burnish.config.job import TrainingJob, derived_batch
from burnish.config.model import CriticConfig, ReferenceConfig
from burnish.config.passes import passes_lines, total_rows
from burnish.config.ptx import PtxConfig
from burnish.config.rewards import FailurePolicy, FunctionReward, RewardConfig, ShapingConfig
from burnish.config.roles import (
    Role,
    RolloutRole,
    RowLengths,
    TrainRole,
    reward_roles,
    rollout_precision,
    samples_with_policy,
)
from burnish.config.rollout import EvalConfig, RolloutConfig
from burnish.config.sync import LinkSync, SyncConfig
from burnish.config.teacher import TeacherConfig, without_rewards
from burnish.config.train import RLTrainConfig


class RLFields(TrainingJob):
    """Fields of ``RLConfig`` (rl.py), whose rules are in ``rl_rules.py``."""

    max_steps: int = Field(ge=1)
    """Number of RL steps; each is one rollout and its updates."""
    data: PromptDataConfig
    """Training prompts."""
    rollout: RolloutConfig
    """Sampling of responses."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """Rewards; the total is their weighted sum. With advantage ``on_policy_distill`` only measured,
    by default none."""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """Treatment of failed rewards."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to the reward after the weighted sum."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, KL."""
    critic: CriticConfig | None = None
    """Value model, for ``advantage: gae`` only. None with gae: defaults."""
    ptx: PtxConfig | None = None
    """Pre-training rows mixed into every update (PPO-ptx). None: none."""
    reference: ReferenceConfig | None = None
    """Reference model of the KL term. None: the policy at the start."""
    teacher: TeacherConfig | None = None
    """Model to learn from, for ``advantage: on_policy_distill`` only."""
    train: RLTrainConfig
    """Batches, optimizer, schedule."""
    sync: SyncConfig = LinkSync()
    """Weight transfer to the rollout engine: a kind, or a mapping."""
    eval: EvalConfig | None = None
    """Held-out evaluation. None: none."""

    _no_rewards = model_validator(mode="before")(without_rewards)

    def roles(self) -> tuple[Role, ...]:
        policy, rollout = self._policy(), self._rollout()
        roles: list[Role] = [policy, rollout]
        roles += reward_roles(
            self.rewards,
            self.cluster,
            train=self.train,
            precision=self.precision,
            lengths=policy.lengths,
        )
        if isinstance(self.algorithm.advantage, GaeAdvantage):
            own = self.critic or CriticConfig()
            critic = policy.beside("critic", own.model, self.cluster, trainable=True)
            roles.append(replace(critic, lr=own.lr))
        if self.algorithm.kl.init_kl_coef and not policy.holds_reference:
            model = self.reference.model if self.reference is not None else None
            roles.append(policy.beside("reference", model, self.cluster, trainable=False))
        if self.teacher is not None:
            teacher = policy.beside("teacher", self.teacher.model, self.cluster, trainable=False)
            precision = self.teacher.precision_or(self.precision)
            roles.append(replace(teacher, precision=precision))
        return tuple(roles)

    def _policy(self) -> TrainRole:
        return TrainRole(
            name="policy",
            kind="policy",
            model=self.model,
            precision=self.precision,
            ranks=self.cluster.ranks("policy"),
            lengths=self._lengths,
            train=self.train,
            with_entropy=True,
            dropout=False,
            needs_old_logprobs=self.needs_old_logprobs,
            holds_reference=self.holds_reference,
            ptx=self.ptx,
            sync=self.sync,
            checkpoint=self.checkpoint,
        )

    def _rollout(self) -> RolloutRole:
        return RolloutRole(
            name="rollout",
            kind="rollout",
            model=self.model,
            precision=rollout_precision(self.precision),
            ranks=self.cluster.ranks("rollout"),
            lengths=self._lengths,
            engine=self.rollout.engine,
            key="rollout.engine",
            prompts=self.rollout.rollout_batch_size,
            samples_per_prompt=self.rollout.n_samples_per_prompt,
            evaluation=self.eval,
            of_policy=True,
            shares_weights=samples_with_policy(self.train.engine, self.precision),
        )

    @property
    def _lengths(self) -> RowLengths:
        return RowLengths(self.data.prompt_max_len, self.rollout.generate_max_len)

    @property
    def holds_reference(self) -> bool:
        """Return whether the reference model of the KL term is the base of the LoRA policy."""
        own = self.reference.model if self.reference is not None else None
        return bool(self.algorithm.kl.init_kl_coef) and self.model.lora is not None and own is None

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether log-probs of the policy before the update are computed. They are needed if
        a rollout has several updates, because the policy then differs from the one that sampled.
        They are also needed if the reward contains KL, or if a teacher is compared with them."""
        kl = self.algorithm.kl
        in_reward = bool(kl.init_kl_coef) and kl.placement == "reward"
        return in_reward or self.teacher is not None or self.several_updates

    @property
    def several_updates(self) -> bool:
        """Return whether a rollout is used for several optimizer steps."""
        try:
            return (self.batch_plan().optimizer_steps_per_rollout or 1) > 1
        except BatchError:
            return False

    def batch_plan(self) -> BatchPlan:
        """Return the batch sizes after derivation. Raises BatchError."""
        plan = replace(
            derived_batch(self.train, self.cluster),
            rollout_batch_size=self.rollout.rollout_batch_size,
            n_samples_per_prompt=self.rollout.n_samples_per_prompt,
            epochs_per_rollout=self.train.epochs_per_rollout,
        )
        train = self.train
        given = 1 if train.max_tokens_per_micro_batch else None
        part = given or train.micro_train_batch_size or train.gradient_accumulation_steps or 1
        return check_rollout(plan, unit=part * plan.data_parallel_size)

    def launch_table(self) -> list[tuple[str, str, str]]:
        """Return rows for the batch, the number of draws per prompt, and the aggregation of
        per-token losses."""
        table, num = super().launch_table(), total_rows(self.data)
        if num is not None:
            drawn = self.max_steps * self.rollout.rollout_batch_size
            more = " or more" if self.rollout.dynamic_sampling is not None else ""
            table += passes_lines(self.data, num, drawn=drawn, steps=self.max_steps, more=more)
        return [*table, self.algorithm.table_row()]
