"""Split of sources into rows for training and held-out rows for evaluation (``data.held_out``).

The choice is a function of the name and the number of rows of each source. It does not depend on
the seed of a run, so runs with different seeds and resumed runs evaluate the same rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from burnish.config.held_out import empty_part
from burnish.config.passes import num_held_out
from burnish.data.base import DataError, Row, Source
from burnish.data.config import DataConfig

_SPLIT = 2**32 - 3
"""First number of the seed of the choice."""


class PartOfRows:
    """Some rows of a source, in the order of the source. ``whole``: the source."""

    def __init__(self, source: Source, rows: np.ndarray) -> None:
        self.name = source.name
        self.whole, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Row:
        return self.whole[int(self._rows[i])]


def part_of(sources: Sequence[Source], config: DataConfig) -> list[Source]:
    """Return the rows of ``sources`` that ``config.part`` selects; all rows if nothing is held out.

    Sources without held-out rows are left out of the held-out part. Raises DataError if a part is
    empty.
    """
    if config.held_out is None:
        return list(sources)
    sizes = [len(source) for source in sources]
    if problem := empty_part(config.held_out, sizes):
        raise DataError(problem)
    parts: list[Source] = []
    for source, num in zip(sources, num_held_out(config.held_out, sizes), strict=True):
        chosen = held_out_rows(source.name, len(source), num)
        if config.part == "train":
            chosen = np.setdiff1d(np.arange(len(source)), chosen)
        if len(chosen):
            parts.append(PartOfRows(source, chosen))
    return parts


def held_out_rows(name: str, size: int, num: int) -> np.ndarray:
    """Return the sorted numbers [num] of the held-out rows of a source with ``size`` rows. A larger
    ``num`` adds rows to those of a smaller one."""
    seed = [_SPLIT, zlib.crc32(name.encode()), size]
    return np.sort(np.random.default_rng(seed).permutation(size)[:num])
