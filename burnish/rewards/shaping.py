"""Changes to the total reward of a response, before any baseline. Pure functions of numbers.

Order: clip, then the truncation penalty, the penalty per token and the soft overlong penalty;
penalties are not clipped away.
"""

from __future__ import annotations

from burnish.config.rewards import ShapingConfig
from burnish.types import Sample


def clip(reward: float, limit: float | None) -> float:
    """``reward`` in [-limit, limit]; unchanged where ``limit`` is None."""
    return reward if limit is None else max(-limit, min(limit, reward))


def overlong_penalty(num_tokens: int, *, max_len: int, buffer_len: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) as a positive number to take off.

    With the free length F = max_len - buffer_len, for n response tokens (end token included)::

        0                            n <= F
        penalty * (n - F) / buffer   F < n <= max_len
        penalty                      n > max_len

    ``buffer_len`` 0: always 0.
    """
    if not buffer_len:
        return 0.0
    over = num_tokens - (max_len - buffer_len)
    return penalty * min(max(over, 0), buffer_len) / buffer_len


def shaped(total: float, sample: Sample, *, config: ShapingConfig, generate_max_len: int) -> float:
    """The reward that is trained on, from the weighted sum ``total`` and how the response ended."""
    reward = clip(total, config.reward_clip)
    if sample.finish_reason == "length":
        reward -= config.truncation_penalty
    reward -= config.length_penalty * len(sample.response_ids)
    return reward - overlong_penalty(
        len(sample.response_ids),
        max_len=generate_max_len,
        buffer_len=config.overlong_buffer_len,
        penalty=config.overlong_penalty,
    )
