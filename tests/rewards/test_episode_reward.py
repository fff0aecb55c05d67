"""Rewards that an environment or an agent gave: a missing one is not a silent 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.episodes.loop import EngineCall, EpisodeResult
from burnish.episodes.runner import FAILED, episode_sample
from burnish.rewards.base import RewardError
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet
from burnish.rollout.base import Completion, VersionSpan
from burnish.transcript import Episode, EpisodeStatus, Turn
from burnish.types import Group, Prompt, Sample

PROMPT = Prompt("p", (1,), "2+2?")
SAID = {"role": "assistant", "content": "4"}
SCORED: tuple[EpisodeStatus, ...] = (
    *("done", "max_turns", "max_turn_tokens", "max_tokens", "parse_error"),
)


def sample(
    *turns: Mapping[str, float], status: EpisodeStatus = "done", cut: bool = False
) -> Sample:
    """An episode with the rewards of its turns. ``cut``: the last call was."""
    reason: Any = "length" if cut else "stop"
    completion = Completion("r", 0, (7,), (-1.0,), reason, "4", (VersionSpan(0, 0, 1),))
    record = Episode(status, (), turns=tuple(Turn(SAID, (), rewards=r) for r in turns))
    return episode_sample(PROMPT, "p/0", EpisodeResult(record, (EngineCall((1,), completion),)))


def score(
    reward: EpisodeScorer, samples: Sequence[Sample], **shaping: float
) -> tuple[list[float], dict[str, float]]:
    rewards = RewardSet(
        [(reward, 1.0)],
        on_failure=FailurePolicy(then="drop_group"),
        shaping=ShapingConfig(**shaping),
        generate_max_len=9,
    )
    scored = rewards.score([Group(0, PROMPT, (one,)) for one in samples])
    return [s.reward for g in scored.groups for s in g.samples], scored.stats.floats()


@pytest.mark.parametrize("per_turn", [False, True])
def test_an_episode_that_ended_without_its_reward_is_a_failure(per_turn: bool) -> None:
    """A wrong name, an agent that returned None, an environment that gives nothing."""
    found, right = {"found": 1.0}, {"rigth": 1.0}
    named = EpisodeScorer("right", name="r", per_turn=per_turn)
    for episode, says in ((sample(right), "nearest: rigth"), (sample({}, {}), "returned None")):
        with pytest.raises(NoGroupLeftError, match=says):
            score(named, [episode])
        with pytest.raises(RewardError, match=says):
            policy = FailurePolicy(then="fail")
            shaping = ShapingConfig()
            RewardSet([(named, 1.0)], on_failure=policy, shaping=shaping, generate_max_len=9).score(
                [Group(0, PROMPT, (episode,))]
            )
    rewards, stats = score(named, [sample(right), sample(found, {"right": 0.5}), sample({})])
    assert rewards == [0.5] and stats["reward/groups_dropped"] == 2
    with pytest.raises(NoGroupLeftError, match="gave none in any step"):
        score(EpisodeScorer(None, name="r", per_turn=per_turn), [sample({}, {})])
    assert score(EpisodeScorer(None, name="r"), [sample(found, {}, right)])[0] == [2.0]


def test_an_episode_that_a_limit_ended_may_lack_its_reward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = EpisodeScorer("right", name="r")
    limits = [status for status in SCORED if status != "done"]
    assert len(SCORED) + len(FAILED) + 1 == 10  # and prompt_too_long, which has no calls
    with caplog.at_level(logging.WARNING):
        rewards, stats = score(reward, [sample({}, status=status) for status in limits])
        assert rewards == [0.0] * 4 and "reward/r/missing" not in stats and not caplog.messages
        for _ in range(2):
            rewards, stats = score(reward, [sample({"rigth": 1.0}, status=s) for s in limits])
            assert rewards == [0.0] * 4 and stats["reward/r/missing"] == 4
    (warning,) = caplog.messages
    assert "'right'" in warning and "rigth" in warning and "reward/r/missing" in warning


@pytest.mark.parametrize(
    ("reward", "listed", "episodes", "logged"),
    [
        (None, (), [{"right": 1.0}, {"right": 0.5}], []),
        (None, (), [{"right": 1.0}, {"rigth": 0.5}], ["rigth (nearest: right)"]),
        (None, (), [{"right": 1.0, "format": 0.5}] * 2, ["right, format"]),
        (None, ("format",), [{"right": 1.0, "format": 0.5}], ["right"]),
        ("right", (), [{"right": 1.0}, {"right": 1.0, "format": 0.5}], ["format"]),
        ("right", ("format",), [{"right": 1.0, "format": 0.5}], []),
    ],
)
def test_names_that_no_entry_lists_are_logged_once(
    reward: str | None,
    listed: tuple[str, ...],
    episodes: list[dict[str, float]],
    logged: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A misspelled name is in the sum of all rewards, or in none."""
    scorer = EpisodeScorer(reward, name="r", listed=listed)
    with caplog.at_level(logging.WARNING):
        for rewards in [*episodes, *episodes]:
            score(scorer, [sample(rewards)])
    assert [f"have the rewards {names}, " in text for names, text in zip(
        logged, caplog.messages, strict=True)] == [True] * len(logged)  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
def test_only_two_statuses_are_truncations(cut: bool) -> None:
    """The last call of an agent may be cut at its own limit, as that of a classifier is."""
    found = {
        status: score(
            EpisodeScorer(None, name="r"),
            [sample({"x": 1.0}, status=status, cut=cut)],
            truncation_penalty=0.25,
        )
        for status in SCORED
    }
    for status, ((reward,), stats) in found.items():
        is_cut = status in ("max_turn_tokens", "max_tokens")
        assert stats["reward/truncated_frac"] == float(is_cut), status
        assert math.isclose(reward, 0.75 if is_cut else 1.0), status
