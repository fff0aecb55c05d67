"""Batch inference: prompts in, rows of data out, a step at a time, and each step kept.

A step is a fixed slice of the prompts, sampled and scored together. Nothing goes from one step to
the next: responses own their random numbers, and the global generators are seeded for each step. So
a run that was killed does its missing steps and has the rows of one that was not.
"""

from __future__ import annotations

import logging
import math
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from burnish.config import GenerateConfig, dump_yaml
from burnish.config.changes import changed_settings
from burnish.config.rewards import ModelReward
from burnish.data.generation_prompts import GenerationPrompt, GenerationPrompts
from burnish.data.selection import DROPS, Selection, select
from burnish.jobs.base import (
    Driver,
    Functions,
    Job,
    Metrics,
    rare_garbage_collection,
    seed_everything,
)
from burnish.jobs.build import reward_set, sampling_of, weighted_rewards, within_positions
from burnish.jobs.degenerate import warn_without_labels
from burnish.jobs.errors import Interrupted, RunError
from burnish.jobs.memory_monitor import OOM_FILE, MemoryMonitor
from burnish.jobs.output_shards import STATE_FILE, OutputShards
from burnish.jobs.signals import StopSignals
from burnish.models.digest import weights_digest
from burnish.observe.files import write_text
from burnish.observe.memory import memory_metrics
from burnish.observe.metrics import read_metrics
from burnish.observe.progress import Progress
from burnish.observe.samples import drop_samples_after, write_samples
from burnish.observe.timeline import timed
from burnish.rewards.base import NoGroupLeftError, RewardError
from burnish.rollout.runner import Rollout, Runner
from burnish.runtime.base import Runtime
from burnish.types import Stats

log = logging.getLogger("burnish")

MAY_CHANGE = ("run_dir", "cluster", "device", "observe", "output", "rollout.engine")
"""Keys that a resumed run may set anew: none of them decides what is asked and which responses are
kept. (Another ``rollout.engine.kind`` draws other random numbers of the same distribution.)"""

_HOW_TO_ASK = (
    *("urls", "batch_size", "max_concurrency", "max_reply_bytes", "token_env", "use_proxy"),
    *("connect_timeout_s", "read_timeout_s", "retries", "backoff_s", "max_backoff_s", "rest_s"),
    *("num_workers", "micro_batch_size"),
)
_MAY_CHANGE = re.compile(
    rf"({'|'.join(map(re.escape, MAY_CHANGE))}|on_reward_failure|"
    rf"rewards\.\d+\.({'|'.join(_HOW_TO_ASK)}))(\..*)?"
)
"""Also how rewards are asked, and what happens where one fails: a run that a reward ended goes on
with what the error advises."""

_MAX_LOST_STEPS = 10
"""Steps in a row in which a reward failed on every prompt, after which going on makes no sense."""


@dataclass(frozen=True)
class Generation:
    """The parts of a ``generate`` run."""

    config: GenerateConfig
    generation_prompts: GenerationPrompts
    runner: Runner
    tokenizer: PreTrainedTokenizerBase

    @property
    def total_steps(self) -> int:
        return math.ceil(len(self.generation_prompts) / self.config.rollout.rollout_batch_size)

    def prompts_of_step(self, step: int) -> list[GenerationPrompt]:
        """The prompts of a step; the first is 1."""
        size = self.config.rollout.rollout_batch_size
        return self.generation_prompts.take((step - 1) * size, size)

    def num_prompts_of_step(self, step: int) -> int:
        """How many those are."""
        size = self.config.rollout.rollout_batch_size
        return max(0, min(size, len(self.generation_prompts) - (step - 1) * size))

    def close(self) -> None:
        """Close rewards and engine."""
        self.runner.rewards.close()
        self.runner.engine.close()


@dataclass(frozen=True)
class GenerationStep:
    """What a step gave."""

    rollout: Rollout
    selection: Selection
    num_lost: int
    """Prompts on which a reward failed."""


def generate_step(parts: Generation, step: int) -> GenerationStep:
    """Sample, score and choose: the rows of one step. Depends on the step's number and the weights
    alone."""
    config = parts.config
    generation_prompts = {q.prompt.id: q for q in parts.prompts_of_step(step)}
    # For rewards that draw random numbers.
    seed_everything(zlib.crc32(f"{config.seed}/{step}".encode()))
    try:
        rollout = parts.runner.run([q.prompt for q in generation_prompts.values()])
    except NoGroupLeftError as error:
        log.warning("step %d: %s", step, error)
        rollout = Rollout((), Stats(sums={"reward/groups_dropped": error.num_dropped}))
    chosen = select(
        config.mode,
        rollout.groups,
        generation_prompts,
        template=config.condition.template if config.condition is not None else "",
        with_tokens=config.with_tokens,
        tokenizer=parts.tokenizer,
    )
    return GenerationStep(rollout, chosen, len(generation_prompts) - len(rollout.groups))


