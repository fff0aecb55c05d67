"""Weight transfer through a folder that trainer and rollout workers can access (a local or a
network disk).

Every transfer is one folder, written like a checkpoint (``checkpoint/save.py``). It is hidden until
complete, its manifest with sizes and checksums is written last, and it is renamed into place. A
writer that is killed therefore leaves no folder that appears complete:

    step_000007/              the 8th push of this folder (the version is in sync.json)
      weights-00000.safetensors, weights-00001.safetensors, ...
      sync.json               version; name and shape of every weight
      manifest.json           size and SHA-256 of each file

A receiver checks all names and, unless ``check`` is off, every byte before it yields the first
tensor. A damaged transfer that it detects therefore never leaves an engine partly overwritten.
There are no acknowledgments. The sender waits for no receiver. A receiver waits until the requested
version (or any new one) exists.

Each start of a trainer needs its own folder: transfers of an earlier start contain versions too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.manifest import verify
from burnish.config.model import Dtype
from burnish.models.buffers import wanted_dtype
from burnish.models.load import DTYPES
from burnish.rollout.weights import Shape, WeightNameCheck
from burnish.sync.base import LinkError, Metrics, SyncError, mismatch_at, sync_metrics
from burnish.sync.engine import HasWeights, drain

CONTENTS = "sync.json"
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
        sizes: list[int] = []
        """Bytes of tensors in each file."""
        try:
            self._store.save(number, lambda folder: self._write(folder, weights, version, sizes))
        except CheckpointError as error:
            drain(weights)  # the other ranks wait in the same gathers
            raise SyncError(
                f"version {version} of the weights could not be written to {self._store.folder}: "
                f"{error}; check the disk, then push again"
            ) from error
        seconds = time.perf_counter() - started
        return sync_metrics(version, sum(sizes), buckets=len(sizes), seconds=seconds)

    def close(self) -> None:
        """Do nothing: pushed weights remain on disk."""

    def _write(self, folder: Path, weights: Weights, version: int, sizes: list[int]) -> None:
        names = WeightNameCheck(None)
        for part in self._parts(weights, names, f"version {version}"):
            save_file(part, folder / f"weights-{len(sizes):05d}.safetensors")
            sizes.append(sum(t.nbytes for t in part.values()))
        contents = {"version": version, "weights": names.given}
        (folder / CONTENTS).write_text(json.dumps(contents), encoding="utf-8")

    def _parts(
        self, weights: Weights, names: WeightNameCheck, where: str
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each file."""
        part: dict[str, Tensor] = {}
        size = 0
        for name, tensor in weights:
            with mismatch_at(where):
                names.add(name, tuple(tensor.shape))
            target_dtype = wanted_dtype(tensor, self.dtype)
            # Always copy: a tensor of a sharded engine is valid only until the next one.
            copy = tensor.detach().to("cpu", target_dtype, copy=True).contiguous()
            if part and size + copy.nbytes > self.bucket_bytes:
                yield part
                part, size = {}, 0
            part[name] = copy
            size += copy.nbytes
        yield part


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

    @contextmanager
    def open(self, version: int | None = None) -> Iterator[DiskTransfer]:
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
            transfer = DiskTransfer(push, self.expected)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise SyncError(
                f"{push} cannot be read: {error}. None of its weights were loaded; push again"
            ) from error
        yield transfer
        self._last, self.expected = push_number(push), transfer.shapes

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _wait_for(self, version: int | None) -> Path:
        deadline = time.monotonic() + self.timeout_s
        while (push := self._find(version)) is None:
            if time.monotonic() > deadline:
                have = [f"{p.name} (version {self._version(p)})" for p in self._pushes()]
                awaited = "a new version" if version is None else f"version {version}"
                raise LinkError(
                    f"{awaited} of the weights did not appear in {self.folder} within "
                    f"{self.timeout_s:g} s; found: {', '.join(have) or 'nothing'}. Check whether "
                    "the trainer is running and writes to this folder, or raise sync.timeout_s"
                )
            time.sleep(self.poll_s)
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

    @staticmethod
    def _version(path: Path) -> int | None:
        """Return the version of a push. None if the file is missing or unreadable; the manifest
        check reports the cause."""
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads((path / CONTENTS).read_text(encoding="utf-8"))["version"])
        return None


class DiskTransfer:
    """One transfer on disk. Implements :class:`burnish.sync.base.WeightTransfer`."""

    def __init__(self, folder: Path, expected: Mapping[str, Shape] | None) -> None:
        """Raises SyncError if the weights are not the expected ones."""
        contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        self.version = int(contents["version"])
        self._files = sorted(folder.glob("weights-*.safetensors"))
        self.num_bytes, self.num_buckets = 0, len(self._files)
        names = WeightNameCheck(expected)
        for file in self._files:
            with safe_open(file, "pt") as opened, mismatch_at(file.name):
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    names.add(name, tuple(opened.get_slice(name).get_shape()))
        with mismatch_at(str(folder)):
            names.complete()
        self.shapes = names.given
        listed = {name: tuple(shape) for name, shape in contents["weights"].items()}
        if listed != self.shapes:
            raise SyncError(
                f"{folder} contains {len(self.shapes)} weights, but its {CONTENTS} lists "
                f"{len(listed)} (or other shapes); push again"
            )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor)."""
        for file in self._files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor: torch.Tensor = opened.get_tensor(name)
                    self.num_bytes += tensor.nbytes
                    yield name, tensor


def push_number(folder: Path) -> int:
    """Return the push number of a folder, from 0."""
    return int(folder.name.removeprefix("step_"))
