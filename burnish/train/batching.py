"""Conversion of ragged rows to model inputs: micro-batches, then padded, packed or shared-prefix
layouts.

The three layouts give the same numbers and differ in redundant computation. ``padded`` computes on
padding. ``packed`` does not. ``shared_prefix`` also computes the prompt of a group once for all its
responses.

:class:`MicroBatchBackoff` makes micro-batches smaller after a pass ran out of memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.models.attention import PackedPlan, plan_segments
from burnish.models.flash import FlashSwitch
from burnish.oom import is_out_of_memory
from burnish.tensors import upload
from burnish.train.row_layout import (
    Layout as Layout,
)
from burnish.train.row_layout import (
    RowGroup,
    RowSize,
    by_count,
    by_tokens,
    count_tokens,
    place_rows,
    segments_of,
)
from burnish.types import Batch, row_runs

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class Arranged:
    """A micro-batch in the layout that the model reads."""

    input_ids: Tensor  # [R, T]
    position_ids: Tensor  # [R, T]
    plan: PackedPlan | None  # None: plain causal attention (padding on the right)
    flat_index: Tensor  # [M] index into [R * T] of each token of the batch; on the CPU


def split_rows(
    batch: Batch, *, micro_batch_size: int | None, max_tokens: int | None, layout: Layout
) -> Iterator[list[int]]:
    """Yield the rows of each micro-batch, in order; every row exactly once.

    With ``max_tokens`` a micro-batch takes complete units (:func:`row_units`) while its computed
    tokens stay within the budget, but at least one unit. Otherwise it takes
    ``micro_batch_size`` units; None: all of them.
    """
    units = row_units(batch)
    if max_tokens is None:
        micros = by_count(units, micro_batch_size)
    else:
        micros = by_tokens(units, max_tokens, _Work(batch, layout).tokens)
    for micro in micros:
        yield _rows(micro)


def split_over_ranks(
    batch: Batch,
    *,
    ranks: int,
    micro_batch_size: int | None,
    max_tokens: int | None,
    layout: Layout,
) -> list[list[list[int]]]:
    """Return [rank][micro-batch] -> rows; every row exactly once.

    The result depends on the batch alone. Every rank holds the entire batch and computes the same
    split without communication.

    All ranks have the same number of micro-batches, because a sharded model waits for all ranks in
    every pass. If a rank has too few, its largest micro-batch is halved. Empty micro-batches are
    added only if none can be halved. Every rank follows the rules of :func:`split_rows`, which is
    also the split for one rank.

    Without ``max_tokens`` each rank takes its share of the units in order; shares differ by at most
    one unit. With ``max_tokens`` the work is balanced: no rank computes more tokens than total /
    ranks plus the larger of one unit and a quarter of that. (For ``padded`` this counts the units
    alone, without added padding.) Under ``shared_prefix``, rows that share their prompt go to one
    rank up to that quarter.
    """
    units = row_units(batch)
    if ranks == 1:
        rows = split_rows(
            batch, micro_batch_size=micro_batch_size, max_tokens=max_tokens, layout=layout
        )
        return [list(rows)]
    work = _Work(batch, layout)
    if max_tokens is None:
        shares = [
            units[r * len(units) // ranks : (r + 1) * len(units) // ranks] for r in range(ranks)
        ]
        parts = [list(by_count(share, micro_batch_size)) for share in shares]
    else:
        shares = _balanced(units, ranks, max_tokens, work)
        parts = [list(by_tokens(share, max_tokens, work.tokens)) for share in shares]
    passes = max(len(part) for part in parts)
    return [[_rows(micro) for micro in _in_passes(part, passes, work)] for part in parts]


@dataclass(frozen=True)
class Share:
    """The part of a batch that one data-parallel rank computes."""

    batch: Batch
    """Its rows, or a batch that contains them; with the denominators of the entire step."""
    passes: list[list[int]]
    """Rows of ``batch`` in each micro-batch, in order. All ranks have the same number of
    micro-batches, of which some may be empty."""
    row_numbers: Sequence[int]
    """[N] number of each row of ``batch`` in the batch that was split."""

    def passes_to_run(self, *, waits: bool) -> list[list[int]]:
        """Return :attr:`passes`, without the empty ones unless other ranks wait for this rank in
        every pass (``waits``)."""
        return self.passes if waits else [rows for rows in self.passes if rows]


@dataclass(frozen=True)
class RowSplit:
    """Rule by which an engine splits a batch over its data-parallel ranks and micro-batches. The
    arguments of :func:`split_over_ranks`."""

    ranks: int
    micro_batch_size: int | None
    max_tokens: int | None
    layout: Layout

    def passes(self, batch: Batch) -> list[list[list[int]]]:
        """Return [rank][micro-batch] -> rows of ``batch``."""
        return split_over_ranks(batch, **vars(self))

    def share(self, batch: Batch, rank: int) -> Share:
        """Return the share of one rank that has the entire batch."""
        return Share(batch, self.passes(batch)[rank], range(batch.num_rows))

    def shares(self, batch: Batch) -> Iterator[Share]:
        """Yield the share of each rank, with its own rows only, in the order of its micro-batches.
        Their arrays may share memory with ``batch``."""
        for passes in self.passes(batch):
            rows = [row for micro in passes for row in micro]
            ends = list(itertools.accumulate(map(len, passes)))
            micro_batches = [
                list(range(end - len(micro), end)) for micro, end in zip(passes, ends, strict=True)
            ]
            yield Share(batch.select(rows, copy=False), micro_batches, rows)


def computed_tokens(batch: Batch, rows: Sequence[int], layout: Layout) -> int:
    """Return the number of tokens that one forward pass over ``rows`` of a batch computes."""
    return _Work(batch, layout).tokens(rows)


class _Work:
    """Token counts of forward passes over rows of a batch in a layout."""

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self._sizes, self._layout = row_sizes(batch, layout), layout

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of one pass over ``rows``, in this order."""
        return count_tokens([self._sizes[row] for row in rows], self._layout)

    def joined(self, left: RowGroup, right: RowGroup) -> bool:
        """Return whether ``right`` shares its prompt with ``left`` if placed after it."""
        return self._sizes[left[-1]].group == self._sizes[right[0]].group


