"""Samples survive the way through a file bit for bit, whatever objects they were made from."""

from __future__ import annotations

import enum
import types
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from burnish.checkpoint.errors import UnstorableError
from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.state import load_state, save_state
from burnish.rollout.sample_state import samples_from_plain, samples_to_plain
from burnish.transcript import Episode, Turn
from burnish.types import Sample, TokenRow

Pair = namedtuple("Pair", "first second")


class Word(enum.StrEnum):
    YES = "yes"


numbers = st.floats() | st.integers() | st.booleans() | st.builds(np.float32, st.floats(width=32))
texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(("$tuple", "$"))
leaves = st.none() | numbers | texts | st.just(Word.YES)


def containers(values: Any) -> Any:
    """All kinds of containers that a program's messages can be made of."""
    tables = st.dictionaries(texts, values, max_size=3)
    lists = st.lists(values, max_size=3)
    kinds = (OrderedDict, types.MappingProxyType, lambda d: defaultdict(list, d))
    return st.one_of(
        *(tables.map(kind) for kind in kinds),
        *(lists.map(kind) for kind in (list, tuple)),
        st.builds(Pair, values, values),
        st.sets(st.integers() | st.text(), max_size=3),
        st.sets(st.text(), max_size=3).map(frozenset),
    )


trees = st.recursive(leaves, containers, max_leaves=12)
messages = st.dictionaries(texts, trees, max_size=3)
counts = st.dictionaries(texts, st.integers(0, 9), max_size=3).map(Counter) | st.dictionaries(
    texts, numbers, max_size=3
).map(lambda values: defaultdict(float, values))
turns = st.builds(
    Turn,
    message=messages,
    answer=st.lists(messages, max_size=2).map(tuple),
    prompt=st.none() | st.lists(messages, max_size=2).map(tuple),
    rewards=counts,
    counts=counts,
    problem=texts,
)
episodes = st.builds(
    Episode,
    status=st.sampled_from(("done", "max_turns", "env_error")),
    start=st.lists(messages, max_size=2).map(tuple),
    tools=st.lists(messages, max_size=1).map(tuple),
    turns=st.lists(turns, max_size=2).map(tuple),
    error=texts,
)


@st.composite
def rows(draw: st.DrawFn) -> TokenRow:
    size = draw(st.integers(0, 4))
    of = lambda each: tuple(draw(st.lists(each, min_size=size, max_size=size)))  # noqa: E731
    ids = st.integers(0, 2**31 - 1)
    kept = st.lists(ids, max_size=2).map(tuple)
    return TokenRow(
        prompt_ids=tuple(draw(st.lists(ids, max_size=3))),
        response_ids=of(ids),
        sampler_logprobs=of(st.floats(max_value=0.0, allow_nan=False)),
        action_mask=of(st.booleans()),
        versions=of(st.integers(0, 99)),
        turns=of(st.integers(-1, 3)),
        kept_ids=of(kept) if draw(st.booleans()) else (),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    last = draw(rows())
    return Sample(
        sample_id=draw(texts),
        prompt_id=draw(texts),
        group_id=draw(st.integers(0, 9)),
        **vars(last),
        text=draw(texts),
        finish_reason=draw(st.sampled_from(("stop", "length", "aborted"))),
        reward=draw(numbers),
        reward_parts=draw(counts),
        earlier_rows=tuple(draw(st.lists(rows(), max_size=2))),
        turn_rewards=tuple(draw(st.lists(st.floats(), max_size=2))),
        episode=draw(st.none() | episodes),
    )


@given(st.lists(samples(), min_size=1, max_size=3))
def test_every_sample_survives_a_file(tmp_path_factory: Any, found: list[Sample]) -> None:
    folder = tmp_path_factory.mktemp("state")
    save_state(folder, "samples", samples_to_plain(found))
    loaded = samples_from_plain(load_state(folder, "samples"))
    assert repr(normal(loaded)) == repr(normal(found))


def normal(found: list[Sample]) -> list[Any]:
    """The values of samples. (Any mapping is as good as another one with the same entries.)"""
    return [vars(sample) | {"reward_parts": dict(sample.reward_parts)} for sample in found]


def test_a_record_is_detached_from_what_it_was_made_of() -> None:
    counts, arguments = Counter(refused=1), {"a": [1]}
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    turn = Turn(message, ({"content": arguments},), (message,), rewards=counts, counts=counts)
    episode = Episode("done", (message,), (message,), (turn,))
    before = repr(episode)
    counts["refused"] += 1
    counts["late"] += 1
    arguments["a"].append(2)
    message["role"] = "user"
    assert repr(episode) == before and type(turn.counts) is dict


class Own:
    """An object that no file format has."""


@pytest.mark.parametrize("error", [None, KeyError("samples"), OSError(28, "No space left")])
def test_a_save_that_fails_says_whether_the_disk_is_the_cause(
    tmp_path: Path, error: Exception | None
) -> None:
    def write(folder: Path) -> None:
        if error is not None:
            raise error
        save_state(folder, "rl", {"rollouts": {"own": Own()}})

    with pytest.raises(RuntimeError) as caught:
        CheckpointStore(tmp_path, keep_last=1, best_mode="max").begin(1, write)
    of_disk = isinstance(error, OSError)
    assert ("disk is full" in str(caught.value)) == of_disk
    assert ("disk is not the cause" in str(caught.value)) != of_disk
    if error is None:
        assert "/rollouts/own" in str(caught.value)
        assert isinstance(caught.value.__cause__, UnstorableError)
