"""Score given responses: read rows, and write the same rows with ``reward`` and ``rewards`` added.

A step is a fixed slice of the rows; each reward is called once with the entire slice.
``driver/rows_run.py`` runs the steps, keeps the result of each, and resumes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from burnish.config.model import ModelConfig
from burnish.config.score import ScoreConfig
from burnish.data.responses.encode import GivenResponses
from burnish.driver.base import Functions
from burnish.driver.rows_run import StepRows, WritesRows, sums_of
from burnish.jobs.build import reward_set, weighted_rewards
from burnish.observe.timeline import timed
from burnish.rewards.labels import label_problem, label_readers
from burnish.rewards.reward_set import NoGroupLeftError, RewardedGroups, RewardSet
from burnish.runtime.base import Runtime
from burnish.steps.no_signal import warn_without_labels

log = logging.getLogger("burnish")

FAILED = "prompts_reward_failed"
_WORDS = {
    "prompts_overlong": "rows dropped because their prompt is longer than data.prompt_max_len "
    "(data.overlong=drop)",
    FAILED: "rows whose reward is null because a reward failed (on_reward_failure.then=drop_group)",
}


@dataclass(frozen=True)
class ScoreLoop:
    """The loop of a ``score`` run. Implements ``rows_run.RowsLoop``."""

    config: ScoreConfig
    responses: GivenResponses
    rewards: RewardSet

    @property
    def total_steps(self) -> int:
        """Number of slices of ``batch_size`` rows."""
        return math.ceil(len(self.responses) / self.config.batch_size)

    @property
    def identity(self) -> Mapping[str, Any]:
        """Number of rows and their digest, which must not change on resume."""
        return {"prompts": len(self.responses), "digest": self.responses.digest}

    @property
    def models(self) -> Sequence[ModelConfig]:
        """Empty: only the tokenizer of ``model`` is used, and the digest covers its tokens."""
        return []

    def num_prompts_of_step(self, step: int) -> int:
        """Return the number of rows of a step; the first step is 1."""
        size = self.config.batch_size
        return max(0, min(size, len(self.responses) - (step - 1) * size))

    def warn(self) -> None:
        """Log how many rows are dropped."""
        if self.responses.dropped:
            log.warning("%d %s", self.responses.dropped, _WORDS["prompts_overlong"])

    def step(self, number: int) -> StepRows:
        """Score one slice. If a reward fails on a row, the row is kept with null as its reward."""
        size = self.config.batch_size
        responses = self.responses.take((number - 1) * size, size)
        try:
            scored = self.rewards.score([item.group for item in responses])
        except NoGroupLeftError as error:
            log.warning("step %d: %s", number, error)
            scored = RewardedGroups((), (), error.stats)
        samples = {group.prompt.id: group.samples[0] for group in scored.groups}
        rows = []
        for item in responses:
            sample = samples.get(item.group.prompt.id)
            reward = None if sample is None else sample.reward
            rewards = None if sample is None else dict(sample.reward_parts)
            rows.append({**item.columns, "reward": reward, "rewards": rewards})
        lost = len(responses) - len(samples)
        metrics = scored.stats.floats()
        done = (number - 1) * size + len(responses)
        metrics |= {"score/rows_done": float(done), "score/rows_total": float(len(self.responses))}
        dropped = {FAILED: lost} if lost else {}
        return StepRows(rows, scored.groups, metrics, dropped, sums_of(scored.groups))

    def totals(self) -> Mapping[str, float]:
        """Return the number of rows dropped before the first step."""
        return {"prompts_overlong": self.responses.dropped} if self.responses.dropped else {}

    def summary(self, totals: Mapping[str, float], output: Path) -> list[str]:
        """Return a summary of the run: rows, the mean reward, and failures."""
        lines = [f"wrote {output}: {totals['rows']:,.0f} rows"]
        if totals.get("scored"):
            lines.append(f"mean reward {totals['reward'] / totals['scored']:.4g}")
        return lines + [f"{totals[k]:,.0f} {words}" for k, words in _WORDS.items() if totals.get(k)]

    def close(self) -> None:
        """Close the rewards."""
        self.rewards.close()


class ScoreJob(WritesRows[ScoreConfig, ScoreLoop]):
    """The job ``score``."""

    config_class = ScoreConfig

    def build(
        self, config: ScoreConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> ScoreLoop:
        responses = GivenResponses(
            config.data,
            runtime.tokenizer,
            limit=config.num_rows,
            problem_of=partial(
                label_problem, label_readers(config.rewards, config.on_reward_failure)
            ),
        )
        rewards = reward_set(
            weighted_rewards(config.rewards, runtime, functions),
            on_failure=config.on_reward_failure,
            max_len=config.generate_max_len or 1,
            shaping=config.shaping,
        )
        first = responses.take(0, config.batch_size)
        warn_without_labels([item.group.prompt for item in first], rewards)
        return ScoreLoop(config, responses, timed(rewards, runtime.timeline, {"score": "reward"}))


JOB = ScoreJob()
