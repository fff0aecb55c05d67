"""Reduction of micro-batches after a pass ran out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from burnish.oom import is_out_of_memory
from burnish.train.batching import Layout, computed_tokens, row_units
from burnish.types import Batch

log = logging.getLogger("burnish")


class MicroBatchBackoff:
    """Backoff for ``train.on_oom=retry_smaller``: micro-batches that do not fit are halved, and
    later micro-batches are limited to that size."""

    def __init__(self, layout: Layout, *, forget: Callable[[], None]) -> None:
        """``forget``: clears the gradient, because the contribution of a failed pass to it is
        unknown."""
        self.layout, self.forget = layout, forget
        self.most_tokens: int | None = None
        """Limit on the computed tokens of a pass; None: no limit."""
        self._retries = 0

    def try_reduce(self, error: Exception, batch: Batch, rows: Sequence[int]) -> bool:
        """Return whether a pass over ``rows`` that raised ``error`` can be retried with less. If
        so, lower the limit that :meth:`parts` applies."""
        if not is_out_of_memory(error):
            return False
        tokens = computed_tokens(batch, rows, self.layout)
        if len(row_units(batch, rows)) <= 1:
            error.add_note(
                f"train.on_oom=retry_smaller cannot split this pass: it has {len(rows)} row(s) of "
                f"{tokens} tokens that must stay in one micro-batch"
            )
            return False
        halves = _halves(batch, rows)
        self.most_tokens = max(computed_tokens(batch, half, self.layout) for half in halves)
        self._retries += 1
        log.warning(
            "out of memory in a pass over %d rows of %d tokens; the limit is now %d tokens "
            "(train.on_oom=retry_smaller)",
            len(rows),
            tokens,
            self.most_tokens,
        )
        return True

    def parts(self, batch: Batch, rows: list[int]) -> Iterator[list[int]]:
        """Yield a micro-batch, halved repeatedly while it exceeds the limit. Units are never
        split."""
        small = self.most_tokens is None or len(row_units(batch, rows)) <= 1
        if small or computed_tokens(batch, rows, self.layout) <= (self.most_tokens or 0):
            yield rows
            return
        for half in _halves(batch, rows):
            yield from self.parts(batch, half)

    def taken(self) -> int:
        """Return the number of retries since the last call."""
        retries, self._retries = self._retries, 0
        return retries


def _halves(batch: Batch, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split ``rows`` between two units."""
    units = row_units(batch, rows)
    middle = (len(units) + 1) // 2
    left, right = units[:middle], units[middle:]
    return [row for unit in left for row in unit], [row for unit in right for row in unit]
