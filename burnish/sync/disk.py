"""Weight transfer through a folder that trainer and rollout workers can access (a local or a
network disk).

Every transfer is one folder, written like a checkpoint (``checkpoint/save.py``). It is hidden until
complete, its manifest with sizes and checksums is written last, and it is renamed into place. A
writer that is killed therefore leaves no folder that appears complete:

    step_000007/              the 8th push of this folder (the version is in sync.json)
      weights-00000.bin, weights-00001.bin, ...     the bytes of each bucket
      sync.json               version, and the headers of the buckets (``base.py``)
      manifest.json           size and checksum of each file: XXH3 of weights, SHA-256 of others

The bytes of a weight are hashed, written, and flushed to the disk while the next ones are copied
from the GPU. A receiver checks all names and, unless ``check`` is off, every byte before it yields
the first tensor. A damaged transfer that it detects therefore never leaves an engine partly
overwritten. There are no acknowledgments. The sender waits for no receiver. A receiver waits until
the requested version (or any new one) exists.

Each start of a trainer needs its own folder: transfers of an earlier start contain versions too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.manifest import Record, TransferRecord, verify
from burnish.config.model import Dtype
from burnish.host_copies import HostStream, memory_of
from burnish.models.buffers import wanted_dtype
from burnish.models.load import DTYPES
from burnish.rollout.weights import Shape, WeightNameCheck
from burnish.sync.base import (
    Bucket,
    BucketEntry,
    End,
    LinkError,
    Metrics,
    SyncError,
    decode,
    encode,
    mismatch_at,
    sync_metrics,
)
from burnish.sync.buckets import ALIGN, MAX_ENTRIES
from burnish.sync.engine import HasWeights, drain
from burnish.sync.snapshot import SnapshotSource
from burnish.sync.source import BucketTransfer

CONTENTS = "sync.json"
SHORTEST_POLL_S = 0.005
SMALL_BYTES = 1 << 20
"""Parts below this size are hashed in the thread that writes them."""
Weights = Iterator[tuple[str, Tensor]]


class DiskSender:
    """Sender that writes a train engine's weights into a folder. One process per folder.

    Every rank of the trainer has one and calls :meth:`push` at the same time. All ranks but one
    have ``folder`` None. They take part in gathering the weights and write nothing.
    """

    def __init__(
        self,
        policy: HasWeights,
        folder: Path | None,
        *,
        bucket_bytes: int,
        keep: int = 2,
        dtype: Dtype | None = None,
    ) -> None:
        self.policy, self.bucket_bytes = policy, bucket_bytes
        self.dtype = None if dtype is None else DTYPES[dtype]
        self._num_bytes = 0
        self._store = None
        if folder is not None:
            self._store = CheckpointStore(folder, keep_last=keep, best_mode="max")

    def push(self) -> Metrics:
        """Write the weights and their version; delete older transfers except the newest ``keep``.

        Raises SyncError if the weights cannot be written; existing transfers remain. Ranks without
        a folder return no metrics.
        """
        started, weights = time.perf_counter(), self.policy.weights()
        if self._store is None:
            drain(weights)
            return {}
        version = self.policy.version
        number = max((push_number(p) for p in self._store.all()), default=-1) + 1
        records: dict[str, Record] = {}
        try:
            self._store.save(
                number,
                lambda folder: self._write(folder, weights, version, records),
                records=records,
            )
        except CheckpointError as error:
            drain(weights)  # the other ranks wait in the same gathers
            raise SyncError(
                f"version {version} of the weights could not be written to {self._store.folder}: "
                f"{error}; check the disk, then push again"
            ) from error
        seconds = time.perf_counter() - started
        return sync_metrics(version, self._num_bytes, buckets=len(records), seconds=seconds)

    def close(self) -> None:
        """Do nothing: pushed weights remain on disk."""

    def _write(
        self, folder: Path, weights: Weights, version: int, records: dict[str, Record]
    ) -> None:
        with BucketFiles(folder, version, self.bucket_bytes) as files:
            names = WeightNameCheck(None)
            for name, tensor in weights:
                with mismatch_at(f"version {version}"):
                    names.add(name, tuple(tensor.shape))
                files.add(name, tensor, wanted_dtype(tensor, self.dtype))
            headers, self._num_bytes = files.finish()
        records.update(files.records)
        contents = {"version": version, "headers": [header.decode() for header in headers]}
        (folder / CONTENTS).write_text(json.dumps(contents), encoding="utf-8")


class BucketFiles:
    """The files of one transfer. A tensor is in one file; a file has at most ``bucket_bytes``
    unless its only tensor is larger."""

    def __init__(self, folder: Path, version: int, bucket_bytes: int) -> None:
        self.folder, self.version, self.bucket_bytes = folder, version, bucket_bytes
        self.records: dict[str, Record] = {}
        self._stream = HostStream()
        self._files: list[_HashedFile] = []
        self._buckets: list[list[BucketEntry]] = []
        self._hashing = ThreadPoolExecutor(1)
        self._closing = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            file.abandon()
        self._hashing.shutdown()
        self._closing.shutdown()

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Write a tensor, converted to ``dtype``. It may change or be freed afterwards."""
        num_bytes = tensor.numel() * dtype.itemsize
        used = self._files[-1].size if self._files else 0
        offset = -(-used // ALIGN) * ALIGN
        entries = self._buckets[-1] if self._buckets else []
        full = offset + num_bytes > self.bucket_bytes or len(entries) == MAX_ENTRIES
        if not self._files or (full and used):
            self._next_file()
            offset = used = 0
        file = self._files[-1]
        if offset > used:
            self._stream.add(torch.zeros(offset - used, dtype=torch.uint8), file.write)
        self._stream.add(tensor, file.write, dtype)
        file.size = offset + num_bytes
        format_name = str(dtype).removeprefix("torch.")
        entry = BucketEntry(name, tuple(tensor.shape), format_name, offset, 0, num_bytes)
        self._buckets[-1].append(entry)

    def finish(self) -> tuple[list[bytes], int]:
        """Complete all files. Return the headers, with the end, and the size of all tensors."""
        self._stream.flush()
        for file in self._files:
            file.close_soon()
        headers = []
        for index, (file, entries) in enumerate(zip(self._files, self._buckets, strict=True)):
            self.records[file.path.name] = file.record()
            # the manifest has the checksum
            bucket = Bucket(0, self.version, index, file.size, "", tuple(entries))
            headers.append(encode(bucket))
        every = [entry for entries in self._buckets for entry in entries]
        total = sum(entry.num_bytes for entry in every)
        end = End(0, self.version, len(self._files), len(every), total)
        return [*headers, encode(end)], total

    def _next_file(self) -> None:
        path = self.folder / f"weights-{len(self._files):05d}.bin"
        before = self._files[-1] if self._files else None
        self._files.append(_HashedFile(path, before, self._hashing, self._closing))
        self._buckets.append([])


class _HashedFile:
    """A file whose bytes are hashed while they are written, and that is flushed to the disk while
    the next one is written."""

    def __init__(
        self,
        path: Path,
        before: _HashedFile | None,
        hashing: ThreadPoolExecutor,
        closing: ThreadPoolExecutor,
    ) -> None:
        self.path, self.size = path, 0
        self._before, self._hashing, self._closing = before, hashing, closing
        self._file = path.open("wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._closed: Future[None] | None = None

    def write(self, part: Tensor) -> None:
        """Append bytes, uint8 [n] on the CPU."""
        if self._before is not None:  # its bytes come first, so all of them are written
            self._before.close_soon()
            self._before = None
        data = memory_of(part)
        if len(data) < SMALL_BYTES:
            self._digest.update(data)
            self._write(data)
        else:
            hashed = self._hashing.submit(self._digest.update, data)
            self._write(data)
            hashed.result()

    def close_soon(self) -> None:
        """Flush the file to the disk and close it, in another thread."""
        if self._closed is None:
            self._closed = self._closing.submit(self._close)

    def record(self) -> TransferRecord:
        """Wait until the file is on the disk; return its size and checksum. Raises OSError."""
        assert self._closed is not None
        self._closed.result()
        return TransferRecord(num_bytes=self.size, xxh3=self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file if it is open."""
        if self._closed is None:
            self._file.close()

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):  # a write may be short, and is limited to 2 GiB
            done += self._file.write(data[done:])

    def _close(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())


class DiskSource:
    """Source that reads the transfers of a :class:`DiskSender`. Implements
    :class:`burnish.sync.base.WeightSource`."""

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float = 300.0,
        poll_s: float = 0.2,
        check: bool = True,
        expected: Mapping[str, Shape] | None = None,
    ) -> None:
        """``expected``: that of :class:`burnish.sync.source.Checks`. ``check``: compare every byte
        with the manifest, in addition to sizes."""
        self.folder, self.timeout_s, self.poll_s, self.check = folder, timeout_s, poll_s, check
        self.expected = expected
        self._last = -1
        """Number of the last push that was loaded."""
        self._versions: dict[str, int] = {}
        """Versions of pushes, by the name of their folder."""

    @contextmanager
    def open(self, version: int | None = None) -> Iterator[BucketTransfer]:
        """Wait for the newest transfer of ``version`` (None: for one newer than the last loaded).

        Raises LinkError after a timeout. Raises SyncError if the transfer is damaged or of another
        model; no tensor has been yielded then.
        """
        push = self._wait_for(version)
        problems = verify(push, checksums=self.check)
        if problems:
            raise SyncError(
                f"{push} is corrupted: {'; '.join(problems)}. None of its weights were "
                "loaded; push again"
            )
        try:
            headers = read_headers(push)
            names = _names(headers, self.expected, push)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, SyncError):
                raise
            raise SyncError(
                f"{push} cannot be read: {error}. None of its weights were loaded; push again"
            ) from error
        payloads = (_mapped(file).numpy() for file in sorted(push.glob("weights-*.bin")))
        source = SnapshotSource(headers, payloads, expected=names, check=False)
        with source.open() as transfer:
            yield transfer
        self._last, self.expected = push_number(push), names

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _wait_for(self, version: int | None) -> Path:
        started = time.monotonic()
        while (push := self._find(version)) is None:
            waited = time.monotonic() - started
            if waited > self.timeout_s:
                have = [f"{p.name} (version {self._version(p)})" for p in self._pushes()]
                awaited = "a new version" if version is None else f"version {version}"
                raise LinkError(
                    f"{awaited} of the weights did not appear in {self.folder} within "
                    f"{self.timeout_s:g} s; found: {', '.join(have) or 'nothing'}. Check whether "
                    "the trainer is running and writes to this folder, or raise sync.timeout_s"
                )
            time.sleep(min(max(waited / 10, SHORTEST_POLL_S), self.poll_s))
        return push

    def _pushes(self) -> list[Path]:
        folders = self.folder.glob("step_*") if self.folder.is_dir() else ()
        return sorted(folders, key=push_number, reverse=True)

    def _find(self, version: int | None) -> Path | None:
        for path in self._pushes():
            if version is None:
                return path if push_number(path) > self._last else None
            if self._version(path) == version:
                return path
        return None

    def _version(self, path: Path) -> int | None:
        """Return the version of a push. None if the file is missing or unreadable; the manifest
        check reports the cause."""
        if path.name not in self._versions:
            with suppress(OSError, ValueError, KeyError):
                contents = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
                self._versions[path.name] = int(contents["version"])
        return self._versions.get(path.name)


def read_headers(push: Path) -> list[bytes]:
    """Return the headers of a transfer's buckets, then that of its end."""
    contents: dict[str, Any] = json.loads((push / CONTENTS).read_text(encoding="utf-8"))
    return [header.encode() for header in contents["headers"]]


def _names(
    headers: Sequence[bytes], expected: Mapping[str, Shape] | None, push: Path
) -> Mapping[str, Shape]:
    """Return the shape of every weight of a transfer. Raises SyncError if they are not the expected
    ones."""
    names = WeightNameCheck(expected)
    with mismatch_at(str(push)):
        for message in map(decode, headers):
            for entry in message.entries if isinstance(message, Bucket) else ():
                names.add(entry.name, entry.shape)
        names.complete()
    return names.given


def _mapped(file: Path) -> Tensor:
    """Return the bytes of a file, which are read when they are used."""
    size = file.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(file), size=size, dtype=torch.uint8)


def push_number(folder: Path) -> int:
    """Return the push number of a folder, from 0."""
    return int(folder.name.removeprefix("step_"))
