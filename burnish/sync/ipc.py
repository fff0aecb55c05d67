"""Weight transfer through shared memory, between trainer and rollout workers on one machine.

The sender has two buffers that the receivers map. On CUDA they are device memory, shared by cudaIpc
handles (not run: no GPU was available; the code follows ``torch.multiprocessing.reductions``). On
the CPU they are files in memory (/dev/shm). Only headers are sent. A receiver reads the buffer
directly and marks it when done.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from burnish import shm
from burnish.sync.base import LinkError, SyncError
from burnish.sync.channel import Channel
from burnish.sync.links import ChannelSender, ChannelSource, split_frame
from burnish.sync.source import Checks


class SharedSender(ChannelSender):
    """Sender with shared buffers. Must be created at the same time as the receivers: waits until
    all have joined."""

    def __init__(
        self, channel: Channel, *, bucket_bytes: int, device: torch.device | str = "cpu"
    ) -> None:
        """Raises LinkError with the names of the receivers that did not join in time. Raises
        SyncError if there is no memory for the buffers."""
        device = torch.device(device)
        channel.rendezvous()
        files: list[Path] = []
        try:
            if device.type == "cuda":  # not run
                buffers = [
                    torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in "ab"
                ]
            else:
                files += [_new_file(bucket_bytes), _new_file(bucket_bytes)]
                buffers = [_map(file, bucket_bytes) for file in files]
            for rank in channel.receivers:  # CUDA handles count openers: one per receiver
                handles = [_file_handle(f) for f in files] or [cuda_ipc_handle(b) for b in buffers]
                channel.set(f"buffers/{rank}", json.dumps(handles).encode())
            channel.wait({r: f"mapped/{r}" for r in channel.receivers}, "did not map the buffers")
        finally:
            for file in files:  # all have mapped them: freed with the last process
                file.unlink()
        super().__init__(channel, buffers)
        self._sent: list[int | None] = [None, None]
        """Number of the last message sent from each buffer."""

    def _before(self, payload: Tensor) -> None:
        if payload.device.type == "cuda":  # not run
            torch.cuda.current_stream(payload.device).synchronize()

    def _after(self, slot: int, payload: Tensor, number: int) -> None:
        self._sent[slot] = number

    def _wait_free(self, slot: int) -> None:
        number = self._sent[slot]
        if number is not None:
            self.channel.wait_marks(number, "did not read its bucket")
        self._sent[slot] = None


class SharedSource(ChannelSource):
    """Source that reads the sender's shared buffers."""

    def __init__(self, channel: Channel, **checks: Unpack[Checks]) -> None:
        """Raises LinkError with the names of the processes that did not join in time. Raises
        SyncError if the buffers cannot be mapped."""
        super().__init__(**checks)
        self.channel = channel
        channel.rendezvous()
        handles = json.loads(
            channel.get(f"buffers/{channel.rank}", rank=0, awaited="did not create the buffers")
        )
        self._buffers = [_open_handle(handle) for handle in handles]
        channel.set(f"mapped/{channel.rank}", b"1")
        self._reading: int | None = None
        self._closed = False

    def answer(self, push: int, problem: str | None) -> None:
        """Report the result of the transfer to the sender."""
        self._mark_read()
        super().answer(push, problem)

    def close(self) -> None:
        """Unmap the buffers."""
        self._buffers, self._closed = [], True

    def _receive(self) -> tuple[bytes, Tensor]:
        if self._closed:
            raise LinkError(
                f"connection {self.channel.name!r} was closed in this process; make a new one"
            )
        self._mark_read()
        self._reading, data = self.channel.next()
        num_bytes, slot, header = split_frame(data)
        return header, self._buffers[slot][:num_bytes]

    def _mark_read(self) -> None:
        if self._reading is None:
            return
        if self._buffers and self._buffers[0].device.type == "cuda":  # not run
            torch.cuda.current_stream(self._buffers[0].device).synchronize()
        self.channel.mark(self._reading)
        self._reading = None


# ---- files in memory ---------------------------------------------------------------------------


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _new_file(num_bytes: int) -> Path:
    """Create a file in memory with all of its space reserved; remove files of killed processes
    first.

    Without the reservation, writing into a mapped file that has no space left would kill the
    process.
    """
    shm.sweep("sync", _folder())
    handle, name = tempfile.mkstemp(prefix=shm.prefix("sync"), dir=_folder())
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        os.unlink(name)
        raise SyncError(
            f"no space for a buffer of {num_bytes} bytes in {_folder()} ({error}); lower "
            "sync.bucket_bytes, or give the container more shared memory (docker: --shm-size)"
        ) from error
    finally:
        os.close(handle)
    return Path(name)


def _map(file: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)


def _file_handle(file: Path) -> dict[str, Any]:
    return {"file": str(file), "num_bytes": file.stat().st_size}


def _open_handle(handle: dict[str, Any]) -> Tensor:
    if "file" not in handle:
        return open_cuda_ipc_handle(handle)
    file = Path(handle["file"])
    if not file.is_file():
        raise SyncError(
            f"the sender's buffer {file} is not on this machine: sync.kind=ipc needs all "
            "processes on one machine, with one /dev/shm; use sync.kind=collective"
        )
    return _map(file, handle["num_bytes"])


# ---- CUDA (not run) ----------------------------------------------------------------------------

_DEVICE = 6
"""Index of the first argument of ``rebuild_cuda_tensor`` that describes the location of the
memory."""


def cuda_ipc_handle(buffer: Tensor) -> dict[str, Any]:
    """Return the IPC handle of a CUDA buffer, as JSON-compatible values. Not run."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, args = reduce_tensor(buffer)
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    packed = [_packed(v) for v in args[_DEVICE:]]
    return {"cuda": packed, "num_bytes": buffer.numel(), "uuid": uuid}


def open_cuda_ipc_handle(handle: dict[str, Any]) -> Tensor:
    """Map the CUDA buffer of another process, on the same GPU. Not run.

    Raises SyncError if that GPU is not visible to this process.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    if handle["uuid"] not in uuids:
        raise SyncError(
            f"the sender's buffer is on GPU {handle['uuid']}, but this process sees {uuids}: "
            "sync.kind=ipc needs both on one GPU; use sync.kind=collective"
        )
    _, *where = (_unpacked(v) for v in handle["cuda"])
    layout = (
        torch.Tensor,
        (handle["num_bytes"],),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
    )
    return rebuild_cuda_tensor(*layout, uuids.index(handle["uuid"]), *where)


def _packed(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _unpacked(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
