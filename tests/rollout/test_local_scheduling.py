"""Work of the local engine: each prompt once, and none for finished samples."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.attention import DecodePlan
from burnish.models.cache_attention import PrefillPlan
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.running_batch import RunningBatch


@dataclass
class Counted:
    """An engine whose passes through the body are counted."""

    engine: LocalRolloutEngine
    prefills: list[int] = field(default_factory=list)
    """Tokens of each prefill"""
    decodes: list[int] = field(default_factory=list)
    """Rows of each decode step, without padding"""


def counted(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, **config: int) -> Counted:
    engine = LocalRolloutEngine(model, tokenizer, LocalEngine(**config))
    found = Counted(engine)
    body = engine.network.body

    def watched(input_ids: Tensor, position_ids: Tensor, plan: object) -> Tensor:
        if isinstance(plan, PrefillPlan):
            assert input_ids.shape[0] == 1
            found.prefills.append(plan.num_tokens)
        else:
            assert isinstance(plan, DecodePlan)
            found.decodes.append(plan.slots.numel())
        return body(input_ids, position_ids, plan)

    engine.network.body = watched
    return found


def lengths(completions: list[Completion]) -> list[int]:
    return [len(c.token_ids) for c in completions]


def test_samples_of_a_prompt_share_one_prefill(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prompts of 5, 3 and 9 tokens with 6, 1 and 4 samples: 17 tokens, not 5 x 6 + 3 + 9 x 4 =
    69."""
    run = counted(tiny_model, tiny_tokenizer)
    requests = [Request(str(p), tuple(range(6, 6 + p)), n=n) for p, n in ((5, 6), (3, 1), (9, 4))]
    done = list(run.engine.generate(requests, Sampling(10)))
    assert run.prefills == [17] and len(done) == 11


