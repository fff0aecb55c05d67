"""Roles of a job: model, trainable or frozen, number format, and number of ranks.

A job's config derives them once (``JobConfig.resolve``). Placement, parallelism checks, builders,
the memory planner and the probe read them from here. This module does not import torch."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, cast

from burnish.config.arithmetic import BatchPlan
from burnish.config.cluster import COLOCATED, ClusterConfig, ClusterRole
from burnish.config.episodes import AnyEpisodes
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.rollout import AsynchronousRollout, EvalConfig
from burnish.config.sync import SyncConfig
from burnish.config.train import CheckpointConfig, PtxConfig, TrainConfig
from burnish.config.train_engines import TrainEngineConfig
from burnish.config.vllm_arguments import vllm_sampling_problems
from burnish.data.prompts.config import PromptDataConfig
from burnish.rewards.kinds import RewardConfig
from burnish.rewards.model.config import ModelReward
from burnish.rollout.kinds import RolloutEngineConfig

ForwardPass = Literal["logprobs", "base_logprobs", "entropies", "values", "states"]
"""A method of a train engine (``train/base.py``) that computes without gradient."""


@dataclass(frozen=True)
class RowLengths:
    """Maximum row lengths that a recipe allows, in tokens."""

    prompt: int
    """Maximum prompt length. 0: rows are given, not sampled."""
    rest: int
    """Maximum number of tokens after the prompt."""
    episodes: AnyEpisodes | None = None
    """Multi-turn episodes, whose conversations are the rows. Their first messages may be shorter
    than ``prompt``, and their rest longer. None: single responses, or given rows."""

    @property
    def rows_per_sample(self) -> int:
        """Maximum number of rows of a sample: one per turn of an episode that is rendered again for
        every turn, else 1."""
        if self.episodes is None or self.episodes.history != "template":
            return 1
        return self.episodes.max_turns

    def within(self, limit: int) -> tuple[int, int]:
        """Return (row length, prompt length) for a model with ``limit`` positions.

        >>> RowLengths(prompt=1024, rest=256).within(1000)
        (1000, 744)
        >>> RowLengths(prompt=0, rest=2048).within(1000)
        (1000, 1)
        """
        if not self.prompt:
            return min(self.rest, limit), 1
        prompt = max(1, min(self.prompt, limit - self.rest))
        return prompt + self.rest, prompt


class SectionLimits(NamedTuple):
    """Limits of the rows that a job reads from one data section."""

    models: tuple[ModelConfig, ...]
    """Models whose positions must have room for a row and the tokens that are sampled after it."""
    new_tokens: int = 0
    """Maximum number of tokens that are sampled after a row."""
    num_rows: int | None = None
    """Number of rows, from the start of the data. None: all."""


def eval_limits(config: EvalConfig, model: ModelConfig, *, new_tokens: int) -> SectionLimits:
    """Return the limits of held-out prompts. ``new_tokens``: those of the rollout."""
    new_tokens = config.generate_max_len or new_tokens
    return SectionLimits((model,), new_tokens, config.num_prompts)


def sampled_lengths(
    data: PromptDataConfig, new_tokens: int, episodes: AnyEpisodes | None
) -> RowLengths:
    """Return the maximum lengths of sampled rows: a prompt and ``new_tokens``, or the conversation
    of an episode."""
    if episodes is None:
        return RowLengths(data.prompt_max_len, new_tokens)
    rest = max(1, episodes.max_tokens - data.prompt_max_len)
    return RowLengths(data.prompt_max_len, rest, episodes)


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One group of workers of a job, and its model."""

    name: str
    """Unique in the job: the kind, or ``reward 2``, ``reward 3`` for additional reward models."""
    kind: ClusterRole
    model: ModelConfig
    """The role's own model, or the policy's."""
    precision: PrecisionConfig
    ranks: int
    """Number of data-parallel workers."""
    lengths: RowLengths

    @property
    def dtype(self) -> Dtype:
        """Compute format."""
        return self.precision.dtype

    @property
    def tensor_parallel(self) -> int:
        """Number of processes over which the heads of each layer are split."""
        return 1


