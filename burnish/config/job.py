"""Fields and rules shared by several jobs: all jobs, training jobs, and jobs on given rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, model_validator

from burnish.config.arithmetic import BatchError, BatchPlan, batch_table, derive_batch
from burnish.config.base import Node, OlderKeys, PathText, lock_of
from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.early_stopping import (
    EarlyStoppingConfig,
    best_metric_advice,
    early_stopping_rules,
    named_metric_rules,
)
from burnish.config.eval_section import OLDER_EVAL_KEYS, SupervisedEval
from burnish.config.held_out import held_out_rules, split_rules, with_evaluation_sections
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.observe import ObserveConfig
from burnish.config.passes import (
    held_out_line,
    passes_lines,
    supervised_rules,
    table_rules,
    total_rows,
)
from burnish.config.placement_rules import offload_rules, placement_rules
from burnish.config.rewards import Scoring
from burnish.config.roles import (
    JobSpec,
    Role,
    RolloutRole,
    RowLengths,
    SectionLimits,
    TrainRole,
    readers_of_rows,
    rollout_precision,
)
from burnish.config.train import (
    CheckpointConfig,
    TrainConfig,
    checkpoint_rules,
    expert_rules,
    export_rules,
    parallel_rules,
)
from burnish.data.config import DataConfig
from burnish.rollout.kinds import RolloutEngineConfig

WITHOUT_RULES = {"rules": False}
"""Validation context in which only types are validated, to inspect a recipe that breaks rules."""


class JobConfig(Node):
    """Fields of every job."""

    not_spmd: ClassVar[str | None] = None
    """Reason why the job cannot run on the ranks of a launcher (``cluster.runtime=spmd``), or
    None."""

    in_order: ClassVar[tuple[str, ...]] = ()
    """Data sections whose rows are read in order, so that they can be streamed."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """Reason by dotted key, for keys that act in other jobs alone. Setting one is an error."""

    writes_rows: ClassVar[bool] = False
    """True if the job writes rows: it encodes all rows before it samples, and reports all errors
    together; a resumed run continues its output."""

    job: str
    """Job of the recipe."""
    run_dir: PathText = "runs/{job}"
    """Run folder; ``{job}`` and ``{time}`` are replaced. Must be new or empty unless a run is
    resumed."""
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    """Seed of all random choices: data order, sampling, initial heads, dropout."""
    model: ModelConfig
    """Model to train (for rl: the policy)."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    cluster: ClusterConfig = ClusterConfig()
    """Runtime and placement of the job's roles."""

    @model_validator(mode="after")
    def _report_all_broken_rules(self, info: ValidationInfo) -> JobConfig:
        if info.context is WITHOUT_RULES:
            return self
        roles = self.roles()
        problems = [
            *self.broken_rules(),
            *placement_rules(self.cluster, roles),
            *offload_rules(self.cluster, roles),
            *(p for r in roles if isinstance(r, RolloutRole) for p in r.sampling_rules()),
            *table_rules(self.paths_of(DataConfig), in_order=self.in_order),
            *held_out_rules(self.paths_of(DataConfig), trains=self.training is not None),
            *split_rules(self.paths_of(DataConfig)),
        ]
        for dotted, reason in self.without_effect.items():
            name, _, key = dotted.partition(".")
            node = self.value_of(name)
            if node.is_own(key):
                problems.append(
                    f"{name}: {key}={node.value_of(key)} has no effect in the job {self.job}, "
                    f"because {reason}; remove it"
                )
        if self.cluster.runtime == "spmd" and self.not_spmd is not None:
            problems.append(
                f"recipe: the job {self.job} cannot run on the ranks of torchrun, accelerate or "
                f"srun (cluster.runtime=spmd): {self.not_spmd}. Start one process without the "
                "launcher, with cluster.runtime=ray and cluster.policy_ranks for several GPUs"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def training(self) -> TrainingJob | None:
        """The recipe, if the job has gradient steps."""
        return None

    @property
    def scoring(self) -> Scoring:
        """Rewards of the job's responses."""
        return Scoring()

    def output_locks(self, run_dir: Path) -> dict[str, Path]:
        """Return the lock files of what a run writes at paths of the recipe, by key."""
        return {}

    def section_limits(self, name: str) -> SectionLimits:
        """Return the limits of the rows of the data section ``name``."""
        return SectionLimits(tuple(role.model for role in readers_of_rows(self.roles())))

    def inputs_of_replay(self) -> JobConfig:
        """Return a config without the inputs that a replay of a run does not read. It is only for
        checks of inputs and roles."""
        return self

    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """Return every role of the job. Roles do not depend on batch sizes, so a recipe with
        inconsistent batch sizes has its other errors reported too."""

    @abstractmethod
    def resolve(self) -> JobSpec:
        """Return the facts of the job that several modules need. Raises BatchError."""

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        """Return rows (name, value, origin) of the table printed at start. ``num_rows``: usable
        rows of the training data, if they were counted."""
        return self.form_lines()

    def form_lines(self) -> list[tuple[str, str, str]]:
        """Return rows of the table with the form of each data file and the held-out rows."""
        sections = self.nodes_of(DataConfig)
        lines = [line for data in sections for line in (*data.form_lines(), *held_out_line(data))]
        return list(dict.fromkeys(lines))

    def rollout_on(
        self, engine: RolloutEngineConfig, *, key: str, lengths: RowLengths
    ) -> RolloutRole:
        """Return the role of a rollout engine for the job's model. ``key``: the place of
        ``engine`` in the recipe."""
        return RolloutRole(
            name="rollout",
            kind="rollout",
            model=self.model,
            precision=rollout_precision(self.precision),
            ranks=1 if engine.on_servers else self.cluster.ranks("rollout"),
            lengths=lengths,
            engine=engine,
            key=key,
        )


class TrainingJob(JobConfig):
    """Fields of every job with gradient steps."""

    in_order: ClassVar[tuple[str, ...]] = ("data", "ptx.data")

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving of checkpoints."""
    observe: ObserveConfig = ObserveConfig()
    """Files and progress output of the run."""
    early_stopping: EarlyStoppingConfig | None = None
    """End of the run before its last step, by a metric or the KL. None: never."""

    @classmethod
    def as_mapping(cls, data: Any) -> Any:
        """Also complete the section ``eval`` with the keys of ``data``."""
        return with_evaluation_sections(super().as_mapping(data))

    @property
    def training(self) -> TrainingJob:
        return self

    def output_locks(self, run_dir: Path) -> dict[str, Path]:
        export = self.checkpoint.export_folder(run_dir)
        return {} if export is None else {"checkpoint.export_at_end": lock_of(export)}

    @property
    def named_metrics(self) -> dict[str, str | None]:
        """Metrics that the recipe names, by key."""
        watched = None if self.early_stopping is None else self.early_stopping.metric
        return {
            "checkpoint.best_metric": self.checkpoint.best_metric,
            "early_stopping.metric": None if watched is None else watched.name,
        }

    @property
    def rows_per_unit(self) -> int:
        """Number of rows per unit of a batch: 2 for pairs, else 1."""
        return 1

    @abstractmethod
    def batch_plan(self) -> BatchPlan:
        """Return the batch sizes after derivation. Raises BatchError."""

    @property
    @abstractmethod
    def eval_metrics(self) -> frozenset[str]:
        """Names after ``eval/`` of the metrics of an evaluation; empty if there is none."""

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        return [*batch_table(self.batch_plan()), *self.form_lines()]

    @property
    def trained(self) -> TrainRole:
        """The role of the model that the job trains (for rl: the policy)."""
        return next(r for r in self.roles() if isinstance(r, TrainRole) and r.trainable)

    def resolve(self) -> JobSpec:
        batch, roles, trained = self.batch_plan(), self.roles(), self.trained
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
            else rollout,
            updates_per_step=batch.optimizer_steps_per_rollout or 1,
        )


class SupervisedJob(TrainingJob):
    """Fields of the jobs that train on given rows."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "precision.rollout_dtype": "it samples no responses",
        "observe.samples_per_step": "it samples no responses",
        "observe.samples_with_tokens": "it samples no responses",
        "observe.record_rollouts": "it samples no responses",
    }

    older_keys: ClassVar[tuple[OlderKeys, ...]] = (OLDER_EVAL_KEYS,)

    train: TrainConfig
    """Batches, optimizer, schedule."""
    max_epochs: int | None = Field(None, ge=1)
    """Passes over the usable rows: without those that ``overlong`` drops or ``on_bad_row`` skips.
    None: 1, or as many as ``max_steps`` needs."""
    drop_last: bool = True
    """Drop the last epoch's rows that do not fill a batch. False: the last step is a smaller batch,
    averaged over its own tokens or rows, so each row is seen exactly ``max_epochs`` times; several
    sources need ``data.mix: size``."""
    max_steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; with ``max_epochs`` the smaller of both. None: by epochs."""

    def batch_plan(self) -> BatchPlan:
        return derived_batch(self.train, self.cluster)

    @property
    @abstractmethod
    def rows(self) -> DataConfig:
        """Training data."""

    @property
    @abstractmethod
    def evaluation(self) -> SupervisedEval[DataConfig] | None:
        """Held-out evaluation; None if there is none."""

    def roles(self) -> tuple[TrainRole, ...]:
        return (self.trained_role("policy"),)

    def trained_role(self, kind: ClusterRole) -> TrainRole:
        """Return the role of the model that is trained."""
        return TrainRole(
            name=kind,
            kind=kind,
            model=self.model,
            precision=self.precision,
            ranks=self.cluster.ranks(kind),
            lengths=RowLengths(prompt=0, rest=self.rows.length_limit),
            train=self.train,
            offload=kind in self.cluster.offload_between_phases,
            rows_per_unit=self.rows_per_unit,
            checkpoint=self.checkpoint,
        )

    @property
    def rows_per_item(self) -> int:
        """Number of batch rows per row of the data."""
        return 1

    def steps_for(self, num_rows: int | None) -> int:
        """Return the number of optimizer steps over ``num_rows`` rows. Raises ValueError if both it
        and ``max_steps`` are None."""
        if self.max_steps is not None and (num_rows is None or self.max_epochs is None):
            return self.max_steps
        if num_rows is None:
            raise ValueError("data of unknown length need max_steps")
        size = self.batch_plan().train_batch_size
        rows = num_rows * (self.max_epochs or 1)
        by_epochs = max(1, rows // size if self.drop_last else -(-rows // size))
        return min(by_epochs, self.max_steps or by_epochs)

    @property
    def counts_rows(self) -> bool:
        """Return whether the steps, or the times of evaluations, depend on the number of rows."""
        by_epochs = self.evaluation is not None and self.evaluation.every_n_epochs > 0
        return self.max_steps is None or self.max_epochs is not None or by_epochs

    def batch_size_at(self, step: int, num_rows: int | None) -> int:
        """Return the number of rows that optimizer step ``step`` (from 1) takes of data with
        ``num_rows`` rows. None: unknown."""
        size = self.batch_plan().train_batch_size
        if num_rows is None or (self.max_epochs is None and self.max_steps is not None):
            return size
        left = num_rows * (self.max_epochs or 1) - (step - 1) * size
        return min(size, left) if not self.drop_last and left > 0 else size

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        table = super().launch_table()
        num = num_rows or total_rows(self.rows, self.rows_per_item)
        if num is None:
            return table
        steps = self.steps_for(num)
        drawn = sum(self.batch_size_at(step, num) for step in (1, steps)[: min(2, steps)])
        drawn += max(0, steps - 2) * self.batch_plan().train_batch_size
        counted = num_rows is not None
        return table + passes_lines(self.rows, num, (steps, drawn), counted=counted)

    def rules(self) -> Iterator[str]:
        yield from training_rules(self, self.train)
        yield from supervised_rules(
            self.rows,
            max_steps=self.max_steps,
            max_epochs=self.max_epochs,
            drop_last=self.drop_last,
        )
        yield from named_metric_rules(self.named_metrics, self.eval_metrics)
        times = self.evaluation
        if times is not None and times.every_n_epochs and self.rows.streamed:
            yield (
                f"eval.every_n_epochs={times.every_n_epochs} with streamed rows, whose number is "
                "unknown; use eval.every_n_steps"
            )
        yield from early_stopping_rules(
            self.early_stopping,
            eval_every=None if times is None else times.every_n_steps or times.every_n_epochs,
            measures_kl=False,
        )
        if not self.drop_last and self.max_steps is not None and self.max_epochs is None:
            yield (
                f"drop_last=false has no effect with max_steps={self.max_steps}, after which a run "
                "ends wherever it is in the data; set max_epochs instead, or remove drop_last"
            )
        if not self.drop_last and len(self.rows.sources) > 1 and self.rows.mix == "weight":
            yield (
                "drop_last=false with sources drawn by weight: such an epoch has no last row; "
                "set data.mix=size, or drop_last=true"
            )

    def advice(self) -> Iterator[str]:
        if self.evaluation is not None:
            yield from best_metric_advice(self.checkpoint, self.evaluation.every_n_steps)


def derived_batch(train: TrainConfig, cluster: ClusterConfig) -> BatchPlan:
    """Return the batch sizes of a train engine. Raises BatchError."""
    return derive_batch(
        train_batch_size=train.train_batch_size,
        micro_train_batch_size=train.micro_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        data_parallel_size=max(1, cluster.policy_ranks // train.engine.ranks_per_row),
        token_budget=train.max_tokens_per_micro_batch is not None,
    )


def training_rules(job: TrainingJob, train: TrainConfig) -> Iterator[str]:
    """Yield the broken rules between the fields of every training job."""
    try:
        job.batch_plan()
    except BatchError as error:
        yield str(error)
    yield from train.engine.precision_rules(job.precision)
    yield from checkpoint_rules(job.checkpoint, train, ranks=job.cluster.policy_ranks)
    yield from export_rules(job.checkpoint, job.model, kind=job.trained.kind)
    yield from expert_rules(train, job.model)
    yield from parallel_rules(train, job.cluster)
    if (problem := train.engine.lora_problem) is not None:
        adapters = [model.lora for model in job.nodes_of(ModelConfig) if model.lora is not None]
        settings = dict.fromkeys(setting for lora in adapters for setting in lora.plain_only)
        yield from (f"{setting} with {problem}" for setting in settings)
    yield from attention_rules(job.roles(), train)


def flash_rules(roles: Sequence[TrainRole], train: TrainConfig) -> Iterator[str]:
    """Yield an error for each setting with which FlashAttention cannot be used."""
    if train.layout == "padded":
        yield (
            "train.attention=flash with train.layout=padded: it computes packed rows only; use "
            "train.layout=packed or shared_prefix, or train.attention=auto"
        )
    if any(role.precision.dtype == "fp32" for role in roles):
        yield (
            "train.attention=flash with precision.dtype=fp32: FlashAttention computes in bf16 and "
            "fp16 only; use precision.dtype=bf16, or train.attention=auto"
        )
    for role in roles:
        implementation = role.model.attn_implementation
        if implementation != "auto":
            yield (
                f"train.attention=flash with attn_implementation={implementation} of the "
                f"{role.name}, which pads rows; use attn_implementation=auto, or "
                "train.attention=auto"
            )


def compile_rules(roles: Sequence[TrainRole], train: TrainConfig) -> Iterator[str]:
    """Yield an error for each setting with which layers are not compiled."""
    if train.layout == "padded":
        yield (
            "train.compile=layers with train.layout=padded: layers are compiled for packed rows; "
            "use train.layout=packed or shared_prefix, or train.compile=off"
        )
    if (problem := train.engine.compile_problem) is not None:
        yield f"train.compile=layers with {problem}; use train.compile=off"
    if train.gradient_checkpointing == "selective":
        yield (
            "train.compile=layers with train.gradient_checkpointing=selective: the products of a "
            "compiled layer are inside of its code, where they cannot be kept one by one; use "
            "train.compile=off, or gradient_checkpointing=true (least memory) or false"
        )
    if train.moe_aux_loss_coef:
        yield (
            f"train.compile=layers with train.moe_aux_loss_coef={train.moe_aux_loss_coef:g}: the "
            "routing of tokens is recorded by hooks inside of layers, which compiled layers do not "
            "call; use train.compile=off, or train.moe_aux_loss_coef=0"
        )
    for role in roles:
        implementation = role.model.attn_implementation
        if implementation != "auto":
            yield (
                f"train.compile=layers with attn_implementation={implementation} of the "
                f"{role.name}, which pads rows; use attn_implementation=auto, or "
                "train.compile=off"
            )
        lora = role.model.lora
        if lora is not None and lora.quantization is not None:
            yield (
                f"train.compile=layers with lora.quantization={lora.quantization.kind} of the "
                f"{role.name}: its weights are unpacked by code that is not compiled; remove "
                "quantization, or use train.compile=off"
            )


def attention_rules(roles: Sequence[Role], train: TrainConfig) -> Iterator[str]:
    """Yield an error for each setting that contradicts the attention of a model."""
    trained = [role for role in roles if isinstance(role, TrainRole)]
    if train.attention == "flash":
        yield from flash_rules(trained, train)
    if train.compile == "layers":
        yield from compile_rules(trained, train)
    problem = train.engine.selective_problem
    if train.gradient_checkpointing == "selective" and problem is not None:
        yield (
            f"train.gradient_checkpointing=selective with {problem}; use "
            "gradient_checkpointing=true, or train.engine.zero_stage=2"
        )
    for role in trained:
        implementation = role.model.attn_implementation
        if implementation == "auto":
            continue
        if train.deterministic and implementation == "flash_attention_2":
            yield (
                f"train.deterministic=true with attn_implementation={implementation} of the "
                f"{role.name}, whose kernel does not follow it; use attn_implementation=auto, or "
                "train.deterministic=false"
            )
        key = f"attn_implementation={implementation} of the {role.name}"
        if implementation == "flash_attention_2" and role.precision.dtype == "fp32":
            yield (
                f"{key} with precision.dtype=fp32, which FlashAttention does not compute; use "
                "precision.dtype=bf16, or attn_implementation=auto"
            )
        if train.is_own("layout") and train.layout != "padded":
            yield (
                f"{key} computes padded rows, but train.layout={train.layout}; remove "
                "train.layout, or use attn_implementation=auto"
            )
        if role.sequence_parallel > 1:
            yield (
                f"{key} with train.engine.sequence_parallel_size={role.sequence_parallel}: ranks "
                "can only share attention over packed rows; use attn_implementation=auto"
            )
    shares = any(isinstance(role, RolloutRole) and role.shares_weights for role in roles)
    policy = next((role for role in trained if role.kind == "policy"), None)
    if shares and policy is not None and policy.model.attn_implementation != "auto":
        yield (
            f"model.attn_implementation={policy.model.attn_implementation}: the local rollout "
            "engine samples with the policy's own modules, and needs their packed attention; set "
            "rollout.engine.own_weights=true, or use rollout.engine.kind=vllm"
        )
