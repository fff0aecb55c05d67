"""How the policy's weights get from the trainer to the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.base import Node, PathText

SyncKind = Literal["inproc", "collective", "ipc", "disk"]


class SyncConfig(Node):
    """How the policy's weights get from the trainer to the rollout engine."""

    kind: Literal["auto", "inproc", "collective", "ipc", "disk"] = "auto"
    """inproc: one process; nothing is copied where the formats agree. ipc: memory that processes of
    one machine (on CUDA: one GPU) share. collective: broadcast over gloo or NCCL. disk: safetensors
    in a folder that all see. auto: the first of inproc, ipc and collective that fits."""
    bucket_bytes: int = Field(512 << 20, ge=1024, multiple_of=16)
    """Weights travel in buckets of this many bytes; sender and receivers keep two each. (disk: the
    size of a file.)"""
    timeout_s: float = Field(300.0, gt=0)
    """Longest wait for the other side, in seconds; then the hand-over fails and names who is
    missing."""
    verify: bool = True
    """Compute a checksum of every bucket on both sides and compare."""
    folder: PathText | None = None
    """disk: where hand-overs are written; every process must see it."""
    keep: int = Field(2, ge=1)
    """disk: newest hand-overs kept. With 1, one that is being read may be deleted."""

    def rules(self) -> Iterator[str]:
        if self.kind == "disk" and self.folder is None:
            yield "kind=disk needs a folder that trainer and rollout workers see; set folder"
        for name in ("folder", "keep"):
            if self.kind != "disk" and self._is_set(name):
                yield f"{name} is for kind=disk, and kind={self.kind}; remove it, or set kind=disk"
        for name in ("bucket_bytes", "timeout_s", "verify"):
            if self.kind == "inproc" and self._is_set(name):
                yield f"{name} is set, and kind=inproc sends nothing; remove it"

    def one_process_rules(self) -> Iterator[str]:
        """What a recipe whose trainer samples in its own process cannot ask for."""
        if self.kind not in ("auto", "inproc"):
            yield (
                f"sync.kind={self.kind} hands weights from process to process, and here trainer "
                "and rollout engine are in one; leave sync out (kind=auto), or use kind=inproc"
            )
        elif self.kind == "auto":
            for name in ("bucket_bytes", "timeout_s", "verify"):
                if self._is_set(name):
                    yield (
                        f"sync.{name} is set, and trainer and rollout engine are in one process, "
                        "where nothing is sent; remove it"
                    )

    def resolve(self, *, same_process: bool, same_memory: bool) -> SyncKind:
        """The kind for engines in these places; ``same_memory``: all on one machine, and on CUDA on
        one GPU.

        >>> SyncConfig().resolve(same_process=False, same_memory=True)
        'ipc'
        """
        if self.kind != "auto":
            return self.kind
        if same_process:
            return "inproc"
        return "ipc" if same_memory else "collective"

    def _is_set(self, name: str) -> bool:
        return bool(self.model_dump()[name] != type(self).model_fields[name].default)
