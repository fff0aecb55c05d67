"""Recipe of the job ``rl``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.algorithm import (
    AlgorithmConfig,
    OnPolicyDistillAdvantage,
)
from burnish.config.arithmetic import (
    BatchError,
    BatchPlan,
    check_critic,
    check_rollout,
    critic_table,
)
from burnish.config.early_stopping import (
    best_metric_advice,
    early_stopping_rules,
    named_metric_rules,
)
from burnish.config.episodes import episode_data_rules, episode_rules, episodes_lines
from burnish.config.job import TrainingJob, derived_batch, training_rules
from burnish.config.model import ReferenceConfig, lora_advice, random_reference_advice
from burnish.config.off_policy import (
    asynchronous_advice,
    asynchronous_rules,
    max_kept_ids,
    off_policy_advice,
    off_policy_rules,
)
from burnish.config.older import with_critic_values
from burnish.config.passes import passes_lines, step_rules, total_rows
from burnish.config.rewards import (
    RESERVED_NAMES,
    FailurePolicy,
    Scoring,
    ShapingConfig,
    each_reward_rules,
    reward_names,
    running_norm_advice,
    weigh_nothing,
)
from burnish.config.roles import (
    ForwardPass,
    Role,
    RolloutRole,
    RowLengths,
    SectionLimits,
    TrainRole,
    eval_limits,
    reward_roles,
    sampled_lengths,
    samples_with_policy,
)
from burnish.config.rollout import EvalConfig, RolloutConfig, eval_advice
from burnish.config.sync import LinkSync, SyncConfig, sync_rules
from burnish.config.teacher import TeacherConfig, without_rewards
from burnish.config.train import (
    CriticConfig,
    PtxConfig,
    RLTrainConfig,
    critic_rules,
    ptx_rules,
    reference_sync_advice,
    reference_sync_rules,
)
from burnish.data.prompts.config import PromptDataConfig
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.kinds import RewardConfig


def turn_rewards_refused(kind: str) -> str:
    """Return the error for an advantage that takes no rewards of single turns, whose samples have
    such rewards."""
    return (
        f"algorithm.advantage={kind} with rewards of single turns: its baseline is the mean total "
        "reward of the group, and the return of a later turn only contains the rewards from there "
        "on; use gae or reinforce_pp (each turn's reward counts from its turn), or grpo, dr_grpo "
        "or opo (all turns share the total)"
    )


class RLConfig(TrainingJob):
    """``burnish rl``: reinforcement learning from rewards (PPO, GRPO and their family)."""

    not_spmd: ClassVar[str | None] = (
        "one controller samples, scores and filters the rollouts, and hands them to the ranks"
    )

    job: Literal["rl"] = "rl"
    """Job of the recipe."""
    max_steps: int | None = Field(None, ge=1)
    """Number of RL steps; each is one rollout and its updates. Set this or ``max_epochs``."""
    max_epochs: int | None = Field(None, ge=1)
    """Passes over the prompts, instead of ``max_steps``: ``max_epochs`` x prompts /
    ``rollout_batch_size`` steps, rounded down. A resumed run has the number as ``max_steps``."""
    data: PromptDataConfig
    """Training prompts."""
    rollout: RolloutConfig
    """Sampling of responses."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """Rewards of the responses. With advantage ``on_policy_distill`` only measured, by default
    none."""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """Treatment of failed rewards."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping and penalties."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, KL."""
    critic: CriticConfig | None = None
    """Value model, for ``advantage: gae`` only. None with gae: defaults."""
    ptx: PtxConfig | None = None
    """Pre-training rows mixed into every update (PPO-ptx). None: none."""
    reference: ReferenceConfig | None = None
    """Reference model of the KL term. None: the policy at the start (with LoRA: its base)."""
    teacher: TeacherConfig | None = None
    """Model to learn from, for ``advantage: on_policy_distill`` only."""
    train: RLTrainConfig
    """Batches, optimizer, schedule."""
    sync: SyncConfig = LinkSync()
    """Weight transfer to the rollout engine: a kind, or a mapping."""
    eval: EvalConfig | None = None
    """Held-out evaluation. None: none."""

    @classmethod
    def as_mapping(cls, data: Any) -> Any:
        """Also copy older keys of ``train`` to the critic."""
        return super().as_mapping(with_critic_values(data))

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
        if self.algorithm.advantage.needs_critic:
            critic_settings = self.critic or CriticConfig()
            critic = policy.derived_role(
                "critic", critic_settings.model, self.cluster, trainable=True
            )
            roles.append(
                replace(critic, lr=critic_settings.lr, train=critic_settings.for_role(critic.train))
            )
        if self.algorithm.kl.init_kl_coef and not self.holds_reference:
            reference = self.reference or ReferenceConfig()
            frozen = policy.derived_role(
                "reference", reference.model, self.cluster, trainable=False
            )
            roles.append(replace(frozen, is_saved=reference.moving is not None))
        if self.teacher is not None:
            teacher = policy.derived_role(
                "teacher", self.teacher.model, self.cluster, trainable=False
            )
            precision = self.teacher.precision_or(self.precision)
            roles.append(replace(teacher, precision=precision))
        return tuple(roles)

    def _policy(self) -> TrainRole:
        passes: dict[ForwardPass, bool] = {
            "logprobs": self.needs_old_logprobs,
            "entropies": self.algorithm.top_entropy_quantile < 1,
            "base_logprobs": self.holds_reference,
        }
        return TrainRole(
            name="policy",
            kind="policy",
            model=self.model,
            precision=self.precision,
            ranks=self.cluster.ranks("policy"),
            lengths=self.row_lengths,
            train=self.train,
            rows_per_unit=self.row_lengths.rows_per_sample
            if self.algorithm.reduces_over_samples
            else 1,
            with_entropy=True,
            entropy_gradient=self.algorithm.entropy_coef > 0,
            kept_ids=max_kept_ids(self.algorithm, self.rollout),
            dropout=False,
            offload="policy" in self.cluster.offload_between_phases,
            passes=tuple(name for name, is_made in passes.items() if is_made),
            ptx=self.ptx,
            sync=self.sync,
            checkpoint=self.checkpoint,
        )

    def _rollout(self) -> RolloutRole:
        return replace(
            self.rollout_on(self.rollout.engine, key="rollout.engine", lengths=self.row_lengths),
            prompts=self.rollout.rollout_batch_size,
            samples_per_prompt=self.rollout.n_samples_per_prompt,
            episodes=self.rollout.episodes,
            temperature=self.rollout.temperature,
            asynchronous=self.rollout.asynchronous,
            evaluation=self.eval,
            of_policy=True,
            shares_weights=samples_with_policy(
                self.train.engine, self.rollout.engine, self.precision
            ),
        )

    @property
    def scoring(self) -> Scoring:
        in_episodes = self.rollout.episodes is not None
        return Scoring(self.rewards, in_episodes, self.on_reward_failure)

    def section_limits(self, name: str) -> SectionLimits:
        if name == "ptx.data":
            return SectionLimits((self.model,))
        new_tokens = self.row_lengths.rest
        if name.startswith("eval.") and self.eval is not None:
            return eval_limits(self.eval, self.model, new_tokens=new_tokens)
        return super().section_limits(name)._replace(new_tokens=new_tokens)

    @property
    def row_lengths(self) -> RowLengths:
        """Return the maximum lengths of sampled rows."""
        rollout = self.rollout
        return sampled_lengths(self.data, rollout.generate_max_len, rollout.episodes)

    @property
    def holds_reference(self) -> bool:
        """Return whether the reference model of the KL term is the base of the LoRA policy."""
        model = self.reference.model if self.reference is not None else None
        return (
            bool(self.algorithm.kl.init_kl_coef) and self.model.lora is not None and model is None
        )

    def output_locks(self, run_dir: Path) -> dict[str, Path]:
        lock = self.sync.lock
        return super().output_locks(run_dir) | ({} if lock is None else {"sync.folder": lock})

    def inputs_of_replay(self) -> RLConfig:
        """Return a config without prompts, rewards and held-out data."""
        data = self.data.model_copy(update={"sources": (), "held_out": None})
        return self.model_copy(update={"data": data, "rewards": (), "eval": None})

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether log-probs of the policy before the update are computed. They are needed if
        a rollout has several updates, because the policy then differs from the one that sampled.
        They are also needed if the reward contains KL, or if a teacher is compared with them.
        With ``old_policy=sampler``, those of the sampler are used for all of these."""
        if self.algorithm.old_policy == "sampler":
            return False
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
        plan = replace(
            derived_batch(self.train, self.cluster),
            rollout_batch_size=self.rollout.rollout_batch_size,
            n_samples_per_prompt=self.rollout.n_samples_per_prompt,
            epochs_per_rollout=self.train.epochs_per_rollout,
        )
        train = self.train
        micro_batch = 1 if train.max_tokens_per_micro_batch else None
        part = micro_batch or train.micro_train_batch_size or train.gradient_accumulation_steps or 1
        return check_rollout(plan, unit=part * plan.data_parallel_size)

    @property
    def num_steps(self) -> int:
        """Number of RL steps. Raises ValueError before :meth:`with_steps` if it is derived."""
        if self.max_steps is None:
            raise ValueError(f"max_epochs={self.max_epochs}: the prompts are not counted yet")
        return self.max_steps

    def with_steps(self, num_prompts: int) -> RLConfig:
        """Return the config with ``max_steps`` derived from ``max_epochs``, if it is set."""
        if self.max_epochs is None:
            return self
        steps = max(1, num_prompts * self.max_epochs // self.rollout.rollout_batch_size)
        return self.model_copy(update={"max_steps": steps, "max_epochs": None})

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        """Return rows for the batch, the number of draws per prompt, the episodes, and the
        aggregation of per-token losses."""
        table, num = super().launch_table(), num_rows or total_rows(self.data)
        rollout, size = self.rollout, self.rollout.rollout_batch_size
        if self.max_epochs is not None:
            over = f"max_epochs={self.max_epochs} x"
            if num is None:
                origin = f"{over} prompts / {size}, counted when the run starts"
                table.append(("max_steps", "?", origin))
            else:
                steps = self.with_steps(num).num_steps
                table.append(("max_steps", str(steps), f"{over} {num} prompts / {size}"))
        if num is not None:
            steps = self.with_steps(num).num_steps
            more = " or more" if rollout.dynamic_sampling is not None else ""
            length, counted = (steps, steps * size), num_rows is not None
            table += passes_lines(self.data, num, length, counted=counted, more=more)
        if (critic := self._critic_ranks()) is not None:
            table += critic_table(self.batch_plan(), critic)
        at_once = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        table += episodes_lines(
            rollout.episodes, turn_tokens=rollout.generate_max_len, at_once=at_once
        )
        return [*table, self.algorithm.table_row()]

    def _critic_ranks(self) -> int | None:
        """Return the critic's data-parallel ranks, if there is one with another number of them
        than the policy."""
        roles = [role for role in self.roles() if isinstance(role, TrainRole)]
        sizes = {role.kind: role.data_parallel_size for role in roles}
        ranks = sizes.get("critic")
        return None if ranks == sizes["policy"] else ranks

    def rules(self) -> Iterator[str]:
        yield from step_rules(self.data, max_steps=self.max_steps, max_epochs=self.max_epochs)
        yield from training_rules(self, self.train)
        yield from _critic_rules(self, self._critic_ranks())
        yield from _advantage_rules(self)
        yield from _kl_rules(self)
        yield from _reward_rules(self)
        yield from episode_rules(self.rollout.episodes, self.data, self.rewards)
        if self.eval is not None:
            for key, data in self.eval.sections.items():
                yield from episode_data_rules(self.rollout.episodes, data, key=key)
        advantage = self.algorithm.advantage
        by_turn = any(entry.credits_turns for entry in self.rewards)
        if by_turn and not advantage.takes_turn_rewards:
            yield turn_rewards_refused(advantage.kind)
        yield from ptx_rules(self.ptx, temperature=self.rollout.temperature)
        yield from _teacher_rules(self)
        engine = self.train.engine
        yield from reference_sync_rules(
            self.reference, self.cluster, engine, holds_reference=self.holds_reference
        )
        yield from sync_rules(self.sync, self.cluster.runtime)
        yield from asynchronous_rules(self.rollout, self.roles(), self.cluster, self.sync)
        yield from off_policy_rules(
            self.algorithm, self.rollout, several_updates=self.several_updates
        )
        yield from self._metric_rules()

    @property
    def eval_metrics(self) -> frozenset[str]:
        if self.eval is None:
            return frozenset()
        return self.eval.metric_names(reward_names(self.rewards))

    def _metric_rules(self) -> Iterator[str]:
        """Yield an error for each named metric that this recipe does not measure."""
        rewards = reward_names(self.rewards)
        unused = {"shaping"} if self.shaping == ShapingConfig() else set()
        means = [name for name in RESERVED_NAMES if name not in unused] if rewards else []
        reward_metrics = [f"reward/{name}" for name in (*rewards, *means)]
        prefixes = ["rollout/", "sync/", *(f"reward/{name}/" for name in rewards)]
        if self.algorithm.advantage.needs_critic:
            prefixes.append("critic/")
        if self.rollout.episodes is not None:
            prefixes.append("episodes/")
        yield from named_metric_rules(
            self.named_metrics,
            self.eval_metrics,
            names=reward_metrics,
            prefixes=tuple(prefixes),
        )
        yield from early_stopping_rules(
            self.early_stopping,
            eval_every=None if self.eval is None else self.eval.every_n_steps,
            measures_kl=bool(self.algorithm.kl.init_kl_coef),
        )

    def advice(self) -> Iterator[str]:
        yield from asynchronous_advice(self.rollout, self.roles(), self.cluster, self.eval)
        yield from off_policy_advice(self.algorithm, self.rollout)
        yield from reference_sync_advice(self.reference, self.precision)
        yield from lora_advice(self.model, holds_reference=self.holds_reference)
        if self.eval is not None:
            yield from best_metric_advice(self.checkpoint, self.eval.every_n_steps)
            yield from eval_advice(self.eval, self.data, self.rewards)
        trainer, sampler = self.precision.dtype, self.precision.sampler_dtype
        if sampler != trainer:
            yield (
                f"precision.rollout_dtype: the trainer computes in {trainer} but the sampler in "
                f"{sampler}, so their log-probs differ for the same weights, as if the policy had "
                "changed; remove rollout_dtype to use one format (train/mismatch_* is the gap)"
            )
        has_model = self.reference is not None and self.reference.model is not None
        if self.algorithm.kl.init_kl_coef and not has_model and self.model.scratch is not None:
            yield random_reference_advice("algorithm.kl")
        watched = dict(self.named_metrics)
        if self.eval is None and self.checkpoint.best_metric is None:
            watched["checkpoint.best_metric"] = "reward/mean"
        yield from running_norm_advice(self.rewards, watched)


def _critic_rules(config: RLConfig, ranks: int | None) -> Iterator[str]:
    if ranks is None:
        return
    try:
        plan = config.batch_plan()
    except BatchError:  # reported with the rules of training jobs
        return
    try:
        check_critic(plan, ranks)
    except BatchError as error:
        yield str(error)


def _advantage_rules(config: RLConfig) -> Iterator[str]:
    advantage = config.algorithm.advantage
    if config.critic is not None and not advantage.needs_critic:
        yield (
            f"critic is set, but algorithm.advantage={advantage.kind} does not use one; remove "
            "critic or use gae"
        )
    if config.critic is not None:
        num = None if config.max_epochs is None else total_rows(config.data)
        steps = config.max_steps if num is None else config.with_steps(num).max_steps
        yield from critic_rules(config.critic, config.train, max_steps=steps)
        if config.critic.freeze_policy_steps and config.rollout.asynchronous is not None:
            yield (
                f"critic.freeze_policy_steps={config.critic.freeze_policy_steps} with "
                "rollout.asynchronous: an asynchronous run counts the age of samples in policy "
                "updates, which frozen steps do not make; use freeze_policy_steps=0, or remove "
                "rollout.asynchronous"
            )
    if advantage.compares_groups and config.rollout.n_samples_per_prompt < 2:
        yield (
            f"algorithm.advantage={advantage.kind} compares the samples of one prompt, but "
            "rollout.n_samples_per_prompt=1; use 2 or more (8 is usual)"
        )
    if advantage.kind == "reinforce_pp_baseline" and advantage.gamma != 1.0:
        yield (
            f"algorithm.advantage.gamma={advantage.gamma} with a group baseline: the baseline "
            "is not discounted; use gamma=1"
        )


def _kl_rules(config: RLConfig) -> Iterator[str]:
    kl = config.algorithm.kl
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    if kl.adaptive is not None and samples >= 5 * kl.adaptive.horizon:
        yield (
            f"algorithm.kl.adaptive.horizon={kl.adaptive.horizon} is too short for {samples} "
            "samples per rollout: the weight could reach 0 in one step; use more than "
            f"{samples // 5} (10000 is usual)"
        )
    if config.reference is not None and not kl.init_kl_coef:
        yield (
            "reference is set, but algorithm.kl.init_kl_coef=0 does not use it; remove it or set "
            "a KL weight"
        )


def _reward_rules(config: RLConfig) -> Iterator[str]:
    shaping = config.shaping
    penalties = (shaping.length_penalty, shaping.truncation_penalty, shaping.overlong)
    learns = config.algorithm.advantage.uses_rewards
    if weigh_nothing(config.rewards) and not any(penalties) and learns:
        yield (
            "every entry of rewards has weight 0, so all responses have the same reward and "
            "nothing is learned; set a weight above 0"
        )
    yield from each_reward_rules(config.algorithm.advantage, config.rewards, shaping)
    limit, episodes = config.row_lengths.rest, config.rollout.episodes
    if shaping.overlong is not None and shaping.overlong.buffer_len >= limit:
        name = (
            f"rollout.generate_max_len={limit}"
            if episodes is None
            else f"rollout.episodes.max_tokens - data.prompt_max_len={limit}"
        )
        yield f"shaping.overlong.buffer_len={shaping.overlong.buffer_len} must be below {name}"


def _teacher_rules(config: RLConfig) -> Iterator[str]:
    """Yield an error for each setting of a recipe for ``rl`` that is inconsistent with the presence
    or absence of a teacher."""
    kind = config.algorithm.advantage.kind
    if not isinstance(config.algorithm.advantage, OnPolicyDistillAdvantage):
        if config.teacher is not None:
            yield (
                f"teacher is set, but algorithm.advantage={kind} does not use it; remove it, or "
                "use on_policy_distill"
            )
        if not config.rewards:
            yield (
                f"rewards is empty, but algorithm.advantage={kind} learns from them; add an entry"
            )
        return
    if config.teacher is None:
        yield (
            f"algorithm.advantage={kind} compares every token with a teacher, but none is set; "
            "set teacher.model.path"
        )
    kl = config.algorithm.kl
    if kl.init_kl_coef and kl.placement == "reward":
        yield (
            f"algorithm.kl.placement=reward with advantage={kind}, which uses no reward; use "
            "placement=loss (estimator k3 is usual)"
        )
    if config.rollout.dynamic_sampling is not None:
        yield (
            f"rollout.dynamic_sampling drops groups by their rewards, but advantage={kind} "
            "learns from every token; remove it"
        )
    if config.shaping != ShapingConfig():
        yield (f"shaping changes rewards, but advantage={kind} does not learn from them; remove it")
    if config.eval is not None and not config.rewards:
        yield (
            f"eval measures rewards, but the recipe has none (advantage={kind} needs none); add "
            "some, which are then measured in training too, or remove eval"
        )
