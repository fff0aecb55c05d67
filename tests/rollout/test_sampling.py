"""Draws from logits: the distribution, its support, the extremes, and whose randomness it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.rollout.base import Sampling
from burnish.rollout.local.sampling import sample_tokens, uniforms_for
from burnish.rollout.runner import prompt_seed

DRAWS = 20_000
BELOW_ONE = 1 - 2**-24  # the largest number that uniforms_for can give


def draw(logits: Tensor, **options: float) -> Tensor:
    """20,000 tokens from one row of logits."""
    uniforms = uniforms_for(5, 0, DRAWS)
    tokens, *_ = sample_tokens(logits.repeat(DRAWS, 1), uniforms, Sampling(1, **options))
    return tokens


def chi_square(tokens: Tensor, probs: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom); tokens expected fewer than 8 times count as one bin."""
    counts, expected = torch.bincount(tokens, minlength=len(probs)).double(), probs.double() * DRAWS
    rare = expected < 8
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 8:
        counts[-2] += counts[-1]
        expected[-2] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected).square() / expected).sum()), len(counts) - 1


def logits_of(vocab: int) -> Tensor:
    return 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))


def support(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The definition, one token after another: of the k most probable with at least min_p of the
    largest probability, take the next one while those taken have not reached top_p of all these."""
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    order = probs.argsort(descending=True).tolist()[: top_k or None]
    total, before, kept = float(probs[order].sum()), 0.0, []
    for token in order:
        if before >= top_p * total or not float(probs[token]):
            break
        kept.append(token)
        before += float(probs[token])
    mask = torch.zeros(len(probs), dtype=torch.bool)
    mask[kept] = True
    return mask


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [7, 256, 300, 1000])
def test_draws_follow_the_softmax(vocab: int, temperature: float) -> None:
    logits = logits_of(vocab)
    probs = (logits.double() / temperature).softmax(-1)
    statistic, freedom = chi_square(draw(logits, temperature=temperature), probs)
    # mean df, standard deviation sqrt(2 df): five of them, for draws that are the same in every run
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "options",
    [
        *({"top_k": 1}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.97}, {"top_k": 20, "top_p": 0.8}),
        *({"min_p": 0.1}, {"min_p": 0.1, "top_k": 40, "top_p": 0.9}),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_top_k_and_top_p_exclude_exactly_the_tokens_of_the_definition(
    options: dict[str, float], temperature: float
) -> None:
    logits = logits_of(300)
    probs = (logits.double() / temperature).softmax(-1)
    kept = support(probs, **options)
    tokens = draw(logits, temperature=temperature, **options)
    assert set(tokens.tolist()) <= set(kept.nonzero()[:, 0].tolist())
    inside = torch.where(kept, probs, 0.0)
    statistic, freedom = chi_square(tokens, inside / inside.sum())
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5
    expected = inside / inside.sum() * DRAWS
    seen = torch.bincount(tokens, minlength=300) > 0
    assert bool(seen[expected > 20].all()), "e^-20: no token of that weight may be missing"


def test_the_smallest_set_that_reaches_top_p_by_hand() -> None:
    """p = 1/2, 1/4, 1/8, 1/8: 0.7 needs two tokens, 0.8 three, 0.4 one."""
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    for top_p, expected in ((0.4, {1}), (0.7, {0, 1}), (0.8, {0, 1, 2}), (0.9, {0, 1, 2, 3})):
        found = set(draw(logits, top_p=top_p).tolist())
        assert len(found) == len(expected) and (len(expected) == 3 or found == expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}])
@pytest.mark.parametrize("vocab", [7, 255, 256, 257, 511, 300])
def test_the_ends_of_the_unit_interval_give_tokens_that_have_weight(
    vocab: int, options: dict[str, float]
) -> None:
    """Tokens of weight 0 are at both ends and in entire blocks between."""
    logits = logits_of(vocab)
    logits[: vocab // 3] = -torch.inf
    logits[-(vocab // 3) :] = -torch.inf
    for uniform in (0.0, 2**-24, 0.5, 1 - 2**-20, BELOW_ONE):
        tokens, logprobs, _ = sample_tokens(
            logits[None].clone(), torch.tensor([uniform]), Sampling(1, **options)
        )
        assert logits[tokens[0]] > -torch.inf and bool(logprobs.isfinite())
    if not options:
        first = sample_tokens(logits[None].clone(), torch.tensor([0.0]), Sampling(1))[0]
        last = sample_tokens(logits[None].clone(), torch.tensor([BELOW_ONE]), Sampling(1))[0]
        has_weight = (logits > -torch.inf).nonzero()[:, 0]
        assert int(first) == int(has_weight[0]) and int(last) == int(has_weight[-1])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("hot", [0, 255, 256, 299])
def test_a_token_of_probability_one_is_always_drawn(hot: int, options: dict[str, float]) -> None:
    logits = torch.full((3, 300), -200.0)
    logits[:, hot] = 0.0
    uniforms = torch.tensor([0.0, 0.5, BELOW_ONE])
    tokens, logprobs, _ = sample_tokens(logits, uniforms, Sampling(1, **options))
    assert tokens.tolist() == [hot] * 3 and logprobs.tolist() == [0.0] * 3


def test_each_row_uses_its_own_uniform() -> None:
    """Four equal tokens: uniforms 0.1, 0.3, 0.6, 0.9 fall into quarters 0, 1, 2, 3."""
    tokens, *_ = sample_tokens(torch.zeros(4, 4), torch.tensor([0.1, 0.3, 0.6, 0.9]), Sampling(1))
    assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"temperature": 0.7}, {"top_k": 4, "temperature": 1.3}, {"top_p": 0.5}),
        {"min_p": 0.2, "temperature": 1.3},
    ],
)
def test_logprobs_are_of_the_full_distribution_at_the_temperature(
    options: dict[str, float],
) -> None:
    logits = torch.stack([logits_of(300), logits_of(300).roll(7)])
    expected = (logits.double() / options.get("temperature", 1.0)).log_softmax(-1)
    tokens, logprobs, _ = sample_tokens(
        logits.clone(), torch.tensor([0.3, 0.8]), Sampling(1, **options)
    )
    exact = expected.gather(-1, tokens[:, None])[:, 0]
    # log-probs of up to 10 in fp32: a few ulps of 5e-7
    torch.testing.assert_close(logprobs.double(), exact, atol=3e-6, rtol=0)


def test_temperature_zero_is_argmax_with_the_logprobs_of_temperature_one() -> None:
    logits = logits_of(300)[None]
    tokens, logprobs, _ = sample_tokens(
        logits.clone(), torch.tensor([0.99]), Sampling(1, temperature=0.0)
    )
    assert int(tokens) == int(logits.argmax())
    assert float(logprobs) == pytest.approx(float(logits.double().log_softmax(-1).max()), abs=3e-6)


# ---- whose randomness
# ------------------------------------------------------------------------------


def test_uniforms_are_below_one_and_depend_only_on_seed_and_sample() -> None:
    streams = {
        (seed, index): tuple(uniforms_for(seed, index, 8).tolist())
        for seed in (0, 1, 2**32, 2**32 + 1, 5 << 32, 2**63, -1)
        for index in (0, 1, 2)
    }
    assert len(set(streams.values())) == len(streams), "every bit of the seed counts"
    assert all(0 <= u < 1 for stream in streams.values() for u in stream)
    assert torch.equal(uniforms_for(3, 4, 8), uniforms_for(3, 4, 8))
    assert torch.equal(uniforms_for(3, 4, 8), uniforms_for(3, 4, 20)[:8]), "whatever the length"


def test_uniforms_are_uniform_over_requests_and_samples() -> None:
    """First numbers of 4000 neighbouring streams: mean 1/2, standard error 1/sqrt(12 x 4000) =
    0.0046."""
    first = torch.stack([uniforms_for(s, i, 1) for s in range(1000) for i in range(4)]).double()
    assert abs(float(first.mean()) - 0.5) < 5 * 0.0046
    assert abs(float(first.var()) - 1 / 12) < 0.01


def test_no_global_generator_is_advanced() -> None:
    import numpy as np

    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    uniforms_for(1, 2, 3)
    assert (torch.rand(1), np.random.rand()) == expected


def test_the_seed_of_a_run_changes_what_is_sampled() -> None:
    """The seed is above the 32 bits of the prompt's checksum and must not be truncated."""
    streams = {
        tuple(uniforms_for(prompt_seed(seed, "train:1@0"), 0, 4).tolist()) for seed in range(4)
    }
    assert len(streams) == 4
