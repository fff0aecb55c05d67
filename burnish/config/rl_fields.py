"""The fields of the job ``rl``, and what follows from them: its roles and its batch sizes."""

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
    """The fields of ``RLConfig`` (rl.py), whose rules are in ``rl_rules.py``."""

    max_steps: int = Field(ge=1)
    """RL steps; each is one rollout and the updates on it."""
    data: PromptDataConfig
    """Training prompts."""
    rollout: RolloutConfig
    """How responses are sampled."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """What scores them; the total is the weighted sum. (None unless given where the advantage is
    ``on_policy_distill``, with which they are only measured.)"""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """What happens when a reward fails."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to the reward after the weighted sum."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, KL."""
    critic: CriticConfig | None = None
    """Value model, for ``advantage: gae`` only. None with gae: defaults."""
    ptx: PtxConfig | None = None
    """Pre-training rows mixed into every update (PPO-ptx). None: none."""
    reference: ReferenceConfig | None = None
    """Reference model of the KL term. None with a KL term: the policy at the start."""
    teacher: TeacherConfig | None = None
    """The model to learn from, for ``advantage: on_policy_distill`` only."""
    train: RLTrainConfig
    """Batches, optimizer, schedule."""
    sync: SyncConfig = LinkSync()
    """How the policy's weights get to the rollout engine: ``auto | inproc | ipc | collective |
    disk | object_store``, or a node with ``kind`` and its options."""
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
        """Return whether the reference of the KL term is the base of the LoRA policy."""
        own = self.reference.model if self.reference is not None else None
        return bool(self.algorithm.kl.init_kl_coef) and self.model.lora is not None and own is None

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether log-probs of the policy before the update are computed: if they differ
        from those of the update itself (several updates on one rollout), or are needed before it
        (KL in the reward, or a teacher to compare them with)."""
        kl = self.algorithm.kl
        in_reward = bool(kl.init_kl_coef) and kl.placement == "reward"
        return in_reward or self.teacher is not None or self.several_updates

    @property
    def several_updates(self) -> bool:
        """Return whether a rollout is trained on in several optimizer steps."""
        try:
            return (self.batch_plan().optimizer_steps_per_rollout or 1) > 1
        except BatchError:
            return False

    def batch_plan(self) -> BatchPlan:
        """The batch sizes after derivation. Raises BatchError."""
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
        """The batch, how often each prompt is drawn, and how losses per token become one
        number."""
        table, num = super().launch_table(), total_rows(self.data)
        if num is not None:
            drawn = self.max_steps * self.rollout.rollout_batch_size
            more = " or more" if self.rollout.dynamic_sampling is not None else ""
            table += passes_lines(self.data, num, drawn=drawn, steps=self.max_steps, more=more)
        return [*table, self.algorithm.table_row()]
