"""Key/value caches: the bytes of a token, and the load of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.model import Dtype
from burnish.plan.model_state import SIZES
from burnish.plan.shapes import ModelShape


@dataclass(frozen=True)
class Demand:
    """Load of a rollout engine."""

    sequences: int
    """Number of responses of one generate call."""
    prompt: int
    """Longest prompt, in tokens."""
    new_tokens: int
    """Longest response, in tokens."""

    @property
    def longest(self) -> int:
        """Longest prompt with its response, in tokens."""
        return self.prompt + self.new_tokens


def bytes_per_token(shape: ModelShape, dtype: Dtype) -> int:
    """Return the bytes of keys and values of one token in all layers; 0 for models without
    attention, whose state does not grow."""
    return 2 * len(shape.layers) * shape.kv_heads * shape.head_dim * SIZES[dtype]
