"""Layout of rows and their division into micro-batches, computed from sizes alone.

``batching.py`` moves tokens by these sizes. The memory planner counts tokens with them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.models.segments import Segment

Layout = Literal["shared_prefix", "packed", "padded"]

RowGroup = list[int]
"""Rows that stay in one micro-batch."""


@dataclass(frozen=True)
class RowSize:
    """Tokens of one row."""

    length: int
    prompt: int
    group: int
    """Neighboring rows with equal numbers have the same prompt."""


@dataclass(frozen=True)
class PlacedRow:
    """Position of a row within a packed row.

    Its tokens from ``skipped`` on are at ``[start, start + count)``. Its first ``skipped`` tokens
    are those of a neighbor at ``prefix_start``.
    """

    start: int
    count: int
    prefix_start: int = 0
    skipped: int = 0

    @property
    def segment(self) -> Segment:
        """Queries of this row and the tokens that they attend to."""
        return Segment(self.start, self.count, self.prefix_start, self.skipped)


def count_tokens(rows: Sequence[RowSize], layout: Layout) -> int:
    """Return the tokens that one forward pass over ``rows`` computes, padding included.

    >>> pair = [RowSize(7, prompt=4, group=0), RowSize(9, prompt=4, group=0)]
    >>> [count_tokens(pair, layout) for layout in ("padded", "packed", "shared_prefix")]
    [18, 16, 12]
    """
    if layout == "padded":
        return max(row.length for row in rows) * len(rows)
    total = sum(row.length for row in rows)
    if layout == "shared_prefix":
        total -= sum(b.prompt for a, b in itertools.pairwise(rows) if a.group == b.group)
    return total


def place_rows(rows: Sequence[RowSize], layout: Layout) -> list[PlacedRow]:
    """Return the position of each row in a packed row. Under ``shared_prefix``, neighbors in one
    group share one copy of the prompt, with the first of them."""
    placed: list[PlacedRow] = []
    used = first = 0
    for i, row in enumerate(rows):
        shares = layout == "shared_prefix" and i > 0 and rows[i - 1].group == row.group
        if not shares:
            first = used
        skipped = row.prompt if shares else 0
        count = row.length - skipped
        placed.append(PlacedRow(used, count, first if skipped else 0, skipped))
        used += count
    return placed


def segments_of(placed: Sequence[PlacedRow]) -> list[Segment]:
    """Return the segments of rows that have tokens of their own."""
    return [row.segment for row in placed if row.count]


def by_count(groups: Sequence[RowGroup], size: int | None) -> Iterator[list[RowGroup]]:
    """Yield micro-batches of ``size`` groups; None: one micro-batch of all groups."""
    for begin in range(0, len(groups), size or len(groups) or 1):
        yield list(groups[begin : begin + (size or len(groups))])


def by_tokens(
    groups: Sequence[RowGroup], max_tokens: float, tokens: Callable[[Sequence[int]], int]
) -> Iterator[list[RowGroup]]:
    """Yield micro-batches of consecutive groups that stay within the budget, of at least one group.
    ``tokens``: returns the number of tokens that a pass over given rows computes, which more rows
    never reduce."""
    begin = 0
    while begin < len(groups):

        def size(end: int, begin: int = begin) -> int:
            return tokens([row for rows in groups[begin:end] for row in rows])

        fits, step = begin + 1, 1
        while fits < len(groups) and size(min(fits + step, len(groups))) <= max_tokens:
            fits, step = min(fits + step, len(groups)), 2 * step
        others = range(fits + 1, min(fits + step, len(groups)))
        fits += bisect_right(others, max_tokens, key=size)
        yield list(groups[begin:fits])
        begin = fits
