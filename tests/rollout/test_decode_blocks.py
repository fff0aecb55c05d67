"""Blocks of recorded decode steps give the results of single steps, with one read of the host per
block. Graphs are tapes of operations on the CPU (``tests/support/graph_tapes.py``)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_tapes import Tape, record_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.attention import ATTENTION_NAME
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling, SamplingError
from burnish.rollout.local import model as local_model
from burnish.rollout.local import running_batch
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.decode_graphs import BLOCK, DecodeBlock, DecodeGraphs, RowState
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.model import CacheTooLargeError
from burnish.rollout.local.running_batch import RunningBatch
from burnish.rollout.local.sampling import draw_groups

MODEL = ModelConfig(
    scratch=ScratchConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, tie_word_embeddings=False
    )
)
TOKENIZER = load_tokenizer(MODEL)


def lively() -> PreTrainedModel:
    model: PreTrainedModel = load_causal_lm(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


WEIGHTS = lively()


@pytest.fixture(scope="module", autouse=True)
def recorded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        record_on_cpu(monkeypatch)
        yield


def engine_of(*, blocks: bool, model: PreTrainedModel = WEIGHTS, **config: Any) -> Any:
    """An engine that decodes token by token, or one that records blocks as on a GPU."""
    engine = LocalRolloutEngine(model, TOKENIZER, LocalEngine(**config))
    if blocks:
        engine.network.uses_graphs, engine.network.keeps_conversations = True, False
    return engine


def results(engine: LocalRolloutEngine, work: list[tuple[Request, Sampling]]) -> dict[Any, Any]:
    """Completions of requests that are submitted one after the other, between polls."""
    draw, left, done = random.Random(0), list(work), list[Completion]()
    while left or engine.busy:
        while left and draw.random() < 0.5:
            request, sampling = left.pop(0)
            engine.submit([request], sampling)
        done += engine.poll()
    found = {(c.request_id, c.index): c for c in done}
    assert len(found) == len(done)
    return found


STRINGS = ("1", "7+", "= ", "ab", "9")
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.05]),
    stop=st.lists(st.sampled_from(STRINGS), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(6, 52), max_size=10, unique=True).map(tuple),
    sampling_mask=st.booleans(),
)


@settings(max_examples=60)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=3),
    shapes=st.lists(
        st.tuples(
            st.integers(1, 70),  # tokens of the prompt
            st.integers(1, 5),  # samples
            st.integers(0, 2),  # which of the samplings
            st.none() | st.integers(1, 90),  # max_tokens of the request
        ),
        min_size=1,
        max_size=6,
    ),
    slots=st.integers(1, 9),
    prefill=st.integers(1, 200),
    seed=st.integers(0, 1 << 64),
)
def test_blocks_give_the_bits_of_single_steps(
    samplings: list[Sampling],
    shapes: list[tuple[int, int, int, int | None]],
    slots: int,
    prefill: int,
    seed: int,
) -> None:
    """Groups with other numbers of samples, slots that are refilled, limits and stops at any place
    of a block, a cache that grows every 64 positions, and requests with equal and with different
    parameters in a batch."""
    work = [
        (
            Request(str(i), tuple(range(6, 53))[:p] * (1 + p // 47), n, seed + i, limit),
            samplings[which % len(samplings)],
        )
        for i, (p, n, which, limit) in enumerate(shapes)
    ]
    config: dict[str, Any] = {"max_batch_size": slots, "max_prefill_tokens": prefill}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_batch, "_LEAST_ROOM", 1)
        expected = results(engine_of(blocks=False, **config), work)
        engine = engine_of(blocks=True, **config)
        assert results(engine, work) == expected
        assert results(engine, work[::-1]) == expected, "with the graphs and cache of the first"


def test_a_response_that_ends_at_the_end_of_the_cache_stays_there() -> None:
    """Prompts of 60 and 3 tokens and 4 and 20 new ones: the cache has 64 positions. Five steps of
    the first block are behind the end of the first response."""
    requests = [
        Request("a", tuple(range(6, 36)) * 2, seed=1, max_tokens=4),
        Request("b", (7, 8, 9), seed=2, max_tokens=20),
    ]
    found = []
    for blocks in (False, True):
        engine = engine_of(blocks=blocks)
        engine._end_tokens = set()
        engine.submit(requests, Sampling(1))
        engine.poll()
        assert engine.batch.cache.capacity == 64
        found.append({c.request_id: c for _ in range(20) for c in engine.poll()})
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.parametrize("window", [None, 5])
def test_masks_of_recorded_steps_follow_the_positions(window: int | None) -> None:
    """As on a GPU: keys are masked, not batch invariant. 100 tokens are beyond the first bucket of
    64 keys. Log-probs of up to 10 nats with sums over other numbers of keys in fp32."""
    config = MistralConfig(
        vocab_size=53,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=window,
        attn_implementation=ATTENTION_NAME,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    work = [
        (Request(str(i), tuple(range(6, 6 + p)), n=2, seed=i, max_tokens=m), Sampling(1, t))
        for i, (p, m, t) in enumerate([(3, 100, 1.0), (30, 9, 0.7), (1, 40, 0.0), (12, 70, 1.0)])
    ]
    done = []
    for blocks in (False, True):
        engine = engine_of(blocks=blocks, model=model, batch_invariant=False, max_batch_size=5)
        engine._end_tokens = set()
        done.append(results(engine, work))
    assert done[0].keys() == done[1].keys() and len({c.token_ids for c in done[0].values()}) == 7
    for key, one in done[0].items():
        assert done[1][key].token_ids == one.token_ids
        assert done[1][key].logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_a_stop_string_across_two_blocks_ends_the_response() -> None:
    """The tokens of a response are digits, of which two in a row are the stop string."""
    (plain,) = engine_of(blocks=False).generate([Request("r", (7, 8), seed=5)], Sampling(40))
    for first in range(1, len(plain.token_ids) - 1):
        string = str(TOKENIZER.decode(plain.token_ids[first : first + 2]))
        sampling = Sampling(40, stop=(string,))
        (one,) = engine_of(blocks=False).generate([Request("r", (7, 8), seed=5)], sampling)
        (block,) = engine_of(blocks=True).generate([Request("r", (7, 8), seed=5)], sampling)
        assert block == one and len(one.token_ids) <= first + 2


def count_reads(engine: LocalRolloutEngine, sampling: Sampling, host_reads: Any) -> Any:
    """Reads during decoding of samples that end at their limits of 33 tokens."""
    engine._end_tokens = set()
    requests = [Request(str(i), (7, 8 + i), n=3, seed=i) for i in range(2)]
    engine.submit(requests, sampling)
    assert engine.poll() == [], "the prefill and its token"
    before = Tape.replays
    with host_reads() as reads:
        while engine.busy:
            engine.poll()
    return reads, Tape.replays - before


@pytest.mark.parametrize(
    ("sampling", "replays"),
    [
        (Sampling(33), 2),
        (Sampling(33, 0.0), 2),
        (Sampling(33, 0.7, top_p=0.9, top_k=9, min_p=0.01), 2),
        (Sampling(33, top_k=9, sampling_mask=True), 1),
    ],
)
def test_the_host_reads_once_per_eight_tokens(
    sampling: Sampling, replays: int, host_reads: Any
) -> None:
    """32 tokens in four blocks. Draws are recorded, unless kept ids are."""
    reads, count = count_reads(engine_of(blocks=True), sampling, host_reads)
    assert BLOCK == 8 and reads.lists == [(8, 2, 6)] * 4 and reads.values == 0
    assert count == 32 * replays
    reads, count = count_reads(engine_of(blocks=False), sampling, host_reads)
    assert len(reads.lists) == 32 and count == 0


def test_kept_ids_as_wide_as_the_vocabulary_are_read_after_each_token(host_reads: Any) -> None:
    sampling = Sampling(33, top_p=0.9, sampling_mask=True)
    reads, _ = count_reads(engine_of(blocks=True), sampling, host_reads)
    assert reads.lists == [(1, 2, 6)] * 32


def test_different_parameters_are_read_once_per_block_too(host_reads: Any) -> None:
    engine = engine_of(blocks=True)
    engine._end_tokens = set()
    for i, sampling in enumerate((Sampling(33), Sampling(33, 0.5), Sampling(33, 0.0))):
        engine.submit([Request(str(i), (7, 8), n=2)], sampling)
    engine.poll()
    with host_reads() as reads:
        while engine.busy:
            engine.poll()
    assert reads.lists == [(8, 2, 6)] * 4 and reads.values == 0


def test_steps_before_a_log_prob_that_is_not_finite_are_kept() -> None:
    """From position 12 on the logits are NaN: the prompt has 3 tokens, so 10 tokens are sampled and
    a sample with a limit of 10 finishes; its neighbor fails with the next token."""
    done: dict[bool, list[Any]] = {}
    for blocks in (False, True):
        engine = engine_of(blocks=blocks)
        engine._end_tokens = set()
        body = engine.network.body

        def broken(ids: Tensor, positions: Tensor, plan: object, body: Any = body) -> Tensor:
            return body(ids, positions, plan).masked_fill(positions[..., None] >= 12, torch.nan)

        engine.network.body = broken
        requests = [Request("a", (7, 8, 9), seed=1, max_tokens=10), Request("b", (7, 8, 9), seed=2)]
        engine.submit(requests, Sampling(20))
        done[blocks] = []
        with pytest.raises(SamplingError, match="weights are finite"):
            while True:
                done[blocks] += engine.poll()
        assert isinstance(engine.batch, RunningBatch)
        ((row,),) = engine.batch.waiting
        done[blocks] += [row.tokens, row.logprobs]
    assert done[True] == done[False] and len(done[True]) == 3 and len(done[True][1]) == 10


def test_weights_change_between_blocks() -> None:
    """With kept and with recomputed keys; only the head changes, so both are the same."""
    request, sampling = Request("r", (7, 9, 12)), Sampling(24, 0.0)
    found = []
    for keep_cache in (False, True):
        engine = engine_of(blocks=True, model=lively())
        engine._end_tokens = set()
        engine.submit([request], sampling)
        assert engine.poll() == engine.poll() == []  # one token, then eight
        weights = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
        engine.load_weights(3, weights.items(), keep_cache=keep_cache)
        (done,) = [c for _ in range(9) for c in engine.poll()]
        assert done.versions == (0,) * 9 + (3,) * 15
        found.append((done.token_ids, done.logprobs))
    assert found[0] == found[1]


# ---- the cache -----------------------------------------------------------------------------


def test_the_cache_grows_by_blocks_and_drops_slots_that_are_not_needed() -> None:
    """Five samples need eight slots. Prompts of 3 tokens and 259 new ones would need 262 positions;
    the first cache has 3 + 256, in blocks of 64: 320. At 320 tokens one sample is left."""
    engine = engine_of(blocks=True)
    engine._end_tokens = set()
    requests = [Request(str(i), (7, 8, 9 + i), max_tokens=20) for i in range(4)]
    engine.submit([*requests, Request("x", (7, 8, 9), max_tokens=400)], Sampling(1))
    sizes = []
    while engine.busy:
        engine.poll()
        cache = engine.batch.cache
        if cache is not None and (cache.num_slots, cache.capacity) not in sizes:
            sizes.append((cache.num_slots, cache.capacity))
    assert sizes == [(8, 320), (1, 448)], "403 positions in blocks of 64"
    cache = engine.network.graphs.cache
    list(engine.generate(requests, Sampling(1)))
    assert engine.network.graphs.cache is cache and (cache.num_slots, cache.capacity) == (4, 64)


def test_a_cache_that_does_not_fit_is_an_error_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token has keys and values of one layer with one head of 16 fp32 numbers: 128 bytes. Four
    slots of 64 positions need 32,768 bytes. To grow to 4 x 384 positions, with 4 x 320 allocated,
    takes 4 x 64 x 128 = 32,768 bytes, and 4 x 320 x 64 = 81,920 for keys that are copied."""
    free = 32767
    monkeypatch.setattr(local_model, "free_memory", lambda device: free)
    engine = engine_of(blocks=True, max_batch_size=4)
    engine._end_tokens = set()
    request = Request("r", (7, 8), n=4, max_tokens=20)
    engine.submit([request], Sampling(1))
    with pytest.raises(CacheTooLargeError, match=r"4 slots x 64 .*max_batch_size=2 or less"):
        engine.poll()
    free = 32768
    assert len([c for _ in range(9) for c in engine.poll()]) == 4
    free = 32768 + 81920 - 1 + 131072  # 131,072 more for the first cache of the next request
    engine.network.free()
    engine.submit([Request("r", (7, 8), n=4, max_tokens=350)], Sampling(1))
    engine.poll()
    free -= 131072
    with pytest.raises(CacheTooLargeError, match="4 slots x 384 positions"):
        while engine.busy:
            engine.poll()
    free += 131073
    assert len([c for _ in range(99) for c in engine.poll()]) == 4


def test_rows_stay_at_their_position_behind_a_stop_token_and_a_limit() -> None:
    """Equal logits: token 0 is drawn at temperature 0. From position 3 on, the first row stops at
    once, the second moves 8 positions, the third has its last input at 5."""
    cache: Any = SimpleNamespace(capacity=64, num_slots=4)
    cpu = torch.device("cpu")
    graphs = DecodeGraphs(lambda ids, at, plan: torch.zeros(*ids.shape, 7), lambda x: x, cache, cpu)
    rows = [RowState(5, 3, last, stops) for last, stops in ((40, (9, 0)), (40, (9,)), (5, ()))]
    groups = draw_groups([Sampling(9, 0.0)] * 3, cpu)
    steps = graphs.run(DecodeBlock(rows, torch.zeros(8, 3), groups))
    assert [step.tokens for step in steps] == [[0.0] * 3] * 8
    assert graphs._state is not None
    assert graphs._state.positions.tolist() == [3, 11, 5, 0], "the last one is padding"
