"""Scored groups become rows of a batch; of an episode with several rows, all are one sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from burnish.batches import groups_to_batch
from burnish.driver.rows_run import sums_of
from burnish.rollout.sample_state import samples_from_plain, samples_to_plain
from burnish.runtime.worker import pack_share, unpack_share
from burnish.train.batching import Share
from burnish.types import Batch, Group, Prompt, Sample, TokenRow


def row(prompt: tuple[int, ...], turns: tuple[int, ...]) -> TokenRow:
    """Response token t is 10 + t, with log-prob -t; sampled where its turn is not -1."""
    length = range(len(turns))
    return TokenRow(
        prompt_ids=prompt,
        response_ids=tuple(10 + t for t in length),
        sampler_logprobs=tuple(-float(t) for t in length),
        action_mask=tuple(turn >= 0 for turn in turns),
        versions=(0,) * len(turns),
        turns=turns,
    )


def sample(name: str, *rows: TokenRow, reward: float = 0.0, **more: Any) -> Sample:
    *earlier, last = rows
    data: dict[str, Any] = dict(vars(last))
    return Sample(
        sample_id=name,
        prompt_id="p",
        group_id=4,
        **(data | {"text": "", "finish_reason": "stop", "reward": reward} | more),
        earlier_rows=tuple(earlier),
    )


def group(*samples: Sample) -> Group:
    return Group(4, Prompt("p", (5,), ""), samples)


def episodes() -> list[Group]:
    """a: turns 0 and 2 in one row, turn 1 in an earlier one (a branch); b: a single turn."""
    a = sample(
        "a",
        row((5, 6), (1, 1)),
        row((5,), (0, 0, -1, 2)),
        reward=3.0,
        turn_rewards=(0.5, 1.5, 0.25),
    )
    return [group(a, sample("b", row((5,), (0,)), reward=1.0, turns=()))]


def test_the_rows_of_an_episode_follow_each_other_and_say_whose_they_are() -> None:
    """Rows [5 6 | 10 11], [5 | 10 11 12 13], [5 | 10]; 12 is an observation. The rewards of turns 0
    to 2 are on the last tokens of their turns, at 6, 3 and 8."""
    batch = groups_to_batch(episodes())
    assert batch.tokens.tolist() == [5, 6, 10, 11, 5, 10, 11, 12, 13, 5, 10]
    assert batch.action_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1]
    assert batch.prompt_lens.tolist() == [2, 1, 1] and batch.group_ids.tolist() == [4, 4, 4]
    assert batch.sample_ids is not None and batch.sample_ids.tolist() == [0, 0, 1]
    assert batch.sample_tokens is not None and batch.sample_tokens.tolist() == [5, 5, 1]
    assert batch.turn_ids is not None
    assert batch.turn_ids.tolist() == [-1, -1, 1, 1, -1, 0, 0, -1, 2, -1, 0]
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [0, 0, 0, 1.5, 0, 0, 0.5, 0, 0.25, 0, 0]
    assert batch.rewards is not None and batch.rewards.tolist() == [3.0, 3.0, 1.0]
    assert batch.sampler_logprobs is not None
    assert batch.sampler_logprobs.tolist() == [0, 0, 0, -1, 0, 0, -1, -2, -3, 0, 0]
    assert (batch.num_sequences, batch.num_tokens, batch.num_samples) == (2, 6, 2)


def test_single_turns_have_no_fields_of_episodes() -> None:
    one = replace(episodes()[0].samples[1], turns=())
    batch = groups_to_batch([group(one, one)])
    found = (batch.sample_ids, batch.sample_tokens, batch.turn_ids, batch.turn_rewards)
    assert found == (None,) * 4 and not batch.samples_together
    assert (batch.num_sequences, batch.num_samples) == (2, 2)
    assert torch.equal(batch.token_samples, batch.row_ids)
    assert [x.tolist() for x in batch.row_samples()] == [[0, 1], [0, 1]]


def test_turn_rewards_of_nobody_are_left_out() -> None:
    found = groups_to_batch([group(sample("a", row((5,), (0, -1, 1))))])
    assert found.turn_rewards is None and found.turn_ids is not None


def test_selected_rows_keep_their_sample_and_the_count_of_all_its_tokens() -> None:
    part = groups_to_batch(episodes()).select([2, 0])
    assert part.sample_ids is not None and part.sample_ids.tolist() == [1, 0]
    assert part.sample_tokens is not None and part.sample_tokens.tolist() == [1, 5]
    assert part.turn_ids is not None and part.turn_ids.tolist() == [-1, 0, -1, -1, 1, 1]
    assert part.turn_rewards is not None and part.turn_rewards.tolist() == [0, 0, 0, 0, 0, 1.5]
    assert part.token_samples.tolist() == [1, 1, 0, 0, 0, 0]
    assert [x.tolist() for x in part.row_samples()] == [[1, 0], [1, 0]]
    assert (part.num_sequences, part.num_tokens) == (2, 6), "of the entire step"


def test_global_counts_count_samples() -> None:
    """Rows 0 and 1 are one sample of 5 action tokens."""
    part = groups_to_batch(episodes()).select([1, 0]).with_global_counts()
    assert (part.num_sequences, part.num_tokens) == (1, 5)


def test_moving_and_packing_keep_the_fields_of_episodes() -> None:
    batch = replace(groups_to_batch(episodes(), {0: 2}), samples_together=True)
    packed = unpack_share(pack_share(Share(batch, [[0]], [0]))).batch
    for other in (packed, batch.to("cpu"), batch.to("meta")):
        for name, value in vars(batch).items():
            found = vars(other)[name]
            if name == "sample_ids":
                assert found.device.type == "cpu", "indices are computed from it"
            if isinstance(value, torch.Tensor):
                assert found.is_meta or torch.equal(found, value), name
            elif name != "host":
                assert found == value, name
    moved = batch.to("meta")
    assert moved.turn_ids is not None and moved.turn_ids.is_meta
    assert moved.sample_tokens is not None and moved.sample_tokens.is_meta
    assert moved.ages is not None and moved.ages.is_meta


def test_all_rows_of_a_sample_count_as_sampled() -> None:
    a, b = episodes()[0].samples
    assert (a.num_sampled_tokens, b.num_sampled_tokens) == (5, 1)
    assert [r.turns for r in a.rows] == [(1, 1), (0, 0, -1, 2)]
    assert [r.turns for r in b.rows] == [(0,)], "one turn, if none is named"
    assert sums_of(episodes())["tokens"] == 6, "of the totals of generate, too"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sample("x", row((5,), (0,)), row((5,), (1,)), turns=()), "earlier"),
        (sample("x", row((5,), (0, -1)), turns=(0, 0)), "sample 'x'"),
        (sample("x", row((5,), (0, -1)), turns=(0,)), "sample 'x'"),
        (sample("x", row((5,), (2,)), row((5,), (2,))), "turn 2 in two rows"),
        (sample("x", row((5,), (0,)), turn_rewards=(0.0, 0.5)), "turn 1"),
    ],
)
def test_turns_that_contradict_the_tokens_are_refused(wrong: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_to_batch([group(wrong)])


def test_a_reward_of_zero_needs_no_token() -> None:
    found = groups_to_batch([group(sample("x", row((5,), (0,)), turn_rewards=(0.5, 0.0)))])
    assert found.turn_rewards is not None and found.turn_rewards.tolist() == [0, 0.5]


def test_the_last_call_may_have_sampled_nothing() -> None:
    found = groups_to_batch([group(sample("x", row((5,), (0,)), row((6,), ())))])
    assert found.sample_ids is not None and found.sample_ids.tolist() == [0, 0]
    assert found.num_tokens == 1


def test_row_samples_are_in_the_order_of_ids_whatever_the_order_of_rows() -> None:
    batch: Batch = groups_to_batch(episodes())
    assert [x.tolist() for x in batch.select([2, 1, 0]).row_samples()] == [[1, 0, 0], [1, 0]]


def test_kept_ids_are_aligned_with_the_tokens_and_survive_the_way_to_a_worker() -> None:
    """Rows [5 | 10 11] with kept ids {10 12} and {11}, and [5 | 10] with {9 10 3}."""
    masked = sample("a", replace(row((5,), (0, 0)), kept_ids=((10, 12), (11,))), turns=())
    other = sample("b", replace(row((5,), (0,)), kept_ids=((9, 10, 3),)), turns=())
    batch = groups_to_batch([group(masked, other)])
    expected = [[-1] * 3, [10, 12, -1], [11, -1, -1], [-1] * 3, [9, 10, 3]]
    assert batch.kept_ids is not None and batch.kept_ids.tolist() == expected
    assert batch.kept_ids.dtype == torch.int32
    share = unpack_share(pack_share(Share(batch, [[0], [1]], [0, 1])))
    assert share.batch.kept_ids is not None
    assert torch.equal(share.batch.select([1]).kept_ids, batch.kept_ids[3:])
    with pytest.raises(ValueError, match=r"some action tokens have the ids .* and others do not"):
        groups_to_batch([group(masked, sample("c", row((5,), (0,)), turns=()))])


AGES = {3: 5, 4: 0, 9: 2}
PER_TOKEN = ("response_ids", "sampler_logprobs", "action_mask", "versions", "turns")
logprobs = st.floats(max_value=0, width=32) | st.floats(-100, 0)


@st.composite
def token_rows(draw: st.DrawFn, turns: tuple[int, ...], kept: bool) -> TokenRow:
    """A row with observations before, between and after ``turns``."""
    of_tokens: list[int] = []
    for turn in turns:
        of_tokens += [-1] * draw(st.integers(0, 2)) + [turn] * draw(st.integers(1, 3))
    of_tokens += [-1] * draw(st.integers(0, 2))
    ids, length = st.integers(0, 2**31 - 1), len(of_tokens)
    some = st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), min_size=length)
    return TokenRow(
        prompt_ids=tuple(draw(st.lists(ids, min_size=1, max_size=3))),
        response_ids=tuple(draw(st.lists(ids, min_size=length, max_size=length))),
        sampler_logprobs=tuple(draw(st.lists(logprobs, min_size=length, max_size=length))),
        action_mask=tuple(turn >= 0 for turn in of_tokens),
        versions=tuple(draw(st.sampled_from([3, 4, 9])) for _ in of_tokens),
        turns=tuple(of_tokens),
        kept_ids=tuple(draw(some)[:length]) if kept else (),
    )


@st.composite
def scored_groups(draw: st.DrawFn) -> list[Group]:
    """Groups of single responses, or of episodes of up to two rows with rewards of turns."""
    episodes, kept = draw(st.booleans()), draw(st.booleans())
    found = []
    for number in range(draw(st.integers(1, 3))):
        turns = [(0, 2), (1, 3)] if episodes and draw(st.booleans()) else [(0,)]
        rows = [draw(token_rows(of_row, kept)) for of_row in turns]
        rewards = draw(st.lists(st.floats(-1, 1, width=32), max_size=4)) if episodes else []
        own: dict[str, Any] = {"turn_rewards": tuple(rewards[: 2 * len(rows) - 1 or 1])}
        own |= {} if episodes else {"turns": ()}
        found.append(group(sample(f"{number}", *rows, reward=0.5 * number, **own)))
    return found


def from_python_numbers(groups: list[Group]) -> dict[str, list[Any]]:
    """The per-token columns of a batch, one Python number after the other."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "tokens",
            "action_mask",
            "sampler_logprobs",
            "ages",
            "turn_ids",
            "turn_rewards",
        )
    }
    for one in (each for g in groups for each in g.samples):
        placed = {turn: reward for turn, reward in enumerate(one.turn_rewards)}
        for row in one.rows:
            blank = [0] * len(row.prompt_ids)
            turns, mask = list(row.turns), list(row.action_mask)
            last = {turn: t for t, turn in enumerate(turns)}
            columns["tokens"] += [*row.prompt_ids, *row.response_ids]
            columns["action_mask"] += [*map(bool, blank), *mask]
            columns["sampler_logprobs"] += [*blank, *row.sampler_logprobs]
            columns["turn_ids"] += [-1 for _ in blank] + turns
            columns["ages"] += blank + [
                AGES[v] if on else 0 for v, on in zip(row.versions, mask, strict=True)
            ]
            columns["turn_rewards"] += blank + [
                placed.get(turn, 0.0) if on and last[turn] == t else 0.0
                for t, (turn, on) in enumerate(zip(turns, mask, strict=True))
            ]
    return columns


