"""How the policy's weights get from the trainer to the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, PathText

SyncKind = Literal["inproc", "collective", "ipc", "disk", "object_store"]


class InprocSync(Node):
    """Trainer and rollout engine in one process: nothing is copied where their formats agree."""

    kind: Literal["inproc"]


class _Sending(Node):
    bucket_bytes: int = Field(512 << 20, ge=1024, multiple_of=16)
    """Weights travel in buckets of this many bytes; sender and receivers keep two each. (disk: the
    size of a file.)"""
    timeout_s: float = Field(300.0, gt=0)
    """Longest wait for the other side, in seconds; then the hand-over fails and names who is
    missing."""
    verify: bool = True
    """Compare checksums of what was sent and of what came."""


class LinkSync(_Sending):
    """Trainer and rollout engines in several processes."""

    kind: Literal["auto", "collective", "ipc", "object_store"] = "auto"
    """ipc: memory that processes of one machine (on CUDA: one GPU) share. collective: broadcast
    over gloo or NCCL. object_store: Ray's, which keeps them for workers that restart. auto: on
    Ray object_store, else inproc, ipc or collective, the first that fits."""


class DiskSync(_Sending):
    """Safetensors in a folder that all processes see."""

    kind: Literal["disk"]
    folder: PathText
    """Where hand-overs are written. A new one for every start of a trainer."""
    keep: int = Field(2, ge=1)
    """Newest hand-overs kept. With 1, one that is being read may be deleted."""


def _with_kind(value: Any) -> Any:
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "auto", **value} if isinstance(value, dict) else value


SyncConfig = Annotated[
    Annotated[LinkSync | InprocSync | DiskSync, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]


def sync_rules(
    sync: LinkSync | InprocSync | DiskSync, runtime: Literal["inline", "ray"]
) -> Iterator[str]:
    """Yield the problems of a ``sync`` that this runtime does not support."""
    if runtime == "ray":
        if sync.kind == "inproc":
            yield (
                "sync.kind=inproc hands weights over inside one process, and with "
                "cluster.runtime=ray trainer and rollout engines are in several; leave sync out, "
                "or use sync.kind=object_store"
            )
        return
    if sync.kind not in ("auto", "inproc"):
        yield (
            f"sync.kind={sync.kind} hands weights from process to process, and here trainer and "
            "rollout engine are in one; leave sync out, or use sync.kind=inproc"
        )
    elif isinstance(sync, LinkSync) and sync != LinkSync():
        yield (
            "sync sets how weights are sent, and trainer and rollout engine are in one process, "
            "where nothing is; leave sync out, or use sync.kind=inproc"
        )


def resolve_kind(
    sync: LinkSync | InprocSync | DiskSync,
    *,
    same_process: bool,
    same_memory: bool,
    has_store: bool = False,
) -> SyncKind:
    """The kind for engines in these places; ``same_memory``: all on one machine, and on CUDA on one
    GPU. ``has_store``: there is an object store between them (Ray's), which needs no new connection
    after a worker is restarted.

    >>> resolve_kind(LinkSync(), same_process=False, same_memory=True)
    'ipc'
    """
    if sync.kind != "auto":
        return sync.kind
    if same_process:
        return "inproc"
    if has_store:
        return "object_store"
    return "ipc" if same_memory else "collective"
