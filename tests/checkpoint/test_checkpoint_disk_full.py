"""A full disk fails the save with a clear error and never touches the older checkpoints."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal

import pytest
import torch

from burnish.checkpoint import CheckpointError, CheckpointStore, save_state, verify
from burnish.checkpoint import manifest as manifest_module


def writes(num_bytes: int):
    def write(folder):
        (folder / "weights.bin").write_bytes(bytes(num_bytes))

    return write


def save_tensors(folder):
    save_state(folder, "policy", {"w": torch.zeros(300_000)})  # 1.2 MB


def check_refused(store, write, said: str) -> None:
    """Saving step 2 fails with the message ``said``; step 1 is complete and the only one; then 3
    works."""
    with pytest.raises(CheckpointError, match=said) as caught:
        store.save(2, write, num_bytes=1000)
    assert "step_000002" in str(caught.value)
    assert "older checkpoints are unchanged" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert [path.name for path in store.folder.iterdir()] == ["step_000001"]
    assert verify(store.folder / "step_000001") == []
    assert store.latest() == store.folder / "step_000001"
    store.save(3, writes(1000))
    assert store.latest() == store.folder / "step_000003"
    shutil.rmtree(store.folder / "step_000003")


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, best_mode="max")
    store.save(1, writes(1000))
    return store


def test_no_space_while_writing_is_reported_and_older_checkpoints_survive(store):
    def write(folder):
        (folder / "half.bin").write_bytes(bytes(100))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "weights.bin"))

    check_refused(store, write, "No space left on device")


def test_no_space_while_flushing_is_reported_and_older_checkpoints_survive(store, monkeypatch):
    fsync = os.fsync

    def full_once(descriptor):
        monkeypatch.setattr(manifest_module.os, "fsync", fsync)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest_module.os, "fsync", full_once)
    check_refused(store, writes(1000), "No space left on device")


@pytest.mark.parametrize("write", [writes(200_000), save_tensors], ids=["bytes", "safetensors"])
def test_a_file_size_limit_is_reported_and_older_checkpoints_survive(store, run_in_child, write):
    """A real failing write that needs no rights: no file of this process may pass 100 kB."""

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        check_refused(store, write, "File too large")

    assert run_in_child(work) == 0


def test_the_space_is_checked_before_anything_is_written(store, monkeypatch):
    """5.00 MB wanted and 2.00 MB free: the error has both and the 3.00 MB to free."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**7, 8 * 10**6, 2 * 10**6)
    )
    with pytest.raises(CheckpointError) as caught:
        store.save(2, lambda folder: pytest.fail("it wrote"), num_bytes=5 * 10**6)
    for part in ("step_000002", "needs 5.00 MB", "2.00 MB are free", "Free 3.00 MB", "keep_last"):
        assert part in str(caught.value)
    assert store.latest() == store.folder / "step_000001"


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (-1, False)])
def test_without_an_estimate_the_newest_size_plus_a_tenth_is_required(
    store, monkeypatch, spare, fits
):
    """Step 1 holds 1000 bytes and its manifest of m bytes, so ceil(1.1 (1000 + m)) are needed."""
    size = 1000 + (store.folder / "step_000001" / "manifest.json").stat().st_size
    free = -(-size * 11 // 10) + spare
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**7, 0, free))
    if fits:
        store.save(2, writes(10))
    else:
        with pytest.raises(CheckpointError, match="no space"):
            store.save(2, writes(10))


def test_the_first_save_without_an_estimate_proceeds(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    assert CheckpointStore(tmp_path, keep_last=1, best_mode="max").save(1, writes(10)).is_dir()


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", keep_last=1, best_mode="max")
    with pytest.raises(CheckpointError, match=r"checkpoints.*run_dir"):
        store.save(1, writes(10))


MAY_NOT_MOUNT = 77


def mount_small_disk(folder) -> None:
    """A 1 MiB file system on ``folder``, seen by this process only and gone with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive_private = 0x20000, 0x4000 | 0x40000
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, recursive_private, None):
        os._exit(MAY_NOT_MOUNT)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m"):
        os._exit(MAY_NOT_MOUNT)


@pytest.mark.parametrize("write", [writes(2 * 10**6), save_tensors], ids=["bytes", "safetensors"])
def test_a_full_disk_is_reported_and_older_checkpoints_survive(tmp_path, run_in_child, write):
    def work():
        mount_small_disk(tmp_path)
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, best_mode="max")
        store.save(1, writes(300_000))
        check_refused(store, write, "No space left on device")
        with pytest.raises(CheckpointError, match=r"needs 2\.00 MB"):
            store.save(2, writes(1), num_bytes=2 * 10**6)
        # 300 kB stand; 500 kB fit beside them, and then a second one of 550 kB (1.1 x 500) does not
        store.save(4, writes(500_000))
        with pytest.raises(CheckpointError, match="no space"):
            store.save(5, writes(500_000))
        assert [path.name for path in store.all()] == ["step_000001", "step_000004"]

    code = run_in_child(work)
    if code == MAY_NOT_MOUNT:
        pytest.skip("mounting a small disk needs root; the tests above fail writes without it")
    assert code == 0
