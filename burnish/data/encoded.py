"""Encoded rows, as an endless resumable stream or all once. Shared by all kinds of data.

An encoder (each kind has one) encodes a row. The index stream decides the row order. This module
applies the length limit, keeps counts and adds the row's position to errors.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from burnish.config.base import module_of
from burnish.data.config import DataConfig
from burnish.data.files import files_digests
from burnish.data.forms import open_rows
from burnish.data.notices import Notices, PostponedNotices, collecting
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import IndexStream, RowRef
from burnish.data.streamed import StreamedRows
from burnish.data.unread import note_marks
from burnish.types import Batch

_log = logging.getLogger(__name__)

_SHOWN = 5
"""Most bad rows listed in one error message."""

_MOST_DROPPED = 100_000
"""Consecutive rows of a streamed source after which it counts as having no usable row."""

T = TypeVar("T")  # a Prompt, a TokenRow or a Pair


class Encoder(Protocol[T]):
    """Encodes a data row to a training item. ``T`` is a Prompt, a token row or a pair of them."""

    unit: str
    """Name of one item in counts and messages: prompt, row, pair."""
    limit: int
    """Longest item in tokens."""
    limit_name: str
    """The config key of the limit."""

    def encode(self, row: Row, ref: RowRef) -> T:
        """Return the item. Raises DataError without the row's position, which the caller adds."""
        ...

    def length(self, item: T) -> int:
        """Return the number of tokens that count against the limit."""
        ...

    def truncate(self, item: T) -> T | None:
        """Truncate an item over the limit at the end that ``overlong`` names. Return None if the
        rest is unusable."""
        ...


class BatchEncoder(Encoder[T], Protocol[T]):
    """An encoder of rows that are trained on."""

    def batch(self, items: Sequence[T], *, first_group: int) -> Batch:
        """Return items as rows of tokens. Item i has the group id ``first_group + i``."""
        ...


def encoder_of(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool = False,
) -> Encoder[Any]:
    """Return the encoder that jobs use for the rows of ``config``. ``sources``: its open sources.
    ``in_episodes``: prompts start episodes.

    Raises DataError if the tokenizer cannot be used.
    """
    encoder: Encoder[Any] = module_of(config, "encode").make_encoder(
        config, tokenizer, sources, in_episodes=in_episodes
    )
    return encoder


