"""Retention is a pure function: a few cases by hand, then properties that hold for every list."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.checkpoint.retention import Entry, best_step, to_delete

entries = st.lists(
    st.builds(
        Entry,
        step=st.integers(0, 30),
        metric=st.none() | st.sampled_from([0.0, 0.5, 1.0, math.nan]),
        good=st.booleans(),
    ),
    unique_by=lambda entry: entry.step,
    max_size=8,
)
keep = st.integers(1, 4)
mode = st.sampled_from(["max", "min"])


def test_the_last_two_and_the_best_are_kept():
    """Metrics .1 .9 .3 .4 .2 at steps 1 to 5: 4 and 5 (last) and 2 (best) stay; 1 and 3 go."""
    checkpoints = [
        Entry(step, metric, True) for step, metric in enumerate([0.1, 0.9, 0.3, 0.4, 0.2], 1)
    ]
    assert to_delete(checkpoints, keep_last=2, best_mode="max") == [1, 3]


def test_with_min_the_smallest_metric_is_best():
    """Metrics 3 1 2 at steps 1 2 3, keep_last=1: keep 3 (last) and 2 (least); 1 goes."""
    checkpoints = [Entry(1, 3.0, True), Entry(2, 1.0, True), Entry(3, 2.0, True)]
    assert to_delete(checkpoints, keep_last=1, best_mode="min") == [1]


def test_of_equal_metrics_the_newest_is_best():
    checkpoints = [Entry(7, 0.5, True), Entry(3, 0.5, True), Entry(9, 0.1, True)]
    assert best_step(checkpoints, "max") == 7


def test_a_bad_checkpoint_is_deleted_only_if_a_newer_good_one_exists():
    """Broken 1 is older than good 2 and goes; broken 3 is newer than every good one and stays."""
    checkpoints = [Entry(1, None, False), Entry(2, None, True), Entry(3, None, False)]
    assert to_delete(checkpoints, keep_last=1, best_mode="max") == [1]


def test_a_bad_checkpoint_does_not_count_as_one_of_the_last_k():
    checkpoints = [Entry(1, None, True), Entry(2, None, False), Entry(3, None, True)]
    assert to_delete(checkpoints, keep_last=2, best_mode="max") == [2]


def test_keeping_none_is_refused():
    with pytest.raises(ValueError, match="keep_last=0"):
        to_delete([], keep_last=0, best_mode="max")


@given(entries, keep, mode)
def test_the_last_k_good_checkpoints_are_kept(checkpoints, keep_last, best_mode):
    deleted = to_delete(checkpoints, keep_last=keep_last, best_mode=best_mode)
    good = sorted(entry.step for entry in checkpoints if entry.good)
    assert not set(good[-keep_last:]) & set(deleted)


@given(entries, keep, mode)
def test_no_deleted_metric_is_better_than_every_kept_one(checkpoints, keep_last, best_mode):
    deleted = to_delete(checkpoints, keep_last=keep_last, best_mode=best_mode)
    better = max if best_mode == "max" else min
    measured = [
        e for e in checkpoints if e.good and e.metric is not None and not math.isnan(e.metric)
    ]
    kept = [e.metric for e in measured if e.step not in deleted]
    if measured:
        assert better(kept) == better(e.metric for e in measured)


@given(entries, keep, mode)
def test_at_most_k_good_checkpoints_and_the_best_are_kept(checkpoints, keep_last, best_mode):
    deleted = to_delete(checkpoints, keep_last=keep_last, best_mode=best_mode)
    kept = [entry for entry in checkpoints if entry.good and entry.step not in deleted]
    assert len(kept) <= keep_last + 1


@given(entries, keep, mode)
def test_bad_checkpoints_are_kept_exactly_while_no_newer_good_one_exists(
    checkpoints, keep_last, best_mode
):
    deleted = to_delete(checkpoints, keep_last=keep_last, best_mode=best_mode)
    good = [entry.step for entry in checkpoints if entry.good]
    for entry in checkpoints:
        if not entry.good:
            assert (entry.step in deleted) == any(step > entry.step for step in good)


@given(entries, keep, mode)
def test_deleting_once_is_enough_and_order_does_not_matter(checkpoints, keep_last, best_mode):
    deleted = to_delete(checkpoints, keep_last=keep_last, best_mode=best_mode)
    left = [entry for entry in checkpoints if entry.step not in deleted]
    assert to_delete(left, keep_last=keep_last, best_mode=best_mode) == []
    assert to_delete(checkpoints[::-1], keep_last=keep_last, best_mode=best_mode) == deleted
