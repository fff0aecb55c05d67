"""Batch inference: sample responses to prompts and write them as rows of data.

A step is a fixed slice of the prompts, sampled and scored together. Each response has its own
random numbers. ``driver/rows_run.py`` runs the steps, keeps the result of each, and resumes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config import GenerateConfig
from burnish.config.model import ModelConfig
from burnish.data.prompts.generation import (
    GenerationPrompt,
    GenerationPrompts,
)
from burnish.data.selection import DROPS, Selection, select
from burnish.driver.base import Functions, Metrics
from burnish.driver.rows_run import StepRows, WritesRows, sums_of
from burnish.episodes.runner import EpisodePool
from burnish.jobs.build import reward_set, sampling_of, weighted_rewards
from burnish.jobs.episodes import RunnerOptions, build_episode_pool, closed_on_error, make_runner
from burnish.observe.sample_tokens import TokenTexts
from burnish.observe.timeline import timed
from burnish.preflight.limits import limited
from burnish.rewards.labels import label_problem, label_readers
from burnish.rewards.reward_set import NoGroupLeftError
from burnish.rollout.base import wait_for_engine
from burnish.rollout.runner import Rollout, Runner
from burnish.runtime.base import Runtime
from burnish.steps.kept_samples import sampled_tokens
from burnish.steps.no_signal import warn_without_labels

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class Generation:
    """The components of a ``generate`` run. Implements ``rows_run.RowsLoop``."""

    config: GenerateConfig
    generation_prompts: GenerationPrompts
    runner: Runner
    tokenizer: PreTrainedTokenizerBase
    texts: TokenTexts

    @property
    def total_steps(self) -> int:
        return math.ceil(len(self.generation_prompts) / self.config.rollout.rollout_batch_size)

    def prompts_of_step(self, step: int) -> list[GenerationPrompt]:
        """Return the prompts of a step; the first step is 1."""
        size = self.config.rollout.rollout_batch_size
        return self.generation_prompts.take((step - 1) * size, size)

    def num_prompts_of_step(self, step: int) -> int:
        """Return the number of prompts of a step; the first step is 1."""
        size = self.config.rollout.rollout_batch_size
        return max(0, min(size, len(self.generation_prompts) - (step - 1) * size))

    @property
    def identity(self) -> Mapping[str, Any]:
        """Number of prompts and their digest, which must not change on resume."""
        return {"prompts": len(self.generation_prompts), "digest": self.generation_prompts.digest}

    @property
    def models(self) -> Sequence[ModelConfig]:
        """The sampled model."""
        return [self.config.model]

    def warn(self) -> None:
        """Log the prompts and columns that are excluded."""
        generation_prompts = self.generation_prompts
        if generation_prompts.dropped:
            log.warning("dropped: %d %s", generation_prompts.dropped, DROPS["prompts_overlong"])
        if generation_prompts.left_out:
            log.warning(
                "columns of the data that are not copied to the output, because their names are "
                "those of output columns, or of columns that the next job would read: %s",
                ", ".join(generation_prompts.left_out),
            )

    def step(self, number: int) -> StepRows:
        """Sample, score and select the rows of one step."""
        answered = generate_step(self, number)
        chosen, groups = answered.selection, answered.rollout.groups
        dropped = dict(chosen.dropped)
        if answered.num_lost:
            dropped["prompts_reward_failed"] = answered.num_lost
        planned = self.config.rollout.n_samples_per_prompt * len(groups)
        if failed := planned - sum(len(group.samples) for group in groups):
            dropped["samples_failed"] = failed
        sums = sums_of(groups) | dict(chosen.sums)
        metrics = self._measure(number, answered, sums)
        tokens = sampled_tokens(
            groups,
            self.texts,
            limit=self.config.observe.samples_per_step,
            count=self.config.observe.samples_with_tokens,
        )
        return StepRows(chosen.rows, groups, metrics, dropped, sums, tokens)

    def _measure(self, step: int, answered: GenerationStep, sums: Mapping[str, float]) -> Metrics:
        metrics, rows = answered.rollout.stats.floats(), len(answered.selection.rows)
        if not self.config.rewards:
            metrics = {k: v for k, v in metrics.items() if not k.startswith("reward/")}
        size = self.config.rollout.rollout_batch_size
        metrics["generate/prompts_done"] = float((step - 1) * size + self.num_prompts_of_step(step))
        metrics["generate/prompts_total"] = float(len(self.generation_prompts))
        for name in ("kept_reward", "margin"):
            if rows and name in sums:
                metrics[f"generate/{name}"] = sums[name] / rows
        if sums["samples"]:
            metrics["rollout/truncated_frac"] = sums["truncated"] / sums["samples"]
        return metrics

    def totals(self) -> Mapping[str, float]:
        """Return the number of prompts dropped before the first step."""
        dropped = self.generation_prompts.dropped
        return {"prompts_overlong": dropped} if dropped else {}

    def summary(self, totals: Mapping[str, float], output: Path) -> list[str]:
        """Return a summary of the run: rows, prompts, and everything that was dropped."""
        return summary(totals, output)

    def close(self) -> None:
        """Close the rewards and the engine."""
        self.runner.close()


@dataclass(frozen=True)
class GenerationStep:
    """Rollout and selected rows of one step."""

    rollout: Rollout
    selection: Selection
    num_lost: int
    """Number of prompts for which a reward failed."""


def generate_step(parts: Generation, step: int) -> GenerationStep:
    """Sample, score and select the rows of one step. The result depends only on the step number and
    the weights."""
    config = parts.config
    generation_prompts = {q.prompt.id: q for q in parts.prompts_of_step(step)}
    try:
        rollout = parts.runner.run([q.prompt for q in generation_prompts.values()])
    except NoGroupLeftError as error:
        log.warning("step %d: %s", step, error)
        rollout = Rollout((), error.stats)
    chosen = select(
        config.mode,
        rollout.groups,
        generation_prompts,
        template=config.condition.template if config.condition is not None else "",
        with_tokens=config.with_tokens,
        tokenizer=parts.tokenizer,
        as_text=not config.output.lower().endswith(".jsonl"),
    )
    return GenerationStep(rollout, chosen, len(generation_prompts) - len(rollout.groups))


def build_generation(config: GenerateConfig, runtime: Runtime, functions: Functions) -> Generation:
    """Return the components of a ``generate`` job. Data and rewards are built first, because their
    errors are the quickest to find."""
    episode_pool = build_episode_pool(config.rollout.episodes, config.model, runtime)
    with closed_on_error(episode_pool):
        return _build(config, runtime, functions, episode_pool)


def _build(
    config: GenerateConfig, runtime: Runtime, functions: Functions, episode_pool: EpisodePool | None
) -> Generation:
    new_tokens = config.row_lengths.rest
    data = limited(config, config.data)
    generation_prompts = GenerationPrompts(
        data,
        runtime.tokenizer,
        limit=config.num_prompts,
        condition=config.condition,
        one_form=not config.output.lower().endswith(".jsonl"),
        in_episodes=config.rollout.episodes is not None,
        problem_of=partial(label_problem, label_readers(config.rewards, config.on_reward_failure)),
    )
    wait_for_engine(config.rollout.engine)
    rewards = reward_set(
        weighted_rewards(config.rewards, runtime, functions),
        on_failure=config.on_reward_failure,
        max_len=new_tokens,
    )
    first = generation_prompts.take(0, config.rollout.rollout_batch_size)
    warn_without_labels([generation_prompt.prompt for generation_prompt in first], rewards)
    longest = data.prompt_max_len + new_tokens
    engine = runtime.standalone_rollout(config.model, config.rollout.engine, max_len=longest)
    runner = make_runner(
        engine,
        timed(rewards, runtime.timeline, {"score": "reward"}),
        sampling_of(config.rollout),
        episode_pool,
        timeline=runtime.timeline,
        options=RunnerOptions(config.rollout.n_samples_per_prompt, config.seed),
    )
    texts = TokenTexts(runtime.tokenizer)
    return Generation(config, generation_prompts, runner, runtime.tokenizer, texts)


def summary(totals: Mapping[str, float], output: Path) -> list[str]:
    """Return a summary of a run, a few lines: rows, prompts, and everything that was dropped."""
    lines = [
        f"wrote {output}: {totals['rows']:,.0f} rows from {totals['prompts']:,.0f} prompts "
        f"({totals.get('samples', 0):,.0f} responses, {totals.get('tokens', 0):,.0f} tokens)"
    ]
    if totals.get("scored"):
        lines.append(f"mean reward {totals['reward'] / totals['scored']:.4g}")
    means = {"kept_reward": "mean reward of the rows", "margin": "mean margin of the pairs"}
    for name, words in means.items():
        if name in totals and totals["rows"]:
            lines.append(f"{words} {totals[name] / totals['rows']:.4g}")
    lines += [f"dropped: {totals[k]:,.0f} {words}" for k, words in DROPS.items() if totals.get(k)]
    return lines


class GenerateJob(WritesRows[GenerateConfig, Generation]):
    """The job ``generate``."""

    config_class = GenerateConfig

    def build(
        self, config: GenerateConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> Generation:
        return build_generation(config, runtime, functions)


JOB = GenerateJob()
