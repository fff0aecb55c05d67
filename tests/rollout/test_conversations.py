"""Conversations whose keys and values the local engine keeps between requests."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish.models.cache_attention import PrefillPlan
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.running_batch import RunningBatch

SAMPLING = Sampling(14)
Answers = dict[tuple[int, int], Completion]


@pytest.fixture
def engine(
    lively_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> LocalRolloutEngine:
    return LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine())


def batch_of(engine: LocalRolloutEngine) -> RunningBatch:
    assert isinstance(engine.batch, RunningBatch)
    return engine.batch


def talk(
    engine: LocalRolloutEngine, count: int, turns: int, *, seed: int, keep: bool = True
) -> Answers:
    """Hold ``count`` conversations of ``turns`` turns, which are continued in a random order."""
    draw, answers = random.Random(seed), Answers()
    history = {i: [6 + i, 7, 8] for i in range(count)}
    left = [i for i in range(count) for _ in range(turns)]
    draw.shuffle(left)
    turn = dict.fromkeys(range(count), 0)
    open_: set[int] = set()
    while left or engine.busy:
        ready = [i for i in left if i not in open_]
        if ready and draw.random() < 0.5:
            i = ready[0]
            left.remove(i)
            open_.add(i)
            request = Request(
                f"{i}/{turn[i]}",
                tuple(history[i]),
                seed=100 * i + turn[i],
                conversation=f"c{i}" if keep else None,
            )
            engine.submit([request], SAMPLING)
        for done in engine.poll():
            i, t = map(int, done.request_id.split("/"))
            answers[i, t] = done
            history[i] += [*done.token_ids, 9 + t, 20 + i]
            turn[i] = t + 1
            open_.remove(i)
    engine.release([f"c{i}" for i in range(count)])
    return answers


def bits(answers: Answers) -> dict[tuple[int, int], object]:
    return {k: (c.token_ids, c.logprobs) for k, c in answers.items()}


@pytest.mark.parametrize("slots", [1, 3, 5, 128])
def test_bits_do_not_depend_on_what_was_kept(slots: int, engine: LocalRolloutEngine) -> None:
    """With few slots most conversations are dropped before they continue, with many none."""
    expected = talk(engine, 6, 4, seed=0, keep=False)
    assert {c.cached_tokens for c in expected.values()} == {0}
    small = LocalRolloutEngine(
        engine.model, engine.tokenizer, LocalEngine(max_batch_size=slots, max_prefill_tokens=40)
    )
    found = talk(small, 6, 4, seed=1)
    assert bits(found) == bits(expected)
    cached = sum(c.cached_tokens > 0 for (_, turn), c in found.items() if turn)
    assert cached == 18 if slots == 128 else cached < 18
    assert batch_of(small).cache is None and not batch_of(small).kept, "all were released"


def test_without_batch_invariance_conversations_are_kept_too(engine: LocalRolloutEngine) -> None:
    """Log-probs are those of another order of sums, to 1e-5 nats."""
    expected = talk(engine, 6, 4, seed=0, keep=False)
    for slots in (5, 128):
        config = LocalEngine(batch_invariant=False, max_batch_size=slots, max_prefill_tokens=40)
        other = LocalRolloutEngine(engine.model, engine.tokenizer, config)
        found = talk(other, 6, 4, seed=1)
        for key, one in found.items():
            assert one.token_ids == expected[key].token_ids
            assert one.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)
    assert sum(c.cached_tokens > 0 for (_, turn), c in found.items() if turn) == 18


def test_a_follow_up_prefills_its_new_tokens(engine: LocalRolloutEngine) -> None:
    """The last sampled token was never an input of the model, so it is computed too."""
    prefills: list[int] = []
    body = engine.network.body

    def watched(input_ids: torch.Tensor, position_ids: torch.Tensor, plan: object) -> torch.Tensor:
        if isinstance(plan, PrefillPlan):
            prefills.append(plan.num_tokens)
        return body(input_ids, position_ids, plan)

    engine.network.body = watched  # type: ignore[method-assign]
    prompt = tuple(range(6, 26))
    (first,) = engine.generate([Request("0", prompt, conversation="c")], SAMPLING)
    longer = (*prompt, *first.token_ids, 9, 10, 11)
    (second,) = engine.generate([Request("1", longer, conversation="c")], SAMPLING)
    assert second.cached_tokens == len(longer) - 4 and prefills == [20, 4]
    edited = (*prompt[:10], 45, *longer[11:])
    (third,) = engine.generate([Request("2", edited, conversation="c")], SAMPLING)
    assert third.cached_tokens == 10, "up to the first difference"
    engine.release(["c"])
    (fourth,) = engine.generate([Request("3", edited, conversation="c")], SAMPLING)
    assert fourth.cached_tokens == 0
    assert (fourth.token_ids, fourth.logprobs) == (third.token_ids, third.logprobs)


def test_a_conversation_released_while_it_is_sampled_is_not_kept(
    engine: LocalRolloutEngine,
) -> None:
    waiting = LocalRolloutEngine(engine.model, engine.tokenizer, LocalEngine(max_batch_size=1))
    for i in range(2):
        waiting.submit([Request(str(i), (7, 8), conversation=f"c{i}")], SAMPLING)
    waiting.poll()
    waiting.release(["c0", "c1"])  # c0 is active, c1 waits
    while waiting.busy:
        waiting.poll()
    assert not batch_of(waiting).kept and batch_of(waiting).cache is None


def test_a_cache_that_grows_for_short_rows_keeps_long_conversations(
    engine: LocalRolloutEngine,
) -> None:
    """The conversation has 214 tokens; then four requests of 16 tokens need three more slots."""
    prompt = tuple(range(6, 46)) * 5
    (first,) = engine.generate([Request("0", prompt, conversation="c")], SAMPLING)
    list(engine.generate([Request("1", (7, 8), n=4)], SAMPLING))
    assert batch_of(engine).cache is not None and batch_of(engine).cache.num_slots == 5
    longer = Request("2", (*prompt, *first.token_ids, 9), conversation="c")
    (second,) = engine.generate([longer], SAMPLING)
    assert second.cached_tokens == len(longer.prompt_ids) - 2
    engine.release(["c"])
    (fresh,) = engine.generate([longer], SAMPLING)
    assert (second.token_ids, second.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_requests_without_conversation_use_no_kept_keys(engine: LocalRolloutEngine) -> None:
    """Not even those of a conversation named ''."""
    (first,) = engine.generate([Request("0", (7, 8, 9), conversation="")], SAMPLING)
    plain = Request("1", (7, 8, 9, 10), n=3, seed=4)
    found = list(engine.generate([plain], SAMPLING))
    assert {c.cached_tokens for c in found} == {0}
    (second,) = engine.generate(
        [Request("2", (7, 8, 9, *first.token_ids), conversation="")], SAMPLING
    )
    assert second.cached_tokens == 3 + len(first.token_ids) - 1


def test_the_least_recently_used_conversation_is_dropped(engine: LocalRolloutEngine) -> None:
    small = LocalRolloutEngine(engine.model, engine.tokenizer, LocalEngine(max_batch_size=3))
    for i in (0, 1, 2, 0):
        list(small.generate([Request(str(i), (7, 8 + i), conversation=f"c{i}")], SAMPLING))
    assert list(batch_of(small).kept) == ["c1", "c2", "c0"]
    list(small.generate([Request("x", (30, 31), n=2)], SAMPLING))
    assert list(batch_of(small).kept) == ["c0"], "new requests get the slots"


def test_kept_keys_are_dropped_with_the_weights_and_in_sleep(engine: LocalRolloutEngine) -> None:
    request = Request("0", tuple(range(6, 26)), conversation="c")
    for drop in (
        lambda: engine.load_weights(1, list(engine.model.named_parameters())),
        lambda: setattr(engine, "version", 2),
        lambda: engine.sleep(),
    ):
        list(engine.generate([request], SAMPLING))
        assert batch_of(engine).kept
        drop()
        assert not batch_of(engine).kept
    (done,) = engine.generate([request], SAMPLING)
    assert done.cached_tokens == 0
