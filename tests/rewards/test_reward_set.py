"""RewardSet: checks, failure policies, weighted sums and stats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import EvalConfig, pass_advice
from burnish.data.prompts.config import PromptDataConfig
from burnish.rewards.base import Reward, RewardError
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.function.reward import FunctionScorer
from burnish.rewards.reward_set import RewardSet
from burnish.transcript import Episode, Turn
from burnish.types import Group

MakeGroup = Callable[..., Group]
FAIL, DROP = FailurePolicy(then="fail"), FailurePolicy(then="drop_group")


def _set(
    *rewards: tuple[Reward, float],
    policy: FailurePolicy = FAIL,
    shaping: ShapingConfig | None = None,
) -> RewardSet:
    return RewardSet(
        rewards, on_failure=policy, shaping=shaping or ShapingConfig(), generate_max_len=4
    )


def _reward(function: Callable[..., Any], name: str = "r") -> FunctionScorer:
    return FunctionScorer(function, name=name)


def _constant(response: str, score: float) -> float:
    return score


def _raise() -> Any:
    raise ZeroDivisionError("no such luck")


BAD_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (_raise, "raised ZeroDivisionError: no such luck"),
    "nan": (lambda: float("nan"), "returned nan instead of a finite number"),
    "inf": (lambda: float("inf"), "returned inf instead of a finite number"),
    "string": (lambda: "1.0", "returned '1.0' instead of a finite number"),
    "none": (lambda: None, "returned None instead of a finite number"),
    "list": (lambda: [1.0], "returned [1.0] instead of a finite number"),
    "huge": (lambda: 10**400, "instead of a finite number"),
    "beyond fp32": (
        lambda: 1e39,
        "returned 1e+39 instead of a number within fp32's range, +-3.4e+38",
    ),
    "beyond fp32, int": (lambda: -(10**39), "instead of a number within fp32's range"),
}
BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (lambda: [1.0], "returned 1 values for 2 responses"),
    "too many": (lambda: [1.0] * 3, "returned 3 values for 2 responses"),
    "string": (lambda: "ab", "returned 'ab' instead of a list of 2 numbers"),
    "none": (lambda: None, "returned None instead of a list of 2 numbers"),
    "number": (lambda: 1.0, "returned 1.0 instead of a list of 2 numbers"),
    "matrix": (lambda: torch.zeros(2, 1), "Tensor of shape (2, 1) instead of shape (2,)"),
    "raises": (_raise, "raised ZeroDivisionError: no such luck"),
}


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_a_bad_value_stops_the_run_with_its_location(bad: str, make_group: MakeGroup) -> None:
    make, message = BAD_VALUES[bad]

    def score(response: str) -> Any:
        return make() if response == "bad" else 1.0

    with pytest.raises(RewardError) as caught:
        _set((_reward(score), 1.0)).score([make_group(0, ["a"]), make_group(1, ["b", "bad"])])
    text = str(caught.value)
    for part in (message, "reward 'r'", "test_reward_set.py:", "'q:1/1'", "'q:1'", "'bad'"):
        assert part in text
    assert "question 1" in text and "What to do" in text and "drop_group" in text


def test_the_largest_number_of_fp32_is_a_reward(make_group: MakeGroup) -> None:
    largest = torch.finfo(torch.float32).max
    scored = _set((_reward(lambda response: -largest), 1.0)).score([make_group(0, ["a"])])
    assert scored.groups[0].samples[0].reward == -largest


def test_the_original_exception_is_the_cause(make_group: MakeGroup) -> None:
    def score(responses: list[str]) -> Any:
        return _raise()

    with pytest.raises(RewardError) as caught:
        _set((_reward(score), 1.0)).score([make_group(0, ["a"])])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_a_bad_value_drops_only_its_own_group(bad: str, make_group: MakeGroup) -> None:
    make, _ = BAD_VALUES[bad]

    def score(response: str) -> Any:
        return make() if response == "bad" else 1.0

    groups = [make_group(0, ["a"]), make_group(1, ["b", "bad"]), make_group(2, ["c"])]
    scored = _set((_reward(score), 1.0), policy=DROP).score(groups)
    assert [group.group_id for group in scored.groups] == [0, 2]
    assert scored.dropped == ("q:1",)
    assert scored.stats.floats()["reward/groups_dropped"] == 1
    assert all(s.reward == 1.0 for group in scored.groups for s in group.samples)


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_to_a_batch_stops_the_run(bad: str, make_group: MakeGroup) -> None:
    make, message = BAD_ANSWERS[bad]

    def score(responses: list[str]) -> Any:
        return make()

    with pytest.raises(RewardError) as caught:
        _set((_reward(score), 1.0)).score([make_group(0, ["a", "b"])])
    assert message in str(caught.value) and "'q:0/0'" in str(caught.value)


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_failed_batch_call_drops_only_the_failing_group(bad: str, make_group: MakeGroup) -> None:
    """Called with all, then group by group: only calls that hold the response ``bad`` fail."""
    make, _ = BAD_ANSWERS[bad]

    def score(responses: list[str]) -> Any:
        return make() if "bad" in responses else [1.0] * len(responses)

    groups = [make_group(0, ["a", "b", "c"]), make_group(1, ["b", "bad"]), make_group(2, ["c"] * 3)]
    scored = _set((_reward(score), 1.0), policy=DROP).score(groups)
    assert [group.group_id for group in scored.groups] == [0, 2]
    assert scored.dropped == ("q:1",)


def test_losing_every_group_is_an_error_with_the_first_failure(make_group: MakeGroup) -> None:
    def score(response: str) -> Any:
        return None

    with pytest.raises(RewardError, match="all 2 groups") as caught:
        _set((_reward(score), 1.0), policy=DROP).score([make_group(0, ["a"]), make_group(1, ["b"])])
    assert "returned None" in str(caught.value)


@pytest.mark.parametrize(("retries", "survives"), [(1, False), (2, True)])
def test_a_failed_call_is_retried_retries_times(
    retries: int, survives: bool, make_group: MakeGroup
) -> None:
    """The third call is the first good one: 1 + 2 calls reach it, 1 + 1 do not."""
    calls: list[int] = []

    def score(responses: list[str]) -> Any:
        calls.append(1)
        return [1.0] if len(calls) == 3 else _raise()

    rewards = _set((_reward(score), 1.0), policy=FailurePolicy(retries=retries))
    if survives:
        assert rewards.score([make_group(0, ["a"])]).groups[0].samples[0].reward == 1.0
    else:
        with pytest.raises(RewardError):
            rewards.score([make_group(0, ["a"])])
    assert len(calls) == 1 + retries


@pytest.mark.parametrize(
    "answer",
    [
        [True, 0],
        (1.0, 0.0),
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([True, False]),
        np.array([1.0, 0.0], dtype=np.float32),
        [np.float32(1), np.bool_(False)],
        [torch.tensor(1.0), torch.tensor(0)],
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_common_number_types_are_accepted(answer: Any, make_group: MakeGroup) -> None:
    def score(responses: list[str]) -> Any:
        return answer

    (group,) = _set((_reward(score), 1.0)).score([make_group(0, ["a", "b"])]).groups
    rewards = [sample.reward for sample in group.samples]
    assert rewards == [1.0, 0.0] and all(type(reward) is float for reward in rewards)


def test_the_total_is_the_weighted_sum_and_parts_are_unweighted(make_group: MakeGroup) -> None:
    """Sample a: 2 * 1 + 0.5 * 4 = 4; sample bb: 2 * 2 + 0.5 * 4 = 6; mean total 5, mean len 1.5."""

    def length(response: str) -> float:
        return len(response)

    def four(response: str) -> float:
        return 4.0

    rewards = _set((_reward(length, "len"), 2.0), (_reward(four, "four"), 0.5))
    scored = rewards.score([make_group(0, ["a", "bb"])])
    first, second = scored.groups[0].samples
    assert (first.reward, second.reward) == (4.0, 6.0)
    assert first.reward_parts == {"len": 1.0, "four": 4.0}
    stats = scored.stats.floats()
    assert (stats["reward/len"], stats["reward/four"], stats["reward/mean"]) == (1.5, 4.0, 5.0)
    assert (stats["reward/truncated_frac"], stats["reward/groups_dropped"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("weights", "compared"),
    [((2.0,), 3), ((0.5, 0.0), 3), ((-2.0,), -6), ((-1.0, 0.0), -3), ((2.0, -1.0), 3.0 * 2 - 4)],
)
def test_a_response_passes_by_the_plain_score_of_the_only_positive_weight(
    weights: tuple[float, ...], compared: float, make_group: MakeGroup
) -> None:
    """Scores 3 and 4; with a negative weight, a lower score is better."""
    rewards = [
        (_reward(partial(_constant, score=score), name=f"r{score}"), weight)
        for score, weight in zip((3.0, 4.0), weights, strict=False)
    ]
    scorer = _set(*rewards)
    (group,) = scorer.score([make_group(0, ["a"])]).groups
    assert scorer.to_pass(group.samples[0]) == compared
    configs = [FunctionReward(weight=weight) for weight in weights]
    section = EvalConfig(data=PromptDataConfig(sources=("x.jsonl",)), pass_threshold=1)
    assert any(pass_advice(section, configs)) == (max(weights) <= 0)


def test_shaping_is_a_separate_part(make_group: MakeGroup) -> None:
    """Reward 1, truncated: 1 - 0.25 = 0.75. Untouched sample: 1, no shaping part. Mean -0.125."""

    def one(response: str) -> float:
        return 1.0

    rewards = _set((_reward(one), 1.0), shaping=ShapingConfig(truncation_penalty=0.25))
    scored = rewards.score([make_group(0, ["a"], finish="length"), make_group(1, ["b"])])
    cut, whole = (group.samples[0] for group in scored.groups)
    assert (cut.reward, cut.reward_parts) == (0.75, {"r": 1.0, "shaping": -0.25})
    assert (whole.reward, whole.reward_parts) == (1.0, {"r": 1.0})
    stats = scored.stats.floats()
    assert (stats["reward/shaping"], stats["reward/truncated_frac"]) == (-0.125, 0.5)
    assert (stats["reward/r"], stats["reward/mean"]) == (1.0, 0.875)


@pytest.mark.parametrize("names", [("a", "a"), ("mean",), ()])
def test_ambiguous_names_are_refused(names: tuple[str, ...]) -> None:
    def one(response: str) -> float:
        return 1.0

    with pytest.raises(RewardError):
        _set(*((_reward(one, name), 1.0) for name in names))


def test_scoring_no_samples_is_an_error() -> None:
    def one(response: str) -> float:
        return 1.0

    with pytest.raises(RewardError, match="no samples to score"):
        _set((_reward(one), 1.0)).score([])


def test_a_dropped_group_does_not_enter_the_running_statistics(
    make_group: MakeGroup,
) -> None:
    """Scores 1 and 3 are kept: mean 2, std 1, so -1 and 1; the 1000 of the dropped group is not in
    them. Then 8 alone: mean 4, std sqrt((9 + 1 + 16) / 3) = 2.943920, (8 - 4) / 2.943920 =
    1.358732."""

    def score(response: str) -> float:
        return float(response)

    rewards = RewardSet(
        [(_reward(score), 1.0)],
        on_failure=DROP,
        shaping=ShapingConfig(),
        generate_max_len=4,
        running={"r": "mean_std"},
    )
    groups = [make_group(0, ["1", "3"]), make_group(1, ["1000", "nan"])]
    first = rewards.score(groups)
    assert [s.reward for g in first.groups for s in g.samples] == [-1.0, 1.0]
    assert [s.reward_parts["r"] for g in first.groups for s in g.samples] == [1.0, 3.0]
    state = rewards.state_dict()
    (group,) = rewards.score([make_group(2, ["8"])]).groups
    assert group.samples[0].reward == pytest.approx(1.358732, abs=1e-6)  # six written decimals
    rewards.load_state_dict(state)
    (again,) = rewards.score([make_group(2, ["8"])]).groups
    assert again.samples[0].reward == group.samples[0].reward
    rewards.load_state_dict({})


def _played(group: Group, *rewards: dict[str, float]) -> Group:
    """The group's samples as episodes with these rewards of their turns."""
    record = Episode("done", (), turns=tuple(Turn({}, (), rewards=given) for given in rewards))
    return replace(group, samples=tuple(replace(s, episode=record) for s in group.samples))


