"""The meter of the gap between the trainer's and the sampler's log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.correction import mismatch_stats


def test_mismatch_by_hand() -> None:
    """Gaps g = trainer - sampler: ln 2, -ln 4, 0. |g|: (0.693147 + 1.386294) / 3 = 0.693147,
    largest 1.386294. exp(g) - 1 - g: 1 - 0.693147, -3/4 + 1.386294, 0: sum 0.943147, mean
    0.314382."""
    sampler = torch.tensor([-1.0, -2.0, -3.0]).double()
    trainer = sampler + torch.tensor([math.log(2), -math.log(4), 0.0]).double()
    found = mismatch_stats(trainer, sampler, torch.ones(3, dtype=torch.bool)).floats()
    expected = {"mismatch_abs": 0.693147, "mismatch_k3": 0.314382, "mismatch_max": 1.386294}
    # 1e-6: six written decimals
    assert found == pytest.approx(expected, abs=1e-6)


def test_equal_logprobs_have_no_mismatch() -> None:
    x = torch.tensor([-0.3, -7.0])
    found = mismatch_stats(x, x, x < 0).floats()
    assert found == {"mismatch_abs": 0, "mismatch_k3": 0, "mismatch_max": 0}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_is_not_seen(garbage: float) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    trainer = torch.tensor([[-1.0, garbage], [-2.0, -3.0]])
    sampler = torch.tensor([[-1.5, garbage], [-2.0, -3.25]])
    found = mismatch_stats(trainer, sampler, mask).floats()
    # the gaps are 0.5, 0 and 0.25, exact in fp32
    assert found["mismatch_abs"] == 0.25 and found["mismatch_max"] == 0.5
    assert math.isfinite(found["mismatch_k3"])


def test_stats_of_parts_add_up_and_carry_no_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    trainer, sampler = torch.randn(2, 6, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=g) < 0.7
    trainer.requires_grad_()
    whole = mismatch_stats(trainer, sampler, mask)
    parts = [mismatch_stats(trainer[i], sampler[i], mask[i]) for i in range(6)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    # 1e-12: fp64 sums in another order
    assert total.floats() == pytest.approx(whole.floats(), abs=1e-12)
    assert not whole.maxima["mismatch_max"].requires_grad
    assert not any(number.requires_grad for number, _ in whole.means.values())


def test_bf16_logprobs_are_subtracted_in_fp32() -> None:
    """-1 and -1.0078125 are bf16 numbers; their gap 2^-7 comes out exactly."""
    trainer = torch.tensor([-1.0]).bfloat16()
    found = mismatch_stats(trainer, torch.tensor([-1.0078125]), trainer < 0).floats()
    assert found["mismatch_max"] == 2.0**-7
