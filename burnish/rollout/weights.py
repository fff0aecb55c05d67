"""Checks of weights that a rollout engine receives: names, shapes, fingerprints that are compared
with those of the sender, and log-probs that are compared with the trainer's.

Fingerprints compare values whose places are known. The order in which a library's loader stores the
others, and what its kernels compute with them, shows only in log-probs: these are compared once,
after the first load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.rollout.base import Completion, Request

Shape = tuple[int, ...]

_CHUNK = 1 << 22
"""Elements at a time on a GPU: few launches, and temporary tensors of 32 MiB."""
_CHUNKS = {"cpu": 1 << 15}
"""On a CPU the 64-bit products stay in the cache."""
_ROW_SEED, _COLUMN_SEED = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
NUM_SAMPLES = 8
_PROMPT_TOKENS = 16
_NEW_TOKENS = 8
_EXACT, _HALF = 0.01, 0.3
"""Largest median difference in nats in fp32, and if one of both computes in half precision."""


class StaleWeightsError(BurnishError, RuntimeError):
    """A rollout engine did not store the given weights, or does not compute with them."""


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


class Fingerprint(NamedTuple):
    """Two 64-bit hashes of a tensor."""

    values: int
    """Fingerprint of the values in any order."""
    placed: int
    """Fingerprint of the values at their rows and columns."""


def fingerprint(tensor: Tensor, dtype: torch.dtype, *, row: int = 0, column: int = 0) -> Tensor:
    """Return two 64-bit hashes of the values of ``tensor`` in ``dtype``, int64 [2]: one independent
    of their order, and one of their places. The bits of each value are mixed (the finalizer of
    SplitMix64, doi 10.1145/2660193.2660195) and added modulo 2^64; for the second hash, each is
    multiplied by two odd random numbers, one of its row and one of its column. Axes after the first
    count as one. ``row``, ``column``: place of the first value in the tensor of which ``tensor`` is
    a part.

    The hashes of a tensor are the sums of the hashes of its parts, and zeros add nothing. A change
    of one bit changes both; other changes, also permutations for the second hash, go unnoticed with
    a probability of about 2^-60. Does not wait for the device; :func:`read_fingerprints` reads the
    result.
    """
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    table = as_table(tensor.detach())
    num_rows, num_columns = table.shape
    of_row = _weights(row, num_rows, _ROW_SEED, table.device)
    of_column = _weights(column, num_columns, _COLUMN_SEED, table.device)
    total = torch.zeros(2, dtype=torch.int64, device=table.device)
    step = max(1, _CHUNKS.get(table.device.type, _CHUNK) // max(1, num_columns))
    for rows, weights in zip(table.split(step), of_row.split(step), strict=True):
        mixed = _mixed(rows.to(dtype).view(bits).to(torch.int64))
        total[0] += mixed.sum()
        mixed = mixed.mul_(of_column)
        total[1] += ((mixed.sum(1) if num_columns != 1 else mixed[:, 0]) * weights).sum()
    return total


def as_table(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as rows and columns: its axes after the first count as one."""
    return tensor.reshape(tensor.shape[0] if tensor.ndim else 1, math.prod(tensor.shape[1:]))


def _mixed(numbers: Tensor) -> Tensor:
    """Mix the bits of int64 ``numbers``; 0 stays 0."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def _weights(begin: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Return [count] odd numbers, those of the places from ``begin`` on."""
    places = torch.arange(begin, begin + count, dtype=torch.int64, device=device)
    return _mixed((places + 1) * seed) | 1


def read_fingerprints(numbers: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """Return the values of fingerprints, each in [0, 2^64); one copy from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, number in numbers.items():
        by_device.setdefault(number.device, []).append(name)
    values: dict[str, Fingerprint] = {}
    for names in by_device.values():
        read = torch.stack([numbers[name] for name in names]).tolist()
        for name, (plain, placed) in zip(names, read, strict=True):
            values[name] = Fingerprint(plain % (1 << 64), placed % (1 << 64))
    return values


def probe_requests(vocab_size: int, *, max_len: int, num_samples: int) -> list[Request]:
    """Return requests for one sample each, with a prompt of tokens from the entire vocabulary."""
    length = max(1, min(_PROMPT_TOKENS, max_len - 1))
    new = min(_NEW_TOKENS, max_len - length)
    prompt = tuple(i * vocab_size // length for i in range(length))
    return [
        Request(f"probe-{i}", prompt, seed=i, max_tokens=max(1, new)) for i in range(num_samples)
    ]


def check_logprobs(
    completions: Sequence[Completion],
    expected: Sequence[Tensor],
    *,
    temperature: float,
    dtypes: tuple[str, str],
) -> None:
    """Raise StaleWeightsError if the log-probs of ``completions`` differ from ``expected``, those
    of the trainer for the same tokens. ``dtypes``: number formats of trainer and sampler.

    The median over tokens is compared, because single tokens of a mixture in half precision may
    choose other experts.
    """
    sampled = torch.cat([torch.tensor(list(c.logprobs)) for c in completions])
    gaps = (sampled - torch.cat([e.float().cpu() for e in expected])).abs()
    gap = float(gaps.nan_to_num(nan=torch.inf).median())
    limit = _EXACT if set(dtypes) == {"fp32"} else _HALF
    limit /= min(1.0, temperature or 1.0)  # the temperature divides logits with their rounding
    if gap > limit:
        raise StaleWeightsError(
            f"the log-probs of the rollout engine ({dtypes[1]}) and of the trainer ({dtypes[0]}) "
            f"differ by {gap:.2g} nats per token (median over {len(gaps)} tokens, at most "
            f"{limit:.2g} is rounding), although all weights were transferred: the engine stores "
            "them in another order, or computes another function than transformers does; use "
            "rollout.engine.kind=local, or another version of vLLM"
        )
