"""Compact sequences behave like the tuples of their elements, in a few bytes per token."""

from __future__ import annotations

import copy
import pickle
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.compact import BoolRuns, Compact, FloatArray, IntArray, IntLists, IntRuns
from burnish.episodes.loop import EngineCall
from burnish.episodes.rows import episode_rows
from burnish.rollout.base import Completion, VersionSpan
from burnish.types import Sample, TokenRow

integers = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
floats = st.one_of(st.floats(width=32, allow_nan=False), st.floats(allow_nan=False))
ELEMENTS: dict[type[Compact[Any]], st.SearchStrategy[Any]] = {
    IntArray: integers,
    FloatArray: floats,
    IntRuns: integers,
    BoolRuns: st.booleans(),
    IntLists: st.lists(integers, max_size=3).map(tuple),
}
KINDS = list(ELEMENTS)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_compact_sequence_does_what_the_tuple_of_its_elements_does(
    kind: type[Compact[Any]], data: st.DataObject
) -> None:
    parts = st.lists(ELEMENTS[kind], max_size=8).map(tuple)
    mine, other = data.draw(parts), data.draw(parts)
    made: Any = kind(mine)
    assert kind(made) is made and (made == mine, mine == made) == (True, True)
    assert (made == kind(other), made == other) == (mine == other, mine == other)
    assert (made < kind(other), made >= other) == (mine < other, mine >= other)
    assert (mine <= kind(other), mine > kind(other)) == (mine <= other, mine > other)
    assert made != list(mine) and hash(made) == hash(mine) and repr(made) == repr(mine)
    assert (len(made), bool(made), [*made]) == (len(mine), bool(mine), [*mine])
    assert [type(one) for one in made] == [
        type(one) if kind != IntLists else IntArray for one in mine
    ]
    assert [made[i] for i in range(-len(mine), len(mine))] == [*mine, *mine]
    for sum_of in (made + kind(other), made + other, kind(mine) + other):
        assert type(sum_of) is kind and sum_of == mine + other
    assert type(mine + kind(other)) is kind and mine + kind(other) == mine + other
    cut = data.draw(st.slices(len(mine)))
    assert type(made[cut]) is kind and made[cut] == mine[cut]
    for one in (*mine, *other):
        assert (one in made, made.count(one)) == (one in mine, mine.count(one))
    for restored in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), kind(iter(mine))):
        assert type(restored) is kind and restored == made
    with pytest.raises(IndexError):
        made[len(mine)]


@given(st.lists(st.one_of(st.floats(), st.floats(width=32)), max_size=8))
def test_every_bit_of_a_log_prob_survives(numbers: list[float]) -> None:
    """Infinity, -0.0 and subnormal numbers included. Of NaN only the kind survives."""

    def bits(values: Sequence[float]) -> list[bytes]:
        return [b"nan" if x != x else struct.pack("d", x) for x in values]

    for made in (FloatArray(numbers), FloatArray(np.array(numbers)), FloatArray() + tuple(numbers)):
        assert bits(tuple(made)) == bits(numbers)
        assert repr(made) == repr(tuple(numbers))
        assert made == FloatArray(numbers) and hash(made) == hash(FloatArray(numbers))


def test_only_numbers_that_need_it_take_8_bytes() -> None:
    """0.1 is no fp32 number, but its rounding to fp32 is one; 2^31 is outside int32."""
    rounded = float(np.float32(0.1))
    assert np.asarray(FloatArray((rounded, -1.0))).dtype == np.float32
    assert np.asarray(FloatArray((rounded, 0.1))).dtype == np.float64
    assert np.asarray(FloatArray((rounded,)) + FloatArray((0.1,))).tolist() == [rounded, 0.1]
    assert np.asarray(IntArray((2**31 - 1,))).dtype == np.int32
    assert np.asarray(IntArray((2**31 - 1,)) + IntArray((2**31,))).tolist() == [2**31 - 1, 2**31]


def test_two_columns_are_equal_if_nan_is_in_the_same_places() -> None:
    """A tuple with NaN is equal to nothing but itself, as everywhere in Python."""
    nan = float("nan")
    assert FloatArray((1.0, nan)) == FloatArray((1.0, nan)) != FloatArray((nan, 1.0))
    assert FloatArray((nan,)) != (nan,)


