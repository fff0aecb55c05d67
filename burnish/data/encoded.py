"""Encoded rows, as an endless resumable stream or all once: what prompts, SFT and pairs share.

What a row becomes is the encoder's business (prompts, sft, preference have one each); which row
comes next is the index stream's; here are the length limit, the counts and the place named in every
error.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from burnish.config.data import DataConfig, Overlong
from burnish.data.notices import Notices, collecting
from burnish.data.sources import DataError, Row, Source, open_sources
from burnish.data.stream import IndexStream, RowRef

_log = logging.getLogger(__name__)

_SHOWN = 5
"""Bad rows that a message names."""

T = TypeVar("T")  # a Prompt, a TokenRow or a Pair


class Encoder(Protocol[T]):
    """From a data row to what is trained on. ``T`` is a Prompt, a token row or a pair of them."""

    unit: str
    """What one item is called in counts and messages: prompt, row, pair."""
    limit: int
    """Longest item in tokens."""
    limit_name: str
    """What the config calls the limit."""

    def encode(self, row: Row, ref: RowRef) -> T:
        """The item. Raises DataError without the place; the stream puts it in front."""
        ...

    def length(self, item: T) -> int:
        """Tokens that count against the limit."""
        ...

    def cut(self, item: T) -> T | None:
        """An item over the limit without its left end; None where that leaves nothing of use."""
        ...


class EncodedStream(Generic[T]):
    """Encoded rows without end, in an order that is a function of the seed.

    The state is the position in the data and the counts, so a resumed stream goes on with the very
    next row.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder[T],
        *,
        seed: int,
        sources: Sequence[Source] | None = None,
    ) -> None:
        """``sources``: those of ``config``, if they are open already."""
        opened = open_sources(config.sources) if sources is None else sources
        self.sources = {source.name: source for source in opened}
        self._encoder = encoder
        self._overlong = config.overlong
        weights = [source.weight for source in config.sources]
        self._index = IndexStream(
            {name: len(source) for name, source in self.sources.items()},
            weights=weights if config.mix == "weight" else None,
            seed=seed,
            shuffle=config.shuffle,
        )
        self._counts = {"seen": 0, "dropped": 0, "truncated": 0}
        self._dropped_in_a_row = dict.fromkeys(self.sources, 0)
        self._notices = Notices()

    def __len__(self) -> int:
        """Rows in all sources, those over the limit included."""
        return len(self._index)

    @property
    def counts(self) -> dict[str, int]:
        """Since the start of the run: ``prompts_seen`` (handed out), ``prompts_dropped``,
        ``prompts_truncated`` (rows_, pairs_ for the others), ``prompts_<kind>`` for each kind of
        notice that there was (``rows_no_end_token``), and ``epoch``: whole passes over the source
        furthest behind."""
        unit, counts = self._encoder.unit, {**self._counts, **self._notices.counts}
        return {f"{unit}s_{what}": count for what, count in counts.items()} | {
            "epoch": self._index.epoch
        }

    def take(self, num: int) -> list[T]:
        """The next ``num`` items. Raises DataError, with the place, for a row that is of no use."""
        items: list[T] = []
        while len(items) < num:
            ref = self._index.next()
            source = self.sources[ref.source]
            fitted: _Fitted[T] = _fit(source, ref, self._encoder, self._overlong, self._notices)
            if fitted.item is None:
                self._count_dropped(ref.source)
                continue
            self._dropped_in_a_row[ref.source] = 0
            self._counts["truncated"] += fitted.cut
            self._counts["seen"] += 1
            items.append(fitted.item)
        return items

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "index": self._index.state_dict(),
            "counts": dict(self._counts),
            "notices": dict(self._notices.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises DataError if it is of other sources."""
        self._index.load_state_dict(state["index"])
        self._counts = {what: int(state["counts"][what]) for what in self._counts}
        self._notices.counts.clear()  # older states have none
        self._notices.counts.update({k: int(n) for k, n in state.get("notices", {}).items()})
        self._dropped_in_a_row = dict.fromkeys(self.sources, 0)

    def _count_dropped(self, source: str) -> None:
        self._counts["dropped"] += 1
        self._dropped_in_a_row[source] += 1
        # Wherever they begin, 2n - 1 draws in a row contain a whole epoch: no row fits.
        if self._dropped_in_a_row[source] >= 2 * len(self.sources[source]) - 1:
            raise _all_dropped(f"source {source!r}", self._encoder, self._overlong)


def load_all(
    sources: Sequence[Source], config: DataConfig, encoder: Encoder[T], *, limit: int | None = None
) -> list[T]:
    """Every row once, source after source in file order; at most ``limit`` that are of use.

    How many were left out or cut is reported in the log. Raises DataError if none is left.
    """
    items: list[T] = []
    dropped = truncated = 0
    refs = (RowRef(s.name, i, 0) for s in sources for i in range(len(s)))
    by_name = {source.name: source for source in sources}
    notices = Notices()
    for ref in refs:
        if limit is not None and len(items) >= limit:
            break
        fitted: _Fitted[T] = _fit(by_name[ref.source], ref, encoder, config.overlong, notices)
        truncated += fitted.cut
        if fitted.item is None:
            dropped += 1
        else:
            items.append(fitted.item)
    notices.log_totals(encoder.unit)
    if not items and dropped:
        raise _all_dropped("the data", encoder, config.overlong)
    if dropped or truncated:
        _log.warning(
            "%d %ss left out and %d cut for being over %s=%d (%d kept)",
            *(dropped, encoder.unit, truncated, encoder.limit_name, encoder.limit, len(items)),
        )
    return items


class EncodedTable(Generic[T]):
    """Every row once, source after source in file order, encoded again at every access: the
    data may be larger than memory.

    All rows are encoded once at the start, so that whatever is wrong with them is said before any
    work is done, and all of it.
    """

    def __init__(
        self, config: DataConfig, encoder: Encoder[T], *, limit: int | None = None
    ) -> None:
        """At most ``limit`` rows that are of use. Raises DataError for rows that are of none:
        how many, and the first few."""
        self.sources = open_sources(config.sources)
        self._encoder = encoder
        self._overlong = config.overlong
        self._of, self._rows = array("H"), array("q")
        self.dropped = 0
        """Rows over the length limit, left out."""
        self._bad: list[str] = []
        self._num_bad = 0
        self._notices = Notices()
        for number, source in enumerate(self.sources):
            for row in range(len(source)):
                if limit is not None and len(self) >= limit:
                    break
                self._scan(number, row)
        self._notices.log_totals(encoder.unit)
        if self._num_bad:
            raise DataError(self._what_is_bad())
        if not len(self):
            raise _all_dropped("the data", encoder, config.overlong)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, first: int, count: int) -> list[T]:
        """Items ``first`` to ``first + count``, fewer at the end."""
        numbers = range(first, min(first + count, len(self)))
        return [self._encoded(self._of[i], self._rows[i]) for i in numbers]

    def _scan(self, number: int, row: int) -> None:
        source = self.sources[number]
        try:
            ref = RowRef(source.name, row, 0)
            fitted: _Fitted[T] = _fit(source, ref, self._encoder, self._overlong, self._notices)
        except DataError as error:
            self._num_bad += 1
            if len(self._bad) < _SHOWN:
                self._bad.append(str(error))
            return
        if fitted.item is None:
            self.dropped += 1
            return
        self._of.append(number)
        self._rows.append(row)

    def _encoded(self, number: int, row: int) -> T:
        source = self.sources[number]
        return self._encoder.encode(source[row], RowRef(source.name, row, 0))

    def _what_is_bad(self) -> str:
        if self._num_bad == 1:
            return self._bad[0]
        more = "" if self._num_bad == len(self._bad) else f"; the first {len(self._bad)}"
        told = "".join(f"\n  - {problem}" for problem in self._bad)
        return f"{self._num_bad} {self._encoder.unit}s cannot be used{more}:{told}"


class _Fitted(NamedTuple, Generic[T]):
    item: T | None  # None: left out
    cut: bool  # tokens were cut off


def _fit(
    source: Source, ref: RowRef, encoder: Encoder[T], overlong: Overlong, notices: Notices
) -> _Fitted[T]:
    """Row ``ref`` encoded and held to the limit."""
    row = source[ref.row]
    try:
        with collecting() as found:
            item = encoder.encode(row, ref)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    notices.add(found, row.where)
    length = encoder.length(item)
    if length <= encoder.limit:
        return _Fitted(item, False)
    if overlong == "error":
        raise DataError(
            f"{row.where}: the {encoder.unit} has {length} tokens and {encoder.limit_name} is "
            f"{encoder.limit}. Raise {encoder.limit_name}, or set overlong: truncate_left or drop"
        )
    shorter = encoder.cut(item) if overlong == "truncate_left" else None
    return _Fitted(shorter, shorter is not None)


def _all_dropped(what: str, encoder: Encoder[Any], overlong: Overlong) -> DataError:
    other = ", or set overlong: truncate_left" if overlong == "drop" else ""
    return DataError(
        f"every {encoder.unit} of {what} is over {encoder.limit_name}={encoder.limit} tokens and "
        f"left out, so there is nothing to draw. Raise {encoder.limit_name}{other}"
    )
