"""Fields and rules that several jobs share: those of every job, of training, of given rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import PurePath

from pydantic import Field, model_validator

from burnish.config.arithmetic import BatchError, BatchPlan, batch_table, derive_batch
from burnish.config.base import Node, PathText
from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.data import PreferenceDataConfig, SFTDataConfig
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.observe import ObserveConfig
from burnish.config.passes import passes_lines, total_rows
from burnish.config.rewards import FailurePolicy, RewardConfig
from burnish.config.roles import (
    JobSpec,
    Role,
    RolloutRole,
    RowLengths,
    TrainRole,
    placement_rules,
    reward_roles,
)
from burnish.config.steps import PairsDataConfig, StepsDataConfig
from burnish.config.train import (
    CheckpointConfig,
    TrainConfig,
    checkpoint_rules,
    expert_rules,
    parallel_rules,
    ranks_per_row,
)

OUTPUT_KINDS = (".jsonl", ".parquet")

GivenRows = SFTDataConfig | PreferenceDataConfig | PairsDataConfig | StepsDataConfig


class JobConfig(Node):
    """Fields that every job has."""

    job: str
    """Which job the recipe is for."""
    run_dir: PathText = "runs/{job}"
    """Run folder; ``{job}`` and ``{time}`` are filled in. Must be new or empty unless a run is
    resumed."""
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    """Seed of everything random: data order, sampling, initial heads, dropout."""
    model: ModelConfig
    """The model that is trained (for rl: the policy)."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the parts of the job run."""

    @model_validator(mode="after")
    def _report_all_broken_rules(self) -> JobConfig:
        problems = [*self.broken_rules(), *placement_rules(self.cluster, self.roles())]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """Return every role of the job. (It depends on no batch size, so that a recipe whose sizes
        contradict each other has its other mistakes reported too.)"""

    @abstractmethod
    def resolve(self) -> JobSpec:
        """Return the facts of the job that several modules need. Raises BatchError."""