def row_sizes(batch: Batch, layout: Layout) -> list[RowSize]:
    """Return the sizes of all rows. Rows share a group only under ``shared_prefix``."""
    groups = _prompt_keys(batch) if layout == "shared_prefix" else range(batch.num_rows)
    lengths, prompts = batch.lengths.tolist(), batch.prompt_lens.tolist()
    return [RowSize(*sizes) for sizes in zip(lengths, prompts, groups, strict=True)]


def _prompt_keys(batch: Batch) -> list[int]:
    """Return [N] numbers, equal if rows are of one group and begin with the same prompt."""
    tokens, numbers = batch.on_host.tokens.numpy(), dict[tuple[int, bytes], int]()
    starts, lengths = batch.offsets[:-1].tolist(), batch.prompt_lens.tolist()
    keys = [
        (group, tokens[start : start + length].tobytes())
        for group, start, length in zip(batch.group_ids.tolist(), starts, lengths, strict=True)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def row_units(batch: Batch, rows: Sequence[int] | None = None) -> list[RowGroup]:
    """Return the units of ``rows`` (None: of all rows), which are never split: all rows of a sample
    with ``batch.samples_together``, else ``batch.rows_per_unit`` consecutive rows."""
    rows = range(batch.num_rows) if rows is None else rows
    if batch.samples_together and batch.sample_ids is not None:
        samples, units = batch.sample_ids.tolist(), dict[int, RowGroup]()
        for row in rows:
            units.setdefault(samples[row], []).append(row)
        return list(units.values())
    size = batch.rows_per_unit
    return [list(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def _rows(units: Iterable[RowGroup]) -> list[int]:
    return [row for unit in units for row in unit]


def _balanced(
    units: Sequence[RowGroup], ranks: int, max_tokens: int, work: _Work
) -> list[list[RowGroup]]:
    """Return the units of each rank, in their order. The largest pieces are assigned first, each to
    the rank with the least work so far."""
    fair = sum(work.tokens(unit) for unit in units) / ranks
    pieces: list[list[RowGroup]] = []
    for unit in units:
        joined = bool(pieces) and work.joined(pieces[-1][-1], unit)
        if joined and work.tokens(_rows([*pieces[-1], unit])) <= min(max_tokens, fair / 4):
            pieces[-1].append(unit)
        else:
            pieces.append([unit])
    shares: list[list[RowGroup]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in sorted(pieces, key=lambda p: work.tokens(_rows(p)), reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += work.tokens(_rows(piece))
        shares[rank] += piece
    return [sorted(share) for share in shares]


def _in_passes(micros: Sequence[list[RowGroup]], passes: int, work: _Work) -> list[list[RowGroup]]:
    """Return ``passes`` micro-batches: the largest are halved, then empty ones are added."""
    out = list(micros)
    while len(out) < passes:
        several = [i for i, micro in enumerate(out) if len(micro) > 1]
        if not several:
            return out + [[] for _ in range(passes - len(out))]
        largest = max(several, key=lambda i: work.tokens(_rows(out[i])))
        micro = out[largest]
        cut = min(  # between two groups if there are several, and near the middle
            range(1, len(micro)),
            key=lambda k: (work.joined(micro[k - 1], micro[k]), abs(2 * k - len(micro))),
        )
        out[largest : largest + 1] = [micro[:cut], micro[cut:]]
    return out


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
    return _rows(left), _rows(right)


def arrange(batch: Batch, layout: Layout, *, flash: FlashSwitch | None = None) -> Arranged:
    """Lay out a micro-batch on the device of its tokens. ``flash``: attention by FlashAttention.

    Indices are computed on the CPU from ``batch.on_host``, without device synchronization.
    """
    device, batch = batch.tokens.device, batch.on_host
    num_tokens = batch.tokens.numel()
    if layout == "padded":
        num_rows, width = batch.num_rows, int(batch.lengths.max())
        row_starts = torch.repeat_interleave(batch.offsets[:-1], batch.lengths)
        row = torch.repeat_interleave(torch.arange(num_rows), batch.lengths)
        flat_index = row * width + torch.arange(num_tokens) - row_starts
        input_ids = torch.zeros(num_rows * width, dtype=torch.int64)
        input_ids[flat_index] = batch.tokens
        columns = torch.arange(width, device=device).expand(num_rows, width)
        return Arranged(upload(input_ids.view(num_rows, width), device), columns, None, flat_index)
    # the prompt of each group once, then the rest of its rows; a group of one is an ordinary row
    rows = row_sizes(batch, layout)
    placed = place_rows(rows, layout)
    source: list[Tensor] = []  # per row: indices into the batch's tokens
    positions: list[Tensor] = []
    flat_index = torch.empty(num_tokens, dtype=torch.int64)
    for begin, size, at in zip(batch.offsets.tolist()[:-1], rows, placed, strict=True):
        response_begin, end = begin + at.skipped, begin + size.length
        source.append(torch.arange(response_begin, end))
        positions.append(torch.arange(at.skipped, size.length))
        flat_index[begin:response_begin] = torch.arange(
            at.prefix_start, at.prefix_start + at.skipped
        )
        flat_index[response_begin:end] = torch.arange(at.start, at.start + at.count)
    position = upload(torch.cat(positions), device)
    return Arranged(
        input_ids=upload(batch.tokens[torch.cat(source)][None], device),
        position_ids=position[None],
        plan=plan_segments(segments_of(placed), position, flash=flash),
        flat_index=flat_index,
    )


def read_and_target(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (tokens whose output predicts, tokens that are predicted), both [K] indices into the
    batch's tokens, on the CPU.

    Raises ValueError if the first token of a row is an action: nothing precedes it.
    """
    mask = batch.on_host.action_mask
    targets = mask.nonzero()[:, 0]
    if bool(mask[batch.offsets[:-1][batch.lengths > 0]].any()):
        raise ValueError(
            "the action mask includes the first token of a row, which no earlier token predicts; "
            "set it to 0 there"
        )
    return targets - 1, targets


def fill_rows(out: Tensor, batch: Batch, parts: Sequence[tuple[Sequence[int], Tensor]]) -> None:
    """Copy the results of micro-batches into ``out`` [M, ...] on the CPU.

    ``parts``: (rows of ``batch``, [m, ...] values aligned with their tokens). Device results are
    copied at once, so the host waits for the device once.
    """
    if not parts:
        return
    values = parts[0][1] if len(parts) == 1 else torch.cat([values for _, values in parts])
    values, done, begins = values.cpu(), 0, batch.offsets.tolist()
    for rows, _ in parts:
        for first, last in row_runs(rows):
            begin, end = begins[first], begins[last + 1]
            out[begin:end] = values[done : done + end - begin]
            done += end - begin
