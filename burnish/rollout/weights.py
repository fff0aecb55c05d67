"""Checks of weights that a rollout engine receives: names, shapes, and fingerprints that are
compared with those of the sender."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shape = tuple[int, ...]

_CHUNK = 1 << 22
"""Elements at a time on a GPU: few launches, and temporary tensors of 32 MiB."""
_CHUNKS = {"cpu": 1 << 15}
"""On a CPU the 64-bit products stay in the cache."""


class WeightNameCheck:
    """Check that every weight of a model is received exactly once, with its shape."""

    def __init__(self, expected: Mapping[str, Shape] | None) -> None:
        """``expected``: shape of every weight. None: any names, each once."""
        self._expected = expected
        self.given: dict[str, Shape] = {}
        """Names and shapes received so far, in order."""

    def add(self, name: str, shape: Shape) -> None:
        """Count one weight. Raises ValueError if ``name`` is unknown or was received before, or if
        its shape differs, which a copy could broadcast silently."""
        if name in self.given:
            raise ValueError(
                f"weight {name} was received twice; the sender's weights() repeats it, or a bucket "
                "was sent twice"
            )
        if self._expected is not None and name not in self._expected:
            raise ValueError(
                f"weight {name} is not one of the {len(self._expected)} weights of the rollout "
                "model; trainer and rollout engine must have the same model"
            )
        if self._expected is not None and self._expected[name] != shape:
            raise ValueError(
                f"weight {name} has shape {list(shape)}, but the rollout model has "
                f"{list(self._expected[name])}; trainer and rollout engine must have the same model"
            )
        self.given[name] = shape

    def complete(self) -> None:
        """Raise ValueError if a weight was not received."""
        missing = [n for n in self._expected or () if n not in self.given]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self._expected or ())} weights were not received, e.g. "
                f"{missing[0]}: they would be stale"
            )


def fingerprint(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 64-bit hash of the values of ``tensor`` in ``dtype``, independent of their order.
    The bits of each value are mixed (the finalizer of SplitMix64, doi 10.1145/2660193.2660195) and
    added modulo 2^64.

    The hash of a concatenation is the sum of the hashes of its parts, and zeros add nothing. A
    change of one bit changes the hash; two changes cancel with probability 2^-64. Returns an int64
    scalar on the device of ``tensor`` without waiting for the device; :func:`read_fingerprints`
    reads it.
    """
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).split(_CHUNKS.get(tensor.device.type, _CHUNK)):
        mixed = part.to(dtype).view(bits).to(torch.int64)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
        total += (mixed ^ (mixed >> 31 & (1 << 33) - 1)).sum()
    return total


def read_fingerprints(numbers: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the values of fingerprints, each in [0, 2^64); one copy from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, number in numbers.items():
        by_device.setdefault(number.device, []).append(name)
    values: dict[str, int] = {}
    for names in by_device.values():
        read = torch.stack([numbers[name] for name in names]).tolist()
        values |= {name: value % (1 << 64) for name, value in zip(names, read, strict=True)}
    return values
