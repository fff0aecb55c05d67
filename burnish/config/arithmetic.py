"""Batch arithmetic: derive, validate and print how samples become optimizer steps.

B = ``train_batch_size`` (samples per optimizer step), b = ``micro_train_batch_size``, D =
data-parallel ranks, accumulation = B / (b x D). P = ``rollout_batch_size`` (prompts), n =
``n_samples_per_prompt``. The rollout buffer holds P x n samples, and each pass over it takes P x n
/ B optimizer steps. All functions are pure functions of numbers, independent of the config
classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from burnish.errors import BurnishError


class BatchError(BurnishError, ValueError):
    """Inconsistent batch sizes. The message contains the nearest valid values."""


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes after derivation. ``micro_train_batch_size`` is None under a token budget."""

    train_batch_size: int
    micro_train_batch_size: int | None
    gradient_accumulation_steps: int | None
    data_parallel_size: int = 1
    rollout_batch_size: int | None = None
    n_samples_per_prompt: int = 1
    epochs_per_rollout: int = 1

    @property
    def samples_per_rollout(self) -> int | None:
        return (
            None
            if self.rollout_batch_size is None
            else self.rollout_batch_size * self.n_samples_per_prompt
        )

    @property
    def optimizer_steps_per_rollout(self) -> int | None:
        if self.samples_per_rollout is None:
            return None
        return self.epochs_per_rollout * (self.samples_per_rollout // self.train_batch_size)


def nearest_divisors(total: int, target: float) -> list[int]:
    """Return the largest divisor of ``total`` not above ``target`` and the smallest not below it.

    >>> nearest_divisors(64, 24)
    [16, 32]
    """
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d <= target), default=divisors[0])
    above = min((d for d in divisors if d >= target), default=divisors[-1])
    return sorted({below, above})


