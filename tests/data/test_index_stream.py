"""The order of rows: each once per epoch, mixed by weight, and the same after any interruption."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.sources import DataError
from burnish.data.stream import IndexStream, RowRef

SIZES = {"a": 7, "b": 3}


def make(sizes: dict[str, int] = SIZES, *, seed: int = 0, shuffle: bool = True) -> IndexStream:
    weights = [2.0] + [1.0] * (len(sizes) - 1)
    return IndexStream(sizes, weights=weights, seed=seed, shuffle=shuffle)


@given(stop=st.integers(0, 60), seed=st.integers(-(2**31), 2**31), shuffle=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_stream_resumed_at_any_point_equals_an_uninterrupted_one(
    stop: int, seed: int, shuffle: bool
) -> None:
    whole = make(seed=seed, shuffle=shuffle)
    expected = [whole.next() for _ in range(stop + 25)]
    first = make(seed=seed, shuffle=shuffle)
    before = [first.next() for _ in range(stop)]
    second = make(seed=seed, shuffle=shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.next() for _ in range(25)] == expected
    assert second.epoch == whole.epoch


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_each_row_occurs_exactly_once_per_epoch_of_its_source(
    sizes: list[int], seed: int, shuffle: bool
) -> None:
    stream = make({f"s{i}": n for i, n in enumerate(sizes)}, seed=seed, shuffle=shuffle)
    drawn = [stream.next() for _ in range(100)]
    assert max(Counter(drawn).values()) == 1
    for i, size in enumerate(sizes):
        mine = [ref for ref in drawn if ref.source == f"s{i}"]
        assert [ref.epoch for ref in mine] == [k // size for k in range(len(mine))]
        for epoch in range(len(mine) // size):
            assert {r.row for r in mine if r.epoch == epoch} == set(range(size))


def test_the_order_is_the_documented_permutation_and_differs_between_epochs() -> None:
    stream = make({"a": 50}, seed=3)
    epochs = [[stream.next().row for _ in range(50)] for _ in range(2)]
    assert epochs == [np.random.default_rng([3, 0, e]).permutation(50).tolist() for e in (0, 1)]
    assert epochs[0] != epochs[1]


def test_without_shuffling_rows_come_in_file_order() -> None:
    stream = make({"a": 3}, shuffle=False)
    assert [stream.next().id for _ in range(4)] == ["a:0@0", "a:1@0", "a:2@0", "a:0@1"]


def test_sources_are_mixed_by_their_weights() -> None:
    """Weights 2 : 1 : 1 over 2000 draws: a source of probability 1/2 has a standard deviation of
    sqrt(2000 / 4) = 22.4 draws, one of 1/4 sqrt(2000 * 3 / 16) = 19.4; five of them is the
    bound."""
    stream = make({"a": 5, "b": 500, "c": 9}, seed=1)
    drawn = Counter(stream.next().source for _ in range(2000))
    assert abs(drawn["a"] - 1000) < 5 * 22.4
    assert abs(drawn["b"] - 500) < 5 * 19.4
    assert abs(drawn["c"] - 500) < 5 * 19.4


def test_the_epoch_is_that_of_the_source_furthest_behind() -> None:
    stream = make({"a": 1, "b": 4}, seed=0)
    while stream.epoch == 0:
        last = stream.next()
    assert last == RowRef("b", last.row, 0)
    assert stream.state_dict()["sources"]["b"] == {"size": 4, "epoch": 1, "position": 0}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (make({"a": 7, "b": 4}), "'b' had"),
        (make({"a": 7}), "sources"),
        (make(seed=1), "seed=0"),
        (make(shuffle=False), "shuffle=True"),
    ],
)
def test_a_state_of_other_data_is_refused(other: IndexStream, says: str) -> None:
    with pytest.raises(DataError, match=says):
        other.load_state_dict(make().state_dict())


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    stop=st.integers(0, 40),
    shuffle=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_sources_mixed_by_size_give_every_row_once_per_epoch(
    sizes: list[int], seed: int, stop: int, shuffle: bool
) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    stream = IndexStream(named, weights=None, seed=seed, shuffle=shuffle)
    total = sum(sizes)
    refs = [stream.next() for _ in range(3 * total)]
    every = {(name, row) for name, size in named.items() for row in range(size)}
    for epoch in range(3):
        part = refs[epoch * total : (epoch + 1) * total]
        assert {(ref.source, ref.row) for ref in part} == every
        assert {ref.epoch for ref in part} == {epoch}
    assert stream.epoch == 3
    stop = min(stop, 2 * total)
    first, second = (IndexStream(named, weights=None, seed=seed, shuffle=shuffle) for _ in range(2))
    for _ in range(stop):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.next() for _ in range(total)] == refs[stop : stop + total]


def test_a_position_of_another_mix_is_refused_and_an_old_position_means_by_weight() -> None:
    state = make().state_dict()
    with pytest.raises(DataError, match=r"saved with mix=weight, but this run has mix=size"):
        IndexStream(SIZES, weights=None, seed=0, shuffle=True).load_state_dict(state)
    del state["mix"]
    make().load_state_dict(state)
