"""Any tensors through buckets of any size are the same afterwards, and anything that is not as it
should be is refused before an engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.sync.base import Bucket, End, LinkError, SyncError, decode, encode
from burnish.sync.buckets import ALIGN, MAX_ENTRIES, pack
from burnish.sync.engine import WeightSender

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
]
MakeLink = Callable[[int], Any]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bytes as a tensor."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)


@settings(deadline=None)
@given(kinds=TENSORS, size=st.integers(1, 64), hold=st.booleans())
def test_tensors_are_unchanged_after_a_transfer(
    kinds: list[tuple[tuple[int, ...], torch.dtype]],
    size: int,
    hold: bool,
    memory_link_type: MakeLink,
    weights_type: Any,
) -> None:
    """Larger than a bucket, without elements, single numbers, every format mixed."""
    weights = {f"w{i}": make(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    link = memory_link_type(16 * size)
    metrics = WeightSender(weights_type(weights), link).push()
    expected = {name: tuple(t.shape) for name, t in weights.items()}
    kept, seen = {}, {}
    with link.source(expected=expected, hold=hold).open(3) as transfer:
        for name, tensor in transfer:
            kept[name], seen[name] = tensor, tensor.clone()
    assert list(seen) == list(weights), "in order"
    for name, tensor in weights.items():
        for got in (seen[name], kept[name]) if hold else (seen[name],):
            assert got.shape == tensor.shape and got.dtype == tensor.dtype
            assert torch.equal(bits(got), bits(tensor))
    assert metrics["sync/bytes"] == sum(t.nbytes for t in weights.values()) == transfer.num_bytes
    assert metrics["sync/buckets"] == transfer.num_buckets
    assert link.answers == [(0, None)] and not link.sent


@settings(deadline=None)
@given(kinds=TENSORS, size=st.integers(1, 64))
def test_buckets_respect_their_size_and_split_only_larger_tensors(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], size: int
) -> None:
    weights = [(f"w{i}", make(shape, dtype, i)) for i, (shape, dtype) in enumerate(kinds)]
    times = dict.fromkeys((name for name, _ in weights), 0)
    for entries, payload in pack(weights, lambda: torch.zeros(16 * size, dtype=torch.uint8)):
        assert entries and payload.numel() <= 16 * size
        ends = [0]
        for entry in entries:
            times[entry.name] += 1
            assert entry.offset % ALIGN == 0 and entry.offset >= ends[-1]
            ends.append(entry.offset + entry.num_bytes)
        assert ends[-1] == payload.numel()
    for name, tensor in weights:
        assert times[name] == max(1, -(-tensor.nbytes // (16 * size)))


def test_a_header_stays_small() -> None:
    weights = [(f"w{i}", torch.ones(1)) for i in range(MAX_ENTRIES + 1)]
    buckets = [len(p) for p, _ in pack(weights, lambda: torch.zeros(1 << 20, dtype=torch.uint8))]
    assert buckets == [MAX_ENTRIES, 1]


def test_only_floating_point_weights_are_converted() -> None:
    weights = [("w", torch.tensor([1.0, 1 + 2**-10])), ("steps", torch.tensor([2**40]))]
    strided = ("t", torch.arange(6.0).view(2, 3).T)
    buffer = torch.zeros(64, dtype=torch.uint8)
    ((entries, payload),) = pack([*weights, strided], lambda: buffer, dtype=torch.bfloat16)
    assert [(p.dtype, p.num_bytes, p.offset) for p in entries] == [
        ("bfloat16", 4, 0),
        ("int64", 8, 16),
        ("bfloat16", 12, 32),
    ]
    assert payload[:4].view(torch.bfloat16).tolist() == [1.0, 1.0], "2^-10 is below bf16's 2^-8"
    assert payload[32:44].view(torch.bfloat16).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_bucket_waits_for_its_buffer_only_once_its_first_tensor_exists() -> None:
    """So that tensors are gathered while earlier buckets are on their way."""
    log: list[str] = []

    def weights():
        for i in range(3):
            log.append(f"gather {i}")
            yield f"w{i}", torch.ones(4)

    def buffer() -> Tensor:
        log.append("buffer")
        return torch.zeros(16, dtype=torch.uint8)

    for _ in pack(weights(), buffer):
        log.append("send")
    assert log == [
        *("gather 0", "buffer", "gather 1", "send"),
        *("buffer", "gather 2", "send", "buffer", "send"),
    ]


@settings(deadline=None)
@given(data=st.data())
def test_a_changed_byte_of_a_header_is_detected(data: st.DataObject) -> None:
    for message in (Bucket(1, 2, 3, 4, "xxh3:00", ()), End(1, 2, 3, 4, 5)):
        sent = bytearray(encode(message))
        assert decode(bytes(sent)) == message
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
        with pytest.raises(SyncError, match="header of a bucket was corrupted"):
            decode(bytes(sent))


# ---- what is refused ---------------------------------------------------------------------------

WEIGHTS = {f"w{i}": torch.full((8,), float(i)) for i in range(6)}  # 32 bytes each
EXPECTED = {name: (8,) for name in WEIGHTS}
Change = Callable[[list[Any]], None]


def pushed(link: Any, weights_type: Any, change: Change) -> None:
    """Three buckets of two tensors and the end, as messages, changed and sent."""
    WeightSender(weights_type(WEIGHTS), link).push()
    messages = [(decode(header), payload) for header, payload in link.sent]
    change(messages)
    link.sent.clear()
    link.sent.extend((encode(message), payload) for message, payload in messages)


def edit(index: int, **changes: Any) -> Change:
    """Other fields in the header of one message."""

    def change(messages: list[Any]) -> None:
        message, payload = messages[index]
        messages[index] = (replace(message, **changes), payload)

    return change


def edit_piece(index: int, number: int, **changes: Any) -> Change:
    def change(messages: list[Any]) -> None:
        entries = list(messages[index][0].entries)
        entries[number] = replace(entries[number], **changes)
        edit(index, entries=tuple(entries))(messages)

    return change


def leave_out(index: int, new_end: End | None = None) -> Change:
    """A bucket that was never sent, and an end that knows."""

    def change(messages: list[Any]) -> None:
        del messages[index]
        if new_end is not None:
            messages[-1] = (new_end, None)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "drop": (leave_out(1), "bucket 2 of version 3 was received instead of bucket 1: one was lost"),
    "drop the last": (leave_out(2), "end of version 3.* 3 buckets with 6 .* 2 buckets with 4"),
    "never sent": (
        leave_out(2, End(0, 3, 2, 4, 128)),
        r"2 of 6 weights were not received, e\.g\. w4: they would be stale",
    ),
    "twice": (
        lambda m: m.insert(1, m[1]),
        "bucket 1 of version 3 was received .* it was received twice",
    ),
    "swap": (lambda m: m.insert(1, m.pop(2)), "bucket 2 .* instead of bucket 1"),
    "other version": (
        edit(1, version=4),
        "bucket 1 of version 4 .* two transfers are mixed",
    ),
    "other push": (edit(1, push=1), r"received bucket 1 of version 3 \(push 1\): two transfers"),
    "end of another version": (edit(3, version=4), "the end of version 4"),
    "bytes": (edit(1, num_bytes=80), "bucket 1 .* should have 80 bytes, but 64 were received"),
    "checksum": (edit(1, checksum="xxh3:" + 32 * "0"), "bucket 1 .* is corrupted"),
    "no checksum": (edit(1, checksum=""), "bucket 1 of version 3 has no checksum"),
    "payloads change places": (
        lambda m: m.__setitem__(slice(1, 3), [(m[1][0], m[2][1]), (m[2][0], m[1][1])]),
        "bucket 1 of version 3 is corrupted",
    ),
    "name": (edit_piece(1, 0, name="x"), "bucket 1 .* weight x is not one of the 6 weights"),
    "again": (edit_piece(1, 0, name="w0"), "bucket 1 .* weight w0 was received twice"),
    "shape": (edit_piece(1, 0, shape=(4, 2)), r"weight w2 has shape \[4, 2\], .* has \[8\]"),
    "longer": (edit_piece(1, 1, shape=(99,)), r"weight w3 has shape \[99\], .* has \[8\]"),
    "format": (edit_piece(1, 0, dtype="float12"), "weight w2 has the unknown dtype 'float12'"),
    "wider": (
        edit_piece(1, 1, dtype="float64"),
        "ended in the middle|expected byte .* received byte 0",
    ),
    "narrower": (edit_piece(1, 1, dtype="int8"), r"weight w3 \[8\] int8 \(8 bytes\) cannot have"),
    "beyond": (edit_piece(1, 1, offset=48), r"cannot have its bytes 0 to 32 at offset 48 of 64"),
    "before": (edit_piece(1, 1, offset=-16), "cannot have its bytes"),
    "crooked": (edit_piece(1, 1, offset=8, num_bytes=24), "cannot have its bytes"),
    "part of nothing": (edit_piece(1, 1, begin=16, num_bytes=16), "expected byte 0 of weight w3"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_an_incorrect_weight_transfer_is_rejected(
    fault: str, memory_link_type: MakeLink, weights_type: Any
) -> None:
    change, told = REFUSED[fault]
    link = memory_link_type(64)
    pushed(link, weights_type, change)
    with pytest.raises(SyncError, match=told) as refused:
        with link.source(expected=EXPECTED).open(3) as transfer:
            for name, tensor in transfer:
                assert torch.equal(tensor, WEIGHTS[name]), "what was given out before was right"
    assert link.answers == [(0, str(refused.value))], "the sender learns the cause"
    assert not link.sent, "what was on its way is taken"


def received(source: Any, version: int | None = None) -> list[str]:
    """The names of one transfer."""
    with source.open(version) as transfer:
        return [name for name, _ in transfer]


def test_order_and_names_are_checked_without_checksums(
    memory_link_type: MakeLink, weights_type: Any
) -> None:
    link = memory_link_type(64)
    WeightSender(weights_type(WEIGHTS), link, check=False).push()
    assert decode(link.sent[0][0]).checksum == ""
    assert len(received(link.source(check=False), 3)) == 6
    pushed(link, weights_type, REFUSED["swap"][0])
    with pytest.raises(SyncError, match="instead of"):
        received(link.source(check=False), 3)


def test_expected_names_are_learned_from_the_first_successful_push(
    memory_link_type: MakeLink, weights_type: Any
) -> None:
    link = memory_link_type(64)
    source, policy = link.source(), weights_type(dict(WEIGHTS))
    sender = WeightSender(policy, link)
    sender.push()
    assert len(received(source)) == 6
    del policy.own["w5"]
    sender.push()
    with pytest.raises(SyncError, match=r"1 of 6 weights were not received, e\.g\. w5"):
        received(source)


def test_an_unexpected_version_is_rejected_before_any_tensor_is_yielded(
    memory_link_type: MakeLink, weights_type: Any
) -> None:
    link = memory_link_type(64)
    sender = WeightSender(weights_type(WEIGHTS), link)
    sender.push()
    source = link.source()
    with pytest.raises(
        SyncError, match="expected version 4 of the weights, but received version 3"
    ):
        with source.open(4):
            raise AssertionError("the block began")
    assert "version 4" in (link.answers[0][1] or "") and not link.sent
    sender.push()
    assert len(received(source, 3)) == 6


def test_leftover_messages_of_a_failed_push_are_skipped(
    memory_link_type: MakeLink, weights_type: Any
) -> None:
    """The receiver gave up on push 0 after a silence; its rest comes before push 1."""
    link = memory_link_type(64)
    sender = WeightSender(weights_type(WEIGHTS), link)
    sender.push()
    late = [link.sent.pop() for _ in range(2)][::-1]
    source = link.source()
    with pytest.raises(LinkError, match="after 2 buckets of version 3: nothing more came"):
        received(source, 3)
    link.sent.extend(late)
    sender.push()
    assert received(source, 3) == list(WEIGHTS)
    assert [problem is None for _, problem in link.answers] == [False, True]