def test_rewards_of_turns_are_weighted_parts_of_the_total(make_group: MakeGroup) -> None:
    """a: 1 - 3 = -2, weight 2, per turn: 2 and -6. b: 4, weight 0.5, of the entire episode. Total
    -4 + 2, minus 0.25 for each of two tokens; the penalty belongs to no turn."""
    rewards = _set(
        (EpisodeScorer("a", name="a", per_turn=True), 2.0),
        (EpisodeScorer("b", name="b"), 0.5),
        shaping=ShapingConfig(length_penalty=0.25),
    )
    group = _played(make_group(0, ["x"]), {"a": 1.0, "b": 4.0}, {"a": -3.0})
    (sample,) = rewards.score([group]).groups[0].samples
    assert (sample.reward, sample.turn_rewards) == (-2.5, (2.0, -6.0))
    assert sample.reward_parts == {"a": -2.0, "b": 4.0, "shaping": -0.5}


def test_the_reward_of_a_turn_beyond_fp32_is_an_error(make_group: MakeGroup) -> None:
    """Although the total is 0."""
    rewards = _set((EpisodeScorer(None, name="a", per_turn=True), 2.0))
    group = _played(make_group(0, ["x"]), {"a": 3e38}, {"a": -3e38})
    with pytest.raises(RewardError, match=r"6e\+38 is beyond fp32's range"):
        rewards.score([group])
