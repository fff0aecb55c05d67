"""Cache of a reference model's log-probs, computed once for all rows and kept in the run folder, so
that the model can be released.

The key of a row is its content (a 128-bit XXH3 hash of its tokens and mask), not its position.
Order, epochs and resumes therefore do not matter. For KTO, the key also covers the other rows of
the batch (``by_batch``), so that cached log-probs equal those of the same pass bit for bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.driver.errors import RunError
from burnish.driver.run_dir import REFERENCE_FILE
from burnish.models.digest import weights_changed, weights_digest
from burnish.models.load import describe
from burnish.train.base import HasLogprobs
from burnish.types import Batch

log = logging.getLogger("burnish")

_KEYS = {False: "row", True: "batch"}
"""``by_batch`` -> kind of keys in the metadata of the file (none in older files: by row)."""


class CachedReference:
    """Cached log-probs of a fixed set of rows. Implements
    :class:`burnish.train.base.HasLogprobs`."""

    def __init__(
        self, keys: Sequence[bytes], offsets: Tensor, logprobs: Tensor, *, by_batch: bool = False
    ) -> None:
        """``keys``: of K rows; ``offsets``: [K + 1] into ``logprobs``; ``logprobs``: [M] fp32.
        ``by_batch``: as in :func:`row_keys`."""
        self.by_batch = by_batch
        self._row_offsets = {
            key: (int(begin), int(end))
            for key, begin, end in zip(keys, offsets[:-1], offsets[1:], strict=True)
        }
        self._logprobs = logprobs

    def __len__(self) -> int:
        return len(self._row_offsets)

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probs of the action tokens under the reference: [M] fp32. Raises RunError
        for a row that is not in the cache. :func:`load` checks this before the run starts."""
        parts = []
        for key in row_keys(batch, by_batch=self.by_batch):
            if key not in self._row_offsets:
                raise RunError(
                    f"a row of this batch is not in {REFERENCE_FILE}, so the data files have "
                    "changed during the run. Resume with --resume, which computes the reference "
                    "log-probs of missing rows, and do not change the data files during a run"
                )
            begin, end = self._row_offsets[key]
            parts.append(self._logprobs[begin:end])
        return torch.cat(parts)

    def count_missing(self, batches: Iterable[Batch]) -> tuple[int, int]:
        """Return the number of rows of ``batches`` that are not in the cache, and of all rows."""
        cached = [
            key in self._row_offsets
            for batch in batches
            for key in row_keys(batch, by_batch=self.by_batch)
        ]
        return cached.count(False), len(cached)


def row_keys(batch: Batch, *, by_batch: bool = False) -> Iterator[bytes]:
    """Yield the key of each row: 16 bytes of a hash of its tokens and mask. ``by_batch``: also of
    all other rows of the batch and of its position."""
    bounds = batch.offsets.tolist()
    tokens, mask = batch.tokens.cpu().numpy(), batch.action_mask.cpu().numpy()
    if by_batch:
        digest = xxhash.xxh3_128(tokens.tobytes())
        digest.update(mask.tobytes())
        digest.update(batch.offsets.numpy().tobytes())
        entire = digest.digest()
        yield from (
            xxhash.xxh3_128(entire + row.to_bytes(8, "little")).digest()
            for row in range(batch.num_rows)
        )
        return
    for begin, end in pairwise(bounds):
        digest = xxhash.xxh3_128(tokens[begin:end].tobytes())
        digest.update(mask[begin:end].tobytes())
        yield digest.digest()