class EncodedStream(Generic[T]):
    """An endless stream of encoded rows, in an order that is a function of the seed.

    The state contains the position in the data and the counts. A resumed stream continues with
    exactly the next row.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder[T],
        *,
        seed: int,
        sources: Sequence[Source] | None = None,
        section: str = "data",
    ) -> None:
        """``sources``: the opened sources of ``config``, if they are open already. ``section``: the
        place of ``config`` in the recipe, for messages."""
        opened = open_rows(config) if sources is None else sources
        self.sources = {source.name: source for source in opened}
        self._encoder = encoder
        self._config, self._section = config, section
        weights = [source.weight for source in config.sources]
        self._index = IndexStream(
            {
                name: source if isinstance(source, StreamedRows) else len(source)
                for name, source in self.sources.items()
            },
            weights=weights if config.mix == "weight" else None,
            seed=seed,
            shuffle=config.shuffle,
            files=files_digests(config.sources),
        )
        self._counts = {"seen": 0, "dropped": 0, "truncated": 0}
        if config.on_bad_row == "skip":
            self._counts["skipped"] = 0
        self._dropped_in_a_row = dict.fromkeys(self.sources, 0)
        self._notices = Notices()
        self._may_leave_out = config.overlong != "error" or config.on_bad_row == "skip"
        self._ahead: _Ahead[T] | None = None

    @property
    def num_rows(self) -> int | None:
        """Number of rows in all sources, including rows over the limit. None: unknown, because a
        source is streamed."""
        return self._index.num_rows

    @property
    def num_seen(self) -> int:
        """Number of items returned since the start of the run."""
        return self._counts["seen"]

    @property
    def counts(self) -> dict[str, int]:
        """Counts since the start of the run.

        ``prompts_seen`` (returned), ``prompts_dropped``, ``prompts_truncated``,
        ``prompts_skipped`` (unusable rows, only with ``on_bad_row: skip``), and
        ``prompts_<kind>`` for each kind of notice, such as ``rows_no_end_token``. The prefix is
        ``rows_`` or ``pairs_`` for other units. ``epoch``: completed passes over the usable rows,
        of the source that is furthest behind. An unusable row is counted with the usable row
        before it in the same pass.
        """
        unit, counts = self._encoder.unit, {**self._counts, **self._notices.counts}
        return {f"{unit}s_{event}": count for event, count in counts.items()} | {
            "epoch": self._index.epoch
        }

    def take(self, num: int) -> list[T]:
        """Return the next ``num`` items. Raises DataError with the position of an unusable row."""
        items: list[T] = []
        while len(items) < num:
            item = self._take_row(self._next_row())
            if item is not None:
                items.append(item)
        if self._may_leave_out:
            self._leave_out_following()
        return items

    def _next_row(self) -> _Ahead[T]:
        """Encode the next row, without drawing it. Raises DataError if it is unusable."""
        ref = self._index.peek()
        if self._ahead is None or self._ahead.ref != ref:
            notices = PostponedNotices()
            source = self.sources[ref.source]
            fitted: Fitted[T] = fit(source, ref, self._encoder, self._config, notices=notices)
            self._ahead = _Ahead(ref, fitted, notices)
        return self._ahead

    def _take_row(self, row: _Ahead[T]) -> T | None:
        """Draw the next row and count it. Return its item; None if it is left out."""
        if row.fitted.item is None:
            self._check_dropped(row.ref.source, row.fitted)
        self._index.next()
        self._ahead = None
        self._notices.join(row.notices)
        if row.fitted.item is None:
            self._index.leave_out()
            self._counts["dropped" if row.fitted.bad is None else "skipped"] += 1
            if row.fitted.bad is not None and self._counts["skipped"] == 1:
                _log.warning(
                    "%s: %s\nThe row is skipped (on_bad_row: skip; logged once, such rows are "
                    "counted)",
                    *(self._section, row.fitted.bad),
                )
            return None
        self._dropped_in_a_row[row.ref.source] = 0
        self._counts["truncated"] += row.fitted.truncated
        self._counts["seen"] += 1
        return row.fitted.item

    def _leave_out_following(self) -> None:
        """Draw the unusable rows that follow in this pass, so that a pass ends with its last usable
        row."""
        try:
            while not self._index.ended_pass:
                row = self._next_row()
                if row.fitted.item is not None:
                    return
                self._take_row(row)
        except DataError:
            return  # raised again by the draw of the row, if there is one

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the counts. JSON-serializable."""
        return {
            "index": self._index.state_dict(),
            "counts": dict(self._counts),
            "notices": dict(self._notices.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Raises DataError if it belongs to other sources."""
        self._index.load_state_dict(state["index"])
        counts = state["counts"]  # older states, and those of on_bad_row=fail, have no skipped
        self._counts = {event: int(counts.get(event, 0)) for event in self._counts}
        self._notices.counts.clear()  # older states have none
        self._notices.counts.update({k: int(n) for k, n in state.get("notices", {}).items()})
        self._dropped_in_a_row = dict.fromkeys(self.sources, 0)
        self._ahead = None

    def _check_dropped(self, source: str, fitted: Fitted[T]) -> None:
        """Raise DataError if a source has no usable row."""
        self._dropped_in_a_row[source] += 1
        rows = self.sources[source]
        # Any 2n - 1 consecutive draws contain a full epoch, so no row fits.
        limit = _MOST_DROPPED if isinstance(rows, StreamedRows) else 2 * len(rows) - 1
        if self._dropped_in_a_row[source] >= limit:
            if fitted.bad is not None:
                raise _all_bad(f"source {source!r}", fitted.bad)
            raise _all_dropped(f"source {source!r}", self._encoder, self._config)


def load_all(
    sources: Sequence[Source],
    config: DataConfig,
    encoder: Encoder[T],
    *,
    limit: int | None = None,
    section: str = "data",
) -> list[T]:
    """Return every row once, source after source in file order, at most ``limit`` usable rows.

    ``section``: the place of ``config`` in the recipe, for messages. Logs the numbers of skipped,
    dropped and truncated rows. Raises DataError if no row is left.
    """
    items: list[T] = []
    dropped = truncated = 0
    bad: list[str] = []
    refs = (RowRef(s.name, i, 0) for s in sources for i in range(len(s)))
    by_name = {source.name: source for source in sources}
    notices = Notices()
    for ref in refs:
        if limit is not None and len(items) >= limit:
            break
        fitted: Fitted[T] = fit(by_name[ref.source], ref, encoder, config, notices=notices)
        truncated += fitted.truncated
        if fitted.bad is not None:
            bad.append(fitted.bad)
        elif fitted.item is None:
            dropped += 1
        else:
            items.append(fitted.item)
    notices.log_totals(encoder.unit)
    _log_bad(bad, section, encoder.unit)
    if not items and not dropped and bad:
        raise _all_bad(section, bad[0])
    if not items and dropped:
        raise _all_dropped(section, encoder, config)
    if dropped or truncated:
        _log.warning(
            "%s: %d %ss dropped and %d truncated because they exceed %s=%d (%d kept)",
            *(
                section,
                dropped,
                encoder.unit,
                truncated,
                encoder.limit_name,
                encoder.limit,
                len(items),
            ),
        )
    return items


class EncodedTable(Generic[T]):
    """A table of all rows, source after source in file order, for data larger than memory.

    Rows are encoded again at every access. All rows are also encoded once at construction, so that
    all errors are reported together before any work is done.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder[T],
        *,
        limit: int | None = None,
        problem_of: Callable[[T], str | None] = lambda item: None,
    ) -> None:
        """``limit``: the most usable rows to keep. ``problem_of``: reason why the job cannot use an
        item. Raises DataError if rows are unusable.

        The message contains their number and the first few errors.
        """
        self.sources = open_rows(config)
        self._encoder = encoder
        self._config = config
        self._problem_of = problem_of
        self._of, self._rows = array("H"), array("q")
        self.dropped = 0
        """Number of rows dropped because they exceed the length limit."""
        self._skipped: list[str] = []
        self._bad: list[str] = []
        self._num_bad = 0
        self._notices = Notices()
        for number, source in enumerate(self.sources):
            for row in range(len(source)):
                if limit is not None and len(self) >= limit:
                    break
                self._scan(number, row)
        self._notices.log_totals(encoder.unit)
        if self._num_bad == 1:
            raise DataError(self._bad[0])
        if self._num_bad:
            more = "" if self._num_bad == len(self._bad) else f"; the first {len(self._bad)}"
            shown = "".join(f"\n  - {problem}" for problem in self._bad)
            raise DataError(f"{self._num_bad} {encoder.unit}s cannot be used{more}:{shown}")
        _log_bad(self._skipped, "data", encoder.unit)
        if not len(self):
            if self._skipped and not self.dropped:
                raise _all_bad("the data", self._skipped[0])
            raise _all_dropped("the data", encoder, config)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, first: int, count: int) -> list[T]:
        """Return the items ``first`` to ``first + count``, fewer at the end."""
        numbers = range(first, min(first + count, len(self)))
        return [self._encoded(self._of[i], self._rows[i]) for i in numbers]

    def _scan(self, number: int, row: int) -> None:
        source = self.sources[number]
        try:
            ref = RowRef(source.name, row, 0)
            fitted: Fitted[T] = fit(source, ref, self._encoder, self._config, notices=self._notices)
        except DataError as error:
            self._add_bad(str(error))
            return
        if fitted.bad is not None:
            self._skipped.append(fitted.bad)
            return
        if fitted.item is None:
            self.dropped += 1
            return
        if problem := self._problem_of(fitted.item):
            self._add_bad(f"{source[row].where}: {problem}")
            return
        self._of.append(number)
        self._rows.append(row)

    def _add_bad(self, problem: str) -> None:
        self._num_bad += 1
        if len(self._bad) < _SHOWN:
            self._bad.append(problem)

    def _encoded(self, number: int, row: int) -> T:
        source = self.sources[number]
        return self._encoder.encode(source[row], RowRef(source.name, row, 0))


