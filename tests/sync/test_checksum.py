"""Checksums: known values, and detection of every kind of corruption."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.sync.base import SyncError
from burnish.sync.checksum import CHUNK_WORDS, checksum, verify, word_sums


def as_bytes(*words: int) -> Tensor:
    return torch.tensor(words, dtype=torch.int32).view(torch.uint8)


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def digest_of(payload: Tensor, kind: str) -> str:
    if kind == "xxh3":
        return checksum(payload)
    return "sums:{:016x}{:016x}".format(*word_sums(payload))


KINDS = ("xxh3", "sums")


def test_word_sums_are_the_plain_and_the_position_weighted_sum() -> None:
    """5 + 7 - 2 = 10; 1 x 5 + 2 x 7 + 3 x (-2) = 13. The bytes 1, 1 behind are the word 257 in
    place 4: 10 + 257 = 267, 13 + 4 x 257 = 1041."""
    payload = as_bytes(5, 7, -2)
    assert word_sums(payload) == (10, 13)
    assert word_sums(torch.cat([payload, torch.ones(2, dtype=torch.uint8)])) == (267, 1041)
    assert word_sums(payload[:0]) == (0, 0)
    assert word_sums(as_bytes(-1)) == (2**64 - 1, 2**64 - 1), "modulo 2^64"


def test_word_sums_do_not_depend_on_the_chunk_size() -> None:
    """Over two chunk borders, compared with one sum of Python integers."""
    payload = random_bytes(4 * (2 * CHUNK_WORDS + 5) + 3, seed=1)
    data = bytes(payload.tolist()) + b"\0"
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    assert word_sums(payload) == (
        sum(words) % 2**64,
        sum(i * w for i, w in enumerate(words, 1)) % 2**64,
    )


def test_xxh3_matches_the_published_values() -> None:
    """XXH3_128bits of nothing, from xxhash's own test vectors."""
    assert checksum(torch.empty(0, dtype=torch.uint8)) == "xxh3:99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(count=st.integers(1, 400), seed=st.integers(0, 5), data=st.data())
def test_any_flipped_bit_is_detected(kind: str, count: int, seed: int, data: st.DataObject) -> None:
    payload = random_bytes(count, seed)
    before = digest_of(payload, kind)
    place = data.draw(st.integers(0, 8 * count - 1))
    payload[place // 8] ^= 1 << place % 8
    assert digest_of(payload, kind) != before


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=60), data=st.data())
def test_any_two_swapped_words_are_detected(
    kind: str, words: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(words) - 2))
    second = data.draw(st.integers(first + 1, len(words) - 1))
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    same = words[first] == words[second]
    equal = digest_of(as_bytes(*words), kind) == digest_of(as_bytes(*swapped), kind)
    assert equal == same


@settings(deadline=None)
@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=40),
    changes=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)),
    data=st.data(),
)
def test_word_sums_detect_every_change_of_two_words(
    words: list[int], changes: tuple[int, int], data: st.DataObject
) -> None:
    """Also the changes that a plain sum is blind to: what one word gains the other loses."""
    first = data.draw(st.integers(0, len(words) - 2))
    second = data.draw(st.integers(first + 1, len(words) - 1))
    if data.draw(st.booleans()):  # keep the sum, within the range of a word
        gain = min(changes[0] - words[first], words[second] + 2**31)
        gain = max(gain, words[second] - 2**31 + 1)
        changes = (words[first] + gain, words[second] - gain)
        if not -(2**31) <= changes[0] < 2**31:
            return
    other = list(words)
    other[first], other[second] = changes
    assert (word_sums(as_bytes(*other)) == word_sums(as_bytes(*words))) == (other == words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_top_bit_is_detected(kind: str) -> None:
    """Two bf16 weights, 1 and -1, a power of two apart, change places: a sum over 64-bit words
    with the position as weight would not see it (2^16 x 2^63 is 0 modulo 2^64)."""
    values = torch.ones(2**19, dtype=torch.bfloat16)
    values[3] = -1
    other = values.clone()
    other[3], other[3 + 2**18] = 1, -1
    assert digest_of(values.view(torch.uint8), kind) != digest_of(other.view(torch.uint8), kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)), seed=st.integers(0, 20))
def test_swapped_and_missing_parts_are_detected(
    kind: str, sizes: tuple[int, int], seed: int
) -> None:
    parts = [random_bytes(4 * size, seed + i) for i, size in enumerate(sizes)]
    whole = digest_of(torch.cat(parts), kind)
    if not torch.equal(torch.cat(parts), torch.cat(parts[::-1])):
        assert digest_of(torch.cat(parts[::-1]), kind) != whole
    for part in parts:
        if bool(part.any()):
            assert digest_of(part, kind) != whole


def test_verify_error_has_the_expected_and_the_received_checksum() -> None:
    payload = as_bytes(1, 2)
    verify(payload, checksum(payload), "bucket 0")
    verify(payload, digest_of(payload, "sums"), "bucket 0")
    with pytest.raises(SyncError, match=r"sums:0+30+5"):
        verify(as_bytes(1, 3), digest_of(payload, "sums"), "bucket 0")
    for unknown in ("", "md5:00"):
        with pytest.raises(SyncError, match=r"sync\.verify"):
            verify(payload, unknown, "bucket 0")
