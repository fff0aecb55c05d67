"""From ragged rows to what a model reads: micro-batches, then padded, packed or shared-prefix
layouts.

The three layouts give the same numbers; they differ in what is computed twice. ``padded`` computes
on padding, ``packed`` does not, ``shared_prefix`` also computes the prompt of a group once for all
its responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.models.attention import PackedPlan, Segment, plan_segments
from burnish.tensors import upload
from burnish.types import Batch

Layout = Literal["shared_prefix", "packed", "padded"]


@dataclass(frozen=True)
class Arranged:
    """A micro-batch as the model reads it."""

    input_ids: Tensor  # [R, T]
    position_ids: Tensor  # [R, T]
    plan: PackedPlan | None  # None: plain causal attention (padding stands on the right)
    place: Tensor  # [M] flat index into [R * T] of each token of the batch; on the CPU


RowGroup = list[int]
"""Rows that stay in one micro-batch."""


def split_rows(
    batch: Batch, *, micro_batch_size: int | None, max_tokens: int | None, layout: Layout
) -> Iterator[list[int]]:
    """Rows of each micro-batch, in order; every row exactly once.

    With ``max_tokens`` a micro-batch takes whole units (``batch.rows_per_unit`` rows) while the
    tokens it will compute stay within the budget (at least one unit). Else ``micro_batch_size``
    units each; None: all at once.
    """
    units = _row_groups(batch)
    if max_tokens is None:
        micros = _by_count(units, micro_batch_size)
    else:
        micros = _by_tokens(units, max_tokens, _Work(batch, layout))
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
    """[rank][micro-batch] -> rows; every row exactly once. A function of the batch alone, so that
    every rank, which holds the whole batch, finds the same split without asking the others.

    All ranks have the same number of micro-batches, because a sharded model waits for all ranks
    in every pass: where a rank has too few, its largest micro-batch is halved, and only where
    nothing is left to halve is one empty. Each follows the rules of :func:`split_rows`, which is
    what one rank does.

    Without ``max_tokens`` a rank takes its share of the units as they stand (shares differ by at
    most one unit). With ``max_tokens`` the work is balanced: no rank computes more tokens than
    total / ranks plus the larger of one unit and a quarter of that. (For ``padded`` this counts
    the units alone, without what padding adds.) Under ``shared_prefix`` rows that share their
    prompt go to one rank up to that quarter.
    """
    units = _row_groups(batch)
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
        parts = [list(_by_count(share, micro_batch_size)) for share in shares]
    else:
        shares = _balanced(units, ranks, max_tokens, work)
        parts = [list(_by_tokens(share, max_tokens, work)) for share in shares]
    passes = max(len(part) for part in parts)
    return [[_rows(micro) for micro in _in_passes(part, passes, work)] for part in parts]


def computed_tokens(batch: Batch, rows: Sequence[int], layout: Layout) -> int:
    """Tokens that one forward pass over ``rows`` of a batch computes."""
    return _Work(batch, layout).tokens(rows)


class _Work:
    """How many tokens a forward pass over some rows of a batch computes in a layout."""

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self._padded = layout == "padded"
        self._lengths: list[int] = batch.lengths.tolist()
        self._prompts: list[int] = batch.prompt_lens.tolist()
        shared = layout == "shared_prefix"
        self._groups = _prompt_keys(batch) if shared else list(range(batch.num_rows))
        """Neighbouring rows with equal entries share their prompt."""

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of one pass over ``rows``, in this order."""
        if self._padded:
            return max(self._lengths[row] for row in rows) * len(rows)
        total = sum(self._lengths[row] for row in rows)
        for before, row in itertools.pairwise(rows):
            if self._groups[before] == self._groups[row]:
                total -= self._prompts[row]
        return total

    def joined(self, left: RowGroup, right: RowGroup) -> bool:
        """Whether ``right`` standing behind ``left`` shares its prompt."""
        return self._groups[left[-1]] == self._groups[right[0]]


