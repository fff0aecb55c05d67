"""Convert input rows to output rows step by step, and keep the result of each completed step (jobs
generate and score).

A step is a fixed slice of the input. Steps share no state, and the global random generators are
seeded for each step. A resumed run therefore runs only the missing steps, and its rows are
identical to those of an uninterrupted run.
"""

from __future__ import annotations

import logging
import math
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from burnish.config.changes import changed_settings
from burnish.config.inference import RowsJob
from burnish.config.model import ModelConfig
from burnish.driver.base import (
    Closable,
    Driver,
    Job,
    Metrics,
    StopSignals,
    rare_garbage_collection,
    seed_everything,
)
from burnish.driver.errors import Interrupted, RunError
from burnish.driver.memory_monitor import OOM_FILE, MemoryMonitor
from burnish.driver.output_shards import OutputShards
from burnish.models.digest import (
    present_tokenizer_digest,
    weights_changed,
    weights_digest,
)
from burnish.observe.metrics import read_metrics
from burnish.observe.progress import ProgressDisplay
from burnish.observe.public_recipe import saved_settings, write_recipe
from burnish.observe.resumes import changes_since_start, record_resume
from burnish.observe.samples import drop_samples_after, write_samples
from burnish.rewards.base import RewardError
from burnish.types import Group

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("burnish")

MAY_CHANGE = ("run_dir", "cluster", "device", "observe", "output", "rollout.engine")
"""Keys that a resumed run may change, because they affect neither the requests nor the selection of
responses. (Another ``rollout.engine.kind`` draws different random numbers from the same
distribution.)"""

_CONNECTION_SETTINGS = (
    *("urls", "batch_size", "max_concurrency", "max_reply_bytes", "token_env", "use_proxy"),
    *("connect_timeout_s", "read_timeout_s", "retries", "backoff_s", "max_backoff_s", "rest_s"),
    *("num_workers", "micro_batch_size"),
)
_MAY_CHANGE = re.compile(
    rf"({'|'.join(map(re.escape, MAY_CHANGE))}|on_reward_failure|"
    rf"rewards\.\d+\.({'|'.join(_CONNECTION_SETTINGS)}))(\..*)?"
)
"""Pattern of all keys that may change: ``MAY_CHANGE``, the failure policy, and how rewards are
called. After a reward failure, a run can therefore resume with the changes that the error
suggests."""

_MAX_LOST_STEPS = 10
"""Number of consecutive steps after which the run ends, if rewards or episodes failed for every
prompt."""


@dataclass(frozen=True)
class StepRows:
    """Rows and metrics of one step."""

    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]
    """Scored responses, for sample files."""
    metrics: Metrics
    dropped: Mapping[str, int]
    """Number of dropped prompts or responses, by reason."""
    sums: Mapping[str, float]
    """Quantities that add up over steps: :func:`sums_of`, and job-specific ones."""
    tokens: pa.Table | None = None
    """Tokens of the first samples, for sample files."""


class RowsLoop(Closable, Protocol):
    """The steps of a run that writes rows."""

    @property
    def total_steps(self) -> int: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """Number of input rows (``prompts``) and their ``digest``. Both must be unchanged on
        resume."""
        ...

    @property
    def models(self) -> Sequence[ModelConfig]:
        """Models whose weights determine the rows, in addition to reward models."""
        ...

    def num_prompts_of_step(self, step: int) -> int:
        """Return the number of input rows of a step; the first step is 1."""
        ...

    def warn(self) -> None:
        """Log the number of input rows that are dropped."""
        ...

    def step(self, number: int) -> StepRows:
        """Run one step. The result depends only on the number and the weights."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return the counts from outside the steps, such as rows dropped before the first one."""
        ...

    def summary(self, totals: Mapping[str, float], output: Path) -> list[str]:
        """Return the lines of the summary that is printed at the end of the run."""
        ...


def check_output(config: RowsJob, run_dir: Path, *, resumed: bool) -> None:
    """Raise RunError if the output already exists. A resumed run ignores an existing file here and
    compares it when it writes the output."""
    output = config.output_in(run_dir)
    if output.is_dir() or (output.exists() and not resumed):
        raise RunError(
            f"the output {output} already exists and is never overwritten; move it away, or choose "
            "another path with output=..."
        )


