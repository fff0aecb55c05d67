"""The roots of the config tree: one class per job."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from burnish.config.algorithm import (
    DpoLoss,
    PreferenceLossConfig,
)
from burnish.config.arithmetic import (
    BatchError,
)
from burnish.config.base import PathText
from burnish.config.data import (
    PreferenceDataConfig,
    SFTDataConfig,
    held_out_advice,
)
from burnish.config.generate import GenerateFields
from burnish.config.job import (
    JobConfig as JobConfig,
)
from burnish.config.job import (
    SupervisedJob as SupervisedJob,
)
from burnish.config.job import (
    TrainingJob as TrainingJob,
)
from burnish.config.job import training_rules
from burnish.config.model import (
    ReferenceConfig,
    lora_advice,
)
from burnish.config.observe import TrackersConfig
from burnish.config.ptx import ptx_rules
from burnish.config.rewards import (
    FailurePolicy,
    FunctionReward,
    RewardConfig,
    weigh_nothing,
)
from burnish.config.rl import RLFields
from burnish.config.rl_rules import cut_sampling, rl_advice, rl_rules, teacher_rules
from burnish.config.roles import (
    JobSpec,
    Role,
    RolloutRole,
    RowLengths,
    TrainRole,
    reward_roles,
    rollout_precision,
)
from burnish.config.rollout import (
    EvalConfig,
    LocalEngine,
    RolloutEngineConfig,
)
from burnish.config.steps import (
    PairsDataConfig,
    RewardDataConfig,
    StepsDataConfig,
    reward_data_rules,
)
from burnish.config.sync import sync_rules
from burnish.config.train import (
    TrainConfig,
)


class SFTConfig(SupervisedJob):
    """``burnish sft``: supervised fine-tuning on demonstrations."""

    job: Literal["sft"] = "sft"
    """Which job the recipe is for."""
    data: SFTDataConfig
    """Demonstrations."""
    eval_data: SFTDataConfig | None = None
    """Held-out demonstrations. None: no evaluation."""

    @property
    def rows(self) -> SFTDataConfig:
        """The training data."""
        return self.data

    def advice(self) -> Iterator[str]:
        yield from held_out_advice(self.data, self.eval_data, "eval_data")


class RewardModelConfig(SupervisedJob):
    """``burnish rm``: a reward model from preference pairs (Bradley-Terry), or a process reward
    model from solutions with a label on every step.

    ``data`` and ``eval_data`` have one kind. Steps refuse ``center_coef`` and take the loss
    ``process`` only. Pairs refuse ``label_key``, and ``margin_key`` with the loss ``log_exp``."""

    job: Literal["rm"] = "rm"
    """Which job the recipe is for."""
    data: RewardDataConfig
    """Pairs, or with ``kind: steps`` step-labelled solutions."""
    eval_data: RewardDataConfig | None = None
    """Held-out data of the same kind. None: no evaluation. Mean and spread of its scores go into
    the config of exports."""
    loss: Literal["bradley_terry", "log_exp", "process"] | None = None
    """bradley_terry: -log sigmoid(difference - margin). log_exp: the same without margins, as
    log(1 + exp(-difference)). process: cross-entropy of every step's label. None: bradley_terry
    for pairs, process for steps."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv
    2312.09244). 0: none."""

    @property
    def rows(self) -> PairsDataConfig | StepsDataConfig:
        """The training data."""
        return self.data

    @property
    def process(self) -> bool:
        """Whether it is a process reward model."""
        return isinstance(self.data, StepsDataConfig)

    @property
    def rows_per_unit(self) -> int:
        """A pair is two rows; step-labelled solutions are single rows."""
        return 1 if self.process else 2

    def roles(self) -> tuple[TrainRole, ...]:
        return (replace(self.trained_role("reward"), head="scalar"),)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from reward_data_rules(
            self.data, self.eval_data, loss=self.loss, centered=bool(self.center_coef)
        )

    def advice(self) -> Iterator[str]:
        yield from held_out_advice(self.data, self.eval_data, "eval_data")


class PreferenceReferenceConfig(ReferenceConfig):
    """The frozen model that preferences are measured against."""

    precompute: bool = False
    """Compute its log-probs of all rows once, before the first step, keep them in the run folder
    and give the model's memory back. A resumed run computes them again where rows are missing, or
    model or number format are others. (kto needs it in every step.)"""


class PreferenceConfig(SupervisedJob):
    """``burnish preference``: a policy from preferences, without rollouts (DPO and its family).

    ``margin_key`` is refused, ``label_key`` with any loss but kto, ``reference`` with simpo and
    orpo, ``nll_coef`` with orpo and kto. kto counts single responses in ``train_batch_size`` (a
    pair is two), and refuses ``drop_last: false`` and ``reference.precompute``."""

    job: Literal["preference"] = "preference"
    """Which job the recipe is for."""
    data: PreferenceDataConfig
    """Pairs; for kto also single responses with a verdict (``label_key``)."""
    eval_data: PreferenceDataConfig | None = None
    """Held-out data of the same form. None: no evaluation."""
    loss: PreferenceLossConfig = DpoLoss()
    """``dpo | cdpo | ipo | simpo | orpo | kto``, or a node with ``kind`` and its options."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the chosen response's mean negative log-likelihood per token, added to the loss
    (arXiv 2404.19733)."""
    reference: PreferenceReferenceConfig | None = None
    """Reference model. None: the policy as it is at the start (with LoRA: its base)."""

    @property
    def rows(self) -> PreferenceDataConfig:
        """The training data."""
        return self.data

    @property
    def rows_per_item(self) -> int:
        """KTO takes pairs apart."""
        return 2 if self.loss.kind == "kto" and self.data.label_key is None else 1

    @property
    def rows_per_unit(self) -> int:
        """A pair is two rows; KTO counts single responses."""
        return 1 if self.loss.kind == "kto" else 2

    @property
    def needs_reference(self) -> bool:
        """Whether the loss measures against a reference model."""
        return self.loss.kind not in ("simpo", "orpo")

    def roles(self) -> tuple[TrainRole, ...]:
        policy = replace(self.trained_role("policy"), dropout=False)
        own = self.reference.model if self.reference is not None else None
        if not self.needs_reference or (own is None and self.model.lora is not None):
            return (policy,)
        return policy, policy.beside("reference", own, self.cluster, trainable=False)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        kind = self.loss.kind
        for name, data in (("data", self.data), ("eval_data", self.eval_data)):
            if data is not None and data.margin_key is not None:
                yield (
                    f"{name}.margin_key={data.margin_key}: margins are for reward models (job rm), "
                    "and no preference loss reads them; remove it"
                )
        if self.reference is not None and not self.needs_reference:
            yield f"reference is set and loss={kind} uses none; remove it, or use dpo"
        if kind != "kto":
            for name, data in (("data", self.data), ("eval_data", self.eval_data)):
                if data is not None:
                    yield from data.missing_pairs(name)
                if data is not None and data.label_key is not None:
                    yield (
                        f"{name}.label_key={data.label_key} says that rows are single responses, "
                        f"and loss={kind} compares two; remove it, or use loss=kto"
                    )
        elif self.nll_coef:
            yield "nll_coef is a term of the chosen response, and loss=kto has none; remove it"
        if kind == "orpo" and self.nll_coef:
            yield (
                f"nll_coef={self.nll_coef:g} adds the chosen response's negative log-likelihood, "
                "which is in loss=orpo already; remove it (loss.beta weighs the other term)"
            )
        if kind == "kto":
            yield from self._kto_rules()

    def advice(self) -> Iterator[str]:
        yield from held_out_advice(self.data, self.eval_data, "eval_data")
        own = self.reference is not None and self.reference.model is not None
        if self.needs_reference and not own and self.model.scratch is not None:
            yield _random_reference(f"loss={self.loss.kind}")
        yield from lora_advice(self.model)

    def _kto_rules(self) -> Iterator[str]:
        if not self.drop_last:
            yield (
                "drop_last=false with loss=kto: its reference point needs other prompts in every "
                "batch, and the last may hold a single one; use drop_last=true"
            )
        if self.reference is not None and self.reference.precompute:
            yield (
                "reference.precompute with loss=kto: its reference point needs the reference model "
                "on rows that are made in every step; remove precompute"
            )
        for name, data in (("data", self.data), ("eval_data", self.eval_data)):
            if data is None or data.label_key is not None:
                continue
            for path in data.files_without_pairs():
                yield (
                    f"loss=kto without labels: {name}.label_key is not set, and {path} has no "
                    f"columns {data.chosen_key!r} and {data.rejected_key!r} to make labels of; set "
                    f"{name}.label_key to the column that says whether a response was liked"
                )
        try:
            rows = self.batch_plan().train_batch_size
        except BatchError:
            return
        least = 2 if self.data.label_key is not None else 4
        if rows < least or (self.data.label_key is None and rows % 2):
            yield (
                f"train.train_batch_size={rows} with loss=kto: it counts single responses, puts "
                f"them behind other prompts of the batch, and needs {least} or more"
                + ("" if least == 2 else ", an even number (two for each pair)")
            )


class RLConfig(RLFields):
    """``burnish rl``: reinforcement learning from rewards (PPO, GRPO and their family).

    Advantages that compare the samples of a prompt need ``n_samples_per_prompt`` of 2 or more.
    ``critic`` is refused without gae, and ``reference`` without a KL weight. ``reinforce`` needs
    one optimizer step per rollout. ``correction`` needs ``top_p: 1`` and ``top_k: 0``."""

    job: Literal["rl"] = "rl"
    """Which job the recipe is for."""

    def rules(self) -> Iterator[str]:
        yield from training_rules(self, self.train)
        yield from rl_rules(self)
        yield from ptx_rules(self.ptx, temperature=self.rollout.temperature)
        yield from teacher_rules(self)
        yield from sync_rules(self.sync, self.cluster.runtime)
        if self.algorithm.policy_loss.kind == "reinforce" and self.several_updates:
            yield (
                "algorithm.policy_loss=reinforce has no ratio, so it is right for one optimizer "
                "step per rollout only; use ppo, or train_batch_size = rollout_batch_size x "
                "n_samples_per_prompt with epochs_per_rollout=1"
            )
        cut = cut_sampling(self)
        if self.algorithm.correction is not None and cut:
            yield (
                f"algorithm.correction weighs tokens by what the sampler's log-probs are, and with "
                f"rollout.{cut} tokens are drawn from another distribution than those; use "
                "top_p=1 and top_k=0, or no correction"
            )
        best = self.checkpoint.best_metric
        if best and best.startswith("eval/") and self.eval is None:
            yield f"checkpoint.best_metric={best} is measured by eval, which is not set"

    def advice(self) -> Iterator[str]:
        yield from rl_advice(self)
        yield from lora_advice(self.model)
        if self.eval is not None:
            yield from held_out_advice(self.data, self.eval.data, "eval.data")
            yield from pass_advice(self.eval, self.rewards)
        trainer, sampler = self.precision.dtype, self.precision.sampler_dtype
        if sampler != trainer:
            yield (
                f"precision.rollout_dtype: the trainer computes in {trainer} and the rollout "
                f"engine in {sampler}: their log-probs differ for the same weights, and the "
                "update takes the difference for a change of the policy; leave rollout_dtype out "
                "to use one format (the gap is measured at every step: train/mismatch_*)"
            )
        own = self.reference is not None and self.reference.model is not None
        if self.algorithm.kl.init_kl_coef and not own and self.model.scratch is not None:
            yield _random_reference("algorithm.kl")
        normed = [entry.name or entry.kind for entry in self.rewards if entry.running_norm]
        if normed and self.eval is None and self.checkpoint.best_metric is None:
            yield (
                "checkpoint.best_metric is reward/mean where there is no eval, and running_norm "
                f"measures {', '.join(normed)} in a mean that moves, so the best checkpoint would "
                f"say little; set checkpoint.best_metric=reward/{normed[0]} (the plain score)"
            )


class InferenceJob(JobConfig):
    """Fields that every job without gradient steps has."""

    device: str = "auto"
    """``auto`` (CUDA if there is one, else CPU), or a torch device such as ``cpu`` or
    ``cuda:1``."""

    @abstractmethod
    def rollout_role(self) -> RolloutRole:
        """Return the role of the engine that samples."""

    @property
    @abstractmethod
    def scored_by(self) -> tuple[RewardConfig, ...]:
        """The rewards of the responses."""

    def roles(self) -> tuple[Role, ...]:
        rollout = self.rollout_role()
        rewards = reward_roles(
            self.scored_by,
            self.cluster,
            train=TrainConfig(train_batch_size=1),
            precision=self.precision,
            lengths=rollout.lengths,
        )
        return rollout, *rewards

    def resolve(self) -> JobSpec:
        roles, rollout = self.roles(), self.rollout_role()
        prompts, samples = rollout.prompts, rollout.samples_per_prompt
        if rollout.evaluation is not None:
            prompts = rollout.evaluation.num_prompts or 1000
            samples = rollout.evaluation.n_samples_per_prompt
        return JobSpec(
            job=self.job,
            model=self.model,
            roles=roles,
            cluster=self.cluster,
            device=self.device,
            batch=None,
            rows_per_step=prompts * samples,
            updates_per_step=0,
        )


class EvaluateConfig(InferenceJob):
    """``burnish evaluate``: pass@1 and pass@k of a model on held-out prompts.

    ``eval.generate_max_len`` is required, because there is no ``rollout`` to take it from."""

    job: Literal["evaluate"] = "evaluate"
    """Which job the recipe is for."""
    run_dir: PathText = "runs/{job}-{time}"
    """Folder of the results; ``{job}`` and ``{time}`` are filled in. Must be new or empty."""
    eval: EvalConfig
    """Prompts, samples and thresholds."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """What scores the responses."""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """What happens when a reward fails."""
    engine: RolloutEngineConfig = LocalEngine()
    """Which engine samples."""
    observe: TrackersConfig = TrackersConfig()
    """Trackers of the scores, besides the run folder."""

    @property
    def scored_by(self) -> tuple[RewardConfig, ...]:
        return self.rewards

    def rollout_role(self) -> RolloutRole:
        return RolloutRole(
            name="rollout",
            kind="rollout",
            model=self.model,
            precision=rollout_precision(self.precision),
            ranks=self.cluster.ranks("rollout"),
            lengths=RowLengths(self.eval.data.prompt_max_len, self.eval.generate_max_len or 1),
            engine=self.engine,
            key="engine",
            evaluation=self.eval,
        )

    def rules(self) -> Iterator[str]:
        if self.eval.generate_max_len is None:
            yield "eval.generate_max_len is not set, and this job has no rollout to take it from"

    def advice(self) -> Iterator[str]:
        yield from pass_advice(self.eval, self.rewards)
        if weigh_nothing(self.rewards):
            yield (
                "every entry of rewards has weight 0, so every response has the score 0; give one "
                "a weight"
            )


class GenerateConfig(GenerateFields, InferenceJob):
    """``burnish generate``: answers to a file of prompts as rows of a file, all of them or chosen
    by reward; data for the next job.

    Modes other than ``all`` need a reward with a weight, and ``best_of_n`` and ``pairs`` need
    ``n_samples_per_prompt`` of 2 or more. ``running_norm`` of a reward and
    ``data.overlong: truncate_left`` are refused."""

    job: Literal["generate"] = "generate"
    """Which job the recipe is for."""

    @property
    def scored_by(self) -> tuple[RewardConfig, ...]:
        return self.rewards

    def rollout_role(self) -> RolloutRole:
        return RolloutRole(
            name="rollout",
            kind="rollout",
            model=self.model,
            precision=rollout_precision(self.precision),
            ranks=self.cluster.ranks("rollout"),
            lengths=RowLengths(self.data.prompt_max_len, self.rollout.generate_max_len),
            engine=self.rollout.engine,
            key="rollout.engine",
            prompts=self.rollout.rollout_batch_size,
            samples_per_prompt=self.rollout.n_samples_per_prompt,
        )


def pass_advice(config: EvalConfig, rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """One sentence if no response can pass, unless a score is above 1: the weighted sum of several
    rewards of 1 each stays below the threshold."""
    weights = [entry.weight for entry in rewards if entry.weight]
    most = sum(weight for weight in weights if weight > 0)
    if len(weights) > 1 and most < config.pass_threshold - 1e-9:
        yield (
            f"eval.pass_threshold={config.pass_threshold:g} is above the sum of the positive "
            f"weights ({most:g}): with scores of at most 1 no response passes, and eval/pass@1 "
            f"stays 0; set eval.pass_threshold={most:g} or less"
        )


def _random_reference(what: str) -> str:
    """A reference that is needed and that nobody gave is the policy as it starts."""
    return (
        f"{what} measures against a reference model, none is given, and the policy as it starts "
        "(model.scratch) has random weights; set reference.model.path, or begin from a trained "
        "model"
    )
