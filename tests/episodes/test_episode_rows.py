"""Training rows of random call histories: every sampled token exactly once, on exact ids."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from burnish.episodes.loop import EngineCall
from burnish.episodes.rows import episode_rows
from burnish.rollout.base import Completion, VersionSpan


def call(prompt: tuple[int, ...], sampled: tuple[int, ...], turn: int) -> EngineCall:
    """A call whose log-probs and versions identify its turn and position."""
    return EngineCall(
        prompt,
        Completion(
            request_id=str(turn),
            index=0,
            token_ids=sampled,
            logprobs=tuple(-float(turn + 1) - i / 64 for i in range(len(sampled))),
            finish_reason="stop",
            text="",
            spans=(VersionSpan(turn, 0, len(sampled)),),
        ),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[EngineCall]:
    """Calls that extend an earlier one (maybe the same twice), change its history, or begin
    afresh."""
    tokens = st.integers(0, 3)  # few ids, so that accidental prefixes happen
    calls: list[EngineCall] = []
    for turn in range(draw(st.integers(1, 8))):
        sampled = tuple(draw(st.lists(tokens, min_size=1, max_size=4)))
        prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=4)))
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            base = earlier.prompt_ids + earlier.completion.token_ids
            if draw(st.integers(0, 3)) == 0:  # compacted history
                base = base[draw(st.integers(0, len(base) - 1)) :]
            prompt = base + prompt
        calls.append(call(prompt, sampled, turn))
    return calls


@settings(max_examples=300)
@given(histories())
def test_each_sampled_token_is_trained_in_exactly_one_row(calls: list[EngineCall]) -> None:
    rows = episode_rows(calls)
    trained = [
        (turn, token, logprob, version)
        for row in rows
        for turn, token, logprob, version, action in zip(
            row.turns,
            row.response_ids,
            row.sampler_logprobs,
            row.versions,
            row.action_mask,
            strict=True,
        )
        if action
    ]
    wanted = [
        (turn, token, logprob, turn)
        for turn, c in enumerate(calls)
        for token, logprob in zip(c.completion.token_ids, c.completion.logprobs, strict=True)
    ]
    assert sorted(trained) == sorted(wanted)
    for row in rows:
        assert [turn >= 0 for turn in row.turns] == list(row.action_mask)


@settings(max_examples=300)
@given(histories())
def test_each_turn_is_read_after_its_own_prompt(calls: list[EngineCall]) -> None:
    """The tokens before a turn's first token are exactly the prompt of its call."""
    found: dict[int, tuple[int, ...]] = {}
    for row in episode_rows(calls):
        ids = row.prompt_ids + row.response_ids
        for t, turn in enumerate(row.turns):
            if turn >= 0 and turn not in found:
                found[turn] = ids[: len(row.prompt_ids) + t]
    assert found == {turn: c.prompt_ids for turn, c in enumerate(calls)}


def test_calls_that_extend_each_other_become_one_row() -> None:
    """[5 9 | 7 1], then [5 9 7 1 30 31 | 8]: one row with the observation 30 31 masked. A call on
    edited history [9 | 2] is a row of its own."""
    calls = [call((5, 9), (7, 1), 0), call((5, 9, 7, 1, 30, 31), (8,), 1), call((9,), (2,), 2)]
    joined, own = episode_rows(calls)
    assert (joined.prompt_ids, joined.response_ids) == ((5, 9), (7, 1, 30, 31, 8))
    assert joined.action_mask == (True, True, False, False, True)
    assert joined.turns == (0, 0, -1, -1, 1)
    assert (own.prompt_ids, own.response_ids, own.turns) == ((9,), (2,), (2,))
