"""Shaping of the total reward, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from burnish.config.rewards import OverlongPenalty, ShapingConfig
from burnish.rewards.shaping import clip, overlong_penalty, shaped
from burnish.types import Sample, TokenRow


def _sample(num_tokens: int, finish_reason: str = "stop") -> Sample:
    return Sample(
        sample_id="p/0",
        prompt_id="p",
        group_id=0,
        prompt_ids=(1,),
        response_ids=(2,) * num_tokens,
        sampler_logprobs=(0.0,) * num_tokens,
        action_mask=(True,) * num_tokens,
        versions=(0,) * num_tokens,
        text="x",
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (10, 2.0), (12, 2.0)]
)
def test_overlong_penalty_rises_linearly_over_the_buffer(num_tokens: int, expected: float) -> None:
    """max 10, buffer 4, penalty 2: free up to 6; 7 -> 2 * 1/4; 8 -> 2 * 2/4; 10 and beyond -> 2."""
    assert overlong_penalty(num_tokens, max_len=10, buffer_len=4, penalty=2.0) == expected


def test_a_buffer_of_zero_gives_no_penalty() -> None:
    assert overlong_penalty(99, max_len=10, buffer_len=0, penalty=1.0) == 0.0


def test_clip_works_on_both_sides_and_none_means_none() -> None:
    assert (clip(5.0, 2.0), clip(-5.0, 2.0), clip(1.5, 2.0), clip(5.0, None)) == (2, -2, 1.5, 5)


def test_clipping_comes_before_penalties() -> None:
    """Total 5 clipped to 1; truncated: 1 - 0.5; 9 of 10 tokens, buffer 4: 0.5 - 1 * 3/4 = -0.25."""
    config = ShapingConfig(
        reward_clip=1.0, truncation_penalty=0.5, overlong=OverlongPenalty(buffer_len=4)
    )
    assert shaped(5.0, _sample(9, "length"), config=config, generate_max_len=10) == -0.25


@pytest.mark.parametrize("reason", ["stop", "aborted"])
def test_only_the_length_limit_is_a_truncation(reason: str) -> None:
    config = ShapingConfig(truncation_penalty=0.5)
    assert shaped(1.0, _sample(3, reason), config=config, generate_max_len=10) == 1.0


def test_default_shaping_is_the_identity() -> None:
    assert shaped(7.5, _sample(10, "length"), config=ShapingConfig(), generate_max_len=10) == 7.5


def test_the_length_penalty_is_per_token_and_not_clipped() -> None:
    """Total 5 clipped to 1; 9 tokens at 0.01: 1 - 0.09 = 0.91; truncated as well: 0.91 - 0.5."""
    config = ShapingConfig(reward_clip=1.0, length_penalty=0.01, truncation_penalty=0.5)
    assert shaped(5.0, _sample(9), config=config, generate_max_len=99) == pytest.approx(0.91)
    cut = shaped(5.0, _sample(9, "length"), config=config, generate_max_len=99)
    assert cut == pytest.approx(0.41)


def test_penalties_count_what_the_policy_sampled_in_all_rows() -> None:
    """Last row: 9 tokens, of which a tool wrote 4. An earlier row: 3, of which 1. 5 + 2 = 7 sampled
    tokens at 0.5; of max 8 with buffer 2, 1 token too many: 1 / 2."""
    last = replace(_sample(9), action_mask=(True,) * 5 + (False,) * 4)
    row = TokenRow((1,), (2,) * 3, (0.0,) * 3, (True, True, False), (0,) * 3, (0, 0, -1))
    episode = replace(last, earlier_rows=(row,), turns=(1,) * 5 + (-1,) * 4)
    config = ShapingConfig(length_penalty=0.5)
    assert shaped(0.0, episode, config=config, generate_max_len=8) == -3.5
    config = ShapingConfig(overlong=OverlongPenalty(buffer_len=2))
    assert shaped(0.0, episode, config=config, generate_max_len=8) == -0.5
