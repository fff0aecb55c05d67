"""A request has the same tokens and the same bits of log-probs in any batch, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from burnish.config.model import Dtype, ModelConfig, ScratchConfig
from burnish.models import cache_attention
from burnish.models.cache_attention import (
    KVCache,
    Options,
    additive_mask,
    full_vectors,
    least_rows,
    rounded,
    stable_attention,
)
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.paths import ModelError
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.sampling import sample_tokens

pytestmark = pytest.mark.skipif(
    least_rows(1) is None, reason="the matmuls of this machine depend on the number of rows"
)
SIZES = {
    "tiny heads": ScratchConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2),
    "grouped queries": ScratchConfig(
        hidden_size=128, num_heads=4, num_kv_heads=1, tie_word_embeddings=False
    ),
    "odd widths": ScratchConfig(hidden_size=88, num_heads=2, num_kv_heads=1, num_layers=2),
}
Results = dict[str, Completion]


def engine_of(name: str, dtype: Dtype = "fp32", **config: Any) -> LocalRolloutEngine:
    model = ModelConfig(scratch=SIZES[name])
    network = load_causal_lm(model, dtype=dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    options = LocalEngine(**{"batch_invariant": True, **config})
    return LocalRolloutEngine(network, load_tokenizer(model), options)


def requests(count: int, seed: int, *, longest: int = 60) -> list[tuple[Request, Sampling]]:
    draw = random.Random(seed)
    samplings = [Sampling(40), Sampling(24, 0.7, top_k=9), Sampling(30, 1.3, top_p=0.9)]
    lengths = [draw.choice([1, 2, 3, draw.randint(4, longest)]) for _ in range(count)]
    return [
        (
            Request(str(i), tuple(draw.randrange(6, 50) for _ in range(n)), seed=i),
            draw.choice(samplings),
        )
        for i, n in enumerate(lengths)
    ]


def alone(engine: LocalRolloutEngine, asked: list[tuple[Request, Sampling]]) -> Results:
    return {r.request_id: next(engine.generate([r], s)) for r, s in asked}


def together(
    engine: LocalRolloutEngine, asked: list[tuple[Request, Sampling]], seed: int
) -> Results:
    """Submit in a random order, in parts of random sizes at random times."""
    draw, found, left = random.Random(seed), dict[str, Completion](), list(asked)
    draw.shuffle(left)
    while left or engine.busy:
        for _ in range(min(len(left), draw.choice([0, 0, 1, 2, 8]))):
            request, sampling = left.pop()
            engine.submit([request], sampling)
        for _ in range(draw.randint(1, 12)):
            found |= {c.request_id: c for c in engine.poll()}
    return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tiny heads", "fp32"),
        ("tiny heads", "bf16"),
        ("grouped queries", "fp32"),
        ("odd widths", "fp16"),
        ("odd widths", "bf16"),
    ],
)
def test_bits_do_not_depend_on_arrival_and_batch(name: str, dtype: Dtype) -> None:
    asked = requests(12, seed=7)
    expected = alone(engine_of(name, dtype), asked)
    assert len({c.token_ids for c in expected.values()}) > 9
    for seed in range(4):
        slots = (1, 3, 8, 128)[seed]
        engine = engine_of(name, dtype, max_batch_size=slots, max_prefill_tokens=(7, 90)[seed % 2])
        assert engine.network.stable
        assert together(engine, asked, seed) == expected, (slots, seed)


def test_bits_of_long_rows_do_not_depend_on_the_batch() -> None:
    """Sums over more keys than a chunk, and prompts that differ in length by a factor of 40."""
    asked = requests(8, seed=3, longest=440)
    expected = alone(engine_of("grouped queries"), asked)
    assert max(len(r.prompt_ids) for r, _ in asked) > 300
    for seed in range(2):
        assert together(engine_of("grouped queries"), asked, seed) == expected


def test_bits_do_not_depend_on_the_batch_with_two_threads() -> None:
    asked = requests(4, seed=14, longest=200)
    assert max(len(r.prompt_ids) for r, _ in asked) > 100
    with threads(2):
        expected = alone(engine_of("grouped queries"), asked)
        assert together(engine_of("grouped queries"), asked, 1) == expected


@pytest.mark.parametrize(
    "sampling", [Sampling(1), Sampling(1, 0.0), Sampling(1, 0.7), Sampling(1, top_p=0.9)]
)
def test_a_draw_from_a_large_vocabulary_does_not_depend_on_other_rows(sampling: Sampling) -> None:
    """PyTorch divides the sum of a single row of more than 32,768 numbers among the threads."""
    draw = torch.Generator().manual_seed(0)
    logits, uniforms = 4 * torch.randn(8, 50_000, generator=draw), torch.rand(8, generator=draw)
    with threads(2):
        tokens, logprobs, _ = sample_tokens(logits.clone(), uniforms, sampling)
        for i in range(8):
            token, logprob, _ = sample_tokens(
                logits[i : i + 1].clone(), uniforms[i : i + 1], sampling
            )
            assert token == tokens[i] and logprob == logprobs[i]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("width", [352, 896, 2048])
def test_activations_of_padded_rows_do_not_depend_on_the_rows(width: int, count: int) -> None:
    """PyTorch divides 200 x 2048 elements among the threads; their parts are computed in vectors.

    Example: four threads available, 35 rows of 2048 = 71,680 elements, at most 32,768 a thread: 3
    threads with 23,894 elements each, no multiple of 32. 36 rows: 3 x 24,576 = 3 x 768 x 32."""
    if (width, count) == (2048, 4):
        assert full_vectors(35, [2048], threads=4) == 36
    rows = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    with threads(1):
        expected = silu(rows)  # 200 x width is a multiple of 32
    with threads(count):
        for least in range(1, 190, 9):
            padded = full_vectors(least, [width], threads=count)
            assert torch.equal(silu(rows[:padded]), expected[:padded]), (least, padded)


def test_prefilled_and_decoded_tokens_have_the_same_bits() -> None:
    """A request that starts over in the middle prefills what it had decoded."""
    asked = requests(8, seed=11)
    expected = alone(engine_of("grouped queries"), asked)
    engine = engine_of("grouped queries")
    found: Results = {}
    for request, sampling in asked:
        engine.submit([request], sampling)
    polls = 0
    while engine.busy:
        found |= {c.request_id: c for c in engine.poll()}
        polls += 1
        if polls % 7 == 0:
            engine.version = 0  # the same weights again
    assert found == expected


@pytest.mark.parametrize(("softcap", "num_threads"), [(None, 1), (30.0, 1), (30.0, 3)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 32), (14, 2, 64)])
def test_attention_of_many_queries_has_the_bits_of_single_ones(
    heads: int, kv_heads: int, dim: int, softcap: float | None, num_threads: int
) -> None:
    """300 tokens in parts of 1, 2, 43 and 254 queries, over different numbers of keys, and all as
    one decode batch. 300 keys are two chunks of sums."""
    draw, count = torch.Generator().manual_seed(0), 300
    options = Options(layer=0, scale=dim**-0.5, window=None, dropout=0.0, softcap=softcap)
    cache = KVCache(1, rounded(count), transposed_keys=True)
    at = torch.arange(count)
    new = torch.randn(2, count, kv_heads, dim, generator=draw).unbind(0)
    cache.write(0, torch.zeros_like(at), at, new)
    query = torch.randn(count, heads, 1, dim, generator=draw)

    def attended(tokens: Tensor, length: int) -> Tensor:
        """As one row of queries, [T, heads, dim]."""
        keys, values = cache.read(0, torch.tensor([0]), length)
        mask = additive_mask(tokens[None], range(length), None)
        rows = query[tokens, :, 0].transpose(0, 1)[None]
        return stable_attention(rows, (keys, values), mask, options)[0].transpose(0, 1)

    with threads(num_threads):
        alone = torch.cat([attended(at[i : i + 1], rounded(i + 1)) for i in range(count)])
        for begin, end in ((0, 1), (1, 3), (3, 46), (46, count)):
            for length in (rounded(end), cache.capacity):
                assert torch.equal(attended(at[begin:end], length), alone[begin:end])
        kv = cache.read(0, torch.zeros_like(at), cache.capacity)
        mask = additive_mask(at[:, None], range(cache.capacity), None)
        assert torch.equal(stable_attention(query, kv, mask, options)[:, :, 0], alone)


def test_a_machine_whose_matmuls_depend_on_the_rows_is_not_called_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 7 rows the last row has other bits."""
    true_bmm = torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        out = true_bmm(left, right)
        if left.shape[1] == 7:
            out[:, -1] *= 1 + 1e-6
        return out

    least_rows.cache_clear()
    monkeypatch.setattr(cache_attention.torch, "bmm", bmm)
    with pytest.raises(ModelError, match="depend on the number of rows"):
        engine_of("tiny heads")
    assert not engine_of("tiny heads", batch_invariant=None).network.stable
    monkeypatch.undo()
    least_rows.cache_clear()
    assert engine_of("tiny heads").network.stable
