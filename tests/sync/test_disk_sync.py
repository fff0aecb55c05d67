"""Weight transfers on disk are atomic, even if the writer is killed or files are corrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.sync.base import End, LinkError, SyncError, decode
from burnish.sync.disk import DiskSender, DiskSource

WEIGHTS = {
    **{f"w{i}": torch.full((8,), float(i)) for i in range(6)},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "steps": torch.tensor([3], dtype=torch.int64),
}
SHAPES = {name: tuple(t.shape) for name, t in WEIGHTS.items()}


def receiver(folder: Path, **options: Any) -> DiskSource:
    return DiskSource(folder, **{"timeout_s": 0.2, "poll_s": 0.02, **options})


def received(source: DiskSource, version: int | None = None) -> dict[str, torch.Tensor]:
    """The weights of one transfer."""
    with source.open(version) as transfer:
        return dict(transfer)


def version_of(source: DiskSource, version: int | None = None) -> int:
    """The version of one transfer, which is accepted unread."""
    with source.open(version) as transfer:
        return transfer.version


def push(folder: Path, weights_type: Any, version: int, **options: Any) -> dict[str, float]:
    source = weights_type(WEIGHTS, version)
    return DiskSender(source, folder, **{"bucket_bytes": 64, **options}).push()


def test_pushed_weights_are_received_in_files_of_the_bucket_size(
    tmp_path: Path, weights_type: Any
) -> None:
    """6 x 32 + 4 + 0 + 8 = 204 bytes; two of 32 fill a file of 64, and the rest a fourth."""
    metrics = push(tmp_path, weights_type, 5)
    assert metrics["sync/bytes"] == 204 and metrics["sync/buckets"] == 4
    with receiver(tmp_path, expected=SHAPES).open(5) as transfer:
        got = dict(transfer)
    assert transfer.version == 5 and transfer.num_bytes == 204
    assert got.keys() == WEIGHTS.keys()
    assert all(got[n].shape == t.shape and torch.equal(got[n], t) for n, t in WEIGHTS.items())


def test_weights_are_converted_before_they_are_written(tmp_path: Path, weights_type: Any) -> None:
    metrics = push(tmp_path, weights_type, 5, dtype="bf16")
    assert metrics["sync/bytes"] == 6 * 16 + 2 + 8
    got = received(receiver(tmp_path), 5)
    assert got["w3"].dtype is torch.bfloat16 and got["steps"].dtype is torch.int64


def test_a_receiver_waits_for_a_version_or_for_a_new_one(tmp_path: Path, weights_type: Any) -> None:
    ours = receiver(tmp_path)
    with pytest.raises(LinkError, match="nothing"):
        version_of(ours, 5)
    push(tmp_path, weights_type, 4)
    with pytest.raises(LinkError, match=r"version 5 .* found: step_000000 \(version 4\)"):
        version_of(ours, 5)
    with pytest.raises(ValueError, match="not loaded"), ours.open(None):
        raise ValueError("not loaded")
    assert version_of(ours) == 4
    with pytest.raises(LinkError, match="weights"):
        version_of(ours)
    push(tmp_path, weights_type, 2)  # a trainer that went back to an older checkpoint
    assert version_of(ours) == 2
    assert version_of(ours, 4) == 4, "requested by version"


def test_old_weight_transfers_are_deleted(tmp_path: Path, weights_type: Any) -> None:
    for version in range(4):
        push(tmp_path, weights_type, version, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_a_rank_without_a_folder_gathers_and_writes_nothing(weights_type: Any) -> None:
    taken = []

    class Policy(weights_type):
        def weights(self):
            for item in super().weights():
                taken.append(item[0])
                yield item

    assert DiskSender(Policy(WEIGHTS, 1), None, bucket_bytes=64).push() == {}
    assert taken == list(WEIGHTS)


def test_a_duplicate_name_is_not_written(tmp_path: Path, weights_type: Any) -> None:
    class Policy(weights_type):
        def weights(self):
            yield from super().weights()
            yield "w0", torch.ones(8)

    with pytest.raises(SyncError, match="weight w0 was received twice"):
        DiskSender(Policy(WEIGHTS, 1), tmp_path, bucket_bytes=64).push()
    assert list(tmp_path.iterdir()) == []


def flip(path: Path, place: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "a byte of the weights": (lambda f: flip(f / "weights-00001.bin"), "is corrupted"),
    "the end of a file": (lambda f: cut(f / "weights-00002.bin"), "has 1?[0-9]+ bytes"),
    "a file": (lambda f: (f / "weights-00001.bin").unlink(), "weights-00001.* is missing"),
    "the manifest": (lambda f: flip(f / "manifest.json"), "manifest.json"),
    "half the manifest": (lambda f: cut(f / "manifest.json"), "manifest.json cannot be read"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "the version": (
        lambda f: (f / "sync.json").write_text((f / "sync.json").read_text().replace("5", "6")),
        "sync.json is corrupted",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_corrupted_weight_transfer_is_rejected_before_any_tensor_is_yielded(
    what: str, tmp_path: Path, weights_type: Any
) -> None:
    push(tmp_path, weights_type, 5)
    damage, message = DAMAGE[what]
    damage(tmp_path / "step_000000")
    ours = receiver(tmp_path)
    with pytest.raises(
        SyncError, match=rf"is corrupted: .*{message}.*None of its weights were loaded"
    ):
        version_of(ours)
    push(tmp_path, weights_type, 5)
    assert version_of(ours, 5) == 5, "the newest of that version"


def test_without_checksums_sizes_and_names_are_still_checked(
    tmp_path: Path, weights_type: Any
) -> None:
    push(tmp_path, weights_type, 5)
    flip(tmp_path / "step_000000" / "weights-00001.bin")
    assert len(received(receiver(tmp_path, check=False), 5)) == len(WEIGHTS)
    cut(tmp_path / "step_000000" / "weights-00001.bin")
    with pytest.raises(SyncError, match="is corrupted"):
        version_of(receiver(tmp_path, check=False), 5)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (SHAPES | {"more": (2,)}, "10 weights"),
        ({n: s for n, s in SHAPES.items() if n != "w2"}, "weight w2 is"),
        (SHAPES | {"w2": (4,)}, r"shape \[8\]"),
    ],
)
def test_weights_of_another_model_are_rejected_before_any_tensor_is_yielded(
    expected: dict[str, tuple[int, ...]], message: str, tmp_path: Path, weights_type: Any
) -> None:
    push(tmp_path, weights_type, 5)
    with pytest.raises(SyncError, match=message):
        version_of(receiver(tmp_path, expected=expected), 5)


WRITER = """
import sys, time, torch
from pathlib import Path
from burnish.sync.disk import DiskSender

