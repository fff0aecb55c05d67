"""Segments of a packed row: which tokens attend to which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Queries ``[q_start, q_start + q_len)`` that attend to a prefix and causally to themselves.

    Positions are indices into the packed row. With ``prefix_len`` 0 it is an ordinary causal row.
    """

    q_start: int
    q_len: int
    prefix_start: int = 0
    prefix_len: int = 0

    @property
    def q_end(self) -> int:
        return self.q_start + self.q_len

    @property
    def prefix_end(self) -> int:
        return self.prefix_start + self.prefix_len

    @property
    def k_len(self) -> int:
        return self.prefix_len + self.q_len
