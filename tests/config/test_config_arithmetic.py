"""Batch arithmetic: B = b x accumulation x D, and P x n samples in complete optimizer steps."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.arithmetic import (
    BatchError,
    BatchPlan,
    batch_table,
    check_rollout,
    derive_batch,
    nearest_divisors,
    nearest_multiples,
)

SIZES = st.integers(1, 200)


def derive(big, micro, accum=None, *, ranks=1, token_budget=False) -> BatchPlan:
    return derive_batch(
        train_batch_size=big,
        micro_train_batch_size=micro,
        gradient_accumulation_steps=accum,
        data_parallel_size=ranks,
        token_budget=token_budget,
    )


def numbers_after(text: str, words: str) -> list[int]:
    """The ``3 or 5`` after ``words``."""
    match = re.search(re.escape(words) + r" ?(\d+)(?: or (\d+))?", text)
    return [int(group) for group in match.groups() if group] if match else []


@pytest.mark.parametrize(
    ("big", "micro", "ranks", "accum"),
    [
        (128, 8, 8, 2),  # 128 / (8 x 8)
        (128, 1, 32, 4),  # 128 / (1 x 32)
        (128, 8, 4, 4),  # 128 / (8 x 4); B / b = 16 would be wrong
        (1024, 1, 256, 4),  # 1024 / (1 x 256)
    ],
)
def test_accumulation_is_b_over_micro_times_ranks(big, micro, ranks, accum):
    plan = derive(big, micro, ranks=ranks)
    assert plan.gradient_accumulation_steps == accum
    assert derive(None, micro, accum, ranks=ranks) == plan
    assert derive(big, None, accum, ranks=ranks) == plan
    assert derive(big, micro, accum, ranks=ranks) == plan


def test_the_train_batch_size_alone_means_one_backward_pass():
    assert derive(64, None, ranks=4) == BatchPlan(64, 16, 1, 4)


def test_a_token_budget_leaves_micro_batch_sizes_unset():
    plan = derive(64, None, ranks=4, token_budget=True)
    assert (plan.micro_train_batch_size, plan.gradient_accumulation_steps) == (None, None)


def test_missing_batch_sizes_are_named():
    for given_sizes in [(None, None, None), (None, 8, None), (None, None, 2)]:
        with pytest.raises(BatchError, match="set train_batch_size, or both"):
            derive(*given_sizes)


@pytest.mark.parametrize(
    ("sizes", "ranks", "product", "ways"),
    [
        # 64 / (4 x 2) = 8 of the one or of the other, or 4 x 4 x 2 = 32
        (
            (64, 4, 4),
            2,
            "4 x 4 x 2 = 32",
            "gradient_accumulation_steps=8 or micro_train_batch_size=8 or train_batch_size=32",
        ),
        # 24 / 6 = 4, and 24 / 5 is not an integer
        ((24, 6, 5), 1, "6 x 5 x 1 = 30", "gradient_accumulation_steps=4 or train_batch_size=30"),
        # 20 / 4 = 5, and 20 / 8 is not an integer
        ((20, 8, 4), 1, "8 x 4 x 1 = 32", "micro_train_batch_size=5 or train_batch_size=32"),
        # neither 100 / 8 nor 100 / 3 is an integer
        ((100, 8, 3), 1, "8 x 3 x 1 = 24", "train_batch_size=24"),
    ],
)
def test_contradicting_sizes_are_an_error_that_lists_every_fix(sizes, ranks, product, ways):
    with pytest.raises(BatchError) as caught:
        derive(*sizes, ranks=ranks)
    assert product in str(caught.value)
    assert str(caught.value).endswith(f"remove one of the three, or set {ways}")


@given(big=SIZES, micro=st.integers(1, 12), accum=st.integers(1, 12), ranks=st.integers(1, 4))
def test_each_suggested_fix_of_contradicting_sizes_is_valid(big, micro, accum, ranks):
    if big == micro * accum * ranks:
        return
    with pytest.raises(BatchError) as caught:
        derive(big, micro, accum, ranks=ranks)
    text = str(caught.value).partition("or set ")[2]
    sizes = dict(zip(("train", "micro", "gradient"), (big, micro, accum), strict=True))
    ways = re.findall(r"(train|micro|gradient)\w*=(\d+)", text)
    assert ways
    for name, value in ways:
        mended = {**sizes, name: int(value)}
        derive(mended["train"], mended["micro"], mended["gradient"], ranks=ranks)


def test_an_indivisible_micro_batch_error_names_the_nearest_sizes():
    """24 / 1 = 24: next to 7 its divisors are 6 and 8; next to 24, multiples of 7: 21 and 28."""
    with pytest.raises(BatchError) as caught:
        derive(24, 7)
    assert numbers_after(str(caught.value), "nearest valid micro_train_batch_size:") == [6, 8]
    assert numbers_after(str(caught.value), "or train_batch_size:") == [21, 28]


def test_nearest_batch_sizes_also_fit_the_micro_batch():
    """D = 4 and b = 2 need a multiple of 8; next to 13 these are 8 and 16 (12 would fail next)."""
    with pytest.raises(BatchError) as caught:
        derive(13, 2, ranks=4)
    assert numbers_after(str(caught.value), "nearest valid:") == [8, 16]


def test_1024_prompts_x_4_samples_fill_a_buffer_of_4096():
    """4096 / 512 = 8 optimizer steps a pass, 16 in two passes."""
    plan = check_rollout(
        BatchPlan(512, 8, 64, rollout_batch_size=1024, n_samples_per_prompt=4, epochs_per_rollout=2)
    )
    assert plan.samples_per_rollout == 4096
    assert plan.optimizer_steps_per_rollout == 16


@given(total=SIZES, wanted=SIZES)
def test_nearest_divisors_are_divisors_and_nearest(total, wanted):
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    found = nearest_divisors(total, wanted)
    assert set(found) <= set(divisors)
    inside = [d for d in divisors if min(found) < d < max(found)]
    assert not inside and min(found) <= max(wanted, 1)
    assert max(found) >= wanted or max(found) == total


@given(unit=SIZES, wanted=SIZES)
def test_nearest_multiples_are_multiples_and_nearest(unit, wanted):
    found = nearest_multiples(unit, wanted)
    assert all(m % unit == 0 and m > 0 for m in found)
    assert max(found) >= wanted and max(found) - min(found) <= unit
    assert min(found) <= wanted or min(found) == unit


@given(big=SIZES, micro=st.integers(1, 40), ranks=st.integers(1, 8))
def test_sizes_suggested_by_a_derivation_error_are_valid_and_nearest(big, micro, ranks):
    def works(b, m):
        return b % (m * ranks) == 0

    if works(big, micro):
        plan = derive(big, micro, ranks=ranks)
        assert plan.gradient_accumulation_steps * micro * ranks == big
        return
    with pytest.raises(BatchError) as caught:
        derive(big, micro, ranks=ranks)
    text = str(caught.value)
    batches = numbers_after(text, "nearest valid:") or numbers_after(text, "or train_batch_size:")
    assert batches and all(works(b, micro) for b in batches)
    assert not any(works(b, micro) for b in range(min(batches) + 1, max(batches)))
    for better in numbers_after(text, "nearest valid micro_train_batch_size:"):
        assert works(big, better)


@given(
    big=st.integers(1, 64),
    prompts=st.integers(1, 48),
    samples=st.integers(1, 8),
    unit=st.sampled_from([1, 2, 4]),
)
def test_sizes_suggested_by_a_rollout_error_are_valid_and_nearest(big, prompts, samples, unit):
    big *= unit
    plan = BatchPlan(big, None, None, 1, prompts, samples)
    if prompts * samples % big == 0:
        assert check_rollout(plan, unit=unit) is plan
        return
    with pytest.raises(BatchError) as caught:
        check_rollout(plan, unit=unit)
    text = str(caught.value)

    def fits(b, p):
        return p * samples % b == 0 and b % unit == 0

    batches = numbers_after(text, "nearest train_batch_size:")
    assert all(fits(b, prompts) for b in batches)
    assert not any(
        fits(b, prompts) for b in range(min(batches, default=0) + 1, max(batches, default=0))
    )
    assert batches or not any(fits(b, prompts) for b in range(1, prompts * samples + 1))
    buffers = numbers_after(text, "nearest rollout_batch_size:")
    assert buffers and all(fits(big, p) for p in buffers)
    assert not any(fits(big, p) for p in range(min(buffers) + 1, max(buffers)))
    assert min(buffers) <= prompts or min(buffers) == min(
        p for p in range(1, 10**4) if fits(big, p)
    )


def test_the_table_shows_the_complete_arithmetic():
    plan = BatchPlan(
        128, 8, 4, 4, rollout_batch_size=32, n_samples_per_prompt=8, epochs_per_rollout=2
    )
    assert batch_table(plan) == [
        ("train_batch_size (B)", "128", "samples per optimizer step"),
        ("data-parallel ranks (D)", "4", ""),
        ("micro_train_batch_size (b)", "8", "samples per rank and backward pass"),
        ("gradient_accumulation_steps", "4", "B / (b x D)"),
        ("rollout_batch_size (P)", "32", "prompts per rollout"),
        ("n_samples_per_prompt (n)", "8", ""),
        ("samples per rollout", "256", "P x n"),
        ("epochs_per_rollout", "2", "passes over the buffer"),
        ("optimizer steps per rollout", "4", "epochs x P x n / B"),
    ]


def test_the_table_shows_a_token_budget():
    rows = {name: value for name, value, _ in batch_table(BatchPlan(64, None, None))}
    assert rows["micro_train_batch_size (b)"] == rows["gradient_accumulation_steps"] == "by tokens"