def test_a_decode_step_has_as_many_rows_as_samples_are_alive(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    run = counted(tiny_model, tiny_tokenizer)
    requests = [Request(str(i), (7, 8 + i), n=8, seed=i) for i in range(4)]
    done = list(run.engine.generate(requests, Sampling(60)))
    assert len(set(lengths(done))) > 8, "samples end at many different steps"
    # the first token comes from the prefill; step t makes token t + 1 of every sample that is
    # longer than t
    alive = [sum(n > t for n in lengths(done)) for t in range(1, max(lengths(done)))]
    assert run.decodes == alive


def test_extra_samples_wait_for_slots_and_every_slot_is_used(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    run = counted(tiny_model, tiny_tokenizer, max_batch_size=4)
    requests = [Request(str(i), (7, 8 + i), seed=i) for i in range(12)]
    done = list(run.engine.generate(requests, Sampling(40)))
    assert len(done) == 12 and max(run.decodes) == 4
    assert sum(run.decodes) == sum(lengths(done)) - 12, "one row a token, nothing for the dead"
    assert sum(run.prefills) == 24
    waiting_until = run.decodes[: -max(lengths(done))]
    assert all(rows == 4 for rows in waiting_until), "freed slots are taken at once"


def test_more_samples_than_slots_are_prefilled_once_a_slotful(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """n = 7 with 3 slots: parts of 3, 3 and 1, each computing the prompt of 5 tokens."""
    run = counted(tiny_model, tiny_tokenizer, max_batch_size=3)
    done = list(run.engine.generate([Request("r", (6, 7, 8, 9, 10), n=7, seed=1)], Sampling(12)))
    assert sorted(c.index for c in done) == list(range(7))
    assert run.prefills == [5, 5, 5] and max(run.decodes) <= 3


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(100, [12]), (8, [8, 4]), (7, [4, 4, 4]), (4, [4, 4, 4]), (1, [4, 4, 4])],
)
def test_a_prefill_stays_within_its_tokens(
    budget: int,
    expected: list[int],
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Three prompts of 4 tokens; one that is longer than the budget goes alone."""
    run = counted(tiny_model, tiny_tokenizer, max_prefill_tokens=budget)
    requests = [Request(str(i), (7, 8, 9, 10 + i)) for i in range(3)]
    assert len(list(run.engine.generate(requests, Sampling(4)))) == 3
    assert run.prefills == expected


def test_completions_are_yielded_as_they_finish(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    run = counted(tiny_model, tiny_tokenizer)
    requests = [Request(str(i), (7, 8 + i), n=4, seed=i) for i in range(4)]
    at = [(len(c.token_ids), len(run.decodes)) for c in run.engine.generate(requests, Sampling(40))]
    assert all(length == steps + 1 for length, steps in at)


MODEL = ModelConfig(
    scratch=ScratchConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=6),
    slots=st.integers(1, 9),
    prefill=st.integers(1, 30),
    max_tokens=st.integers(1, 12),
    ends=st.integers(0, 30),
)
def test_any_mix_of_requests_is_answered_once_and_without_waste(
    shapes: list[tuple[int, int]], slots: int, prefill: int, max_tokens: int, ends: int
) -> None:
    """``ends`` of the 53 tokens stop a response, so samples leave at all times and from all
    slots."""
    run = counted(
        load_causal_lm(MODEL),
        load_tokenizer(MODEL),
        max_batch_size=slots,
        max_prefill_tokens=prefill,
    )
    requests = [
        Request(str(i), tuple(range(6, 6 + p)), n=n, seed=i) for i, (p, n) in enumerate(shapes)
    ]
    sampling = Sampling(max_tokens, stop_token_ids=tuple(range(6, 6 + ends)))
    done = list(run.engine.generate(requests, sampling))
    expected = sorted((r.request_id, k) for r in requests for k in range(r.n))
    assert sorted((c.request_id, c.index) for c in done) == expected
    assert sum(run.decodes) == sum(lengths(done)) - len(done)
    assert max(run.decodes, default=0) <= slots
    stops = set(sampling.stop_token_ids) | run.engine._end_tokens
    for completion in done:
        *body, last = completion.token_ids
        assert not stops & set(body) and len(completion.token_ids) <= max_tokens
        assert (completion.finish_reason == "stop") == (last in stops)
        alone = run.engine.generate(
            [r for r in requests if r.request_id == completion.request_id], sampling
        )
        assert completion.token_ids in {c.token_ids for c in alone if c.index == completion.index}


def test_no_requests_compute_nothing(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    run = counted(tiny_model, tiny_tokenizer)
    assert list(run.engine.generate([], Sampling(4))) == []
    assert list(run.engine.generate([Request("r", (7,), n=0)], Sampling(4))) == []
    assert run.prefills == run.decodes == []


def test_a_generate_needs_an_engine_without_open_requests(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = LocalRolloutEngine(tiny_model, tiny_tokenizer, LocalEngine())
    requests = [Request(str(i), (7, 8 + i), n=2, seed=i) for i in range(3)]
    first = engine.generate(requests, Sampling(12, stop_token_ids=(9, 11, 20)))
    next(first)
    with pytest.raises(RuntimeError, match="without open requests"):
        next(engine.generate([Request("x", (7,))], Sampling(4)))
    assert len(list(first)) == 5 and not engine.busy


def test_a_failed_step_changes_no_results_and_a_cancel_frees_the_cache(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each pass fails once, before or after it has written keys and values."""
    requests = [Request(str(i), (7, 8 + i), n=2, seed=i) for i in range(5)]
    engine = LocalRolloutEngine(tiny_model, tiny_tokenizer, LocalEngine(max_batch_size=6))
    expected = {(c.request_id, c.index): c for c in engine.generate(requests, Sampling(9))}
    body, passes = engine.network.body, 0

    def failing(input_ids: Tensor, position_ids: Tensor, plan: object) -> Tensor:
        nonlocal passes
        passes += 1
        if passes % 4 == 1:
            raise MemoryError
        hidden = body(input_ids, position_ids, plan)
        if passes % 4 == 3:
            raise MemoryError
        return hidden

    engine.network.body = failing  # type: ignore[method-assign]
    engine.submit(requests, Sampling(9))
    found: dict[tuple[str, int], Completion] = {}
    while engine.busy:
        with suppress(MemoryError):
            found |= {(c.request_id, c.index): c for c in engine.poll()}
    assert found == expected and passes > 12
    engine.network.body = body  # type: ignore[method-assign]
    engine.submit(requests, Sampling(9))
    engine.poll()
    engine.cancel([request.request_id for request in requests])
    assert isinstance(engine.batch, RunningBatch) and engine.batch.cache is None


def test_the_cache_grows_in_slots_and_positions_with_later_requests(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """One request decodes in a cache of one slot and 2 + 30 positions, in one block of 64; then
    come three prompts of 40 tokens, which need two."""
    engine = LocalRolloutEngine(tiny_model, tiny_tokenizer, LocalEngine())
    requests = [Request("a", (7, 8))] + [Request(str(i), (6 + i,) * 40, seed=i) for i in range(3)]
    alone = {c.request_id: c for c in engine.generate(requests, Sampling(30))}
    engine.submit(requests[:1], Sampling(30))
    assert [engine.poll() for _ in range(4)] == [[]] * 4
    assert isinstance(engine.batch, RunningBatch) and engine.batch.cache is not None
    assert (engine.batch.cache.num_slots, engine.batch.cache.capacity) == (1, 64)
    engine.submit(requests[1:], Sampling(30))
    done = engine.poll()
    assert (engine.batch.cache.num_slots, engine.batch.cache.capacity) == (4, 128)
    while engine.busy:
        done += engine.poll()
    assert {c.request_id: c.token_ids for c in done} == {k: c.token_ids for k, c in alone.items()}
    assert engine.batch.cache is None, "freed once nothing is open"