@given(scored_groups())
def test_every_column_has_the_bits_of_the_python_numbers(groups: list[Group]) -> None:
    """Log-probs that are not fp32 numbers are rounded to the nearest one, as numpy rounds them."""
    batch = vars(groups_to_batch(groups, AGES))
    for name, numbers in from_python_numbers(groups).items():
        if batch[name] is None:
            assert name in ("turn_ids", "turn_rewards")
            continue
        expected = np.fromiter(numbers, batch[name].numpy().dtype, count=len(numbers))
        assert batch[name].numpy().tobytes() == expected.tobytes(), name
    kept = [
        list(ids)
        for g in groups
        for row in g.samples[0].rows
        for ids in ([()] * len(row.prompt_ids) + list(row.kept_ids or [()] * len(row.turns)))
    ]
    if batch["kept_ids"] is not None:
        assert [[i for i in ids if i >= 0] for ids in batch["kept_ids"].tolist()] == kept
    else:
        assert not any(kept)


@given(scored_groups())
def test_recorded_samples_are_equal_and_are_stored_as_before(groups: list[Group]) -> None:
    """The arrays of a file are those of the Python numbers, so that recordings of other versions
    can be read. A sample without turns comes back without them."""
    samples = [each for g in groups for each in g.samples]
    plain = samples_to_plain(samples)
    rows = [row for each in samples for row in each.rows]
    for name in PER_TOKEN:
        stored = plain[{"sampler_logprobs": "logprobs"}.get(name, name)]
        if stored is None:
            assert name == "turns" and not any(each.turns for each in samples)
        else:
            numbers = [number for row in rows for number in vars(row)[name]]
            assert stored.tolist() == numbers and stored.dtype.itemsize in (1, 4, 8)
    numbers = [float(x) for row in rows for x in row.sampler_logprobs]
    exact = np.asarray(numbers).astype(np.float32).astype(np.float64).tolist() == numbers
    assert plain["logprobs"].dtype == (np.float32 if exact else np.float64)
    assert samples_from_plain(plain) == samples
