"""vLLM on CUDA: what sleep frees, and what it samples after it. Needs a device and vLLM (``make
test-gpu``)."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Request, Sampling
from burnish.rollout.vllm.config import VllmEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
MODEL = ModelConfig(
    scratch=ScratchConfig(hidden_size=256, num_heads=4, num_kv_heads=2, tie_word_embeddings=False)
)  # heads of 64, which every attention of vLLM has
CACHE = 1 << 30
REQUESTS = [Request(f"r{i}", tuple(range(6, 10 + i)), seed=i) for i in range(4)]


def lively(seed: int) -> LlamaForCausalLM:
    assert MODEL.scratch is not None
    scratch = MODEL.scratch.model_copy(update={"seed": seed})
    model = load_causal_lm(ModelConfig(scratch=scratch), dtype="bf16")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # far from uniform
    return model


def started(**options: Any) -> Any:
    from burnish.rollout.vllm.engine import VllmRolloutEngine

    config = VllmEngine(kind="vllm", kv_cache_bytes=CACHE, max_num_seqs=8, **options)
    tokenizer = load_tokenizer(MODEL)
    return VllmRolloutEngine(lively(0), tokenizer, config, dtype="bf16", max_model_len=256)


def tokens(engine: Any) -> dict[str, tuple[int, ...]]:
    return {c.request_id: c.token_ids for c in engine.generate(REQUESTS, Sampling(16, 0.0))}


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with closing(started()) as made:
        made.load_weights(1, lively(1).named_parameters())
        yield made


def test_sleep_frees_the_cache_and_waking_samples_the_same_tokens(engine: Any) -> None:
    """At least nine tenths of the cache of 1 GiB."""
    before, awake = tokens(engine), free_bytes()
    engine.sleep()
    assert free_bytes() - awake > 0.9 * CACHE
    engine.sleep()  # twice is once
    engine.wake()
    assert tokens(engine) == before
    engine.sleep()
    assert tokens(engine) == before, "generate wakes it"


def test_weights_are_loaded_into_a_sleeping_engine(engine: Any) -> None:
    engine.load_weights(1, lively(1).named_parameters())
    first = tokens(engine)
    engine.sleep()
    engine.load_weights(2, lively(2).named_parameters())
    second = tokens(engine)
    assert engine.version == 2 and second != first
    engine.load_weights(3, lively(1).named_parameters())
    assert tokens(engine) == first


def test_without_its_weights_it_refuses_until_new_ones_are_loaded(engine: Any) -> None:
    engine.load_weights(1, lively(1).named_parameters())
    before = tokens(engine)
    engine.sleep(new_weights_follow=True)
    with pytest.raises(RuntimeError, match="dropped its weights"):
        tokens(engine)
    engine.load_weights(2, lively(1).named_parameters())
    assert tokens(engine) == before


def test_the_cache_is_allocated_when_something_is_sampled_not_when_weights_come(
    engine: Any,
) -> None:
    awake = free_bytes()
    engine.sleep(new_weights_follow=True)
    engine.load_weights(3, lively(1).named_parameters())
    assert free_bytes() - awake > 0.9 * CACHE
    tokens(engine)
    assert free_bytes() - awake < 0.1 * CACHE