class Policy:
    version = 6
    def weights(self):
        for i in range(6):
            if i == 4:
                Path(sys.argv[2]).touch()
                time.sleep(600)
            yield f"w{i}", torch.ones(8)

DiskSender(Policy(), Path(sys.argv[1]), bucket_bytes=32).push()
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_no_transfer_that_looks_complete(
    tmp_path: Path, weights_type: Any
) -> None:
    folder, there = tmp_path / "sync", tmp_path / "there"
    push(folder, weights_type, 5)
    command = [sys.executable, "-c", WRITER, str(folder), str(there)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env)
    try:
        limit = time.monotonic() + 120
        while not there.exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    left = [p for p in folder.iterdir() if p.name.startswith(".tmp")]
    assert left and any(left[0].glob("*.bin")), "killed with files half there"
    ours = receiver(folder)
    with pytest.raises(LinkError, match=r"version 6 .* found: step_000000 \(version 5\)"):
        version_of(ours, 6)
    assert received(ours, 5).keys() == WEIGHTS.keys(), "the one before is as it was"
    push(folder, weights_type, 6)
    assert version_of(ours, 6) == 6 and not left[0].exists(), "the next push tidies up"


def test_the_contents_file_has_the_version_and_all_headers(
    tmp_path: Path, weights_type: Any
) -> None:
    push(tmp_path, weights_type, 5)
    contents = json.loads((tmp_path / "step_000000" / "sync.json").read_text())
    assert contents["version"] == 5
    messages = [decode(header.encode()) for header in contents["headers"]]
    assert {e.name: e.shape for m in messages[:-1] for e in m.entries} == SHAPES
    assert isinstance(messages[-1], End) and messages[-1].num_bytes == 204