@pytest.mark.parametrize("kind", [IntArray, FloatArray])
def test_numpy_reads_an_array_without_a_copy_and_cannot_change_it(kind: Any) -> None:
    made = kind((1, 2, 3))
    first, second = np.asarray(made), np.asarray(made)
    assert np.shares_memory(first, second) and not np.shares_memory(np.array(made), first)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 5


@pytest.mark.parametrize(("kind", "values"), [(IntRuns, [3, 3, 4, 3]), (BoolRuns, [1, 1, 0, 1])])
def test_numpy_reads_and_makes_runs(kind: Any, values: list[int]) -> None:
    made = kind(np.array(values))
    assert np.asarray(made).tolist() == values and made == tuple(values)
    assert list(made.runs()) == [(values[0], 2), (values[2], 1), (values[3], 1)]
    assert kind(np.array(values[:0])) == () and np.asarray(kind()).tolist() == []


# ---- samples -------------------------------------------------------------------------------------

PROMPT = tuple(range(100_000, 100_100))


def completion(length: int, *, kept: int = 0) -> Completion:
    """A response of two versions, as a worker makes it."""
    logprobs = -np.random.default_rng(0).random(length, dtype=np.float32)
    return Completion(
        request_id="p",
        index=0,
        token_ids=tuple(range(100_000, 100_000 + length)),
        logprobs=tuple(logprobs.tolist()),
        finish_reason="stop",
        text="",
        spans=(VersionSpan(7, 0, length // 2), VersionSpan(8, length // 2, length)),
        kept_ids=(array("i", range(kept)),) * length if kept else (),
    )


def sample(made: Completion) -> Sample:
    return Sample(
        sample_id="p/0",
        prompt_id="p",
        group_id=0,
        prompt_ids=PROMPT,
        response_ids=made.token_ids,
        sampler_logprobs=made.logprobs,
        action_mask=(True,) * len(made.token_ids),
        versions=made.versions,
        kept_ids=made.kept_ids,
        text="",
        finish_reason="stop",
    )


def held_bytes(row: Sample | TokenRow) -> int:
    """Bytes of all per-token data of a row."""
    names = ("response_ids", "sampler_logprobs", "action_mask", "versions", "turns", "kept_ids")
    return sum(sys.getsizeof(vars(row)[name]) for name in names)


def test_a_response_takes_8_bytes_per_token() -> None:
    """4 (id) + 4 (log-prob), and less than 2,000 bytes per sample. 8 more for fp64 log-probs would
    be 4 more per token, and Python numbers about 60."""
    long = sample(completion(10_000))
    assert held_bytes(long) < 8 * 10_000 + 2_000
    assert held_bytes(replace(long, sampler_logprobs=(-0.1,) * 10_000)) < 12 * 10_000 + 2_000
    assert long.rows[0].response_ids is long.response_ids, "rows share the data"


def test_an_episode_takes_8_bytes_per_token_and_60_per_turn() -> None:
    """100 turns of 50 sampled and 50 observed tokens. Each has two runs of 5 (mask) and two of 8
    bytes (turns), and up to three of 8 (versions)."""
    prompt, calls = IntArray(PROMPT), []
    for _ in range(100):
        calls.append(EngineCall(prompt, completion(50)))
        prompt = prompt + calls[-1].completion.token_ids + PROMPT[:50]
    (row,) = episode_rows(calls)
    assert len(row.response_ids) == 100 * 100 - 50
    assert held_bytes(row) < 8 * 10_000 + 100 * 60 + 2_000


def test_kept_ids_take_4_bytes_per_id_and_token() -> None:
    made = sample(completion(1_000, kept=20))
    assert sys.getsizeof(made.kept_ids) < (4 + 20 * 4) * 1_000 + 500


def test_a_worker_sends_8_bytes_per_token() -> None:
    """4 (id) + 4 (log-prob), and less than 1,000 bytes per completion. As tuples, each number
    takes 5 (an id) and 9 (a log-prob) bytes."""
    made = completion(10_000)
    data = pickle.dumps(made)
    assert pickle.loads(data) == made and len(data) < 8 * 10_000 + 1_000