class TrainingJob(JobConfig):
    """Fields that every job with gradient steps has."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    observe: ObserveConfig = ObserveConfig()
    """What is written and printed."""

    @property
    def rows_per_unit(self) -> int:
        """Rows that are one unit of a batch: 2 for pairs."""
        return 1

    @abstractmethod
    def batch_plan(self) -> BatchPlan:
        """The batch sizes after derivation. Raises BatchError."""

    def launch_table(self) -> list[tuple[str, str, str]]:
        """Rows (name, value, how it comes about) of what is printed at start."""
        return batch_table(self.batch_plan())

    def resolve(self) -> JobSpec:
        batch, roles = self.batch_plan(), self.roles()
        trained = next(r for r in roles if isinstance(r, TrainRole) and r.trainable)
        rollout = batch.samples_per_rollout
        return JobSpec(
            job=self.job,
            model=self.model,
            roles=roles,
            cluster=self.cluster,
            device=trained.train.engine.device,
            batch=batch,
            rows_per_step=batch.train_batch_size * trained.rows_per_unit
            if rollout is None
            else rollout * batch.epochs_per_rollout,
            updates_per_step=batch.optimizer_steps_per_rollout or 1,
        )


class SupervisedJob(TrainingJob):
    """Fields of the jobs that learn from given rows."""

    train: TrainConfig
    """Batches, optimizer, schedule."""
    max_epochs: int = Field(1, ge=1)
    """Passes over the data. (Rows that ``overlong: drop`` leaves out are counted as if they were
    there.)"""
    drop_last: bool = True
    """Leave out the rows at the end of the last epoch that do not fill a batch. False: the last
    step learns them as a smaller batch (its mean is over its own tokens or rows), so that each row
    is seen exactly ``max_epochs`` times; several sources need ``data.mix: size``."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps even if epochs are left. None: by epochs."""
    eval_every_n_steps: int = Field(0, ge=0)
    """Measure on ``eval_data`` every this many steps, beside step 0 and the end. 0: only those
    two."""

    def batch_plan(self) -> BatchPlan:
        """The batch sizes after derivation. Raises BatchError."""
        return derived_batch(self.train, self.cluster)

    @property
    @abstractmethod
    def rows(self) -> GivenRows:
        """The training data."""

    def roles(self) -> tuple[TrainRole, ...]:
        return (self.trained_role("policy"),)

    def trained_role(self, kind: ClusterRole) -> TrainRole:
        """Return the role of the model that learns."""
        return TrainRole(
            name=kind,
            kind=kind,
            model=self.model,
            precision=self.precision,
            ranks=self.cluster.ranks(kind),
            lengths=RowLengths(prompt=0, rest=self.rows.max_len),
            train=self.train,
            rows_per_unit=self.rows_per_unit,
            checkpoint=self.checkpoint,
        )

    @property
    def rows_per_item(self) -> int:
        """Rows of a batch that one row of the data makes."""
        return 1

    def steps_for(self, num_rows: int) -> int:
        """Optimizer steps over ``num_rows`` rows."""
        size = self.batch_plan().train_batch_size
        rows = num_rows * self.max_epochs
        by_epochs = max(1, rows // size if self.drop_last else -(-rows // size))
        return min(by_epochs, self.max_steps or by_epochs)

    def batch_size_at(self, step: int, num_rows: int) -> int:
        """Rows that optimizer step ``step`` (from 1) takes of data with ``num_rows`` rows."""
        size = self.batch_plan().train_batch_size
        left = num_rows * self.max_epochs - (step - 1) * size
        return min(size, left) if not self.drop_last and left > 0 else size

    def launch_table(self) -> list[tuple[str, str, str]]:
        """The batch, and how often each row is seen."""
        table, num = super().launch_table(), total_rows(self.rows, self.rows_per_item)
        if num is None:
            return table
        steps = self.steps_for(num)
        drawn = sum(self.batch_size_at(step, num) for step in (1, steps)[: min(2, steps)])
        drawn += max(0, steps - 2) * self.batch_plan().train_batch_size
        return table + passes_lines(self.rows, num, drawn=drawn, steps=steps)

    def rules(self) -> Iterator[str]:
        yield from training_rules(self, self.train)
        if not self.drop_last and len(self.rows.sources) > 1 and self.rows.mix == "weight":
            yield (
                "drop_last=false with several sources that are drawn by weight: an epoch has no "
                "last row; set data.mix=size, or drop_last=true"
            )


class InferenceJob(JobConfig):
    """Fields that every job without gradient steps has."""

    device: str = "auto"
    """``auto`` (CUDA if there is one, else CPU), or a torch device such as ``cpu`` or
    ``cuda:1``."""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """What happens when a reward fails. (score: ``drop_group`` writes null.)"""

    @abstractmethod
    def rollout_role(self) -> RolloutRole | None:
        """Return the role of the engine that samples; None if nothing is sampled."""

    @property
    @abstractmethod
    def scored_by(self) -> tuple[RewardConfig, ...]:
        """The rewards of the responses."""

    @property
    @abstractmethod
    def row_lengths(self) -> RowLengths:
        """The longest prompt and response."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Responses of one step."""

    def roles(self) -> tuple[Role, ...]:
        rollout = self.rollout_role()
        rewards = reward_roles(
            self.scored_by,
            self.cluster,
            train=TrainConfig(train_batch_size=1),
            precision=self.precision,
            lengths=self.row_lengths,
        )
        return (*([] if rollout is None else [rollout]), *rewards)

    def resolve(self) -> JobSpec:
        return JobSpec(
            job=self.job,
            model=self.model,
            roles=self.roles(),
            cluster=self.cluster,
            device=self.device,
            batch=None,
            rows_per_step=self.rows_per_step,
            updates_per_step=0,
        )


class RowsJob(InferenceJob):
    """Fields of the jobs that write rows of data."""

    output: PathText
    """File that is written at the end, ``.jsonl`` or ``.parquet``; must not exist. ``{run_dir}`` is
    filled in."""
    observe: ObserveConfig = ObserveConfig()
    """What is written and printed beside the rows."""

    def rules(self) -> Iterator[str]:
        if PurePath(self.output).suffix.lower() not in OUTPUT_KINDS:
            yield (
                f"output={self.output} has to end in {' or '.join(OUTPUT_KINDS)}, which says what "
                "is written"
            )
        if set("{}") & set(self.output.replace("{run_dir}", "")):
            yield f"output={self.output} has braces, and only {{run_dir}} is filled in; remove them"


def derived_batch(train: TrainConfig, cluster: ClusterConfig) -> BatchPlan:
    """Return the batch sizes of a train engine. Raises BatchError."""
    return derive_batch(
        train_batch_size=train.train_batch_size,
        micro_train_batch_size=train.micro_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        data_parallel_size=max(1, cluster.policy_ranks // ranks_per_row(train)),
        token_budget=train.max_tokens_per_micro_batch is not None,
    )


def training_rules(job: TrainingJob, train: TrainConfig) -> Iterator[str]:
    """Yield the broken rules between the fields that every training job has."""
    try:
        job.batch_plan()
    except BatchError as error:
        yield str(error)
    yield from train.engine.precision_rules(job.precision)
    yield from checkpoint_rules(job.checkpoint, train, ranks=job.cluster.policy_ranks)
    yield from expert_rules(train, job.model)
    yield from parallel_rules(train, job.cluster)
