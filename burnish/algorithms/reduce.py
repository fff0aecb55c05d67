"""From per-token losses to one scalar. This file owns every denominator.

Counts are GLOBAL, over all micro-batches and ranks of the optimizer step. The scalars of the parts
therefore add up to the same total, however the rows are split. A row is never split.

A *sequence* is one sample: a row, or all rows of an episode. Rows of one sequence may be in
different micro-batches for :func:`reduce`, which gets the length of the sequence as an argument.
:func:`row_sum` and :func:`row_mean` need all of its tokens; their ``row_ids`` are then those of
sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_constant"]


def reduce(  # house: ok the counts of every aggregation
    per_token_loss: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_len: int | None = None,
    row_ids: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """The scalar loss of a micro-batch: its share of the loss of the optimizer step.

    token_mean:             sum over tokens / num_tokens               (DAPO, arXiv 2503.14476)
    sequence_mean:          sum over sequences of (the sequence's token mean) / num_sequences
                                                                       (GRPO, arXiv 2402.03300)
    sequence_sum_constant:  sum over tokens / (num_sequences max_len)  (Dr. GRPO,
                                                                        arXiv 2503.20783)

    ``per_token_loss`` and ``mask`` (bool) are padded [N, T], or packed [M] with ``row_ids`` [M]
    (ids need be equal within a row and different between rows, no more). ``sequence_tokens``, of
    the same shape: number of true mask entries of each token's entire sequence; None: every row is
    a sequence of its own. Rows without a true mask add 0. Raises ValueError for a missing
    ``max_len`` or ``row_ids``, a count below 1 and an unknown aggregation.
    """
    if num_tokens < 1 or num_sequences < 1:
        raise ValueError(
            f"num_tokens={num_tokens} and num_sequences={num_sequences} are the counts of the "
            "entire optimizer step and must be at least 1; skip a step without tokens to train on"
        )
    loss = torch.where(mask, at_least_fp32(per_token_loss), 0.0)
    if aggregation == "token_mean":
        return loss.sum() / num_tokens
    if aggregation == "sequence_mean":
        tokens = _tokens_in_row(mask, row_ids) if sequence_tokens is None else sequence_tokens
        return (loss / tokens.clamp(min=1)).sum() / num_sequences
    if aggregation == "sequence_sum_constant":
        if max_len is None:
            raise ValueError(
                "sequence_sum_constant got max_len=None: it divides by a constant length; "
                "pass max_len (usually generate_max_len)"
            )
        return loss.sum() / (num_sequences * max_len)
    raise ValueError(
        f"unknown aggregation {aggregation!r}; "
        "use token_mean, sequence_mean or sequence_sum_constant"
    )


def sum_by_row(x: Tensor, mask: Tensor, *, row_ids: Tensor, num_rows: int) -> Tensor:
    """[num_rows]: sums of packed ``x`` [M] where ``mask`` is true; ``row_ids`` [M] are row numbers.
    Differentiable."""
    inside = torch.where(mask, at_least_fp32(x), 0.0)
    return inside.new_zeros(num_rows).index_add(0, row_ids, inside)


def row_sum(x: Tensor, mask: Tensor, row_ids: Tensor | None = None) -> Tensor:
    """The sum over each token's row, at every token: [N, T] for padded rows, [M] for packed ones
    with ``row_ids`` [M]."""
    inside = torch.where(mask, at_least_fp32(x), 0.0)
    if row_ids is None:
        if mask.dim() != 2:
            raise ValueError(
                f"got packed tokens [{mask.numel()}] and row_ids=None, so row boundaries are "
                "unknown; pass row_ids [M]"
            )
        return inside.sum(1, keepdim=True).expand_as(inside)
    index = _numbered(row_ids)
    return inside.new_zeros(inside.shape).index_add(0, index, inside)[index]


def row_mean(x: Tensor, mask: Tensor, row_ids: Tensor | None = None) -> Tensor:
    """The mean over each token's row, as :func:`row_sum`; 0 in rows without a true mask."""
    return row_sum(x, mask, row_ids) / _tokens_in_row(mask, row_ids).clamp(min=1)


def _tokens_in_row(mask: Tensor, row_ids: Tensor | None) -> Tensor:
    """True entries of the mask in each token's row: [N, 1] for padded rows, [M] for packed ones."""
    if row_ids is None:
        if mask.dim() != 2:
            raise ValueError(
                f"sequence_mean got packed tokens [{mask.numel()}] and row_ids=None, so row "
                "boundaries are unknown; pass row_ids [M]"
            )
        return mask.sum(1, keepdim=True)
    index = _numbered(row_ids)
    return mask.new_zeros(mask.shape, dtype=torch.int64).index_add(0, index, mask.long())[index]


def _numbered(row_ids: Tensor) -> Tensor:
    """Return ``row_ids`` [M] renumbered from 0, in their order: the inverse of ``torch.unique``,
    without its device synchronization for the number of rows."""
    ordered, order = row_ids.sort(stable=True)
    number = torch.diff(ordered, prepend=ordered[:1]).ne(0).cumsum(0)
    return torch.empty_like(number).scatter(0, order, number)
