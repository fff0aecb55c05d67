"""Row order: a seeded, shuffled, endless mix of sources that can be resumed exactly.

Every choice is a function of the seed and of counters, so the state is a few integers and no
generator state. The row order of epoch e of source s is
``default_rng([seed, s, e]).permutation(n)``. The source of draw k is drawn by weight from
``default_rng([seed, _DRAW, k])``. Without weights, all sources are shuffled together. The order of
epoch e is then ``default_rng([seed, _JOINT, e]).permutation(sum of all n)``. A streamed source is
read in order, in blocks: the order of the n rows from row b on is ``default_rng([seed, s, e,
b]).permutation(n)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from burnish.data.sources import DataError

_DRAW = 2**32 - 1  # used in place of a source's number; no source has this number
_JOINT = 2**32 - 2  # the same for the order over all sources


@dataclass(frozen=True)
class RowRef:
    """Row ``row`` of the source named ``source`` in its epoch ``epoch``, both counted from 0."""

    source: str
    row: int
    epoch: int

    @property
    def id(self) -> str:
        """Id such as ``train:17@0``, unique within a run and stable across resumes."""
        return f"{self.source}:{self.row}@{self.epoch}"


class Blocks(Protocol):
    """Rows that are read in order, one block at a time."""

    block_size: int
    """Number of rows of every block but the last."""
    num_rows: int | None
    """Number of rows; None if it is unknown."""

    def load(self, begin: int) -> int:
        """Read the block that begins at row ``begin``. Return its number of rows; 0 at the end."""

    @property
    def is_last(self) -> bool:
        """True if no row follows the block that was read last."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current block. JSON-serializable."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Raises DataError if it belongs to other data."""


class IndexStream:
    """An endless stream of row references. It returns each row once per epoch of its source.

    Example: ``IndexStream({"a": 10, "b": 3}, weights=[3.0, 1.0], seed=0, shuffle=True).next()``.
    """

    def __init__(
        self,
        sizes: Mapping[str, int | Blocks],
        *,
        weights: Sequence[float] | None,
        seed: int,
        shuffle: bool,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """``sizes``: by source, its number of rows, above 0, or the blocks in which it is streamed.
        ``weights``: relative, one per source. If
        None, the rows of all sources are shuffled together, and each is drawn once per epoch.
        ``files``: digest of the file names of each source that consists of several files."""
        if weights is not None and len(weights) != len(sizes):
            raise ValueError(f"{len(weights)} weights for {len(sizes)} sources")
        self._names = list(sizes)
        self._blocks = {i: s for i, s in enumerate(sizes.values()) if not isinstance(s, int)}
        self._sizes = [s if isinstance(s, int) else s.num_rows for s in sizes.values()]
        if weights is None and self._blocks:
            raise ValueError("streamed sources cannot be shuffled together with others")
        self._files = dict(files or {})
        self._joint = weights is None
        shares = np.ones(len(sizes)) if weights is None else np.asarray(weights, dtype=np.float64)
        self._edges = np.cumsum(shares / shares.sum())
        self._begins = np.cumsum([0, *(size or 0 for size in self._sizes)])
        self._seed = seed % 2**64  # numpy takes no negative seeds
        self._shuffle = shuffle
        self._draws = 0
        self._left_out = 0
        """Number of draws whose row was left out."""
        self._epochs = [0] * len(sizes)
        self._positions = [0] * len(sizes)
        self._ended_pass = False
        self._drawn = -1, 0
        """A draw and its source."""
        self._orders: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        """Source -> (its epoch, and the block of a streamed one; their permutation)."""

    @property
    def num_rows(self) -> int | None:
        """Number of rows of all sources; None if one is streamed and has no ``max_samples``."""
        known = [size for size in self._sizes if size is not None]
        return sum(known) if len(known) == len(self._sizes) else None

    @property
    def epoch(self) -> int:
        """Number of completed epochs of the source that is furthest behind."""
        return min(self._epochs)

    @property
    def ended_pass(self) -> bool:
        """True if the last draw was the last row of an epoch of its source."""
        return self._ended_pass

    def peek(self) -> RowRef:
        """Return the next row without drawing it."""
        place = self._draws, list(self._epochs), list(self._positions), self._ended_pass
        try:
            return self.next()
        finally:
            self._draws, self._epochs, self._positions, self._ended_pass = place

    def next(self) -> RowRef:
        """Draw the next row."""
        self._ended_pass = False
        if self._joint:
            total = int(self._begins[-1])
            epoch, position = divmod(self._draws, total)
            place = position
            if self._shuffle:
                place = int(self._order(_JOINT, (epoch,), total)[position])
            source = int(np.searchsorted(self._begins, place, side="right")) - 1
            self._draws += 1
            self._epochs = [self._draws // total] * len(self._sizes)
            self._ended_pass = position + 1 == total
            return RowRef(self._names[source], place - int(self._begins[source]), epoch)
        source = self._source_of(self._draws - self._left_out)
        if source in self._blocks:
            return self._next_streamed(source)
        epoch, position = self._epochs[source], self._positions[source]
        order = self._order(source, (epoch,), self._sizes[source] or 0)
        row = int(order[position]) if self._shuffle else position
        self._draws += 1
        self._positions[source] += 1
        if self._positions[source] == self._sizes[source]:
            self._end_pass(source)
        return RowRef(self._names[source], row, epoch)

    def leave_out(self) -> None:
        """Leave out the row of the last draw: the next one takes a row of the same source instead,
        so that ``weights`` hold for the rows that are used."""
        self._left_out += 1

    def _next_streamed(self, source: int) -> RowRef:
        """Return the next row of the current block."""
        blocks, position = self._blocks[source], self._positions[source]
        begin = position - position % blocks.block_size
        size = blocks.load(begin)
        if position - begin >= size:  # of states that were saved before the end was found
            self._end_pass(source)
            position = begin = 0
            size = blocks.load(begin)
        epoch, row = self._epochs[source], position
        if self._shuffle:
            row = begin + int(self._order(source, (epoch, begin), size)[position - begin])
        self._draws += 1
        self._positions[source] = position + 1
        self._ended_pass = False
        if position + 1 - begin == size and blocks.is_last:
            self._end_pass(source)
        return RowRef(self._names[source], row, epoch)

    def _end_pass(self, source: int) -> None:
        self._epochs[source], self._positions[source] = self._epochs[source] + 1, 0
        self._ended_pass = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position for :meth:`load_state_dict`. JSON-serializable."""
        sources: dict[str, dict[str, Any]] = {}
        for source, name in enumerate(self._names):
            sources[name] = {
                "size": self._sizes[source],
                "epoch": self._epochs[source],
                "position": self._positions[source],
            }
            if name in self._files:
                sources[name]["files"] = self._files[name]
            if source in self._blocks:
                sources[name]["blocks"] = self._blocks[source].state_dict()
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "mix": "size" if self._joint else "weight",
            "draws": self._draws,
            "left_out": self._left_out,
            "sources": sources,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Raises DataError if the sources, sizes, file names, seed, shuffle
        or mix differ.

        Weights may change: later draws use the new weights, and every epoch stays complete.
        """
        self._check_same_data(state)
        self._draws = int(state["draws"])
        self._left_out = int(state.get("left_out", 0))  # older states have none
        self._epochs = [int(state["sources"][name]["epoch"]) for name in self._names]
        self._positions = [int(state["sources"][name]["position"]) for name in self._names]
        for source, blocks in self._blocks.items():
            blocks.load_state_dict(state["sources"][self._names[source]]["blocks"])

    def _source_of(self, draw: int) -> int:
        if len(self._sizes) == 1:
            return 0
        if self._drawn[0] != draw:
            point = np.random.default_rng([self._seed, _DRAW, draw]).random()
            source = int(np.searchsorted(self._edges, point, side="right"))
            self._drawn = draw, min(source, len(self._sizes) - 1)
        return self._drawn[1]

    def _order(self, source: int, part: tuple[int, ...], size: int) -> np.ndarray:
        """Return the permutation of the ``size`` rows of a part of a source: its epoch, and the
        block of a streamed one."""
        known = self._orders.get(source)
        if known is not None and known[0] == part:
            return known[1]
        order = np.random.default_rng([self._seed, source, *part]).permutation(size)
        self._orders[source] = (part, order)
        return order

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        names, now = list(state["sources"]), self._names
        if names != now:
            raise DataError(
                f"the saved data position is for the sources {', '.join(names)}, but this run has "
                f"{', '.join(now)}; resume with the same sources in the same order, or start a "
                "new run"
            )
        for source, (name, size) in enumerate(zip(self._names, self._sizes, strict=True)):
            saved = state["sources"][name]["size"]
            if ("blocks" in state["sources"][name]) != (source in self._blocks):
                raise DataError(
                    f"data source {name!r} was {'not ' * (source in self._blocks)}streamed when "
                    "the run was saved; the saved position would point at other rows. Restore "
                    "streaming of the source, or start a new run"
                )
            if saved != size:
                raise DataError(
                    f"data source {name!r} had {saved} rows when the run was saved but has {size} "
                    "now; the saved position would point at other rows. Restore the data, or "
                    "start a new run"
                )
            if state["sources"][name].get("files") != self._files.get(name):
                raise DataError(
                    f"data source {name!r} consists of other files than when the run was saved; "
                    "the saved position would point at other rows. Restore the files and their "
                    "names, or start a new run"
                )
        mix = "size" if self._joint else "weight"
        then = {"mix": "weight", **state}  # older states have no mix
        for key, value in (("seed", self._seed), ("shuffle", self._shuffle), ("mix", mix)):
            if then[key] != value:
                raise DataError(
                    f"the data position was saved with {key}={then[key]}, but this run has "
                    f"{key}={value}; rows would be repeated or skipped. Resume with "
                    f"{key}={then[key]}"
                )