def build_generation(config: GenerateConfig, runtime: Runtime, functions: Functions) -> Generation:
    """Return the parts of a ``generate`` job. Data and rewards first, as for rl."""
    new_tokens = config.rollout.generate_max_len
    data = within_positions(config.data, config.model, new_tokens=new_tokens)
    generation_prompts = GenerationPrompts(
        data,
        runtime.tokenizer,
        limit=config.num_prompts,
        condition=config.condition,
        one_form=not config.output.lower().endswith(".jsonl"),
    )
    rewards = reward_set(
        weighted_rewards(config.rewards, runtime, functions),
        on_failure=config.on_reward_failure,
        max_len=new_tokens,
    )
    first = generation_prompts.take(0, config.rollout.rollout_batch_size)
    warn_without_labels([generation_prompt.prompt for generation_prompt in first], rewards)
    longest = data.prompt_max_len + new_tokens
    engine = runtime.standalone_rollout(config.model, config.rollout.engine, max_len=longest)
    runner = Runner(
        timed(engine, runtime.timeline, {"generate": "rollout"}),
        timed(rewards, runtime.timeline, {"score": "reward"}),
        sampling_of(config.rollout),
        num_samples=config.rollout.n_samples_per_prompt,
        seed=config.seed,
    )
    return Generation(config, generation_prompts, runner, runtime.tokenizer)


# ---- before a run --------------------------------------------------------------------------------


def output_path(config: GenerateConfig, run_dir: Path) -> Path:
    """Where the rows go at the end."""
    return Path(config.output.replace("{run_dir}", str(run_dir)))