class OverlongError(DataError):
    """A row exceeds the length limit, and ``overlong`` is ``error``."""


class Fitted(NamedTuple, Generic[T]):
    """A row within the length limit, or the reason why it is left out."""

    item: T | None
    """None: dropped because of its length, or skipped."""
    truncated: bool
    bad: str | None = None
    """Error of an unusable row (``on_bad_row: skip``)."""


class _Ahead(NamedTuple, Generic[T]):
    """The next row of a stream, encoded before it is drawn."""

    ref: RowRef
    fitted: Fitted[T]
    notices: PostponedNotices


def fit(
    source: Source, ref: RowRef, encoder: Encoder[T], config: DataConfig, *, notices: Notices
) -> Fitted[T]:
    """Encode row ``ref`` and apply the length limit.

    Raises DataError with the row's position if the row is unusable and ``on_bad_row`` is ``fail``,
    and OverlongError if the row is over the limit and ``overlong`` is ``error``.
    """
    try:
        item, where = _encoded(source, ref, encoder, config, notices)
    except DataError as error:
        if config.on_bad_row == "fail":
            raise
        return Fitted(None, False, str(error))
    length = encoder.length(item)
    if length <= encoder.limit:
        return Fitted(item, False)
    if config.overlong == "error":
        raise OverlongError(
            f"{where}: the {encoder.unit} has {length} tokens, but {encoder.limit_name} is "
            f"{encoder.limit}. Raise {encoder.limit_name} (if the model has enough positions), or "
            f"set overlong: {' or '.join(config.shortenings)}"
        )
    shorter = None if config.overlong == "drop" else encoder.truncate(item)
    return Fitted(shorter, shorter is not None)


