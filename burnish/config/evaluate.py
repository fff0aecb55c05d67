"""Recipe of the job ``evaluate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from burnish.config.base import PathText
from burnish.config.episodes import Episodes, episode_rules, episodes_lines
from burnish.config.inference import InferenceJob
from burnish.config.model import new_adapter_rules
from burnish.config.observe import TrackersConfig
from burnish.config.rewards import Scoring, no_weight_advice
from burnish.config.roles import (
    RolloutRole,
    RowLengths,
    SectionLimits,
    eval_limits,
    sampled_lengths,
)
from burnish.config.rollout import EvalConfig, pass_advice
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.kinds import RewardConfig
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.local.config import LocalEngine


class EvaluateConfig(InferenceJob):
    """``burnish evaluate``: pass@1 and pass@k of a model on held-out prompts.

    ``eval.generate_max_len`` is required, because there is no ``rollout`` to take it from."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "eval.every_n_steps": "it evaluates once",
        "eval.delay_steps": "it evaluates once",
        "eval.training_groups": "it trains on no groups",
    }

    job: Literal["evaluate"] = "evaluate"
    """Job of the recipe."""
    run_dir: PathText = "runs/{job}-{time}"
    """Folder of the results; ``{job}`` and ``{time}`` are replaced. Must be new or empty."""
    eval: EvalConfig
    """Prompts, samples and thresholds."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """Rewards of the responses."""
    engine: RolloutEngineConfig = LocalEngine()
    """Rollout engine."""
    episodes: Episodes | None = None
    """Multi-turn episodes. None: one response per prompt."""
    observe: TrackersConfig = TrackersConfig()
    """Trackers of the scores."""

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.rewards, self.episodes is not None, self.on_reward_failure)

    def section_limits(self, name: str) -> SectionLimits:
        return eval_limits(self.eval, self.model, new_tokens=self.row_lengths.rest)

    @property
    def row_lengths(self) -> RowLengths:
        longest = max(self.eval.sections.values(), key=lambda data: data.prompt_max_len)
        return sampled_lengths(longest, self.eval.generate_max_len or 1, self.episodes)

    @property
    def rows_per_step(self) -> int:
        return (self.eval.num_prompts or 1000) * self.eval.n_samples_per_prompt

    def rollout_role(self) -> RolloutRole:
        return replace(
            self.rollout_on(self.engine, key="engine", lengths=self.row_lengths),
            evaluation=self.eval,
            episodes=self.episodes,
        )

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        return self.form_lines() + episodes_lines(
            self.episodes, turn_tokens=self.eval.generate_max_len, at_once=self.rows_per_step
        )

    def rules(self) -> Iterator[str]:
        yield from new_adapter_rules(self.model, self.job)
        if self.eval.generate_max_len is None:
            yield (
                "eval.generate_max_len is not set, and this job has no rollout to inherit it "
                "from; set it"
            )
        if self.cluster.runtime == "spmd" and self.engine.not_spmd is not None:
            yield (
                f"engine.kind={self.engine.kind} on the ranks of a launcher "
                f"(cluster.runtime=spmd): {self.engine.not_spmd}; use "
                "engine.kind=local, or cluster.runtime=ray with cluster.rollout_workers"
            )
        if self.cluster.runtime == "spmd" and self.episodes is not None:
            yield (
                "episodes on the ranks of a launcher (cluster.runtime=spmd): each rank would start "
                "its own servers and environments; use cluster.runtime=ray, or one process"
            )
        for key, data in self.eval.sections.items():
            yield from episode_rules(self.episodes, data, self.rewards, key=key)

    def advice(self) -> Iterator[str]:
        yield from pass_advice(self.eval, self.rewards)
        yield from no_weight_advice(self.rewards)
