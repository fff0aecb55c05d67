"""The step ``compare`` of benchmarks/gpu_session.py: tokens per second of the attentions of
``train.attention`` in one process, by the rows of the steps ``rl`` and ``sft``.

Cards of one type differ, and so do their clocks from minute to minute. Therefore all settings are
measured in one call, one after another in each case, on one model of the shape of Qwen3-0.6B with
random weights, and the table has the ratio to ``sdpa`` of the same case. The learning rate is so
small that weights stay the same: loss and gradient norm of the settings are those of the same
function, and must agree.

Two steps warm up, three are measured; of steps that take longer than :data:`LONG_S`, one each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from gpu_kernels import operators
from gpu_model import (
    free,
    make_batch,
    make_engine,
    nll,
    peak_flops,
    peak_gb,
    synchronize,
    train_flops,
    vocabulary_of,
)
from gpu_report import Report, Setup
from gpu_speed import Case, rl_cases, sft_cases

from burnish.oom import is_out_of_memory
from burnish.train.base import Outputs
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

SETTINGS = ("sdpa", "flash")
"""Values of train.attention. The first is what others are compared with."""
WARM, MEASURED = 2, 3
LONG_S = 4.0
LR = 1e-12
MOST_LOSS = 1e-3
"""Largest difference of mean losses in nats. Log-probs of single tokens differ by 0.03 in bf16; the
mean over thousands, by far less."""
MOST_NORM = 0.02
"""Largest difference of gradient norms, of the norm."""


@dataclass(frozen=True)
class Measured:
    """One setting in one case."""

    tokens_per_s: float
    loss: float
    norm: float
    row: dict[str, Any]


def compare_cases(*, tiny: bool) -> list[tuple[Case, bool]]:
    """Return (case, with entropies), the most valuable first."""
    short, long, _ = rl_cases(tiny=tiny)
    equal, ragged, _ = sft_cases(tiny=tiny)
    return [(short, True), (long, True), (ragged, False), (equal, False)]


def compare(setup: Setup, report: Report) -> None:
    """Measure each setting in each case."""
    lines = []
    with operators(setup):
        for case, with_entropy in compare_cases(tiny=setup.tiny):
            base: Measured | None = None
            for setting in SETTINGS:
                with report.case(f"{case.name}, {setting}"):
                    found = measure(setup, case, setting, with_entropy=with_entropy)
                    ratio = None if base is None else found.tokens_per_s / base.tokens_per_s
                    _report(report, setup, (case, setting), (found, base))
                    base = base or found
                    if ratio is not None:
                        rate = f"{found.tokens_per_s:.0f} tokens/s, {ratio:.2f} x sdpa"
                        lines.append(f"{case.name}: {rate}")
                        report.summary("; ".join(lines))
                free(setup)


def _report(
    report: Report,
    setup: Setup,
    named: tuple[Case, str],
    measured: tuple[Measured, Measured | None],
) -> None:
    """Add the row of a setting, with its ratio to the first one and their differences."""
    (case, setting), (found, base) = named, measured
    cells: dict[str, Any] = {"rows": case.name, "attention": setting} | found.row
    if base is not None:
        cells["ratio"] = found.tokens_per_s / base.tokens_per_s
        cells["loss_difference"] = found.loss - base.loss
        cells["norm_difference"] = found.norm / base.norm - 1
        if not abs(cells["loss_difference"]) <= MOST_LOSS:
            report.problem(f"{case.name}: losses {base.loss} and {found.loss} of {setting}")
        if not abs(cells["norm_difference"]) <= MOST_NORM:
            report.problem(f"{case.name}: gradient norms {base.norm} and {found.norm} of {setting}")
    report.row("Settings of 0.6B" + (" (tiny)" if setup.tiny else ""), **cells)


def measure(setup: Setup, case: Case, setting: str, *, with_entropy: bool) -> Measured:
    """Measure one setting. Raises if it runs out of memory, with the case's size."""
    try:
        return _measure(setup, case, setting, with_entropy=with_entropy)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    raise MemoryError("does not fit")


def _measure(setup: Setup, case: Case, setting: str, *, with_entropy: bool) -> Measured:
    free(setup)
    engine = make_engine(
        setup,
        with_entropy=with_entropy,
        layout=case.layout,
        gradient_checkpointing=case.checkpointing,
        max_tokens_per_micro_batch=case.budget,
        attention="auto" if setup.tiny and setting == "flash" else setting,  # (fp32)
        lr=LR,
    )
    if engine.attention.kernel != setting:
        raise RuntimeError(f"the engine chose {engine.attention.sentence}")
    batch = make_batch(case.groups, vocabulary_of(setup))
    steps = [_step(setup, engine, batch)]
    warm, measured = (1, 1) if steps[0][0] > LONG_S else (WARM, MEASURED)
    steps += [_step(setup, engine, batch) for _ in range(warm - 1 + measured)]
    taken = [seconds for seconds, _, _ in steps[warm:]]
    seconds, memory, peak = median(taken), peak_gb(setup), peak_flops(setup)
    flops = train_flops(setup, case.groups)
    _, loss, norm = steps[0]
    tokens = sum(group.tokens for group in case.groups)
    row = {
        "checkpointing": case.checkpointing,
        "tokens_per_s": tokens / seconds,
        "MFU": None if peak is None else flops / seconds / peak,
        "step_s": seconds,
        "slowest_s": max(taken),
        "first_s": steps[0][0],
        "peak_GB": None if memory is None else memory[0],
        "loss": loss,
        "norm": norm,
    }
    return Measured(tokens / seconds, loss, norm, row)


def _step(setup: Setup, engine: TorchTrainEngine, batch: Batch) -> tuple[float, float, float]:
    """Return the seconds of an optimizer step, its loss, and its gradient norm."""
    synchronize(setup)
    begun = time.perf_counter()
    stats = engine.forward_backward(batch, _nll_with_stats)
    step = engine.optim_step()
    synchronize(setup)
    return time.perf_counter() - begun, stats.floats()["loss"], step.grad_norm


def _nll_with_stats(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    loss, _ = nll(outputs, batch)
    return loss, Stats(sums={"loss": loss.detach()})