def _encoded(
    source: Source, ref: RowRef, encoder: Encoder[T], config: DataConfig, notices: Notices
) -> tuple[T, str]:
    """Return the item of row ``ref`` and the row's position."""
    with collecting() as notes:
        row = source[ref.row]
    try:
        with collecting() as more:
            item = encoder.encode(row, ref)
            note_marks(row, config)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    notices.add(notes | more, row.where)
    return item, row.where


def _log_bad(bad: Sequence[str], section: str, unit: str) -> None:
    if bad:
        _log.warning(
            "%s: %d %ss are unusable and skipped (on_bad_row: skip); the first: %s",
            *(section, len(bad), unit, bad[0]),
        )


def _all_bad(section: str, first: str) -> DataError:
    return DataError(
        f"every row of {section} is unusable or dropped, and on_bad_row=skip leaves no data. "
        f"Correct the keys of the data section, or the rows; the last error: {first}"
    )


def _all_dropped(section: str, encoder: Encoder[Any], config: DataConfig) -> DataError:
    shorter = [setting for setting in config.shortenings if setting != "drop"]
    truncates = config.overlong == "drop" and bool(shorter)
    other = f", or set overlong: {' or '.join(shorter)}" if truncates else ""
    return DataError(
        f"every {encoder.unit} of {section} exceeds {encoder.limit_name}={encoder.limit} tokens "
        f"and is dropped, so no data is left. Raise {encoder.limit_name} (if the model has enough "
        f"positions){other}"
    )
