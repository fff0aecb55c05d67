"""Packed, shared-prefix and cached attention against the model run on each row alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.attention import (
    NO_MASK,
    PackedPlan,
    decode_plan,
    plan_segments,
)
from burnish.models.cache_attention import KVCache
from burnish.models.load import choose_attention, load_causal_lm
from burnish.models.segments import Segment

# fp32 sums of at most a few hundred terms of size 1, in another order: a few ulps of 1.2e-7
FP32 = 2e-6


@cache
def tiny() -> PreTrainedModel:
    return load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))


def alone(model: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
    return model(row[None]).logits[0]


def packed(model: PreTrainedModel, tokens: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
    out = model(tokens[None], position_ids=plan.positions[None], attention_mask=NO_MASK, plan=plan)
    return out.logits[0]


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 50, (count,), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(prompt=st.integers(1, 9), responses=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_shared_prefix_gives_each_row_its_separate_logits(
    prompt: int, responses: list[int]
) -> None:
    model, head = tiny(), random_tokens(prompt, 1)
    tails = [random_tokens(n, 2 + i) for i, n in enumerate(responses)]
    positions = torch.cat([torch.arange(prompt), *[prompt + torch.arange(n) for n in responses]])
    segments, used = [Segment(0, prompt + responses[0])], prompt + responses[0]
    for n in responses[1:]:
        segments.append(Segment(used, n, 0, prompt))
        used += n
    logits = packed(model, torch.cat([head, *tails]), plan_segments(segments, positions))
    begin = prompt
    for tail in tails:
        expected = alone(model, torch.cat([head, tail]))[prompt:]
        torch.testing.assert_close(logits[begin : begin + len(tail)], expected, atol=FP32, rtol=0)
        begin += len(tail)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 33), min_size=1, max_size=7))
def test_packed_rows_of_any_lengths_do_not_see_each_other(lengths: list[int]) -> None:
    model = tiny()
    rows = [random_tokens(n, i) for i, n in enumerate(lengths)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    positions = torch.cat([torch.arange(n) for n in lengths])
    plan = plan_segments([Segment(s, n) for s, n in zip(starts, lengths, strict=True)], positions)
    logits = packed(model, torch.cat(rows), plan)
    for start, row in zip(starts, rows, strict=True):
        part = logits[start : start + len(row)]
        torch.testing.assert_close(part, alone(model, row), atol=FP32, rtol=0)


def test_gradients_through_a_packed_row_are_those_of_the_rows_alone() -> None:
    model = load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
    rows = [random_tokens(5, 0), random_tokens(8, 1)]
    sum(alone(model, row).square().sum() for row in rows).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    plan = plan_segments(
        [Segment(0, 5), Segment(5, 8)], torch.cat([torch.arange(5), torch.arange(8)])
    )
    packed(model, torch.cat(rows), plan).square().sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        # relative to the largest entry: fp32 sums over 13 tokens x 53 logits in another order
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * scale, rtol=0)


def test_decoding_from_the_cache_gives_the_logits_of_the_full_row() -> None:
    model, row = tiny(), random_tokens(9)
    whole = alone(model, row)
    cache_, length = KVCache(num_slots=2, capacity=6), 4
    plan = plan_segments([Segment(0, length)], torch.arange(length))
    from dataclasses import replace

    plan = replace(
        plan,
        cache=cache_,
        cache_source=torch.arange(length),
        cache_slot=torch.zeros(length, dtype=torch.int64),
        cache_position=torch.arange(length),
    )
    with torch.no_grad():
        packed(model, row[:length], plan)
        for position in range(length, len(row)):
            if position == 6:
                cache_.resize(2, 9)
            at = torch.tensor([position])
            step = decode_plan(cache_, at, position + 1)
            logits = model(
                row[position][None, None], position_ids=at[None], attention_mask=NO_MASK, plan=step
            ).logits[0, 0]
            torch.testing.assert_close(logits, whole[position], atol=FP32, rtol=0)


def test_a_sliding_window_masks_earlier_tokens_packed_and_cached() -> None:
    """Mistral with a window of 4 tokens, on a row of 12, against HuggingFace's own eager
    attention."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    row = random_tokens(12)
    expected = alone(model, row)
    no_window = MistralForCausalLM(MistralConfig(**{**config.to_dict(), "sliding_window": None}))
    no_window.load_state_dict(model.state_dict())
    assert (alone(no_window, row) - expected).abs().max() > 1e-3, "the window must matter here"
    choose_attention(model, "the model")
    plan = plan_segments([Segment(0, 12)], torch.arange(12))
    torch.testing.assert_close(packed(model, row, plan), expected, atol=FP32, rtol=0)


def test_without_a_plan_the_model_equals_transformers() -> None:
    model, rows = tiny(), torch.stack([random_tokens(7, 0), random_tokens(7, 1)])
    mask = torch.ones_like(rows)
    mask[1, 5:] = 0
    ours = model(rows, attention_mask=mask).logits
    reference = load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
    reference.set_attn_implementation("sdpa")
    theirs = reference(rows, attention_mask=mask).logits
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


def test_keywords_that_packed_attention_would_ignore_are_refused_by_name() -> None:
    from burnish.models.attention import burnish_attention

    plan = plan_segments([Segment(0, 2)], torch.arange(2))
    q = torch.zeros(1, 2, 2, 8)
    for name in ("s_aux", "indices", "position_bias"):
        with pytest.raises(NotImplementedError, match=name):
            burnish_attention(torch.nn.Identity(), q, q, q, None, plan=plan, **{name: q})
    with pytest.raises(NotImplementedError, match="its own attention mask"):
        burnish_attention(torch.nn.Identity(), q, q, q, q, plan=plan)
