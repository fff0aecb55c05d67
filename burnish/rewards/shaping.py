"""Shaping of a response's total reward, before any baseline. Pure functions of numbers.

Order: clip, truncation penalty, penalty per token, soft overlong penalty. The penalties are
subtracted after clipping and are not clipped.
"""

from __future__ import annotations

from burnish.config.rewards import ShapingConfig
from burnish.types import Sample


def clip(reward: float, limit: float | None) -> float:
    """Clip ``reward`` to [-limit, limit]. Return it unchanged if ``limit`` is None."""
    return reward if limit is None else max(-limit, min(limit, reward))


def overlong_penalty(num_tokens: int, *, max_len: int, buffer_len: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), as a positive number to
    subtract.

    For n sampled tokens (end token included) and the free length F = max_len - buffer_len::

        0                            n <= F
        penalty * (n - F) / buffer   F < n <= max_len
        penalty                      n > max_len

    If ``buffer_len`` is 0, the penalty is always 0.
    """
    if not buffer_len:
        return 0.0
    over = num_tokens - (max_len - buffer_len)
    return penalty * min(max(over, 0), buffer_len) / buffer_len


def shaped(total: float, sample: Sample, *, config: ShapingConfig, generate_max_len: int) -> float:
    """Return the training reward from the weighted sum ``total``, the finish reason, and the number
    of sampled tokens (of an episode: in all turns, without what tools and environments wrote)."""
    reward = clip(total, config.reward_clip)
    if sample.finish_reason == "length":
        reward -= config.truncation_penalty
    num_tokens = sample.num_sampled_tokens
    reward -= config.length_penalty * num_tokens
    if config.overlong is None:
        return reward
    return reward - overlong_penalty(
        num_tokens,
        max_len=generate_max_len,
        buffer_len=config.overlong.buffer_len,
        penalty=config.overlong.penalty,
    )
