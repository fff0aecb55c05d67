"""Construction of the two ends of a connection from a recipe's ``sync``, for every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

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

Sender = WeightSender | DiskSender


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
) -> Sender:
    """Return the trainer's end; call its ``push()`` on every rank of the trainer at the same time.

    ``rendezvous``: None on all ranks but the one that sends. ``dtype``: compute dtype of the
    rollout engines; None: weights keep their dtype. ``sync.kind`` must be a key of ``TRANSPORTS``.
    Waits for the receivers; raises LinkError with the names of those that do not join in time.
    """
    return _transport(sync).sender(sync, policy, rendezvous, dtype)


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
    return _transport(sync).source(sync, rendezvous, checks)


class Transport(NamedTuple):
    """The two ends of one kind of transfer. Both get its config first."""

    sender: Callable[[Any, HasWeights, Rendezvous | None, Dtype | None], Sender]
    source: Callable[[Any, Rendezvous | None, Checks], WeightSource]


def _transport(sync: LinkSync | DiskSync) -> Transport:
    if sync.kind not in TRANSPORTS:
        raise SyncError(
            f"sync.kind={sync.kind} does not connect two processes: "
            f"use one of {', '.join(TRANSPORTS)}"
        )
    return TRANSPORTS[sync.kind]


def _link(sender: Callable[..., ChannelSender], source: Callable[..., WeightSource]) -> Transport:
    """Return a transport over the message channel of a rendezvous. Both functions are called with
    the channel and ``device``."""

    def send(
        sync: LinkSync, policy: HasWeights, rendezvous: Rendezvous | None, dtype: Dtype | None
    ) -> WeightSender:
        link: ChannelSender | None = None
        if rendezvous is not None:
            channel = rendezvous.channel(sync.timeout_s)
            device = torch.device(rendezvous.device)
            link = sender(channel, bucket_bytes=sync.bucket_bytes, device=device)
        return WeightSender(policy, link, dtype=dtype, check=sync.verify)

    def receive(sync: LinkSync, rendezvous: Rendezvous | None, checks: Checks) -> WeightSource:
        assert rendezvous is not None, "connections between processes need a rendezvous"
        channel = rendezvous.channel(sync.timeout_s)
        return source(channel, device=torch.device(rendezvous.device), **checks)

    return Transport(send, receive)


def _disk_sender(
    sync: DiskSync, policy: HasWeights, rendezvous: Rendezvous | None, dtype: Dtype | None
) -> DiskSender:
    folder = None if rendezvous is None else Path(sync.folder)
    return DiskSender(policy, folder, bucket_bytes=sync.bucket_bytes, keep=sync.keep, dtype=dtype)


def _disk_source(sync: DiskSync, rendezvous: Rendezvous | None, checks: Checks) -> DiskSource:
    return DiskSource(
        Path(sync.folder),
        timeout_s=sync.timeout_s,
        check=checks["check"],
        expected=checks.get("expected"),
    )


TRANSPORTS: Mapping[str, Transport] = {
    "collective": _link(CollectiveSender, CollectiveSource),
    "ipc": _link(SharedSender, lambda channel, device, **checks: SharedSource(channel, **checks)),
    "disk": Transport(_disk_sender, _disk_source),
}
"""``sync.kind`` -> transport between two processes. The configs are in ``config/sync.py``."""
