"""Tensors in safetensors files, whole or in pieces: any rows of any tensor, without reading the
rest.

A set of tensors is one file (``master.safetensors``) or, written by several ranks, one file each
(``master-00001-of-00002.safetensors``) with some rows of every tensor. Which rows is in the file's
own header (metadata ``tensor_shards``: name -> [first row, shape of the whole tensor]), so a set
says everything about itself and a reader does not care how many ranks wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Rows = tuple[int, int]
"""[begin, end) along the first dimension."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class TensorShard:
    """Some rows of a tensor."""

    tensor: Tensor
    begin: int
    """Its first row in the whole tensor"""
    shape: tuple[int, ...]
    """Of the whole tensor"""


TensorShards = Mapping[str, Mapping[str, TensorShard]]
"""set -> name -> what one rank writes of it"""


@dataclass(frozen=True)
class _Stored:
    path: Path
    begin: int
    end: int


class TensorFiles:
    """Named tensors in some safetensors files. Iterates over the names; reads on request."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Reads the headers. Raises ValueError if rows of a tensor are missing."""
        self._open: dict[Path, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, list[_Stored]] = {}
        for path in paths:
            self._add(path)
        for name, stored in self._stored.items():
            stored.sort(key=lambda s: s.begin)
            self._check_whole(name, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the unsharded tensor."""
        return self._shapes[name]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """The tensor, or its rows [begin, end) alone, on the CPU in the format it was written in.

        Only what is asked for is read from the disk.
        """
        stored, shape = self._stored[name], self._shapes[name]
        if not shape:
            return self._file(stored[0].path).get_tensor(name)
        begin, end = rows or (0, shape[0])
        parts = [
            self._file(s.path).get_slice(name)[max(begin, s.begin) - s.begin : end - s.begin]
            for s in stored
            if s.begin < end and s.end > begin
        ]
        if not parts:  # no rows asked for, or none there
            return self._file(stored[0].path).get_slice(name)[0:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _add(self, path: Path) -> None:
        file = self._file(path)
        tensor_shards = json.loads((file.metadata() or {}).get("pieces", "{}"))
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            own = tuple(file.get_slice(name).get_shape())
            begin, shape = tensor_shards.get(name, (0, own))
            rows = own[0] if own else 1
            self._shapes[name] = tuple(shape)
            self._stored.setdefault(name, []).append(_Stored(path, begin, begin + rows))

    def _check_whole(self, name: str, stored: list[_Stored]) -> None:
        shape = self._shapes[name]
        reached = 0
        for part in stored:
            if part.begin != reached:
                break
            reached = part.end
        if reached != (shape[0] if shape else 1):
            raise ValueError(
                f"{stored[0].path.parent} is not whole: it lacks rows of {name}, or has some "
                "twice; use another checkpoint"
            )


def tensor_sets(folder: Path) -> dict[str, TensorFiles]:
    """The sets of tensors in a folder, by name (``master``, ``exp_avg``, ...).

    Raises ValueError if a file of a set is missing, or a set is there in two forms.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = _PART.fullmatch(path.stem)
        found.setdefault(part[1] if part else path.stem, []).append(path)
    for name, paths in found.items():
        parts = [_PART.fullmatch(path.stem) for path in paths]
        expected = {int(part[3]) if part else 1 for part in parts}
        if expected != {len(paths)}:
            raise ValueError(
                f"{folder} has {len(paths)} files of {name} ({', '.join(p.name for p in paths)}), "
                "which do not make one whole set; use another checkpoint"
            )
    return {name: TensorFiles(paths) for name, paths in found.items()}


def write_shard_file(
    folder: Path, name: str, tensor_shards: Mapping[str, TensorShard], part: tuple[int, int]
) -> Path:
    """Write one rank's ``tensor_shards`` as part (k from 0, of n) of the set ``name``; returns the
    file.

    Pieces without rows are left out, unless the whole tensor has none.
    """
    number, count = part
    kept = {
        key: tensor_shard
        for key, tensor_shard in tensor_shards.items()
        if tensor_shard.tensor.numel() or (number == 0 and 0 in tensor_shard.shape)
    }
    path = folder / f"{name}-{number + 1:05d}-of-{count:05d}.safetensors"
    where = {
        key: [tensor_shard.begin, list(tensor_shard.shape)] for key, tensor_shard in kept.items()
    }
    tensors = {key: tensor_shard.tensor.contiguous() for key, tensor_shard in kept.items()}
    save_file(tensors, path, metadata={"format": "pt", "pieces": json.dumps(where)})
    return path


def write_shards(folder: Path, kinds: TensorShards, part: tuple[int, int]) -> None:
    """Write a rank's pieces as part (k from 0, of n) of every set of tensors; what has no rows is
    the first part's."""
    for kind, tensor_shards in kinds.items():
        own = {n: p for n, p in tensor_shards.items() if p.shape or part[0] == 0}
        write_shard_file(folder, kind, own, part)
