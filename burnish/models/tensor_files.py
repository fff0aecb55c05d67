"""Sharded tensors in safetensors files. Any rows of any tensor can be read without the rest.

A set of tensors is one file (``master.safetensors``) or one file per rank that wrote it
(``master-00001-of-00002.safetensors``), each with some rows of every tensor. The file header
contains which rows (metadata ``pieces``: name -> [first row, shape of the unsharded tensor]). A set
is therefore self-describing, and readers are independent of the number of ranks that wrote it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from burnish.host_copies import HostStream, memory_of

Rows = tuple[int, int]
"""Rows [begin, end) along the first dimension."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class TensorShard:
    """Consecutive rows of a tensor."""

    tensor: Tensor
    begin: int
    """Index of its first row in the unsharded tensor"""
    shape: tuple[int, ...]
    """Shape of the unsharded tensor"""


TensorShards = Mapping[str, Mapping[str, TensorShard]]
"""Set -> tensor name -> shard that one rank writes"""


@dataclass(frozen=True)
class _Stored:
    path: Path
    begin: int
    end: int


class TensorFiles:
    """Named tensors in a set of safetensors files, read lazily. Iterates over the names."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the headers. Raises ValueError if rows of a tensor are missing or duplicated."""
        self._open: dict[Path, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, list[_Stored]] = {}
        for path in paths:
            file = self._file(path)
            tensor_shards = json.loads((file.metadata() or {}).get("pieces", "{}"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                shape_in_file = tuple(file.get_slice(name).get_shape())
                begin, shape = tensor_shards.get(name, (0, shape_in_file))
                rows = shape_in_file[0] if shape_in_file else 1
                self._shapes[name] = tuple(shape)
                self._stored.setdefault(name, []).append(_Stored(path, begin, begin + rows))
        for name, stored in self._stored.items():
            stored.sort(key=lambda s: s.begin)
            reached = 0
            for part in stored:
                if part.begin != reached:
                    break
                reached = part.end
            if reached != (self._shapes[name] or (1,))[0]:
                raise ValueError(
                    f"{stored[0].path.parent} is incomplete: rows of {name} are missing or "
                    "duplicated; use another checkpoint"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the unsharded tensor."""
        return self._shapes[name]

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read a tensor, or only its rows [begin, end), on the CPU in the dtype of the file.

        Only the requested rows are read from disk.
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
        if not parts:  # no rows requested, or the tensor has none
            return self._file(stored[0].path).get_slice(name)[0:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def tensor_sets(folder: Path) -> dict[str, TensorFiles]:
    """Return the sets of tensors in a folder, by name (``master``, ``exp_avg``, ...).

    Raises ValueError if a file of a set is missing, or if a set exists with several file counts.
    """
    paths_by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = _PART.fullmatch(path.stem)
        paths_by_name.setdefault(part[1] if part else path.stem, []).append(path)
    for name, paths in paths_by_name.items():
        parts = [_PART.fullmatch(path.stem) for path in paths]
        expected = {int(part[3]) if part else 1 for part in parts}
        if expected != {len(paths)}:
            raise ValueError(
                f"{folder} has {len(paths)} files of {name} ({', '.join(p.name for p in paths)}), "
                "which are not one complete set; use another checkpoint"
            )
    return {name: TensorFiles(paths) for name, paths in paths_by_name.items()}


def in_parts(
    tensors: Iterable[tuple[str, Tensor]], least_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield copies of ``tensors`` on the CPU, in parts of at least ``least_bytes`` (except for the
    last)."""
    part: dict[str, Tensor] = {}
    with HostStream() as stream:
        for name, tensor in tensors:
            part[name] = stream.copy(tensor)
            if sum(each.nbytes for each in part.values()) >= least_bytes:
                stream.flush()
                yield part
                part = {}
        stream.flush()
    if part:
        yield part


# ---- writing ---------------------------------------------------------------------------------

_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Names of dtypes in safetensors files."""
HEADER_BYTES = 1 << 20
"""Room for the header of a file whose tensors are not known when it is begun."""
MAX_TENSORS = 2048
"""Most tensors in such a file: 512 bytes of header for each."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file of tensors on any device. Host memory is used for two pinned buffers
    at most: the writer of the library copies all tensors first. Raises OSError."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # aligned
    infos = [TensorInfo(name, tuple(tensors[name].shape), tensors[name].dtype) for name in ordered]
    write_tensors(path, infos, (tensors[name] for name in ordered), metadata)


def write_tensors(
    path: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file of ``tensors``, which are consumed one at a time and converted to
    the dtypes of ``infos``. Raises OSError."""
    with path.open("wb") as file, HostStream() as stream:
        file.write(_header(infos, metadata))
        for info, tensor in zip(infos, tensors, strict=True):
            stream.add(tensor, partial(_append, file), info.dtype)


class GrowingTensorFile:
    """A safetensors file whose tensors are not known in advance, for :data:`MAX_TENSORS`. Its
    header is written last, into room that is left for it."""

    def __init__(self, path: Path) -> None:
        self.path, self.infos, self.num_bytes = path, list[TensorInfo](), 0
        self._file, self._stream = path.open("wb"), HostStream()
        self._file.seek(HEADER_BYTES)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append a tensor, converted to ``dtype``."""
        self._stream.add(tensor, partial(_append, self._file), dtype)
        self.infos.append(TensorInfo(name, tuple(tensor.shape), dtype))
        self.num_bytes += self.infos[-1].num_bytes

    def close(self) -> Path:
        """Complete the file and return its path."""
        with self._file:
            self._stream.flush()
            self._file.seek(0)
            self._file.write(_header(self.infos, None, num_bytes=HEADER_BYTES))
        return self.path


def _append(file: BinaryIO, data: Tensor) -> None:
    file.write(memory_of(data))


def _header(
    infos: Sequence[TensorInfo],
    metadata: Mapping[str, str] | None,
    *,
    num_bytes: int | None = None,
) -> bytes:
    """Return the header of a safetensors file with these tensors, one after the other.
    ``num_bytes``: its size, with the length at its begin; None: as small as possible."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for info in infos:
        begin, end = end, end + info.num_bytes
        header[info.name] = {
            "dtype": _FORMATS[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    size = 8 + len(text) + -len(text) % 8 if num_bytes is None else num_bytes
    if 8 + len(text) > size:
        raise ValueError(f"the header of {len(infos)} tensors does not fit into {size} bytes")
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def write_shard_file(
    folder: Path, name: str, tensor_shards: Mapping[str, TensorShard], part: tuple[int, int]
) -> Path:
    """Write one rank's ``tensor_shards`` as file ``part`` = (k, n) of the set ``name``, k from 0.

    Returns the path. Empty shards are omitted, except for empty tensors, which file 0 contains.
    """
    number, count = part
    written = {
        key: tensor_shard
        for key, tensor_shard in tensor_shards.items()
        if tensor_shard.tensor.numel() or (number == 0 and 0 in tensor_shard.shape)
    }
    path = folder / f"{name}-{number + 1:05d}-of-{count:05d}.safetensors"
    where = {
        key: [tensor_shard.begin, list(tensor_shard.shape)] for key, tensor_shard in written.items()
    }
    tensors = {key: tensor_shard.tensor for key, tensor_shard in written.items()}
    save_tensors(tensors, path, metadata={"format": "pt", "pieces": json.dumps(where)})
    return path


def write_shards(folder: Path, kinds: TensorShards, part: tuple[int, int]) -> None:
    """Write a rank's shards as file ``part`` = (k, n) of every set, k from 0. Scalars are only in
    file 0."""
    for kind, tensor_shards in kinds.items():
        shards = {n: p for n, p in tensor_shards.items() if p.shape or part[0] == 0}
        write_shard_file(folder, kind, shards, part)
