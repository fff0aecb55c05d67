"""Config of the transfer of the policy's weights from the trainer to the rollout engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from burnish.config.base import Node, PathText, lock_of, named_kind

RayStore = Literal["object_store", "disk"]


class _Sync(Node):
    """Facts of every transfer."""

    @property
    def ray_store(self) -> RayStore | None:
        """Store from which the workers of a Ray cluster read the weights at any time. None: they
        connect to the trainer, and both sides take part in the transfer."""
        return None

    @property
    def lock(self) -> Path | None:
        """Lock file of the folder that the trainer writes; None if there is none."""
        return None

    def with_absolute_paths(self) -> Self:
        """Return the same settings for a process with another working directory."""
        return self


class InprocSync(_Sync):
    """Trainer and rollout engine in one process. Nothing is copied if their formats are the
    same."""

    kind: Literal["inproc"]


class _Sending(_Sync):
    """Keys of transfers between processes (all kinds except ``inproc``)."""

    bucket_bytes: int = Field(512 << 20, ge=1024, multiple_of=16)
    """Size of transfer buckets; sender and receivers hold two each. (disk: file size.)"""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds to wait for the other side; then the sync fails and names missing processes."""
    verify: bool = True
    """Compare checksums of sent and received weights."""


class LinkSync(_Sending):
    """Trainer and rollout engines in several processes."""

    kind: Literal["auto", "collective", "ipc", "object_store"] = "auto"
    """ipc: memory shared on one machine (on CUDA: on one GPU). collective: gloo or NCCL broadcast.
    object_store: Ray's, which keeps the weights for restarted workers. auto: object_store on Ray,
    else inproc."""

    @property
    def ray_store(self) -> RayStore | None:
        return "object_store" if self.kind in ("auto", "object_store") else None


class DiskSync(_Sending):
    """Files in a folder shared by all processes."""

    kind: Literal["disk"]
    folder: PathText
    """Folder of the weight files. Use a new one for every start of a trainer."""
    keep: int = Field(2, ge=1)
    """Newest weight versions kept. With 1, a version may be deleted while it is read."""

    @property
    def ray_store(self) -> RayStore:
        return "disk"

    @property
    def lock(self) -> Path | None:
        return lock_of(Path(self.folder))

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"folder": os.path.abspath(self.folder)})


SyncConfig = Annotated[
    Annotated[LinkSync | InprocSync | DiskSync, Field(discriminator="kind")],
    named_kind("auto"),
]


def sync_rules(
    sync: LinkSync | InprocSync | DiskSync, runtime: Literal["inline", "ray", "spmd"]
) -> Iterator[str]:
    """Yield an error for each ``sync`` setting that this runtime does not support."""
    if runtime == "ray":
        if sync.kind == "inproc":
            yield (
                "sync.kind=inproc transfers weights within one process, but with "
                "cluster.runtime=ray trainer and rollout engines are in different processes; "
                "remove sync, or use sync.kind=object_store"
            )
        return
    if sync.kind not in ("auto", "inproc"):
        yield (
            f"sync.kind={sync.kind} transfers weights between processes, but trainer and rollout "
            "engine are in one; remove sync, or use sync.kind=inproc"
        )
    elif isinstance(sync, LinkSync) and sync != LinkSync():
        yield (
            "sync has no effect, because trainer and rollout engine share their weights in one "
            "process; remove sync, or use sync.kind=inproc"
        )
