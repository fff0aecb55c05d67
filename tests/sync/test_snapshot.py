"""A snapshot of a transfer that is read again: complete, and with missing parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.sync.base import LinkError, SyncError, encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import SnapshotSource, WeightSnapshot

WEIGHTS = {f"w{i}": torch.full((8,), float(i)) for i in range(6)}


@pytest.fixture
def kept() -> WeightSnapshot[Any]:
    """Six weights of 32 bytes in three buckets of 64, of version 3."""
    buffer = torch.empty(64, dtype=torch.uint8)
    found = messages(WEIGHTS.items(), lambda: buffer, push=0, version=3)
    pairs = [(encode(message), payload.clone().numpy()) for message, payload in found]
    headers, payloads = zip(*pairs, strict=True)
    return WeightSnapshot(headers, payloads[:-1])


def given(headers: Any, payloads: Any) -> dict[str, Tensor]:
    with SnapshotSource(headers, payloads, hold=True).open(3) as transfer:
        return dict(transfer)


def test_a_snapshot_can_be_read_repeatedly_from_read_only_memory(
    kept: WeightSnapshot[Any],
) -> None:
    for array in kept.payloads:
        array.flags.writeable = False
    for _ in range(2):
        found = given(kept.headers, kept.payloads)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[n], t) for n, t in WEIGHTS.items())
    assert (kept.end.num_buckets, kept.end.num_tensors, kept.end.num_bytes) == (3, 6, 192)


def test_missing_messages_and_bytes_are_reported(kept: WeightSnapshot[Any]) -> None:
    with pytest.raises(LinkError, match="messages"):
        given(kept.headers[:-1], kept.payloads)
    with pytest.raises(LinkError, match="missing"):
        given(kept.headers, kept.payloads[:-1])
    with pytest.raises(SyncError, match="version"):
        given((kept.headers[0], *kept.headers[2:]), (kept.payloads[0], kept.payloads[2]))
    with pytest.raises(SyncError, match="is incomplete"):
        _ = WeightSnapshot(kept.headers[:-1], kept.payloads).end


def test_a_flipped_bit_in_a_snapshot_is_detected(kept: WeightSnapshot[Any]) -> None:
    kept.payloads[1][5] ^= 1
    with pytest.raises(SyncError, match="bucket 1 of version 3 is corrupted"):
        given(kept.headers, kept.payloads)
