"""The step ``compare`` of benchmarks/gpu_session.py: tokens per second of settings that are added
one after another, in one process, by the rows of the steps ``rl`` and ``sft``.

Cards of one type differ, and so do their clocks from minute to minute. Therefore all settings are
measured in one call, in turn in each case, on one model of the shape of Qwen3-0.6B with random
weights, and the table has the ratio to ``base`` of the same case. ``base`` is masked attention and
log-probs by PyTorch's operations. The learning rate is so small that weights stay the same: loss
and gradient norm of the settings are those of the same function, and must agree.

Last, ``train.deterministic`` in the first case; its ratio is that to the same setting without it.

Two steps warm up, three are measured; of steps that take longer than :data:`LONG_S`, one each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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

from burnish.config.train import TrainConfig
from burnish.models.deterministic import check_deterministic
from burnish.models.flash import FlashSwitch
from burnish.models.flash_versions import is_installed
from burnish.models.fused_head import BY_TORCH, FusedHead
from burnish.oom import is_out_of_memory
from burnish.train.base import Outputs
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class Setting:
    """One setting. Engines with the same keys are one engine, whose parts are switched."""

    name: str
    flash: bool = True
    fused_head: bool = True
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe's section train."""
    newer: bool = False
    """True: with FlashAttention 3 or 4."""

    @property
    def exists(self) -> bool:
        """Return whether this version of Burnish has the keys, and the package is installed."""
        installed = is_installed("FA3") or is_installed("FA4")
        return set(self.keys) <= set(TrainConfig.model_fields) and (installed or not self.newer)


SETTINGS = (
    Setting("base", flash=False, fused_head=False),
    Setting("+ attention", fused_head=False),
    Setting("+ head"),
    Setting("+ compile", keys={"compile": "layers"}),
    Setting("+ FlashAttention 3 or 4", keys={"compile": "layers"}, newer=True),
)
"""The first is what others are compared with."""
DETERMINISTIC = Setting("+ head, deterministic", keys={"deterministic": True})
"""Measured last, in the first case: the cost of ``train.deterministic``."""
BEST = [setting for setting in SETTINGS if setting.exists][-1]
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
    lines, plain = list[str](), None
    settings = [s for s in SETTINGS if s.exists and not (setup.tiny and s.keys)]
    report.add(settings=[s.name for s in settings])
    with operators(setup):
        for case, with_entropy in compare_cases(tiny=setup.tiny):
            lines.append(case.name)
            measured = dict[str, Measured]()
            engines = dict[str, TorchTrainEngine]()
            for setting in settings:
                with report.case(f"{case.name}, {setting.name}"):
                    if str(setting.keys) not in engines:
                        engines.clear()
                        free(setup)
                        engines[str(setting.keys)] = engine_of(
                            setup, case, setting, with_entropy=with_entropy
                        )
                    found = measure(setup, case, setting, engines[str(setting.keys)])
                    measured[setting.name] = found
                    _report(report, setup, (case, setting), (found, measured.get("base")))
                    lines[-1] += f", {setting.name} {found.tokens_per_s:.0f} tokens/s"
                    report.summary("; ".join(lines))
            plain = plain or measured.get("+ head")
        engines.clear()
        free(setup)
        case, with_entropy = compare_cases(tiny=setup.tiny)[0]
        with report.case(f"{case.name}, {DETERMINISTIC.name}"):
            check_deterministic(None, torch.device(setup.device))
            engine = engine_of(setup, case, DETERMINISTIC, with_entropy=with_entropy)
            found = measure(setup, case, DETERMINISTIC, engine)
            _report(report, setup, (case, DETERMINISTIC), (found, plain))
            ratio = "" if plain is None else f" ({found.tokens_per_s / plain.tokens_per_s:.2f} x)"
            lines.append(f"{DETERMINISTIC.name} {found.tokens_per_s:.0f} tokens/s{ratio}")
            report.summary("; ".join(lines))


def _report(
    report: Report,
    setup: Setup,
    named: tuple[Case, Setting],
    measured: tuple[Measured, Measured | None],
) -> None:
    """Add the row of a setting, with its ratio to the first one and their differences."""
    (case, setting), (found, base) = named, measured
    cells: dict[str, Any] = {"rows": case.name, "setting": setting.name} | found.row
    if base is not None and base is not found:
        cells["ratio"] = found.tokens_per_s / base.tokens_per_s
        cells["loss_difference"] = found.loss - base.loss
        cells["norm_difference"] = found.norm / base.norm - 1
        where = f"{case.name}, {setting.name}"
        if not abs(cells["loss_difference"]) <= MOST_LOSS:
            report.problem(f"{where}: loss {found.loss}, that of base {base.loss}")
        if not abs(cells["norm_difference"]) <= MOST_NORM:
            report.problem(f"{where}: gradient norm {found.norm}, that of base {base.norm}")
    report.row("Settings of 0.6B" + (" (tiny)" if setup.tiny else ""), **cells)


def engine_of(
    setup: Setup, case: Case, setting: Setting, *, with_entropy: bool, shape: str | None = None
) -> TorchTrainEngine:
    """Make the engine of a setting for the rows of a case. ``shape``: of another model."""
    return make_engine(
        setup,
        with_entropy=with_entropy,
        shape=shape,
        layout=case.layout,
        gradient_checkpointing=case.checkpointing,
        max_tokens_per_micro_batch=case.budget,
        attention="auto" if setup.tiny else "flash",  # (tiny: fp32)
        lr=LR,
        **{k: v for k, v in setting.keys.items() if k != "compile" or not setup.tiny},
    )


def switch(setup: Setup, engine: TorchTrainEngine, setting: Setting) -> None:
    """Switch the attention and the log-probs of an engine."""
    forward = engine.forward
    newer = engine.attention.newer if setting.newer else None
    if setting.newer and newer is None and not setup.tiny:
        raise RuntimeError(f"attention by {engine.attention.sentence}")
    forward.flash = FlashSwitch(may_fall_back=False, newer=newer) if setting.flash else None
    forward.fused_head = None
    if setting.fused_head:
        choice = forward.choose_head(engine.device, torch.bfloat16)
        if setup.tiny:
            forward.fused_head = FusedHead(BY_TORCH, 64)
        elif choice.kernels is None:
            raise RuntimeError(f"log-probs by {choice.sentence}")


def measure(
    setup: Setup,
    case: Case,
    setting: Setting,
    engine: TorchTrainEngine,
    *,
    shape: str | None = None,
) -> Measured:
    """Measure one setting. Raises if it runs out of memory, or if its kernels were replaced.
    ``shape``: that of another model."""
    switch(setup, engine, setting)
    free(setup)
    try:
        found = _measure(setup, case, engine, shape)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        if engine.forward.fused_head is not None and not engine.forward.fused_head.on:
            raise RuntimeError("a kernel of log-probs raised; the log has its call")
        return found
    raise MemoryError("does not fit")


def _measure(setup: Setup, case: Case, engine: TorchTrainEngine, shape: str | None) -> Measured:
    batch = make_batch(case.groups, vocabulary_of(setup))
    steps = [_step(setup, engine, batch)]
    warm, measured = (1, 1) if steps[0][0] > LONG_S else (WARM, MEASURED)
    steps += [_step(setup, engine, batch) for _ in range(warm - 1 + measured)]
    taken = [seconds for seconds, _, _ in steps[warm:]]
    seconds, memory, peak = median(taken), peak_gb(setup), peak_flops(setup)
    flops = train_flops(setup, case.groups, shape)
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
