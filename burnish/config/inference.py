"""Fields and rules shared by the jobs without gradient steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import ClassVar

from burnish.config.base import PathText, lock_of
from burnish.config.job import JobConfig
from burnish.config.model import new_adapter_rules
from burnish.config.observe import ObserveConfig
from burnish.config.rewards import FailurePolicy
from burnish.config.roles import JobSpec, Role, RolloutRole, RowLengths, reward_roles
from burnish.config.train import TrainConfig

OUTPUT_KINDS = (".jsonl", ".parquet")


class InferenceJob(JobConfig):
    """Fields of every job without gradient steps."""

    device: str = "auto"
    """``auto`` (CUDA if available, else CPU), or a torch device such as ``cpu`` or ``cuda:1``."""
    on_reward_failure: FailurePolicy = FailurePolicy()
    """Treatment of failed rewards. (score: ``drop_group`` writes null.)"""

    @abstractmethod
    def rollout_role(self) -> RolloutRole | None:
        """Return the role of the rollout engine, or None if nothing is sampled."""

    @property
    @abstractmethod
    def row_lengths(self) -> RowLengths:
        """Maximum prompt and response lengths."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Number of responses per step."""

    def roles(self) -> tuple[Role, ...]:
        rollout = self.rollout_role()
        rewards = reward_roles(
            self.scoring.rewards,
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

    writes_rows: ClassVar[bool] = True

    not_spmd: ClassVar[str | None] = "one process writes its output, in the order of the input"
    without_effect: ClassVar[Mapping[str, str]] = {
        "observe.record_rollouts": "only the job rl is replayed",
        "data.shuffle": "it reads all rows in order",
        "data.mix": "it reads all rows in order",
        "data.validate": "it encodes all rows before it starts",
    }

    output: PathText
    """Output file, ``.jsonl`` or ``.parquet``, written at the end; must not exist. ``{run_dir}`` is
    replaced."""
    observe: ObserveConfig = ObserveConfig()
    """Other files and progress output of the run."""

    def output_in(self, run_dir: Path) -> Path:
        """Return the path of the output file."""
        return Path(self.output.replace("{run_dir}", str(run_dir)))

    def output_locks(self, run_dir: Path) -> dict[str, Path]:
        return {"output": lock_of(self.output_in(run_dir))}

    def rules(self) -> Iterator[str]:
        yield from new_adapter_rules(self.model, self.job)
        if PurePath(self.output).suffix.lower() not in OUTPUT_KINDS:
            yield (
                f"output={self.output} must end in {' or '.join(OUTPUT_KINDS)}, which sets the "
                "format"
            )
        if set("{}") & set(self.output.replace("{run_dir}", "")):
            yield (
                f"output={self.output} contains braces, but only {{run_dir}} is replaced; remove "
                "the others"
            )
