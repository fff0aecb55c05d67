"""The files behind shared buffers: reserved, without a name once mapped, and tidied up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.multiprocessing import reductions

from burnish import shm
from burnish.sync import ipc
from burnish.sync.base import LinkError, SyncError
from burnish.sync.channel import Channel, connect_store, serve_store
from burnish.sync.collective import CollectiveSource
from burnish.sync.engine import WeightSender


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ipc, "_folder", lambda: tmp_path)
    return tmp_path


def both(
    timeout_s: float = 30.0, bucket_bytes: int = 1024
) -> tuple[ipc.SharedSender, ipc.SharedSource]:
    """Two ends in two threads of this process, each with a connection to the store."""
    store, made = serve_store("127.0.0.1", timeout_s=timeout_s), []

    def receive() -> None:
        other = connect_store("127.0.0.1", store.port, timeout_s=timeout_s)
        channel = Channel(other, "x", rank=1, num_receivers=1, timeout_s=timeout_s)
        made.append(ipc.SharedSource(channel))

    thread = threading.Thread(target=receive)
    thread.start()
    channel = Channel(store, "x", rank=0, num_receivers=1, timeout_s=timeout_s)
    sender = ipc.SharedSender(channel, bucket_bytes=bucket_bytes)
    thread.join(timeout_s)
    return sender, made[0]


def test_a_receiver_maps_the_senders_memory_and_the_files_are_unlinked(
    own_folder: Path, weights_type: Any
) -> None:
    link, ours = both()
    assert list(own_folder.iterdir()) == [], "so nothing stays if all are killed"
    weights = {"a": torch.randn(100), "b": torch.randn(300)}
    sender = WeightSender(weights_type(weights), link)
    thread = threading.Thread(target=sender.push)  # it waits for the answer
    thread.start()
    with ours.open(3) as transfer:
        for name, tensor in transfer:
            assert torch.equal(tensor, weights[name])
            if name == "a":
                address = {b.data_ptr() for b in link._buffers}
                assert tensor.data_ptr() not in address, "mapped twice"
                link._buffers[1][0] ^= 1
                assert not torch.equal(tensor, weights[name]), "the same memory"
                link._buffers[1][0] ^= 1
    thread.join(30)
    assert not thread.is_alive()
    assert link.channel.store.check(["message/0"]) is False, "messages are deleted when read"


def test_files_of_dead_processes_are_removed_and_others_stay(own_folder: Path) -> None:
    name = "print(__import__('burnish.shm').shm.prefix('sync'))"
    ended = subprocess.run([sys.executable, "-c", name], capture_output=True, text=True, check=True)
    dead = own_folder / f"{ended.stdout.strip()}abc"
    alive = own_folder / f"{shm.prefix('sync')}abc"
    _, kind, pid, whereabouts, _ = dead.name.split("-")
    elsewhere = own_folder / f"burnish-{kind}-{pid}-{whereabouts[::-1]}-abc"
    others = [alive, elsewhere, own_folder / "burnish-sync-notes", own_folder / "burnish-sync-1-x"]
    for file in (dead, *others):
        file.touch()
    ipc._new_file(64).unlink()
    assert not dead.exists() and all(file.exists() for file in others)


def test_machines_with_equal_namespace_numbers_have_different_file_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside of containers that number is a constant of the kernel."""
    here = shm.prefix("sync")
    read = Path.read_text

    def of_another_boot(path: Path, *rest: Any, **options: Any) -> str:
        return "another" if path.name == "boot_id" else read(path, *rest, **options)

    monkeypatch.setattr(Path, "read_text", of_another_boot)
    shm._whereabouts.cache_clear()
    there = shm.prefix("sync")
    monkeypatch.undo()
    shm._whereabouts.cache_clear()
    assert there != here == shm.prefix("sync")
    assert there.split("-")[:3] == here.split("-")[:3]


def test_full_shared_memory_is_an_error_and_kills_no_process(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    channel = Channel(HashStore(), "x", rank=0, num_receivers=0, timeout_s=1)
    with pytest.raises(SyncError, match=r"no space for a buffer of 64 bytes.*--shm-size"):
        ipc.SharedSender(channel, bucket_bytes=64)
    assert list(own_folder.iterdir()) == []


def test_ipc_error_on_another_machine_names_the_alternative() -> None:
    with pytest.raises(SyncError, match=r"not on this machine.*sync\.kind=collective"):
        ipc._open_handle({"file": "/dev/shm/burnish-sync-1-gone", "num_bytes": 64})


def test_duplicate_and_out_of_range_ranks_are_rejected() -> None:
    store = HashStore()
    first = Channel(store, "x", rank=0, num_receivers=0, timeout_s=1)
    first.rendezvous()
    with pytest.raises(SyncError, match="'x'"):
        Channel(store, "x", rank=0, num_receivers=0, timeout_s=1).rendezvous()
    with pytest.raises(SyncError, match=r"\(the sender\)"):
        Channel(store, "x", rank=3, num_receivers=2, timeout_s=1)


def test_unreachable_store_error_has_its_address() -> None:
    with pytest.raises(LinkError, match=r"could not reach the store at 127\.0\.0\.1:1 within 1 s"):
        connect_store("127.0.0.1", 1, timeout_s=1)


def test_receiver_error_names_the_missing_processes() -> None:
    for make in (ipc.SharedSource, CollectiveSource):
        channel = Channel(HashStore(), "x", rank=2, num_receivers=2, timeout_s=0.2)
        with pytest.raises(LinkError, match=r"^the sender, receiver 0 did not join within 0\.2 s"):
            make(channel)


def test_a_cuda_handle_is_json_and_opens_with_its_original_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: torch's two functions are replaced. The GPU is number 1 at the sender and
    number 0 here."""
    layout = (torch.Tensor, (64,), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    where = (b"\x00handle", 64, 0, False, b"ref\xff", 8, b"event", True)
    uuids, opened = {1: "gpu-b"}, []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (None, (*layout, 1, *where)))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *args: opened.append(args))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))

    def properties(device: Any) -> Any:
        return SimpleNamespace(uuid=uuids[device if isinstance(device, int) else 1])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    handle = json.loads(json.dumps(ipc.cuda_ipc_handle(torch.zeros(64, dtype=torch.uint8))))
    uuids = {0: "gpu-b"}
    ipc.open_cuda_ipc_handle(handle)
    assert opened == [(*layout, 0, *where)]
    uuids = {0: "gpu-c"}
    with pytest.raises(SyncError, match=r"on GPU gpu-b, but this process sees \['gpu-c'\]"):
        ipc.open_cuda_ipc_handle(handle)
