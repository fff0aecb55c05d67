"""Checksums of buckets: one for bytes on the CPU, one for bytes on any device.

They detect accidents (a buffer reused too early, a misplaced bucket, a faulty link), not attacks.

``xxh3`` (xxhash's 128-bit XXH3) is used on the CPU. Two different contents collide by chance once
in 2^128, if such a hash is treated as a random function; this is not a proof. ``sums`` is computed
with torch operations on the device of the bytes, so that weights need not leave a GPU. Over the
32-bit words w_1 .. w_n it is the pair

    S1 = sum of w_i          S2 = sum of i * w_i          (both modulo 2^64)

For n < 2^31 (8 GiB), S1 and S2 detect every change within one or two words, and therefore every
flipped bit and every two swapped words. Proof: |w| <= 2^31. Let words i and j change by d and e,
with |d|, |e| < 2^32. S1 is unchanged only if d = -e (|d + e| < 2^64). Then S2 changes by (i - j) *
d, which is not 0 and below 2^63 in absolute value, so it is not 0 modulo 2^64 either. If only word
i changes, S1 changes. Other changes are detected with high probability: the pair takes far more
than 2^64 values. The position weights are needed because a plain sum does not detect two swapped
tensors. On a CPU the pair has about a tenth of the speed of ``xxh3`` (docs/benchmarks.md).
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from burnish.host_copies import memory_of, to_host
from burnish.sync.base import SyncError

CHUNK_WORDS = 1 << 15
"""Words per chunk on the CPU; their 64-bit products fit into the cache."""
CHUNK_WORDS_GPU = 1 << 24
MOST_BYTES = 4 * (2**31 - 1)
"""Above this size ``sums`` may miss two swapped words."""


def checksum(payload: Tensor) -> str:
    """Return ``kind:digest`` of a uint8 tensor [n], with the kind selected by its device."""
    kind = "xxh3" if payload.device.type == "cpu" else "sums"
    return f"{kind}:{_digest(payload, kind)}"


def verify(payload: Tensor, expected: str, where: str) -> None:
    """Compare the checksum of the received bytes. Raises SyncError, beginning with ``where``, if it
    is not ``expected``."""
    kind, _, digest = expected.partition(":")
    if kind not in ("xxh3", "sums"):
        raise SyncError(
            f"{where} has no checksum of a known kind ({expected!r}), but this receiver verifies "
            "checksums; set sync.verify equally on both sides and use one version of burnish"
        )
    computed = _digest(payload, kind)
    if computed != digest:
        raise SyncError(
            f"{where} is corrupted: its checksum should be {expected}, but the {payload.numel()} "
            f"received bytes have {kind}:{computed}; push again, and check the link if this repeats"
        )


def word_sums(payload: Tensor) -> tuple[int, int]:
    """Return (S1, S2) of a uint8 tensor [n], modulo 2^64. Bytes after the last complete word count
    as one word, padded with zeros."""
    aligned = payload.numel() // 4 * 4
    if payload.numel() > MOST_BYTES:
        raise ValueError(
            f"one checksum covers {payload.numel()} bytes, but at most {MOST_BYTES} are supported"
        )
    words = payload[:aligned].view(torch.int32)
    chunk = CHUNK_WORDS if payload.device.type == "cpu" else CHUNK_WORDS_GPU
    position = torch.arange(1, min(chunk, words.numel()) + 1, device=payload.device)
    sums = torch.zeros(2, dtype=torch.int64, device=payload.device)
    for begin in range(0, words.numel(), chunk):
        part = words[begin : begin + chunk].to(torch.int64)
        plain = part.sum()
        sums[0] += plain
        sums[1] += (part * position[: part.numel()]).sum() + begin * plain
    first, second = (int(s) for s in sums)
    if aligned < payload.numel():
        rest = bytes(payload[aligned:].tolist()).ljust(4, b"\0")
        last = int.from_bytes(rest, "little", signed=True)
        first, second = first + last, second + (aligned // 4 + 1) * last
    return first % 2**64, second % 2**64


def _digest(payload: Tensor, kind: str) -> str:
    if kind == "xxh3":
        return xxhash.xxh3_128_hexdigest(memory_of(to_host(payload)))  # type: ignore[arg-type]
    return "{:016x}{:016x}".format(*word_sums(payload))