def compute(
    reference: HasLogprobs, batches: Iterable[Batch], rows_at_once: int | None
) -> CachedReference:
    """Run every row of ``batches`` through ``reference``, once per distinct row, ``rows_at_once``
    rows per call. None: each distinct batch in one call, with its keys ``by_batch``."""
    by_batch = rows_at_once is None
    keys: list[bytes] = []
    parts: list[Tensor] = []
    seen: set[bytes] = set()
    for batch in batches:
        fresh = []
        for row, key in enumerate(row_keys(batch, by_batch=by_batch)):
            if key not in seen:
                seen.add(key)
                keys.append(key)
                fresh.append(row)
        size = rows_at_once or max(1, len(fresh))
        for begin in range(0, len(fresh), size):
            part = batch.select(fresh[begin : begin + size])
            logprobs = reference.logprobs(part)
            parts += logprobs.split(part.lengths.tolist())
    lengths = torch.tensor([part.numel() for part in parts], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    joined = torch.cat([torch.zeros(0), *parts])  # a finished run has no rows left
    return CachedReference(keys, offsets, joined, by_batch=by_batch)


def save(cache: CachedReference, path: Path, *, model: ModelConfig, dtype: str) -> None:
    """Write ``cache`` atomically, with the identity of its model and its number format."""
    joined = bytearray(b"".join(cache._row_offsets))
    keys = torch.zeros(0, 16, dtype=torch.uint8)
    if joined:
        keys = torch.frombuffer(joined, dtype=torch.uint8).view(-1, 16)
    offsets = torch.tensor([0, *(end for _, end in cache._row_offsets.values())], dtype=torch.int64)
    tensors = {"keys": keys, "offsets": offsets, "logprobs": cache._logprobs}
    hidden = path.with_name(f".{path.name}.part")
    identity = {"model": _as_json(model), "weights": weights_digest([model]), "dtype": dtype}
    identity["keys"] = _KEYS[cache.by_batch]
    save_file(tensors, hidden, metadata=identity)
    hidden.replace(path)


def load(  # house: ok the identity of the cache
    path: Path,
    batches: Iterable[Batch],
    *,
    model: ModelConfig,
    dtype: str,
    begun: bool,
    by_batch: bool = False,
) -> CachedReference | None:
    """Load the log-probs that :func:`save` wrote. Return None if the file does not exist. Also
    return None, and log the reason, if the file is of another model, number format or kind of keys
    (``by_batch``), or lacks rows of ``batches``.

    The same applies if the model's folder now contains other weights, unless the run has ``begun``:
    it then keeps its original reference and logs a warning. Raises RunError if such a run would
    compute log-probs again.
    """
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        keys, offsets, logprobs = (file.get_tensor(n) for n in ("keys", "offsets", "logprobs"))
    rows = [bytes(key.tolist()) for key in keys]
    cache = CachedReference(rows, offsets, logprobs, by_batch=by_batch)
    other_weights = weights_changed(metadata.get("weights"), weights_digest([model]))
    why = None
    if metadata.get("model") != _as_json(model):
        why = "was computed with another model"
    elif other_weights and not begun:
        why = f"was computed with weights that {_described(model)} no longer contains"
    elif metadata.get("dtype") != dtype:
        why = f"was computed in {metadata.get('dtype', 'an unknown dtype')} instead of {dtype}"
    elif metadata.get("keys", _KEYS[False]) != _KEYS[by_batch]:
        why = "was computed for another loss"
    else:
        missing, num_rows = cache.count_missing(batches)
        if missing:
            changed = "the data, template or length limit changed"
            changed += ", or the batches or number of steps" if by_batch else ""
            why = f"lacks {missing} of {num_rows} rows ({changed})"
    if why is None:
        if other_weights:
            log.warning(
                "the weights in %s changed after the start of this run; the reference log-probs "
                "computed at the start are kept (%s)",
                *(_described(model), path),
            )
        return cache
    if other_weights and begun and metadata.get("model") == _as_json(model):
        raise RunError(
            f"{path} {why}, so the reference log-probs must be computed again, but the weights in "
            f"{_described(model)} changed after the start of this run; restore the weights, or "
            "what changed in the recipe or the data, or start a new run"
        )
    log.warning("%s %s; the reference log-probs are computed again", path, why)
    return None


def _as_json(model: ModelConfig) -> str:
    return json.dumps(model.model_dump(mode="json"), sort_keys=True)


def _described(model: ModelConfig) -> str:
    """Return the names of the folders whose weights are compared."""
    adapter = None if model.lora is None else model.lora.path
    return describe(model) if adapter is None else f"{describe(model)} and its adapter {adapter}"