def _prompt_keys(batch: Batch) -> list[int]:
    """[N] numbers, equal where rows are of one group and begin with the same prompt."""
    tokens, numbers = batch.on_host.tokens.numpy(), dict[tuple[int, bytes], int]()
    starts, lengths = batch.offsets[:-1].tolist(), batch.prompt_lens.tolist()
    keys = [
        (group, tokens[start : start + length].tobytes())
        for group, start, length in zip(batch.group_ids.tolist(), starts, lengths, strict=True)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _row_groups(batch: Batch) -> list[RowGroup]:
    starts = range(0, batch.num_rows, batch.rows_per_unit)
    return [list(range(s, min(s + batch.rows_per_unit, batch.num_rows))) for s in starts]


def _rows(units: Iterable[RowGroup]) -> list[int]:
    return [row for unit in units for row in unit]


def _by_count(units: Sequence[RowGroup], size: int | None) -> Iterator[list[RowGroup]]:
    for begin in range(0, len(units), size or len(units) or 1):
        yield list(units[begin : begin + (size or len(units))])


def _by_tokens(
    units: Sequence[RowGroup], max_tokens: float, work: _Work
) -> Iterator[list[RowGroup]]:
    """Neighbours together while they stay within the budget; at least one."""
    chosen: list[RowGroup] = []
    for unit in units:
        if chosen and work.tokens(_rows([*chosen, unit])) > max_tokens:
            yield chosen
            chosen = []
        chosen.append(unit)
    if chosen:
        yield chosen


def _balanced(
    units: Sequence[RowGroup], ranks: int, max_tokens: int, work: _Work
) -> list[list[RowGroup]]:
    """Units of each rank, in their order: the largest pieces first, each to the rank with the
    least work so far."""
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
    """The micro-batches, the largest halved until there are ``passes``; then empty ones."""
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


def arrange(batch: Batch, layout: Layout) -> Arranged:
    """Lay a micro-batch out on the device its tokens are on. Indices are computed on the CPU, from
    ``batch.on_host``, and nothing waits for the device."""
    host, device = batch.on_host, batch.tokens.device
    if layout == "padded":
        return _padded(host, device)
    groups = (
        _prefix_groups(host) if layout == "shared_prefix" else [[i] for i in range(host.num_rows)]
    )
    return _packed(host, groups, device)


def read_and_target(batch: Batch) -> tuple[Tensor, Tensor]:
    """(tokens whose output predicts, tokens that are predicted), both [K] indices into the batch's
    tokens, on the CPU.

    Raises ValueError if the first token of a row is an action: nothing precedes it.
    """
    mask = batch.on_host.action_mask
    targets = mask.nonzero()[:, 0]
    if bool(mask[batch.offsets[:-1][batch.lengths > 0]].any()):
        raise ValueError("the first token of a row is marked as an action, and nothing precedes it")
    return targets - 1, targets


def fill_rows(out: Tensor, batch: Batch, found: Sequence[tuple[Sequence[int], Tensor]]) -> None:
    """Copy the results of micro-batches (rows of ``batch``, [m, ...] in line with their tokens)
    into ``out`` [M, ...] on the CPU. Results on a device come in one copy, so the host waits for
    the device once."""
    begins = batch.offsets.tolist()
    index = [torch.arange(begins[r], begins[r + 1]) for rows, _ in found for r in rows]
    if index:
        out[torch.cat(index)] = torch.cat([values for _, values in found]).cpu()


def _padded(batch: Batch, device: torch.device) -> Arranged:
    rows, width = batch.num_rows, int(batch.lengths.max())
    position = torch.arange(batch.tokens.numel()) - torch.repeat_interleave(
        batch.offsets[:-1], batch.lengths
    )
    row = torch.repeat_interleave(torch.arange(rows), batch.lengths)
    place = row * width + position
    input_ids = torch.zeros(rows * width, dtype=torch.int64)
    input_ids[place] = batch.tokens
    positions = torch.arange(width, device=device).expand(rows, width)
    return Arranged(upload(input_ids.view(rows, width), device), positions, None, place)


def _prefix_groups(batch: Batch) -> list[list[int]]:
    """Neighbouring rows of one group that begin with the same prompt."""
    keys = _prompt_keys(batch)
    return [list(run) for _, run in itertools.groupby(range(batch.num_rows), keys.__getitem__)]


def _packed(batch: Batch, groups: Sequence[Sequence[int]], device: torch.device) -> Arranged:
    """Each group's prompt once, then its rows' remainders; a group of one is an ordinary row."""
    offsets, lengths, prompts = (
        x.tolist() for x in (batch.offsets, batch.lengths, batch.prompt_lens)
    )
    source: list[Tensor] = []  # per piece: indices into the batch's tokens
    positions: list[Tensor] = []
    segments: list[Segment] = []
    place = torch.empty(batch.tokens.numel(), dtype=torch.int64)
    used = 0
    for group in groups:
        shared = prompts[group[0]] if len(group) > 1 else 0
        prefix_start = used
        for k, row in enumerate(group):
            begin = 0 if k == 0 else shared
            count = lengths[row] - begin
            source.append(torch.arange(offsets[row] + begin, offsets[row] + lengths[row]))
            positions.append(torch.arange(begin, lengths[row]))
            if begin:
                place[offsets[row] : offsets[row] + shared] = torch.arange(
                    prefix_start, prefix_start + shared
                )
            place[offsets[row] + begin : offsets[row] + lengths[row]] = torch.arange(
                used, used + count
            )
            if count:
                prefix = (prefix_start, shared) if begin else (0, 0)
                segments.append(Segment(used, count, *prefix))
            used += count
    position = upload(torch.cat(positions), device)
    return Arranged(
        input_ids=upload(batch.tokens[torch.cat(source)][None], device),
        position_ids=position[None],
        plan=plan_segments(segments, position),
        place=place,
    )