def finished(config: RowsJob, run_dir: Path) -> Metrics | None:
    """Return the totals of a run that has written its output; None if work is left.

    Raises RunError if the recipe gives another output path, or if the output was removed.
    """
    parts = OutputShards(run_dir, job=config.job)
    state = parts.state() or {}
    if "finished" not in state:
        return None
    written, totals = state.get("output"), state["finished"]
    are_numbers = isinstance(totals, dict) and all(
        isinstance(total, int | float) for total in totals.values()
    )
    if not isinstance(written, str) or not are_numbers:
        raise RunError(
            f"{parts.state_file} does not contain the output and the totals of a finished run; "
            "start a new run"
        )
    output = Path(written.replace("{run_dir}", str(run_dir)))
    if config.output != written:
        raise RunError(
            f"the run {run_dir} is finished, and its rows are in {output}; copy that file, or "
            "start a new run"
        )
    if not output.exists():
        raise RunError(
            f"the run {run_dir} is finished, but its output {output} no longer exists; start a new "
            "run"
        )
    parts.remove()  # left by a run killed before it removed them
    return _as_metrics(totals)


def check_same_recipe(config: RowsJob, run_dir: Path) -> None:
    """Raise RunError if a resumed run's recipe would produce different rows."""
    then = saved_settings(run_dir)
    now = config.model_dump(mode="json")
    changes = changed_settings(then, now).items()
    changed = [f"{key}: {change}" for key, change in changes if not may_change(key)]
    if changed:
        raise RunError(
            f"the run {run_dir} was started with another recipe, so its output would mix rows of "
            f"two recipes: {'; '.join(changed)}. Resume without these changes, or start a new run. "
            f"(Allowed changes: {', '.join(MAY_CHANGE)}, on_reward_failure, and the connection "
            "settings of rewards.)"
        )


def may_change(key: str) -> bool:
    """Return whether a resumed run may set ``key`` to another value."""
    return _MAY_CHANGE.fullmatch(key) is not None


