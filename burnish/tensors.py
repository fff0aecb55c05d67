"""Tensor helpers that know nothing of learning: masked statistics, ragged rows to rectangles.

What stands outside a mask never matters: it may be NaN or infinite, and neither a result nor a
gradient changes. Sums are taken in fp32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``x`` to ``device``. To a GPU the copy goes through pinned memory and the host does not
    wait for it, so work that is queued on the GPU goes on."""
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or as it is where it is wider: fp16, bf16 and integers go up, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``x`` where ``mask`` (bool, broadcast to ``x``) is true, a scalar."""
    return torch.where(mask, at_least_fp32(x), 0.0).sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest entry of a non-negative ``x`` where ``mask`` is true, a scalar. 0 over nothing."""
    inside = torch.where(mask, at_least_fp32(x), 0.0).flatten()
    return torch.cat([inside, inside.new_zeros(1)]).max()


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``x`` brought to mean 0 and population variance 1 where ``mask`` is true; 0 elsewhere.

    (x - mean) / sqrt(max(var, eps)): a variance below ``eps`` is not blown up, and equal entries
    give exactly 0 (they are measured from the smallest, so no rounding of the mean is left over).
    In fp64, as squares of a spread of 1.8e19 overflow fp32; the result is in fp32 at least.
    """
    wanted = at_least_fp32(x).dtype
    x = x.double()
    if x.numel() == 0:
        return x.to(wanted)
    lowest = torch.where(mask, x, torch.inf).amin().detach()
    above = torch.where(mask, x - lowest, 0.0)
    count = mask.expand_as(x).sum().clamp(min=1)
    centered = torch.where(mask, above - above.sum() / count, 0.0)
    return (centered * (centered.square().sum() / count).clamp(min=eps).rsqrt()).to(wanted)


def pad_rows(flat: Tensor, offsets: Tensor, value: float = 0) -> Tensor:
    """Ragged rows [M] as a rectangle [N, Tmax], ``value`` behind each row. Differentiable.

    ``offsets`` [N + 1] as in :class:`burnish.types.Batch`: row i is tokens
    ``offsets[i]`` up to ``offsets[i + 1]``.

    >>> pad_rows(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).tolist()
    [[1, 2], [3, 0]]
    """
    _check_offsets(offsets, flat.numel())
    num_rows = offsets.numel() - 1
    width = int(offsets.diff().max()) if num_rows else 0
    padded = flat.new_full((num_rows * width,), value)
    return padded.index_copy(0, _slots(offsets, width, flat.device), flat).view(num_rows, width)


def unpad_rows(padded: Tensor, offsets: Tensor) -> Tensor:
    """A rectangle [N, T], T >= Tmax, as ragged rows [M]: the inverse of :func:`pad_rows`."""
    num_rows, width = padded.shape
    lengths = offsets.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if lengths.numel() != num_rows or longest > width:
        raise ValueError(
            f"offsets describe {lengths.numel()} rows of at most {longest} tokens, which do not "
            f"fit into a tensor of {num_rows} x {width}; pass the offsets it was padded with"
        )
    return padded.reshape(-1).index_select(0, _slots(offsets, width, padded.device))


def _slots(offsets: Tensor, width: int, device: torch.device) -> Tensor:
    """[M]: where each token of the ragged rows stands in the flattened [N, width] rectangle."""
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