def nearest_multiples(unit: int, target: int) -> list[int]:
    """Return the multiples of ``unit`` on both sides of ``target`` (at least ``unit`` itself).

    >>> nearest_multiples(8, 20)
    [16, 24]
    """
    below = max(unit, target // unit * unit)
    above = -(-target // unit) * unit
    return sorted({below, above})


def derive_batch(
    *,
    train_batch_size: int | None,
    micro_train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    data_parallel_size: int = 1,
    token_budget: bool = False,
) -> BatchPlan:
    """Derive the third of {B, b, accumulation} from the other two, or check that all three agree.

    With only B given, b = B / D (one backward pass) unless a token budget builds the micro-batches.
    Raises BatchError with the nearest valid values."""
    big, micro, accum, ranks = (
        train_batch_size,
        micro_train_batch_size,
        gradient_accumulation_steps,
        data_parallel_size,
    )
    if big is None and (micro is None or accum is None):
        raise BatchError(
            "the size of an optimizer step is not set: set train_batch_size, or both "
            "micro_train_batch_size and gradient_accumulation_steps"
        )
    if big is None:
        assert micro is not None and accum is not None
        big = micro * accum * ranks
    if token_budget:
        micro = accum = None
    if micro is not None and accum is not None and big != micro * accum * ranks:
        raise BatchError(_disagreement(big, micro, accum=accum, ranks=ranks))
    if big % ranks:
        works = nearest_multiples(ranks * (micro or accum or 1), big)
        raise BatchError(
            f"train_batch_size={big} is not a multiple of the {ranks} data-parallel ranks; "
            f"nearest valid: {_join(works)}"
        )
    per_rank = big // ranks
    for name, value in (
        ("micro_train_batch_size", micro),
        ("gradient_accumulation_steps", accum),
    ):
        if value is not None and per_rank % value:
            raise BatchError(
                f"{name}={value} does not divide train_batch_size={big} / {ranks} rank(s) = "
                f"{per_rank}; nearest valid {name}: {_join(nearest_divisors(per_rank, value))}, "
                f"or train_batch_size: {_join(nearest_multiples(value * ranks, big))}"
            )
    if token_budget:
        return BatchPlan(big, None, None, ranks)
    micro = micro or per_rank // (accum or 1)
    return BatchPlan(big, micro, per_rank // micro, ranks)


def _disagreement(big: int, micro: int, *, accum: int, ranks: int) -> str:
    ways = []
    if big % (micro * ranks) == 0:
        ways.append(f"gradient_accumulation_steps={big // (micro * ranks)}")
    if big % (accum * ranks) == 0:
        ways.append(f"micro_train_batch_size={big // (accum * ranks)}")
    ways.append(f"train_batch_size={micro * accum * ranks}")
    return (
        f"train_batch_size={big}, micro_train_batch_size={micro} and "
        f"gradient_accumulation_steps={accum} contradict each other with {ranks} rank(s): "
        f"{micro} x {accum} x {ranks} = {micro * accum * ranks}; remove one of the three, or set "
        f"{' or '.join(ways)}"
    )


def check_rollout(plan: BatchPlan, *, unit: int = 1) -> BatchPlan:
    """Check that the rollout buffer P x n is a multiple of the train batch, and return the plan.

    ``unit``: train_batch_size must remain a multiple of this, because b or accumulation is given.
    Raises BatchError with the nearest valid train_batch_size and rollout_batch_size."""
    samples = plan.samples_per_rollout
    if samples is None or samples % plan.train_batch_size == 0:
        return plan
    n, prompts, big = plan.n_samples_per_prompt, plan.rollout_batch_size, plan.train_batch_size
    assert prompts is not None
    ways = []
    if samples % unit == 0:  # B = unit x k divides the samples if k divides samples / unit
        steps = nearest_divisors(samples // unit, big / unit)
        ways.append(f"nearest train_batch_size: {_join([unit * k for k in steps])}")
    multiple = big // math.gcd(big, n)  # prompts whose samples fill complete steps
    ways.append(f"nearest rollout_batch_size: {_join(nearest_multiples(multiple, prompts))}")
    raise BatchError(
        f"the rollout buffer has rollout_batch_size={prompts} prompts x n_samples_per_prompt={n} "
        f"= {samples} samples, which train_batch_size={big} does not divide; {', '.join(ways)}"
    )


def check_critic(plan: BatchPlan, data_parallel_size: int) -> None:
    """Check that the ranks of a critic, with a number of their own, get equal shares of an
    optimizer step. Raises BatchError with the nearest valid values."""
    if plan.train_batch_size % data_parallel_size:
        works = nearest_divisors(plan.train_batch_size, data_parallel_size)
        raise BatchError(
            f"train_batch_size={plan.train_batch_size} is not a multiple of the "
            f"{data_parallel_size} data-parallel ranks of the critic (cluster.critic_ranks); "
            f"nearest valid numbers of them: {_join(works)}"
        )


def critic_table(plan: BatchPlan, data_parallel_size: int) -> list[tuple[str, str, str]]:
    """Return rows (name, value, origin) for a critic with a number of ranks of its own.

    >>> critic_table(BatchPlan(16, 4, 2, 2), 1)[1]
    ('critic: gradient_accumulation_steps', '4', 'B / (b x D), rounded up')
    """
    micro, accum = plan.micro_train_batch_size, "by tokens"
    if micro is not None:
        accum = str(-(-plan.train_batch_size // (micro * data_parallel_size)))
    return [
        ("critic: data-parallel ranks (D)", str(data_parallel_size), ""),
        ("critic: gradient_accumulation_steps", accum, "B / (b x D), rounded up"),
    ]


def batch_table(plan: BatchPlan) -> list[tuple[str, str, str]]:
    """Return rows (name, value, origin) of the table printed at start."""
    by_tokens = plan.micro_train_batch_size is None
    rows = [
        ("train_batch_size (B)", str(plan.train_batch_size), "samples per optimizer step"),
        ("data-parallel ranks (D)", str(plan.data_parallel_size), ""),
        (
            "micro_train_batch_size (b)",
            "by tokens" if by_tokens else str(plan.micro_train_batch_size),
            "samples per rank and backward pass",
        ),
        (
            "gradient_accumulation_steps",
            "by tokens" if by_tokens else str(plan.gradient_accumulation_steps),
            "B / (b x D)",
        ),
    ]
    if plan.rollout_batch_size is not None:
        rows += [
            ("rollout_batch_size (P)", str(plan.rollout_batch_size), "prompts per rollout"),
            ("n_samples_per_prompt (n)", str(plan.n_samples_per_prompt), ""),
            ("samples per rollout", str(plan.samples_per_rollout), "P x n"),
            ("epochs_per_rollout", str(plan.epochs_per_rollout), "passes over the buffer"),
            (
                "optimizer steps per rollout",
                str(plan.optimizer_steps_per_rollout),
                "epochs x P x n / B",
            ),
        ]
    return rows


def _join(values: list[int]) -> str:
    return " or ".join(str(v) for v in values)