@dataclass(frozen=True)
class DistillTeacher:
    """Teacher whose distribution a student's engine computes."""

    model: ModelConfig
    dtype: Dtype
    divergence: Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, kw_only=True)
class TrainRole(RoleSpec):
    """A role in a train engine: policy, critic, reference, teacher or reward model."""

    head: Literal["lm", "scalar"] = "lm"
    outputs: int = 1
    """Number of outputs of a scalar head: attributes or classes of a reward model."""
    output_names: tuple[str, ...] = ()
    """Names of these outputs, in order. Empty: the score of pairs or steps, or of a critic."""
    trainable: bool = True
    train: TrainConfig
    """Settings of the engine."""
    lr: float | None = None
    """Peak learning rate. None: ``train.lr``."""
    rows_per_unit: int = 1
    """Maximum number of rows that must stay together: 2 for pairs, all rows of an episode if the
    loss of a token depends on them."""
    rows_per_pass: int | None = None
    """Rows per forward pass of a reward model. None: micro-batches of the job."""
    with_entropy: bool = False
    """True if training passes measure the policy's entropy."""
    entropy_gradient: bool = False
    """True if the loss contains the entropy."""
    kept_ids: int = 0
    """Maximum ids per token of a recorded sampling mask. 0: log-probs are over all tokens."""
    offload: bool = False
    """True if its tensors are in host memory between its phases
    (``cluster.offload_between_phases``)."""
    dropout: bool = True
    """True if training passes apply the dropout and router noise of the model's own config."""
    passes: tuple[ForwardPass, ...] = ()
    """Passes without gradient over the rows of a step, outside of the updates. A pass that a step
    makes several times is listed as often."""
    precomputed_reference: bool = False
    """True if the log-probs of the reference model, which the role or the base of its adapters is,
    are computed once for all rows, before the first step."""
    distillation: DistillTeacher | None = None
    """Teacher of a student. None: no teacher in the training pass."""
    ptx: PtxConfig | None = None
    """Pre-training rows mixed into the updates of the policy."""
    sync: SyncConfig | None = None
    """Transfer of weights to the rollout engine. None: no rollout engine."""
    is_saved: bool = False
    """True if checkpoints contain the weights of a frozen role (a reference that follows the
    policy)."""
    checkpoint: CheckpointConfig | None = None
    """None for frozen roles."""

    @property
    def tensor_parallel(self) -> int:
        return self.train.engine.tensor_parallel_size

    @classmethod
    def alone(
        cls,
        kind: ClusterRole,
        train: TrainConfig,
        model: ModelConfig,
        *,
        precision: PrecisionConfig = PrecisionConfig(),
        with_entropy: bool = True,
        **settings: Any,
    ) -> TrainRole:
        """Return a role that belongs to no job. ``settings``: other fields."""
        return cls(
            name=kind,
            kind=kind,
            train=train,
            model=model,
            precision=precision,
            with_entropy=with_entropy,
            ranks=1,
            lengths=RowLengths(prompt=0, rest=0),
            **settings,
        )

    @property
    def model_read_on_resume(self) -> ModelConfig | None:
        """Model whose weights a resumed run reads again, because checkpoints do not contain them:
        the base of adapters, or a frozen model. None: checkpoints, or the cache of the reference's
        log-probs, replace all of its weights."""
        if self.trainable:
            return None if self.model.lora is None else self.model.without_adapter_path()
        return None if self.is_saved or self.precomputed_reference else self.model

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that compute different rows."""
        return max(1, self.ranks // self.train.engine.ranks_per_row)

    @property
    def rows_per_sample(self) -> int:
        """Maximum number of rows of a sample: 2 for pairs, several for some episodes."""
        return max(self.rows_per_unit, self.lengths.rows_per_sample)

    @property
    def runs_forward_passes(self) -> bool:
        """Return whether the role ever makes a pass without gradient, also before the first
        step."""
        return bool(self.passes or self.precomputed_reference)

    @property
    def engine_role(self) -> Literal["policy", "reference", "teacher", "critic", "reward"]:
        """The kind, excluding the rollout."""
        assert self.kind != "rollout"
        return self.kind

    @property
    def sequence_parallel(self) -> int:
        """Number of ranks over which the tokens of each row are split."""
        return self.train.engine.sequence_parallel_size

    def derived_role(
        self, name: str, model: ModelConfig | None, cluster: ClusterConfig, *, trainable: bool
    ) -> TrainRole:
        """Return another role on the same batches. ``model`` None: this role's model."""
        kind = role_of(name)
        divides = self.lengths.episodes is not None and not trainable  # log-probs are per row
        return TrainRole(
            name=name,
            kind=kind,
            model=model or self.model,
            precision=self.precision,
            ranks=cluster.ranks(kind),
            lengths=self.lengths,
            head="scalar" if kind == "critic" else "lm",
            trainable=trainable,
            offload=kind in cluster.offload_between_phases,
            train=self.train.model_copy(update={"moe_aux_loss_coef": 0.0}),
            rows_per_unit=1 if divides else self.rows_per_unit,
            dropout=self.dropout,
            passes=("values",) if kind == "critic" else ("logprobs",),
            checkpoint=self.checkpoint if trainable else None,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutRole(RoleSpec):
    """Rollout engine of a job."""

    engine: RolloutEngineConfig
    key: str
    """Key of ``engine`` in the recipe."""
    prompts: int = 0
    """Prompts of one step, over all workers. 0: the engine runs only the evaluation."""
    samples_per_prompt: int = 1
    episodes: AnyEpisodes | None = None
    """Multi-turn episodes, whose conversations are its prompts. None: one response per prompt."""
    asynchronous: AsynchronousRollout | None = None
    """Bound on the age of groups, and groups started ahead. None: a synchronous run."""
    temperature: float | None = None
    """Softmax temperature of the prompts. None: the engine runs only the evaluation."""
    evaluation: EvalConfig | None = None
    """Held-out evaluation that also runs on this engine. None: none."""
    of_policy: bool = False
    """True if it samples from a policy that the job trains, and receives its weights."""
    shares_weights: bool = False
    """True if, in the process of the policy's engine, it uses the same tensors instead of a
    copy."""

    @property
    def tensor_parallel(self) -> int:
        """Number of processes, each on a GPU, that share one copy of the model."""
        return self.engine.tensor_parallel

    @property
    def on_servers(self) -> bool:
        """Return whether running servers sample, so that the job starts no worker for it."""
        return self.engine.on_servers

    def sampling_rules(self) -> Iterator[str]:
        """Yield an error for each temperature that the engine would not use exactly."""
        evaluated = None if self.evaluation is None else self.evaluation.temperature
        temperatures = {"rollout": self.temperature, "eval": evaluated}
        for section, temperature in temperatures.items():
            if temperature is not None and not self.engine.uses_transformers:
                problems = vllm_sampling_problems(temperature)
                yield from (f"{section}.{problem}" for _, problem in problems)

    @property
    def overlaps(self) -> bool:
        """Return whether the engine samples while the policy is trained."""
        return self.asynchronous is not None and self.asynchronous.overlaps

    @property
    def continues(self) -> bool:
        """Return whether responses may be in progress when a step ends."""
        return self.asynchronous is not None and self.asynchronous.max_staleness > 0

    @property
    def groups_at_once(self) -> int:
        """Maximum number of groups that are sampled at the same time, over all workers."""
        if self.asynchronous is None:
            return self.prompts
        return self.asynchronous.capacity(self.prompts)


Role = TrainRole | RolloutRole


@dataclass(frozen=True)
class JobSpec:
    """Facts of a job that several modules need."""

    job: str
    model: ModelConfig
    """Model of the policy or, in a job that trains a reward model, of that."""
    roles: tuple[Role, ...]
    cluster: ClusterConfig
    device: str
    """Device of the trainer, or of a job without one."""
    batch: BatchPlan | None
    """None if the job trains nothing."""
    rows_per_step: int
    """Rows that one step samples or trains on, each counted once."""
    updates_per_step: int
    """Optimizer steps per step."""

    @property
    def inline(self) -> bool:
        """Return whether all roles are in one process (spmd: in each rank's)."""
        return self.cluster.runtime != "ray"

    @property
    def trained(self) -> TrainRole | None:
        """The policy or, in a job that trains one, the reward model. None if nothing is trained."""
        return next((r for r in self.train_roles if r.trainable), None)

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        """All roles except the rollout."""
        return tuple(role for role in self.roles if isinstance(role, TrainRole))

    @property
    def rollout(self) -> RolloutRole | None:
        """The rollout engine's role, or None if the job samples nothing."""
        return next((role for role in self.roles if isinstance(role, RolloutRole)), None)

    @property
    def samples_per_prompt(self) -> int:
        """Number of consecutive rows of a training batch that have the same prompt."""
        return 1 if self.batch is None else self.batch.n_samples_per_prompt

    @property
    def epochs_per_rollout(self) -> int:
        """Number of times that the updates of a step pass over its rows."""
        return 1 if self.batch is None else self.batch.epochs_per_rollout

    def role(self, name: str) -> TrainRole:
        """Return the role with a train engine that has this name."""
        return next(role for role in self.train_roles if role.name == name)


def readers_of_rows(roles: Sequence[Role]) -> list[TrainRole]:
    """Return the roles that read the token ids of training rows: the trained model, its reference,
    critic and teacher. A reward model renders the conversations with its own template."""
    train_roles = [role for role in roles if isinstance(role, TrainRole)]
    return [role for role in train_roles if role.trainable or role.kind != "reward"]


def samples_with_policy(
    engine: TrainEngineConfig, rollout: RolloutEngineConfig, precision: PrecisionConfig
) -> bool:
    """Return whether a rollout engine in the process of a train engine uses the policy's own
    tensors. A local engine does if the sampler has the same format, no tensor is sharded, and
    ``own_weights`` is off."""
    may_share = rollout.may_share_weights
    return may_share and precision.sampler_dtype == precision.dtype and engine.shares_weights


def rollout_precision(precision: PrecisionConfig) -> PrecisionConfig:
    """Return the number formats of the rollout engine."""
    return PrecisionConfig(dtype=precision.sampler_dtype)


def reward_roles(
    rewards: Sequence[RewardConfig],
    cluster: ClusterConfig,
    *,
    train: TrainConfig,
    precision: PrecisionConfig,
    lengths: RowLengths,
) -> list[TrainRole]:
    """Return one role for each reward model, in the order of the recipe."""
    roles: list[TrainRole] = []
    for entry in rewards:
        if isinstance(entry, ModelReward):
            role = TrainRole(
                name=free_name("reward", [role.name for role in roles]),
                kind="reward",
                model=entry.model,
                precision=precision,
                ranks=cluster.ranks("reward"),
                lengths=lengths,
                head="scalar",
                trainable=False,
                offload="reward" in cluster.offload_between_phases,
                train=train,
                passes=("values",),
                rows_per_pass=entry.micro_batch_size,
            )
            roles.append(role)
    return roles


def free_name(role: str, taken: Container[str]) -> str:
    """Return the name of an additional group with this role.

    >>> free_name("reward", ["reward"])
    'reward 2'
    """
    return next(n for i in count(1) if (n := role if i == 1 else f"{role} {i}") not in taken)


def role_of(name: str) -> ClusterRole:
    """Return the role of a group.

    >>> role_of("reward 2")
    'reward'
    """
    return cast(ClusterRole, name.partition(" ")[0])


def with_workers(cluster: ClusterConfig, roles: Sequence[Role]) -> list[Role]:
    """Return the roles that have places. On Ray, a rollout engine on servers has none, because only
    the controller uses it."""
    if cluster.runtime != "ray":
        return list(roles)
    return [r for r in roles if not (isinstance(r, RolloutRole) and r.on_servers)]


def colocated(cluster: ClusterConfig, roles: Sequence[str]) -> list[str]:
    """Return the groups that share their places."""
    return [name for name in roles if role_of(name) in COLOCATED[cluster.layout]]
