"""Construction of the two ends of a connection from a recipe's ``sync``, for every kind."""

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
    """Meeting point of a sender and its receivers."""

    store: Store
    """Store shared by all processes: ``serve_store`` in the sender's process, ``connect_store`` in
    the others."""
    name: str
    """Name of this connection, unique among all connections on the store."""
    num_receivers: int
    rank: int
    """0: the sender. Receivers count from 1."""
    device: str = "cpu"
    """Device of the buffers: ``cpu`` (gloo, shared memory), or a CUDA device (NCCL, cudaIpc; not
    run)."""

    def channel(self, timeout_s: float) -> Channel:
        """Return the message channel of this connection."""
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
    """Return the trainer's end; call its ``push()`` on every rank of the trainer at the same time.

    ``rendezvous``: None on all ranks but the one that sends. ``dtype``: compute dtype of the
    rollout engines; None: weights keep their dtype. ``sync.kind`` must not be ``auto``
    (``config.sync.resolve_kind`` resolves it). Waits for the receivers; raises LinkError with the
    names of those that do not join in time.
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
    """Return the source of a rollout engine's weights.

    Pass it to a :class:`~burnish.sync.engine.SyncedEngine` and call its ``receive()`` when the
    trainer pushes. ``rendezvous``: None for ``disk``. ``sync.verify`` is the default of ``check``.
    Waits for the sender and the other receivers; raises LinkError with the names of those that do
    not join in time.
    """
    checks.setdefault("check", sync.verify)
    if isinstance(sync, DiskSync):
        return DiskSource(
            Path(sync.folder),
            timeout_s=sync.timeout_s,
            check=checks["check"],
            expected=checks.get("expected"),
        )
    assert rendezvous is not None, "connections between processes need a rendezvous"
    channel = rendezvous.channel(sync.timeout_s)
    if _is_collective(sync):
        return CollectiveSource(channel, device=torch.device(rendezvous.device), **checks)
    return SharedSource(channel, **checks)


def _is_collective(sync: LinkSync) -> bool:
    if sync.kind in ("auto", "object_store"):
        raise SyncError(
            f"sync.kind={sync.kind} does not connect two processes: "
            + ("resolve it first" if sync.kind == "auto" else "the runtime transfers the buckets")
        )
    return sync.kind == "collective"
