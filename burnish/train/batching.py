"""From ragged rows to what a model reads: micro-batches, then padded, packed or shared-prefix
layouts.

The three layouts give the same numbers; they differ in what is computed twice. ``padded`` computes
on padding, ``packed`` does not, ``shared_prefix`` also computes the prompt of a group once for all
its responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.models.attention import PackedPlan, Segment, plan_segments
from burnish.types import Batch

Layout = Literal["shared_prefix", "packed", "padded"]


@dataclass(frozen=True)
class Arranged:
    """A micro-batch as the model reads it."""

    input_ids: Tensor  # [R, T]
    position_ids: Tensor  # [R, T]
    plan: PackedPlan | None  # None: plain causal attention (padding stands on the right)
    place: Tensor  # [M] flat index into [R * T] of each token of the batch


def split_rows(
    batch: Batch, *, micro_batch_size: int | None, max_tokens: int | None, layout: Layout
) -> Iterator[list[int]]:
    """Rows of each micro-batch, in order; every row exactly once.

    With ``max_tokens`` a micro-batch takes whole units (``batch.rows_per_unit`` rows) while the
    tokens it will compute stay within the budget (at least one unit). Else ``micro_batch_size``
    units each; None: all at once.
    """
    unit = batch.rows_per_unit
    starts = range(0, batch.num_rows, unit)
    units = [list(range(s, min(s + unit, batch.num_rows))) for s in starts]
    if max_tokens is None:
        size = micro_batch_size or len(units)
        for begin in range(0, len(units), size):
            yield [row for rows in units[begin : begin + size] for row in rows]
        return
    chosen: list[int] = []
    for rows in units:
        if chosen and _num_computed(batch, chosen + rows, layout) > max_tokens:
            yield chosen
            chosen = []
        chosen = chosen + rows
    if chosen:
        yield chosen


def _num_computed(batch: Batch, rows: Sequence[int], layout: Layout) -> int:
    """Tokens that a forward pass over ``rows`` computes in the given layout."""
    lengths = batch.lengths[list(rows)]
    if layout == "padded":
        return int(lengths.max()) * len(rows)
    total = int(lengths.sum())
    if layout == "shared_prefix":
        for group in _prefix_groups(batch.select(rows)):
            total -= (len(group) - 1) * int(batch.prompt_lens[rows[group[0]]])
    return total


def arrange(batch: Batch, layout: Layout) -> Arranged:
    """Lay a micro-batch out on the device its tokens are on."""
    if layout == "padded":
        return _padded(batch)
    groups = (
        _prefix_groups(batch) if layout == "shared_prefix" else [[i] for i in range(batch.num_rows)]
    )
    return _packed(batch, groups)


def read_and_target(batch: Batch) -> tuple[Tensor, Tensor]:
    """(tokens whose output predicts, tokens that are predicted), both [K] indices into the batch's
    tokens.

    Raises ValueError where the first token of a row is an action: nothing precedes it.
    """
    targets = batch.action_mask.nonzero()[:, 0]
    starts = batch.offsets[:-1].to(targets.device)
    if bool(batch.action_mask[starts[batch.lengths.to(starts.device) > 0]].any()):
        raise ValueError("the first token of a row is marked as an action, and nothing precedes it")
    return targets - 1, targets


def _padded(batch: Batch) -> Arranged:
    device = batch.tokens.device
    rows, width = batch.num_rows, int(batch.lengths.max())
    position = torch.arange(batch.tokens.numel()) - torch.repeat_interleave(
        batch.offsets[:-1], batch.lengths
    )
    row = torch.repeat_interleave(torch.arange(rows), batch.lengths)
    place = (row * width + position).to(device)
    input_ids = torch.zeros(rows * width, dtype=torch.int64, device=device)
    input_ids[place] = batch.tokens
    positions = torch.arange(width, device=device).expand(rows, width)
    return Arranged(input_ids.view(rows, width), positions, None, place)


def _prefix_groups(batch: Batch) -> list[list[int]]:
    """Neighbouring rows of one group that begin with the same prompt."""
    groups: list[list[int]] = []
    tokens = batch.tokens.cpu()
    prompts = [
        tokens[o : o + p]
        for o, p in zip(batch.offsets[:-1].tolist(), batch.prompt_lens.tolist(), strict=True)
    ]
    for i in range(batch.num_rows):
        first = groups[-1][0] if groups else -1
        same_group = first >= 0 and batch.group_ids[first] == batch.group_ids[i]
        if same_group and torch.equal(prompts[first], prompts[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _packed(batch: Batch, groups: Sequence[Sequence[int]]) -> Arranged:
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
    device = batch.tokens.device
    position = torch.cat(positions).to(device)
    return Arranged(
        input_ids=batch.tokens[torch.cat(source).to(device)][None],
        position_ids=position[None],
        plan=plan_segments(segments, position),
        place=place.to(device),
    )
