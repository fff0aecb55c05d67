"""Which responses become rows: hand-made groups, every row left out counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.generate import AllSamples, BestOfN, BestWorstPairs, RewardConditioned
from burnish.data.prompts.generation import OWN_COLUMNS, GenerationPrompt, with_reward
from burnish.data.selection import DROPS, best, best_and_worst, select
from burnish.data.sources import DataError
from burnish.transcript import FinishReason
from burnish.types import ROUNDING, Group, Prompt, Sample, least_score

MODES = [
    AllSamples(),
    BestOfN(kind="best_of_n"),
    BestWorstPairs(kind="pairs"),
    RewardConditioned(kind="conditioned"),
]


def sample(k: int, reward: float, text: str = "", finish: FinishReason = "stop") -> Sample:
    return Sample(
        sample_id=f"d:0@0/{k}",
        prompt_id="d:0@0",
        group_id=0,
        prompt_ids=(5, 9),
        response_ids=(7, k),
        sampler_logprobs=(-0.1, -0.2),
        action_mask=(True, True),
        versions=(0, 0),
        text=text or f"answer {k}",
        finish_reason=finish,
        reward=reward,
        reward_parts={"exact": reward},
    )


PROMPT = Prompt("d:0@0", (5, 9), "1+1=", label="2")
QUESTION = GenerationPrompt(
    PROMPT, content="1+1=", unconditioned="1+1=", label="2", has_label=True, columns={"level": 3}
)


def chosen(mode: Any, samples: Sequence[Sample], **options: Any) -> Any:
    group = Group(0, PROMPT, tuple(samples))
    return select(mode, [group], {PROMPT.id: QUESTION}, **options)


FOUR = [sample(0, 0.0), sample(1, 1.0), sample(2, 1.0), sample(3, 0.5)]


def test_all_samples_are_a_row_each_in_their_order() -> None:
    rows = chosen(AllSamples(), FOUR).rows
    assert [row["response"] for row in rows] == [f"answer {k}" for k in range(4)]
    assert rows[3] == {
        "prompt_id": "d:0@0",
        "sample": 3,
        "prompt": "1+1=",
        "response": "answer 3",
        "finish_reason": "stop",
        "reward": 0.5,
        "rewards": {"exact": 0.5},
        "label": "2",
        "level": 3,
    }


def test_without_rewards_rows_have_no_reward_columns() -> None:
    plain = Sample(**{**vars(FOUR[0]), "reward": float("nan"), "reward_parts": {}})
    (row,) = chosen(AllSamples(), [plain]).rows
    assert "reward" not in row and "rewards" not in row and row["response"] == "answer 0"


def test_the_best_of_n_is_the_first_of_those_with_the_highest_reward() -> None:
    """Rewards 0, 1, 1, 0.5: the second response."""
    found = chosen(BestOfN(kind="best_of_n"), FOUR)
    (row,) = found.rows
    assert (row["response"], row["reward"]) == ("answer 1", 1.0)
    assert found.sums == {"kept_reward": 1.0} and found.dropped == {}


@pytest.mark.parametrize(("bound", "kept"), [(1.0, 1), (1.0 + 1e-12, 1), (1.01, 0), (None, 1)])
def test_rejection_sampling_drops_and_counts_prompts_below_the_bound(
    bound: float | None, kept: int
) -> None:
    """A bound that is missed by rounding alone (1e-12) is reached."""
    found = chosen(BestOfN(kind="best_of_n", min_reward=bound), FOUR)
    assert len(found.rows) == kept
    assert found.dropped == ({} if kept else {"prompts_below_min_reward": 1})


def test_a_score_of_0_reaches_no_positive_threshold() -> None:
    """Any positive reward passes: 1e-9 is as small as the tolerance."""
    for threshold in (1e-12, 1e-9, 2e-9):
        assert 0.0 < least_score(threshold) < threshold
    assert least_score(0.0) == -ROUNDING and least_score(1.0) == 1.0 - ROUNDING


def test_a_pair_is_the_best_over_the_worst_with_their_difference() -> None:
    """Rewards 0, 1, 1, 0.5: the second over the first, margin 1 - 0 = 1."""
    found = chosen(BestWorstPairs(kind="pairs"), FOUR)
    (row,) = found.rows
    assert (row["chosen"], row["rejected"], row["margin"]) == ("answer 1", "answer 0", 1.0)
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0)
    assert row["label"] == "2" and row["level"] == 3
    assert found.sums == {"margin": 1.0}


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([sample(0, 1.0), sample(1, 1.0)], "prompts_equal_rewards"),
        ([sample(0, 0.3), sample(1, 0.1 + 0.2)], "prompts_equal_rewards"),  # but for rounding
        ([sample(0, 1.0, "x"), sample(1, 0.0, "x")], "prompts_same_text"),
        ([sample(0, 0.3), sample(1, 0.0)], "prompts_below_min_margin"),
        ([sample(0, 1.0)], "prompts_truncated"),
    ],
)
def test_prompts_without_a_pair_are_dropped_and_counted_by_reason(
    samples: list[Sample], why: str
) -> None:
    found = chosen(BestWorstPairs(kind="pairs", min_margin=0.5), samples)
    assert found.rows == () and found.dropped == {why: 1}
    assert why in DROPS


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda m: m.kind)
def test_truncated_responses_are_excluded_by_default(mode: Any) -> None:
    cut = [sample(0, 0.0), sample(1, 0.5), sample(2, 9.0, finish="length")]
    found = chosen(mode, cut, template="{prompt}{reward}")
    assert found.dropped["samples_truncated"] == 1
    assert all("answer 2" not in row.values() for row in found.rows)
    kept = chosen(mode.model_copy(update={"keep_truncated": True}), cut, template="{prompt}")
    assert any("answer 2" in row.values() for row in kept.rows) and not kept.dropped


def test_a_prompt_with_only_truncated_responses_is_counted() -> None:
    found = chosen(BestOfN(kind="best_of_n"), [sample(0, 1.0, finish="length")])
    assert found.dropped == {"samples_truncated": 1, "prompts_truncated": 1}


def test_conditioned_rows_state_each_responses_own_reward() -> None:
    rows = chosen(
        RewardConditioned(kind="conditioned"), FOUR, template="[{reward:.1f}] {prompt}"
    ).rows
    assert [row["prompt"] for row in rows] == [f"[{r}] 1+1=" for r in (0.0, 1.0, 1.0, 0.5)]


def test_conditioned_rows_begin_from_the_prompt_without_the_wanted_reward() -> None:
    asked = GenerationPrompt(PROMPT, "[9] 1+1=", "1+1=", "2", True, {})
    group = Group(0, PROMPT, (FOUR[3],))
    (row,) = select(
        RewardConditioned(kind="conditioned"),
        [group],
        {PROMPT.id: asked},
        template="[{reward}] {prompt}",
    ).rows
    assert row["prompt"] == "[0.5] 1+1="


def test_a_reward_is_stated_in_the_last_user_message() -> None:
    talk = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    stated = with_reward(talk, "{reward:g}|{prompt}", 1.0)
    assert stated == [*talk[:3], {"role": "user", "content": "1|c"}]
    assert talk[3]["content"] == "c", "what was given is untouched"


@pytest.mark.parametrize(
    "talk",
    [
        [{"role": "system", "content": "S"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ],
)
def test_a_conversation_without_user_text_cannot_state_a_reward(talk: Any) -> None:
    with pytest.raises(DataError, match="text of the last user message"):
        with_reward(talk, "{reward} {prompt}", 1.0)


def test_tokens_are_written_on_request_and_never_those_of_another_prompt() -> None:
    (row,) = chosen(AllSamples(), FOUR[:1], with_tokens=True).rows
    assert (row["prompt_tokens"], row["response_tokens"]) == ([5, 9], [7, 0])
    (pair,) = chosen(BestWorstPairs(kind="pairs"), FOUR, with_tokens=True).rows
    assert (pair["chosen_tokens"], pair["rejected_tokens"]) == ([7, 1], [7, 0])
    stated = chosen(
        RewardConditioned(kind="conditioned"), FOUR, template="{prompt}{reward}", with_tokens=True
    )
    assert all("prompt_tokens" not in row for row in stated.rows)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.kind)
def test_every_column_that_a_mode_writes_is_reserved(mode: Any) -> None:
    (row, *_) = chosen(mode, FOUR, template="{prompt}{reward}", with_tokens=True).rows
    assert set(row) - {"level"} <= OWN_COLUMNS


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6)
FINISHES: Any = st.lists(st.sampled_from(["stop", "length"]), min_size=6, max_size=6)


@given(
    rewards=REWARDS,
    finishes=FINISHES,
    mode=st.sampled_from(MODES),
    margin=st.sampled_from([0, 0.5]),
)
def test_every_prompt_and_every_response_is_a_row_or_counted(
    rewards: list[float], finishes: Any, mode: Any, margin: float
) -> None:
    """One row a prompt: rows + prompts left out = 1. One row a response: rows + responses left out
    = n."""
    if isinstance(mode, BestWorstPairs):
        mode = mode.model_copy(update={"min_margin": margin})
    samples = [sample(k, r, finish=finishes[k]) for k, r in enumerate(rewards)]
    found = chosen(mode, samples, template="{prompt}{reward}")
    whole = found.dropped.get("samples_truncated", 0)
    prompts = sum(n for name, n in found.dropped.items() if name.startswith("prompts_"))
    if isinstance(mode, AllSamples | RewardConditioned):
        assert len(found.rows) + whole == len(rewards) and not prompts
    else:
        assert len(found.rows) + prompts == 1


@given(rewards=REWARDS)
def test_best_and_worst_have_extreme_rewards(rewards: list[float]) -> None:
    samples = [sample(k, r) for k, r in enumerate(rewards)]
    top = best(samples)
    assert isinstance(top, Sample) and top.reward == max(rewards)
    pair = best_and_worst(samples)
    if isinstance(pair, tuple):
        assert [s.reward for s in pair] == [max(rewards), min(rewards)]
    else:
        assert len(set(rewards)) == 1
