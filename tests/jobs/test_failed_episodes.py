"""Evaluations with failed episodes: they never look better than the same ones with answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import EvalConfig
from burnish.config.train import better
from burnish.data.prompts.config import PromptDataConfig
from burnish.environments.pool import EpisodeFailedError
from burnish.episodes.loop import EngineCall, EpisodeResult
from burnish.episodes.runner import FAILED, EpisodeRunner
from burnish.jobs.evaluate import Evaluator
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.base import Completion, VersionSpan
from burnish.transcript import Episode, Turn
from burnish.types import Prompt

SAID = {"role": "assistant", "content": "4"}


def result_of(score: float | None, status: Any) -> EpisodeResult:
    """An episode with a score; None: it failed."""
    completion = Completion("r", 0, (7,), (-1.0,), "stop", "4", (VersionSpan(0, 0, 1),))
    if score is None:
        return EpisodeResult(Episode(status, ()), (), EpisodeFailedError(status, "it is slow"))
    record = Episode("done", (), turns=(Turn(SAID, (), rewards={"right": score}),))
    return EpisodeResult(record, (EngineCall((1,), completion),))


class FixedRunner(EpisodeRunner):
    """Runs episodes with given scores. NaN: the reward fails."""

    def __init__(self, scores: Sequence[Sequence[float | None]]) -> None:
        rewards = RewardSet(
            [(EpisodeScorer("right", name="right"), 1.0)],
            on_failure=FailurePolicy(then="drop_group"),
            shaping=ShapingConfig(),
            generate_max_len=9,
        )
        self.scores, self.num_samples, self.rewards = scores, len(scores[0]), rewards
        self.seed, self.dynamic = 0, None

    def draw_all(self, prompts: Sequence[Prompt], *, least: int = 2) -> list[Any]:
        status = random.Random(0).choice(FAILED[:3])
        return [
            self._group_of(prompt, [result_of(s, status) for s in scores], least=least)
            for prompt, scores in zip(prompts, self.scores, strict=True)
        ]

    def check(self, drawn: Any) -> None:
        """Any share of episodes may fail."""


def evaluated(scores: Sequence[Sequence[float | None]], *pass_k: int) -> dict[str, float]:
    config = EvalConfig(
        data=PromptDataConfig(sources=["x.jsonl"]),
        n_samples_per_prompt=len(scores[0]),
        temperature=1.0,
        pass_k=pass_k or (1,),
    )
    prompts = [Prompt(f"p:{i}@0", (1,), "2+2?") for i in range(len(scores))]
    return Evaluator(config, {"": prompts}, FixedRunner(scores), lambda *_: None).evaluate(0)


def test_failed_tasks_have_not_passed() -> None:
    """20 tasks, 12 pass and 8 time out: 12 / 20."""
    found = evaluated([[1.0]] * 12 + [[None]] * 8)
    assert found["eval/pass@1"] == found["eval/reward"] == pytest.approx(0.6)
    assert found["eval/failed_frac"] == pytest.approx(0.4)
    assert found["eval/prompts"] == 20 and found["eval/response_len"] == 1
    assert better("eval/failed_frac") == "min"


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_counts_like_a_wrong_answer(seed: int) -> None:
    """Also the only passing sample of a prompt is counted. Against the definition of pass@k; exact
    up to 1e-12."""
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    scores = [[draw.choice([None, math.nan, 0.0, 1.0]) for _ in range(count)] for _ in range(6)]
    scores[0][0] = 1.0
    found = evaluated(scores, *range(1, count + 1))
    scores = [[None if score != score else score for score in row] for row in scores]
    for k in range(1, count + 1):
        shares = [
            sum(any(s == 1.0 for s in part) for part in combinations(row, k))
            / len(list(combinations(row, k)))
            for row in scores
        ]
        assert found[f"eval/pass@{k}"] == pytest.approx(sum(shares) / 6, abs=1e-12)
    as_wrong = evaluated([[score or 0.0 for score in row] for row in scores], 1)
    for name in ("eval/pass@1", "eval/reward", "eval/prompts"):
        assert found[name] == pytest.approx(as_wrong[name], abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_a_failure_is_no_better_than_the_worst_sample(seed: int) -> None:
    """Rewards may be negative. pass@k falls with every failure, and no mean exceeds that of the
    samples with a score."""
    draw = random.Random(seed)
    scores: list[list[float | None]] = [[draw.uniform(-2, 1) for _ in range(2)] for _ in range(5)]
    before = evaluated(scores, 1, 2)
    for place in draw.sample(range(10), 9):
        scores[place // 2][place % 2] = None
        left = [score for row in scores for score in row if score is not None]
        after = evaluated(scores, 1, 2)
        assert after["eval/failed_frac"] == pytest.approx(1 - len(left) / 10)
        assert after["eval/reward"] <= sum(left) / len(left) + 1e-12
        for name in ("eval/pass@1", "eval/pass@2"):
            assert after[name] <= before[name] + 1e-12
        before = after
