"""From a recipe's ``sync`` to the two ends of a connection, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from burnish.config.model import Dtype
from burnish.config.sync import DiskSync, LinkSync
from burnish.sync.base import SyncError, WeightSource
from burnish.sync.channel import Channel
from burnish.sync.collective import CollectiveSender, CollectiveSource
from burnish.sync.disk import DiskSender, DiskSource
from burnish.sync.engine import HasWeights, WeightSender
from burnish.sync.ipc import SharedSender, SharedSource
from burnish.sync.links import ChannelSender
from burnish.sync.source import Checks


@dataclass(frozen=True)
class Rendezvous:
    """Where a sender and its receivers find each other."""

    store: Store
    """Of all of them: ``serve_store`` in the sender's process, ``connect_store`` in the others."""
    name: str
    """Of this connection; a new one has a new name."""
    num_receivers: int
    rank: int
    """0: the sender. Receivers count from 1."""
    device: str = "cpu"
    """Where buffers are: ``cpu`` (gloo, shared memory), or a CUDA device (NCCL, cudaIpc; not
    run)."""

    def channel(self, timeout_s: float) -> Channel:
        """Messages of this connection."""
        return Channel(
            self.store,
            self.name,
            rank=self.rank,
            num_receivers=self.num_receivers,
            timeout_s=timeout_s,
        )


def open_sender(
    sync: LinkSync | DiskSync,
    policy: HasWeights,
    rendezvous: Rendezvous | None,
    *,
    dtype: Dtype | None = None,
) -> WeightSender | DiskSender:
    """The trainer's end; ``push()`` it on every rank of the trainer at the same time.

    ``rendezvous``: None on all ranks but the one that sends. ``dtype``: what the rollout engines
    compute in; None: weights are sent as they are. ``sync.kind`` must not be ``auto``
    (``config.sync.resolve_kind`` chooses). Waits for the receivers; raises LinkError with the names
    of those who do not come in time.
    """
    if isinstance(sync, DiskSync):
        folder = None if rendezvous is None else Path(sync.folder)
        return DiskSender(
            policy, folder, bucket_bytes=sync.bucket_bytes, keep=sync.keep, dtype=dtype
        )
    link: ChannelSender | None = None
    if rendezvous is not None:
        make = CollectiveSender if _is_collective(sync) else SharedSender
        channel = rendezvous.channel(sync.timeout_s)
        link = make(channel, bucket_bytes=sync.bucket_bytes, device=torch.device(rendezvous.device))
    return WeightSender(policy, link, dtype=dtype, check=sync.verify)


def open_source(
    sync: LinkSync | DiskSync, rendezvous: Rendezvous | None, **checks: Unpack[Checks]
) -> WeightSource:
    """The weights of a rollout engine: give them to a :class:`~burnish.sync.engine.SyncedEngine`
    and call its ``receive()`` when the trainer pushes.

    ``rendezvous``: None for ``disk``. ``sync.verify`` is the default of ``check``. Waits as
    :func:`open_sender` does.
    """
    checks.setdefault("check", sync.verify)
    if isinstance(sync, DiskSync):
        return DiskSource(
            Path(sync.folder),
            timeout_s=sync.timeout_s,
            check=checks["check"],
            expected=checks.get("expected"),
        )
    assert rendezvous is not None, "processes have to find each other"
    channel = rendezvous.channel(sync.timeout_s)
    if _is_collective(sync):
        return CollectiveSource(channel, device=torch.device(rendezvous.device), **checks)
    return SharedSource(channel, **checks)


def _is_collective(sync: LinkSync) -> bool:
    if sync.kind in ("auto", "object_store"):
        raise SyncError(
            f"sync.kind={sync.kind} is no connection of two processes: "
            + ("resolve it first" if sync.kind == "auto" else "a runtime carries the buckets")
        )
    return sync.kind == "collective"
