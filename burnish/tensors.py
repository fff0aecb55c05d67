"""Tensor helpers independent of any algorithm: masked statistics, and ragged rows to rectangles.

Entries outside a mask never affect a result or a gradient, even if they are NaN or infinite. Sums
are computed in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``x`` to ``device``. Copies to a GPU use pinned memory and are asynchronous, so work
    queued on the GPU continues."""
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert ``x`` to fp32 if it is narrower: fp16, bf16 and integers are converted, fp64 is
    unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``x`` over the entries with a true ``mask`` (bool, broadcast to ``x``), a
    scalar."""
    return torch.where(mask, at_least_fp32(x), 0.0).sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest entry of a non-negative ``x`` with a true ``mask``, a scalar. 0 if there
    is none."""
    inside = torch.where(mask, at_least_fp32(x), 0.0).flatten()
    return torch.cat([inside, inside.new_zeros(1)]).max()


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Normalize the entries of ``x`` with a true ``mask`` to mean 0 and population variance 1; 0
    elsewhere.

    (x - mean) / sqrt(max(var, eps)): a variance below ``eps`` is not amplified. Equal entries give
    exactly 0, because they are measured from the smallest entry, which leaves no rounding error of
    the mean. Computed in fp64, because squares of a spread of 1.8e19 overflow fp32. The result is
    fp32 or wider."""
    dtype = at_least_fp32(x).dtype
    x = x.double()
    if x.numel() == 0:
        return x.to(dtype)
    lowest = torch.where(mask, x, torch.inf).amin().detach()
    above = torch.where(mask, x - lowest, 0.0)
    count = mask.expand_as(x).sum().clamp(min=1)
    centered = torch.where(mask, above - above.sum() / count, 0.0)
    return (centered * (centered.square().sum() / count).clamp(min=eps).rsqrt()).to(dtype)


def pad_rows(flat: Tensor, offsets: Tensor, value: float = 0) -> Tensor:
    """Return ragged rows [M] as a rectangle [N, Tmax], with ``value`` after the end of each row.
    Differentiable.

    ``offsets`` [N + 1] as in :class:`burnish.types.Batch`: row i is tokens ``offsets[i]`` up to
    ``offsets[i + 1]``.

    >>> pad_rows(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).tolist()
    [[1, 2], [3, 0]]
    """
    _check_offsets(offsets, flat.numel())
    num_rows = offsets.numel() - 1
    width = int(offsets.diff().max()) if num_rows else 0
    padded = flat.new_full((num_rows * width,), value)
    return padded.index_copy(0, _slots(offsets, width, flat.device), flat).view(num_rows, width)


def unpad_rows(padded: Tensor, offsets: Tensor) -> Tensor:
    """Return a rectangle [N, T], T >= Tmax, as ragged rows [M]: the inverse of :func:`pad_rows`."""
    num_rows, width = padded.shape
    lengths = offsets.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if lengths.numel() != num_rows or longest > width:
        raise ValueError(
            f"offsets describe {lengths.numel()} rows of at most {longest} tokens, but the "
            f"tensor is {num_rows} x {width}; pass the offsets it was padded with"
        )
    return padded.reshape(-1).index_select(0, _slots(offsets, width, padded.device))


def _slots(offsets: Tensor, width: int, device: torch.device) -> Tensor:
    """Return [M] indices of the tokens of the ragged rows in the flattened [N, width] rectangle."""
    lengths = offsets.diff()
    row_starts = torch.arange(lengths.numel(), device=offsets.device) * width
    shift = torch.repeat_interleave(row_starts - offsets[:-1], lengths)
    return (torch.arange(shift.numel(), device=offsets.device) + shift).to(device)


def _check_offsets(offsets: Tensor, num_tokens: int) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != num_tokens:
        raise ValueError(
            f"offsets run from {first} to {last}, but the rows have {num_tokens} tokens; "
            "offsets must begin with 0 and end with the number of tokens"
        )