class RowsRun(Driver[RowsLoop]):
    """Driver that runs the missing steps of a rows job and writes metrics, samples, parts and the
    output."""

    config: RowsJob

    def __init__(self, config: RowsJob, run_dir: Path, memory_monitor: MemoryMonitor) -> None:
        super().__init__(config, run_dir, memory_monitor)
        self.files = OutputShards(run_dir, job=config.job)
        self.signals = StopSignals(self._announce_stop)
        self._last: Metrics = {}

    def run(self, loop: RowsLoop) -> Metrics:
        """Run all missing steps, then write the output. Return the last value of every metric.

        Raises Interrupted after a signal, once the current step is saved. A second signal ends the
        process immediately.
        """
        self.loop = loop
        self.open()
        self.progress = ProgressDisplay(
            loop.total_steps, every=self.config.observe.log_every_n_steps
        )
        self.closing.callback(self.progress.close)
        for warning in self.config.warnings():
            log.warning(warning)
        mine = self._check_prompts()
        changes = changes_since_start(self.config, self.run_dir)
        write_recipe(self.config, self.run_dir)
        self.files.write_state(mine)
        self._restore(changes)
        self.metrics.start_trackers()
        self.loop.warn()
        with self.measured_memory():
            with self.signals, rare_garbage_collection():
                for step in range(len(self.files.done) + 1, self.loop.total_steps + 1):
                    if self.signals.asked is not None:
                        raise Interrupted(self.run_dir, self.signals.asked)
                    self._one_step(step)
            return self._last | self._finish()

    def _check_prompts(self) -> dict[str, Any]:
        """Return the state that identifies the run's input and weights. Raises RunError if the run
        was started with other input or other weights."""
        state = self.files.state()
        roles = [role for role in self.config.roles() if role.kind == "reward"]
        weights = weights_digest([*self.loop.models, *(role.model for role in roles)])
        tokenizers = {role.name: present_tokenizer_digest(role.model) for role in roles}
        identity = self.loop.identity
        if state is None and self.files.path(1).exists():
            raise RunError(
                f"{self.run_dir} contains rows but no {self.files.state_file.name}; start a new run"
            )
        if state is not None and weights_changed(state.get("weights"), weights):
            raise RunError(
                f"the run {self.run_dir} was started with other weights or configs than the "
                "model folders contain now, so its output would mix rows of two models; restore "
                "them, or start a new run"
            )
        stored = (state or {}).get("tokenizers", {})
        changed = [n for n, now in tokenizers.items() if weights_changed(stored.get(n), now)]
        if changed:
            raise RunError(
                f"the run {self.run_dir} was started with another tokenizer or chat template of "
                f"{', '.join(changed)} than the model folders contain now, so its output would mix "
                "scores of two kinds; restore the files, or start a new run"
            )
        if state is not None and {name: state.get(name) for name in identity} != identity:
            raise RunError(
                f"the run {self.run_dir} was started with {state.get('prompts')} prompts, and the "
                f"data now contains {identity['prompts']}, or different ones; rows would be "
                "repeated, missing, or have another label. Restore the data and the tokenizer, or "
                "start a new run"
            )
        return {**identity, "weights": weights, "tokenizers": tokenizers}

    def _restore(self, changes: Mapping[str, str]) -> None:
        """Find the completed steps, and truncate metrics and samples to them."""
        (self.run_dir / OOM_FILE).unlink(missing_ok=True)
        self.files.find(self.loop.num_prompts_of_step)
        done = len(self.files.done)
        self.metrics.rewind(done)
        drop_samples_after(self.run_dir, done)
        for line in read_metrics(self.run_dir):
            self._last |= {k: v for k, v in line.items() if k not in ("step", "time")}
        if done:
            self.progress.message(f"resumed after step {done} of {self.loop.total_steps}")
            record_resume(self.run_dir, done, changes)

    def _one_step(self, step: int) -> None:
        started = time.perf_counter()
        # For rewards that draw random numbers.
        seed_everything(zlib.crc32(f"{self.config.seed}/{step}".encode()))
        done = self.loop.step(step)
        metrics = self._measure(done)
        metrics["time/step_s"] = time.perf_counter() - started
        # Write the part last: without it the step is repeated, and its metrics and samples dropped.
        limit, split = self.config.observe.samples_per_step, self.config.job
        write_samples(
            self.run_dir, step, done.groups, None, limit=limit, split=split, tokens=done.tokens
        )
        metrics = self.log(step, metrics)
        num = self.loop.num_prompts_of_step(step)
        info = {"prompts": num, "dropped": dict(done.dropped), "sums": dict(done.sums)}
        self.files.add(info, done.rows)
        self._last |= metrics
        self.progress.step(step, metrics)
        self._raise_if_all_failed()

    def _measure(self, done: StepRows) -> Metrics:
        job, seconds = self.config.job, self.timeline.collect()
        metrics = dict(done.metrics)
        metrics |= {f"{job}/dropped_{name}": float(n) for name, n in done.dropped.items()}
        metrics[f"{job}/rows"] = float(len(done.rows))
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        if seconds.get("rollout"):
            metrics["rollout/tokens_per_s"] = done.sums["tokens"] / seconds["rollout"]
        return metrics

    def _raise_if_all_failed(self) -> None:
        newest = self.files.done[-_MAX_LOST_STEPS:]
        lost = all(i.dropped.get("prompts_reward_failed", 0) == i.prompts for i in newest)
        if len(newest) == _MAX_LOST_STEPS and lost:
            raise RewardError(
                f"rewards or episodes failed for every prompt of the last {_MAX_LOST_STEPS} steps "
                "(the warnings above give the errors). Correct the cause and resume; "
                "on_reward_failure.then=fail stops at the first error of a reward"
            )

    def _finish(self) -> Metrics:
        """Write the output and print a summary that accounts for every prompt."""
        totals = self.files.totals() | dict(self.loop.totals())
        output = self.config.output_in(self.run_dir)
        with self.timeline.span("write"):
            self.files.publish(output)
        state = self.files.state() or {}
        self.files.write_state(state | {"output": self.config.output, "finished": totals})
        self.files.remove()
        for line in self.loop.summary(totals, output):
            self.progress.message(line)
        if not totals["rows"]:
            log.warning("the output %s has no rows: every row was dropped", output)
        return _as_metrics(totals)

    def _announce_stop(self, name: str) -> None:
        self.progress.message(
            f"{name}: finishing the current step, then stopping; a second signal stops "
            "immediately, and a resume runs that step again"
        )


def _as_metrics(totals: Mapping[str, float]) -> Metrics:
    return {f"total/{name}": float(value) for name, value in totals.items()}


def sums_of(groups: Sequence[Group]) -> dict[str, float]:
    """Return the counts of the responses of a step, and the sum of their rewards if they were
    scored."""
    samples = [s for group in groups for s in group.samples]
    scored = [s.reward for s in samples if s.reward_parts]
    sums: dict[str, float] = {
        "samples": len(samples),
        "tokens": sum(s.num_sampled_tokens for s in samples),
        "truncated": sum(s.finish_reason != "stop" for s in samples),
    }
    if scored:
        sums |= {"scored": len(scored), "reward": math.fsum(scored)}
    return sums


R = TypeVar("R", bound=RowsJob)
W = TypeVar("W", bound=RowsLoop)


class WritesRows(Job[R, W]):
    """A job whose driver is :class:`RowsRun`."""

    takes_rewards = True

    def prepare(self, config: R, run_dir: Path, *, resumed: bool) -> Metrics | None:
        check_output(config, run_dir, resumed=resumed)
        if not resumed:
            return None
        check_same_recipe(config, run_dir)
        return finished(config, run_dir)

    def driver(self, config: R, run_dir: Path, memory_monitor: MemoryMonitor) -> Driver[Any]:
        return RowsRun(config, run_dir, memory_monitor)