def check_output(config: GenerateConfig, run_dir: Path, *, resumed: bool) -> None:
    """Raise RunError where the output is there already, or its folder cannot be made. (A resumed
    run looks again when it writes it.)"""
    output = output_path(config, run_dir)
    if output.is_dir() or (output.exists() and not resumed):
        raise RunError(
            f"the output {output} exists, and is not written over; move it away, or choose another "
            "by output=..."
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder of the output {output} cannot be made: {error}") from error


def finished(config: GenerateConfig, run_dir: Path) -> Metrics | None:
    """The totals of a run that has written its output; None where there is something left to do.

    Raises RunError where the output is asked for under another name.
    """
    parts = OutputShards(run_dir)
    state = parts.state() or {}
    if "finished" not in state:
        return None
    output = Path(state["output"].replace("{run_dir}", str(run_dir)))
    if config.output != state["output"]:
        raise RunError(
            f"the run {run_dir} is finished, and its rows are in {output}; copy that file, or "
            "start a new run"
        )
    if not output.exists():
        raise RunError(
            f"the run {run_dir} is finished, and its output {output} is not there any more; start "
            "a new run"
        )
    parts.remove()  # of a run that was killed right before
    return _as_metrics(state["finished"])


def check_same_recipe(config: GenerateConfig, run_dir: Path) -> None:
    """Raise RunError where a resumed run's recipe would give other rows than those it has."""
    saved = run_dir / "config.yaml"
    then = yaml.safe_load(saved.read_text(encoding="utf-8"))
    now = yaml.safe_load(dump_yaml(config))
    told = changed_settings(then, now).items()
    changed = [f"{key}: {what}" for key, what in told if not _may_change(key)]
    if changed:
        raise RunError(
            f"the run {run_dir} was begun with another recipe, and its rows would be of two: "
            f"{'; '.join(changed)}. Go on without these changes, or start a new run. ("
            f"{', '.join(MAY_CHANGE)}, on_reward_failure and how rewards are asked may change.)"
        )


def _may_change(key: str) -> bool:
    return _MAY_CHANGE.fullmatch(key) is not None


# ---- a run ---------------------------------------------------------------------------------------


class GenerateRun(Driver[Generation]):
    """Runs the steps that are missing: metrics, samples, parts, signals, the output."""

    config: GenerateConfig

    def __init__(
        self, config: GenerateConfig, run_dir: Path, memory_monitor: MemoryMonitor
    ) -> None:
        super().__init__(config, run_dir, memory_monitor)
        self.files = OutputShards(run_dir)
        self.signals = StopSignals(self._announce_stop)
        self._last: Metrics = {}

    def run(self, loop: Generation) -> Metrics:
        """Do all steps that are missing, then write the output. Return the last value of every
        metric.

        Raises Interrupted after a signal, once the step under way is kept; a second signal ends the
        process at once.
        """
        self.parts = loop
        self.open()
        self.progress = Progress(loop.total_steps, every=self.config.observe.log_every_n_steps)
        self.closing.callback(self.progress.close)
        for warning in self.config.warnings():
            log.warning(warning)
        mine = self._check_prompts()
        write_text(self.run_dir / "config.yaml", dump_yaml(self.config))
        self.files.write_state(mine)
        self._restore()
        self.metrics.start_trackers()
        self._log_excluded_columns()
        with self.measured_memory():
            self._do_missing_steps()
            return self._last | self._finish()

    def _do_missing_steps(self) -> None:
        with self.signals, rare_garbage_collection():
            for step in range(len(self.files.done) + 1, self.parts.total_steps + 1):
                if self.signals.asked is not None:
                    raise Interrupted(self.run_dir, self.signals.asked)
                self._one_step(step)

    def _check_prompts(self) -> dict[str, Any]:
        """What the run is of. Raises RunError where it was begun with other prompts or
        weights."""
        generation_prompts, state = self.parts.generation_prompts, self.files.state()
        scorers = [r.model for r in self.config.rewards if isinstance(r, ModelReward)]
        mine = {
            "prompts": len(generation_prompts),
            "digest": generation_prompts.digest,
            "weights": weights_digest([self.config.model, *scorers]),
        }
        if state is None and self.files.path(1).exists():
            raise RunError(f"{self.run_dir} has rows and no {STATE_FILE}; start a new run")
        if state is not None and state.get("weights") != mine["weights"]:
            raise RunError(
                f"the run {self.run_dir} was begun with other weights than those that the models' "
                "folders hold now, and its rows would be of two models; restore them, or start a "
                "new run"
            )
        if state is not None and {name: state.get(name) for name in mine} != mine:
            raise RunError(
                f"the run {self.run_dir} was begun with {state.get('prompts')} prompts, and the "
                f"data gives {len(generation_prompts)} now, or other ones; rows would come twice, "
                "never, or with another label. Restore the data and the tokenizer, or "
                "start a new run"
            )
        return mine

    def _restore(self) -> None:
        """What is done, and the logs as they were then."""
        (self.run_dir / OOM_FILE).unlink(missing_ok=True)
        self.files.find(self.parts.num_prompts_of_step)
        done = len(self.files.done)
        self.metrics.rewind(done)
        drop_samples_after(self.run_dir, done)
        for line in read_metrics(self.run_dir):
            self._last |= {k: v for k, v in line.items() if k not in ("step", "time")}
        if done:
            self.progress.message(f"resumed after step {done} of {self.parts.total_steps}")

    def _log_excluded_columns(self) -> None:
        generation_prompts = self.parts.generation_prompts
        if generation_prompts.dropped:
            log.warning("left out: %d %s", generation_prompts.dropped, DROPS["prompts_overlong"])
        if generation_prompts.left_out:
            log.warning(
                "columns of the data that are left out, since rows have their own or SFT would "
                "read them: %s",
                ", ".join(generation_prompts.left_out),
            )

    def _one_step(self, step: int) -> None:
        started = time.perf_counter()
        answered = generate_step(self.parts, step)
        chosen, groups = answered.selection, answered.rollout.groups
        dropped = dict(chosen.dropped)
        if answered.num_lost:
            dropped["prompts_reward_failed"] = answered.num_lost
        sums = _sums(answered)
        metrics = self._measure(step, answered, dropped, sums)
        metrics["time/step_s"] = time.perf_counter() - started
        # The part comes last: a step without it is done again, and its other traces are removed.
        limit = self.config.observe.samples_per_step
        write_samples(self.run_dir, step, groups, None, limit=limit, split="generate")
        self.metrics.log(step, metrics)
        num = self.parts.num_prompts_of_step(step)
        self.files.add({"prompts": num, "dropped": dropped, "sums": sums}, chosen.rows)
        self._last |= metrics
        self.progress.step(step, metrics)
        self._raise_if_all_failed()

    def _measure(
        self,
        step: int,
        answered: GenerationStep,
        dropped: Mapping[str, int],
        sums: Mapping[str, float],
    ) -> Metrics:
        stats, rows = answered.rollout.stats.floats(), len(answered.selection.rows)
        if not self.config.rewards:
            stats = {k: v for k, v in stats.items() if not k.startswith("reward/")}
        metrics = stats | {f"generate/dropped_{name}": float(n) for name, n in dropped.items()}
        size = self.config.rollout.rollout_batch_size
        metrics["generate/rows"] = float(rows)
        metrics["generate/prompts_done"] = float(
            (step - 1) * size + self.parts.num_prompts_of_step(step)
        )
        metrics["generate/prompts_total"] = float(len(self.parts.generation_prompts))
        for name in ("kept_reward", "margin"):
            if rows and name in sums:
                metrics[f"generate/{name}"] = sums[name] / rows
        if sums["samples"]:
            metrics["rollout/truncated_frac"] = sums["truncated"] / sums["samples"]
        seconds = self.timeline.collect()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        if seconds.get("rollout"):
            metrics["rollout/tokens_per_s"] = sums["tokens"] / seconds["rollout"]
        return metrics | memory_metrics() | self.memory_monitor.metrics()

    def _raise_if_all_failed(self) -> None:
        newest = self.files.done[-_MAX_LOST_STEPS:]
        lost = all(i.dropped.get("prompts_reward_failed", 0) == i.prompts for i in newest)
        if len(newest) == _MAX_LOST_STEPS and lost:
            raise RewardError(
                f"a reward failed on every prompt of the last {_MAX_LOST_STEPS} steps (the "
                "warnings above say how); on_reward_failure.then=fail stops at the first error"
            )

    def _finish(self) -> Metrics:
        """Write the output and say what became of every prompt."""
        totals = self.files.totals()
        if self.parts.generation_prompts.dropped:
            totals["prompts_overlong"] = self.parts.generation_prompts.dropped
        output = output_path(self.config, self.run_dir)
        with self.timeline.span("write"):
            self.files.publish(output)
        state = self.files.state() or {}
        self.files.write_state(state | {"output": self.config.output, "finished": totals})
        self.files.remove()
        for line in summary(totals, output):
            self.progress.message(line)
        if not totals["rows"]:
            log.warning("the output %s has no rows: everything was left out", output)
        return _as_metrics(totals)

    def _announce_stop(self, name: str) -> None:
        self.progress.message(
            f"{name}: finishing the step under way, then stopping; once more stops at once, and "
            "that step is done again"
        )


def _as_metrics(totals: Mapping[str, float]) -> Metrics:
    return {f"total/{name}": float(value) for name, value in totals.items()}


def summary(totals: Mapping[str, float], output: Path) -> list[str]:
    """What a run did, in a few lines: rows, prompts, everything that was left out."""
    lines = [
        f"wrote {output}: {totals['rows']:,.0f} rows from {totals['prompts']:,.0f} prompts "
        f"({totals.get('samples', 0):,.0f} responses, {totals.get('tokens', 0):,.0f} tokens)"
    ]
    if totals.get("scored"):
        lines.append(f"mean reward {totals['reward'] / totals['scored']:.4g}")
    for name, words in (("kept_reward", "of the rows"), ("margin", "margin of the pairs")):
        if name in totals and totals["rows"]:
            what = f"mean reward {words}" if name == "kept_reward" else f"mean {words}"
            lines.append(f"{what} {totals[name] / totals['rows']:.4g}")
    lines += [f"left out: {totals[k]:,.0f} {words}" for k, words in DROPS.items() if totals.get(k)]
    return lines


def _sums(answered: GenerationStep) -> dict[str, float]:
    samples = [s for group in answered.rollout.groups for s in group.samples]
    scored = [s.reward for s in samples if s.reward_parts]
    found: dict[str, float] = {
        "samples": len(samples),
        "tokens": sum(len(s.response_ids) for s in samples),
        "truncated": sum(s.finish_reason != "stop" for s in samples),
    }
    if scored:
        found |= {"scored": len(scored), "reward": math.fsum(scored)}
    return found | dict(answered.selection.sums)


class GenerateJob(Job[GenerateConfig, Generation]):
    """The job ``generate``."""

    config_class = GenerateConfig
    takes_rewards = True

    def prepare(self, config: GenerateConfig, run_dir: Path, *, resumed: bool) -> Metrics | None:
        check_output(config, run_dir, resumed=resumed)
        if not resumed:
            return None
        check_same_recipe(config, run_dir)
        return finished(config, run_dir)

    def driver(
        self, config: GenerateConfig, run_dir: Path, memory_monitor: MemoryMonitor
    ) -> GenerateRun:
        return GenerateRun(config, run_dir, memory_monitor)

    def build(
        self, config: GenerateConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> Generation:
        return build_generation(config, runtime, functions)


JOB = GenerateJob()
