"""New weights on their way into a rollout engine: nothing missing, nothing twice, nothing of
another shape; and a number by which what arrived is compared with what was sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 15


class WeightList:
    """The weights that an engine must be given, crossed off one by one."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._missing, self._taken = dict(shapes), set[str]()

    def take(self, name: str, tensor: Tensor) -> None:
        """Cross ``name`` off. Raises ValueError where it is unknown, came before, or has another
        shape (which a copy could broadcast without a word)."""
        if name in self._taken:
            raise ValueError(f"weight {name} was given twice; each parameter is given once")
        if name not in self._missing:
            raise ValueError(f"weight {name} is not a parameter of the rollout model")
        shape = self._missing.pop(name)
        if shape != tensor.shape:
            raise ValueError(
                f"weight {name} is {list(tensor.shape)}, the rollout model has {list(shape)}"
            )
        self._taken.add(name)

    def finish(self) -> None:
        """Raises ValueError where a weight was not given."""
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} weights were not given, e.g. {sorted(self._missing)[0]}: "
                "they would be stale"
            )


def fingerprint(tensor: Tensor, dtype: torch.dtype) -> int:
    """A 64-bit number of the values of ``tensor`` in ``dtype``, whatever their order: each value's
    bits are mixed (the finaliser of SplitMix64, doi 10.1145/2660193.2660195), then added modulo
    2^64.

    So the number of a concatenation is the sum of its parts', zeros add nothing, and one bit
    changed anywhere changes it (two changes cancel with a chance of 2^-64).
    """
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    total = 0
    for part in tensor.detach().reshape(-1).split(_CHUNK):
        mixed = part.to(dtype).view(bits).to(torch.int64)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
        mixed ^= mixed >> 31 & (1 << 33) - 1
        total += int(mixed.sum())
    return total % (1 << 64)
