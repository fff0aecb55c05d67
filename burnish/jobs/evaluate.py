"""Held-out evaluation: pass@1 and pass@k, during a run and as a separate job."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from burnish.config import EvaluateConfig, JobConfig
from burnish.config.eval_section import eval_place, eval_prefix
from burnish.config.rewards import FailurePolicy, ShapingConfig, passes_unweighted
from burnish.config.rollout import EvalConfig, SamplingConfig
from burnish.data.prompts.encode import load_prompts
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.driver.base import Driver, Functions, Job, Metrics
from burnish.driver.errors import RunError
from burnish.driver.memory_monitor import MemoryMonitor
from burnish.episodes.runner import EpisodePool, EpisodesFailedError
from burnish.jobs.build import (
    WeightedRewards,
    sampling_of,
    weighted_rewards,
)
from burnish.jobs.episodes import RunnerOptions, build_episode_pool, closed_on_error, make_runner
from burnish.observe.progress import FILE_ONLY, tell
from burnish.observe.public_recipe import write_recipe
from burnish.observe.sample_tokens import TokenTexts
from burnish.observe.samples import write_samples
from burnish.observe.timeline import timed
from burnish.preflight.limits import limited
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet
from burnish.rollout.base import Sampling, wait_for_engine
from burnish.rollout.runner import Runner, numbered
from burnish.runtime.base import Runtime
from burnish.steps.kept_samples import sampled_tokens
from burnish.steps.no_signal import warn_without_labels
from burnish.types import Group, Prompt, least_score

log = logging.getLogger("burnish")


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k samples drawn without replacement passes (arXiv
    2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k). Example: n = 4, c = 1, k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3/6 = 0.5.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Evaluator:
    """An evaluator that samples responses to held-out prompts and reports the share that passes."""

    config: EvalConfig
    sets: Mapping[str, Sequence[Prompt]]
    """Prompts by the name of their set. The name of ``eval.data`` is empty."""
    runner: Runner
    keep_samples: Callable[[int, Sequence[Group], str], object]
    """Write the scored groups of a step and a set."""
    ranks: RankGroup = SINGLE
    """Ranks that share the prompts. Each has its own runner."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return ``eval/pass@k`` for every requested k, ``eval/reward``, ``eval/response_len``,
        ``eval/prompts`` and ``eval/failed_frac``. If there are several rewards,
        ``eval/reward/<name>`` gives the mean of each, unweighted. The metrics of a named set begin
        with ``eval/NAME/``.

        All cover all samples of all prompts: one without a score (its episode failed, or a reward
        did) has not passed. Only the length is that of the samples with a score. Raises RunError if
        no response or too few episodes can be scored."""
        metrics: dict[str, float] = {}
        for name, prompts in self.sets.items():
            metrics |= self._measured(step, name, prompts)
        return metrics

    def _measured(self, step: int, name: str, prompts: Sequence[Prompt]) -> dict[str, float]:
        groups = self._groups(prompts)
        if self.ranks.rank == 0:
            self.keep_samples(step, groups, name)
        to_pass, least = self.runner.rewards.to_pass, least_score(self.config.pass_threshold)
        passed = [sum(to_pass(s) >= least for s in group.samples) for group in groups]
        passed += [0] * (len(prompts) - len(groups))  # all of their samples failed
        count, prefix = self.runner.num_samples, eval_prefix(name)
        samples, total = [s for group in groups for s in group.samples], count * len(prompts)
        metrics = {
            f"{prefix}pass@{k}": sum(pass_at_k(count, c, k) for c in passed) / len(passed)
            for k in sorted({1, *self.config.pass_k})
        }
        names = dict.fromkeys(name for sample in samples for name in sample.reward_parts)
        if len(names) > 1:
            for part in names:
                values = [sample.reward_parts.get(part, 0.0) for sample in samples]
                metrics[f"{prefix}reward/{part}"] = _mean_of_all(values, total)
        return metrics | {
            f"{prefix}reward": _mean_of_all([s.reward for s in samples], total),
            f"{prefix}response_len": sum(s.num_sampled_tokens for s in samples) / len(samples),
            f"{prefix}prompts": float(len(prompts)),
            f"{prefix}failed_frac": 1 - len(samples) / total,
        }

    def _groups(self, prompts: Sequence[Prompt]) -> Sequence[Group]:
        """Return the scored groups in the order of the prompts. Each rank samples every
        ``ranks.size``-th prompt. Raises RunError on all ranks if none has a result."""
        prompts_of_rank = prompts[self.ranks.rank :: self.ranks.size]
        failure: NoGroupLeftError | EpisodesFailedError | None = None
        groups_of_rank: Sequence[Group] = ()
        try:
            if prompts_of_rank:
                groups_of_rank = self.runner.run(prompts_of_rank, by_sample=True).groups
        except (NoGroupLeftError, EpisodesFailedError) as error:
            failure = error
        by_rank = self.ranks.gather((groups_of_rank, None if failure is None else str(failure)))
        if not any(groups for groups, _ in by_rank):
            why = next((text for _, text in by_rank if text is not None), "there are no prompts")
            raise RunError(
                f"the evaluation of {len(prompts)} prompts has no result: {why}"
            ) from failure
        if self.ranks.size == 1:
            return groups_of_rank
        order = {prompt.id: number for number, prompt in enumerate(prompts)}
        merged = [group for groups, _ in by_rank for group in groups]
        return numbered(sorted(merged, key=lambda group: order[group.prompt.id]))

    def close(self) -> None:
        """Close the rewards and the engine."""
        self.runner.close()


_ALL = 1 << 30
_WITH_TOKENS = 8
"""Samples of a set that the job ``evaluate`` keeps with their tokens."""


def _mean_of_all(scores: Sequence[float], total: int) -> float:
    """Return the mean score of ``total`` samples. One without a score counts as 0, or as the lowest
    score if that is negative: it is no better than the worst sample with a score."""
    return (sum(scores) + (total - len(scores)) * min(0.0, *scores)) / total


def held_out_prompts(
    config: EvalConfig | None,
    job: JobConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    in_episodes: bool,
) -> dict[str, Sequence[Prompt]]:
    """Load the prompts of an evaluation by the name of their set; empty if there is no evaluation.
    ``in_episodes``: the prompts start episodes."""
    prompts: dict[str, Sequence[Prompt]] = {}
    if config is None:
        return prompts
    for name, data in config.by_name.items():
        key = eval_place(name)
        prompts[name] = load_prompts(
            limited(job, data, field=key),
            tokenizer,
            limit=config.num_prompts,
            section=key,
            in_episodes=in_episodes,
        )
    return prompts


def longest_row(config: EvalConfig | None, new_tokens: int) -> int:
    """Return the maximum number of tokens of an evaluation prompt with its response; 0 if there is
    no evaluation."""
    if config is None:
        return 0
    return config.prompt_max_len + (config.generate_max_len or new_tokens)


def eval_sampling(config: EvalConfig, rollout: SamplingConfig) -> Sampling:
    """Return the sampling parameters of the evaluation: its own temperature, and the rollout's
    length and stops unless the evaluation sets them. Top-p, top-k and min-p are off."""
    return replace(
        sampling_of(rollout),
        temperature=config.temperature,
        max_tokens=config.generate_max_len or rollout.generate_max_len,
        stop=rollout.stop if config.stop is None else config.stop,
        stop_token_ids=rollout.stop_token_ids
        if config.stop_token_ids is None
        else config.stop_token_ids,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    )


def eval_rewards(
    scores: WeightedRewards, on_failure: FailurePolicy, sampling: Sampling
) -> RewardSet:
    """Return the reward set of an evaluation, which does not shape rewards."""
    return RewardSet(
        scores,
        on_failure=on_failure,
        shaping=ShapingConfig(),
        generate_max_len=sampling.max_tokens,
    )


def keep_samples(
    run_dir: Path, texts: TokenTexts, *, count: int
) -> Callable[[int, Sequence[Group], str], object]:
    """Return a function that writes all samples of an evaluation to the run folder, the first
    ``count`` of each set with their tokens."""

    def keep(step: int, groups: Sequence[Group], name: str) -> None:
        split = f"eval_{name}" if name else "eval"
        tokens = sampled_tokens(groups, texts, limit=_ALL, count=count)
        write_samples(run_dir, step, groups, None, limit=_ALL, split=split, tokens=tokens)

    return keep


def build_evaluation(
    config: EvaluateConfig, runtime: Runtime, functions: Functions, run_dir: Path
) -> Evaluator:
    """Return the evaluator of an ``evaluate`` job."""
    episode_pool = build_episode_pool(config.episodes, config.model, runtime)
    with closed_on_error(episode_pool):
        return _build(config, runtime, functions, run_dir, episode_pool)


def _build(
    config: EvaluateConfig,
    runtime: Runtime,
    functions: Functions,
    run_dir: Path,
    episode_pool: EpisodePool | None,
) -> Evaluator:
    assert config.eval.generate_max_len is not None
    new_tokens = config.row_lengths.rest
    held_out = held_out_prompts(
        config.eval, config, runtime.tokenizer, in_episodes=episode_pool is not None
    )
    wait_for_engine(config.engine)
    scores = weighted_rewards(config.rewards, runtime, functions)
    longest = config.eval.prompt_max_len + new_tokens
    engine = runtime.standalone_rollout(config.model, config.engine, max_len=longest)
    plain = SamplingConfig(generate_max_len=config.eval.generate_max_len)
    sampling = eval_sampling(config.eval, plain)
    rewards = eval_rewards(scores, config.on_reward_failure, sampling)
    warn_without_labels([prompt for prompts in held_out.values() for prompt in prompts], rewards)
    runner = make_runner(
        engine,
        timed(rewards, runtime.timeline, {"score_samples": "reward"}),
        sampling,
        episode_pool,
        timeline=runtime.timeline,
        options=RunnerOptions(config.eval.n_samples_per_prompt, config.seed),
    )
    keep = keep_samples(run_dir, TokenTexts(runtime.tokenizer), count=_WITH_TOKENS)
    return Evaluator(config.eval, held_out, runner, keep, ranks=runtime.loop_ranks)


class Evaluation(Driver[Evaluator]):
    """Driver of an ``evaluate`` job: one measurement with log, metrics, timeline and score."""

    config: EvaluateConfig

    def run(self, loop: Evaluator) -> Metrics:
        """Measure once, write the metrics and print the score. Return the metrics."""
        self.open()
        for warning in self.config.warnings():  # already printed when the recipe was loaded
            log.warning(warning, extra=FILE_ONLY)
        write_recipe(self.config, self.records_dir)
        self.metrics.start_trackers()
        samples = self.config.eval.n_samples_per_prompt
        num = sum(len(prompts) for prompts in loop.sets.values())
        tell(f"evaluating {num:,} prompts with {samples} samples per prompt")
        with self.measured_memory():
            started = time.perf_counter()
            metrics = loop.evaluate(0)
            metrics["time/step_s"] = time.perf_counter() - started
            seconds = self.timeline.collect()
            metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
            metrics = self.log(0, metrics)
        threshold = self.config.eval.pass_threshold
        weights = [entry.weight for entry in self.config.rewards]
        unweighted = passes_unweighted(weights) and sum(weights) != 1
        for line in score_lines(metrics, threshold=threshold, unweighted=unweighted):
            tell(line)
        return metrics


def score_lines(
    metrics: Mapping[str, float], *, threshold: float, unweighted: bool = False
) -> list[str]:
    """Return each ``eval/`` metric as one line of text. ``unweighted``: responses pass by a score
    that is not the reward, which has a weight.

    >>> score_lines({"eval/pass@1": 0.25, "eval/reward": 0.5, "time/eval_s": 1.0}, threshold=1.0)
    ['pass@1        0.2500  (passed: reward of at least 1)', 'reward        0.5000']
    """
    scores = {n.removeprefix("eval/"): v for n, v in metrics.items() if n.startswith("eval/")}
    width = max(12, *map(len, scores))
    lines = []
    for name, value in scores.items():
        shown = f"{value:,.0f}" if name == "prompts" else f"{value:.4f}"
        lines.append(f"{name:<{width}}  {shown}")
    passed_by = "score without its weight" if unweighted else "reward"
    lines[0] += f"  (passed: {passed_by} of at least {threshold:g})"
    return lines


class EvaluateJob(Job[EvaluateConfig, Evaluator]):
    """The job ``evaluate``."""

    config_class = EvaluateConfig
    takes_rewards = True

    def driver(
        self, config: EvaluateConfig, run_dir: Path, memory_monitor: MemoryMonitor
    ) -> Evaluation:
        return Evaluation(config, run_dir, memory_monitor)

    def build(
        self, config: EvaluateConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> Evaluator:
        return build_evaluation(config, runtime, functions, run_dir)


JOB = EvaluateJob()
